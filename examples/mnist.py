"""Classify handwritten digits (MNIST, bundled): ten clients with five digits each, tested on all ten.

python examples/mnist.py [FOLDER] [options of pfedbayes run]
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import pfedbayes
from pfedbayes.maths.metrics import confidence, decompose_uncertainty, log_average


def main(folder: Path, options: list[str]) -> None:
    """Train on the command line, then show each client its own test digits and as many that it has never seen."""
    run = folder / "run"
    subprocess.run([sys.executable, "-m", "pfedbayes", "run", "--out", run, *options], check=True)

    federation = pfedbayes.load(run)
    shards = federation.shards
    tested = np.concatenate(shards.test)
    print("client     its digits  entropy of own, of unseen  sure (90 %) of own, of unseen")
    for client, name in enumerate(shards.names):
        own = shards.y[shards.train[client]].unique()
        unseen = tested[~torch.isin(shards.y[tested], own).numpy()][: len(shards.test[client])]
        entropies, sure = [], []
        for examples in (shards.test[client], unseen):
            outputs = federation.predict("personal", client, shards.x[examples], samples=20)
            entropies.append(float(decompose_uncertainty(outputs).total.mean()))
            sure.append(float((confidence(log_average(outputs)) > 0.9).double().mean()))
        digits = " ".join(str(int(label)) for label in own)
        print(f"{name:<10} {digits:<11} {entropies[0]:>14.2f} {entropies[1]:>10.2f} {sure[0]:>19.0%} {sure[1]:>10.0%}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "mnist"), sys.argv[2:])
