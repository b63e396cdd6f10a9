"""Write the locked requirement files: exact versions, with the hashes of all files of a release.

    make lock                            keep the locked versions where they still fit pyproject.toml
    make lock ARGS=--upgrade             take the newest versions
    make lock ARGS='--upgrade-package X'

`uv` resolves for all platforms and Python versions at once, from wheels only. torch is not locked by hash, because it
has several builds with different files: `requirements/torch.txt` pins its version. The libraries that only its CUDA
builds need come with it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
EXTRAS = {"dev": ("dev", "docs"), "run": (), "bench": ("bench",)}
"""File name without suffix, and the extras of pyproject.toml that it adds to the dependencies."""
HEADER = "# Written by `make lock`: do not edit. Install it after torch.txt, with --no-deps --require-hashes.\n"
OF_A_TORCH_BUILD = re.compile(r"torch==|triton==|(nvidia|cuda)-")


def lock(name: str, options: list[str], folder: Path) -> str:
    """Return the text of a locked file. Keep the versions of the present one where they fit."""
    backend, constraints, output = (folder / file for file in ("backend.in", "constraints.txt", f"{name}.txt"))
    # The package itself is built without isolation, so that its build backend is locked too.
    build_system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    backend.write_text("\n".join(build_system["requires"]))
    # `make test` trains with the versions that `make run` installs.
    shared = (FOLDER / "dev.txt").read_text() if name == "run" else ""
    constraints.write_text((FOLDER / "torch.txt").read_text() + shared)
    present = FOLDER / output.name
    if present.exists():
        output.write_text(present.read_text())
    extras = [part for extra in EXTRAS[name] for part in ("--extra", extra)]
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", str(backend), *extras]
    command += ["--constraints", str(constraints), "--output-file", str(output), "--quiet", *options]
    command += ["--universal", "--python-version", "3.11", "--generate-hashes", "--only-binary", ":all:"]
    command += ["--no-header", "--no-annotate"]
    subprocess.run(command, cwd=ROOT, check=True)
    pins = re.split(r"^(?=\S)", output.read_text(), flags=re.MULTILINE)
    return HEADER + "".join(pin for pin in pins if not OF_A_TORCH_BUILD.match(pin))


def main() -> None:
    """Write all locked files."""
    with tempfile.TemporaryDirectory() as folder:
        for name in EXTRAS:
            (FOLDER / f"{name}.txt").write_text(lock(name, sys.argv[1:], Path(folder)))


if __name__ == "__main__":
    main()
