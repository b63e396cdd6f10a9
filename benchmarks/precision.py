"""The effect of the precision of matrix products on accuracy: the same runs on bundled MNIST in every precision.

    python -m benchmarks.precision [--device cuda] [--out docs/results/precision.md]

The nets are the DNN, and the VGG on digits padded to 32 x 32, with several seeds at once. Batches and noise are the
same in every precision, so differences are taken per seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import torch
from torch.nn.functional import pad

from pfedbayes.data import DataConfig, Shards, load_shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Precision, plan_for
from pfedbayes.engine.training import Training
from pfedbayes.maths.likelihoods import Classification
from pfedbayes.methods import PFedBayes
from pfedbayes.nets import Init, Model, Net, mlp, vgg

PRECISIONS: tuple[Precision, ...] = ("full", "tf32", "bf16")
HEAD = """# Precision of matrix products

pFedBayes on medium MNIST, {seeds} seeds: accuracy in percent by ten draws after {rounds} rounds. The change is against
full precision, with its standard error over seeds. Written by `{command}` on {device}.

| net | precision | personal | change | shared | change |
|---|---|---|---|---|---|
"""


def accuracies(shards: Shards, net: str, precision: Precision, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return the mean accuracy over clients for every seed, by model."""
    module = mlp([784, 100, 10]) if net == "DNN" else vgg(in_channels=1)
    method = PFedBayes() if net == "DNN" else PFedBayes(rho0=-4.0)
    if net == "VGG":
        shards = dataclasses.replace(shards, x=pad(shards.x, (2, 2, 2, 2)))
    model = Model(Net(module), Classification())
    training = Training(rounds=args.rounds, batch_size=100 if net == "DNN" else 50)
    plan = plan_for(model, method, training, len(shards.train), args.seeds, args.device)
    plan = dataclasses.replace(plan, precision=precision)
    init: Init = "normal" if net == "DNN" else "kaiming"
    federation = Federation(shards, model, method, training, range(1, args.seeds + 1), init, plan)
    for _ in federation.rounds():
        pass
    scores = federation.evaluate(estimators=("mc10",))
    return {which: torch.tensor(scores[which]["mc10"]["accuracy"]).mean(1) for which in federation.models()}


def main() -> None:
    """Train in every precision and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--nets", nargs="+", default=["DNN", "VGG"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shards = load_shards(DataConfig(name="mnist", size="medium"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    options = f"--rounds {args.rounds} --seeds {args.seeds} --nets {' '.join(args.nets)}"
    text = HEAD.format(
        command=f"python -m benchmarks.precision {options}",
        device=device,
        seeds=args.seeds,
        rounds=args.rounds,
    )
    for net in args.nets:
        full = accuracies(shards, net, "full", args)
        for precision in PRECISIONS:
            found = full if precision == "full" else accuracies(shards, net, precision, args)
            cells = [net, precision]
            for which, values in found.items():
                change = values - full[which]
                error = change.std() / math.sqrt(len(change))
                cells += [f"{values.mean():.2f}", "" if precision == "full" else f"{change.mean():+.2f} ± {error:.2f}"]
            text += f"| {' | '.join(cells)} |\n"
            print(f"| {' | '.join(cells)} |", flush=True)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
