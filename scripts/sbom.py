"""Write the software bill of materials (CycloneDX 1.5, JSON): the packages that `make` installs.

    make sbom
    python scripts/sbom.py FILE

It lists every package of the locked files with its version and the SHA-256 of the release's files, and torch, which is
pinned by version only. The scope is `required` for what `pfedbayes` needs and `optional` for extras and tools. Licences
are those that the installed packages state; what is not installed, such as the peers of `make bench`, has none. The
same locked files and installed packages give the same bytes, so the file has no time stamp.

Own code, because `cyclonedx-bom` would add 22 packages to the lock, and lists hashes or licences but not both.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

import pfedbayes

FOLDER = Path(__file__).parents[1] / "requirements"
FILES = ("run", "dev", "bench")
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)[^\\\n]*((?:\\\n\s+--hash=sha256:[0-9a-f]{64} ?)*)$", re.MULTILINE)
LONGEST_NAME = 100
"""Some packages state the whole text of their licence; only a name of at most this many characters is taken."""


def read_pins() -> dict[tuple[str, str], tuple[str, list[str]]]:
    """Return the scope and the hashes of every (package, version)."""
    found: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for file in ("torch", *FILES):
        scope = "required" if file in {"torch", "run"} else "optional"
        for name, version, hashes in PIN.findall((FOLDER / f"{file}.txt").read_text()):
            found.setdefault((name, version), (scope, re.findall(r"[0-9a-f]{64}", hashes)))
    return found


def licences(name: str, version: str) -> list[dict[str, Any]]:
    """Return what the installed package states: an SPDX expression, a name, or classifiers."""
    try:
        stated: dict[str, Any] = metadata.metadata(name).json
    except metadata.PackageNotFoundError:
        return []
    if stated["version"].partition("+")[0] != version:
        return []
    if expression := stated.get("license_expression"):
        return [{"expression": expression}]
    text = stated.get("license", "").strip()
    if text and "\n" not in text and len(text) <= LONGEST_NAME and text != "UNKNOWN":
        return [{"license": {"name": text}}]
    classifiers = stated.get("classifier", [])
    kept = sorted({line.split(" :: ")[-1] for line in classifiers if line.startswith("License :: ")})
    return [{"license": {"name": text}} for text in kept]


def component(name: str, version: str, scope: str, hashes: list[str]) -> dict[str, Any]:
    """Return a package as a component of CycloneDX."""
    url = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version}"
    entry: dict[str, Any] = {"type": "library", "bom-ref": url, "name": name, "version": version, "scope": scope}
    if hashes:
        entry["hashes"] = [{"alg": "SHA-256", "content": content} for content in hashes]
    if stated := licences(name, version):
        entry["licenses"] = stated
    return entry | {"purl": url}


def bill() -> dict[str, Any]:
    """Return the bill of materials."""
    components = [component(*key, scope, hashes) for key, (scope, hashes) in sorted(read_pins().items())]
    version = pfedbayes.__version__
    product = {"type": "application", "bom-ref": "pfedbayes", "name": "pfedbayes", "version": version}
    needed = [entry["bom-ref"] for entry in components if entry["scope"] == "required"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_OID, json.dumps([product, components])).urn,
        "version": 1,
        "metadata": {"component": product | {"licenses": [{"expression": "Apache-2.0"}]}},
        "components": components,
        "dependencies": [{"ref": "pfedbayes", "dependsOn": needed}],
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(bill(), indent=1, ensure_ascii=False) + "\n")
