"""Write manifest.json: the commit of this checkout and a digest of its code.

    python scripts/manifest.py

A copy of the checkout, on a machine with a GPU for example, records this commit in its runs as long as its code is the
same. Refused if files have changed since the commit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from pfedbayes.files.typed import to_json  # noqa: E402
from pfedbayes.runs.provenance import MANIFEST, Manifest, describe_code, digest_of_code  # noqa: E402


def main() -> int:
    """Return the exit code."""
    (ROOT / MANIFEST).unlink(missing_ok=True)
    commit = describe_code()["commit"]
    if commit is None or commit.endswith("-dirty"):
        print("manifest: there are changes without a commit, or no git: commit them first", file=sys.stderr)
        return 2
    untracked = ["git", "-C", str(ROOT), "ls-files", "--others", "--exclude-standard"]
    if found := subprocess.run(untracked, check=True, capture_output=True, text=True).stdout.split("\n")[0]:
        print(f"manifest: {found} is not tracked: commit it, remove it or let git ignore it", file=sys.stderr)
        return 2
    (ROOT / MANIFEST).write_text(json.dumps(to_json(Manifest(commit, digest_of_code(ROOT)))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
