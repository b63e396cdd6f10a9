"""Run the tests that need a GPU, and fail if there is none.

    make gpu-test
    python scripts/gpu_test.py -k compiled     further options are those of pytest

It runs from the source tree. Python, torch, numpy and pytest are enough, without an installed package.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# pyproject.toml sets a time limit, which a pytest without its plugin does not know.
WITHOUT_PLUGINS = ("-W", "ignore:Unknown config option:pytest.PytestConfigWarning")


def missing() -> str | None:
    """Say in one line what keeps the tests from running."""
    for name in ("torch", "numpy", "pytest"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is missing in {sys.executable}: pip install {name}, or make gpu-test PYTHON=…"
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU: run this on a machine with one, with a CUDA build of torch"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    return None


def main() -> int:
    """Return pytest's exit code."""
    if reason := missing():
        print(f"gpu-test: {reason}", file=sys.stderr)
        return 2
    # Other test files import packages that the tests on a GPU do not need.
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "needs_gpu" in path.read_text())
    options = ["-m", "gpu", "-rfEs", "--durations=5", *WITHOUT_PLUGINS, *sys.argv[1:]]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
