"""FedAvg on CIFAR-10 with batch normalisation whose statistics never leave the clients.

    python experiments/batchnorm.py --size large --data-dir DIR --out runs/batchnorm-large

The public code of pFedMe, whose setting the paper follows, has a VGG with batch normalisation. Clients send parameters
and keep the running means and variances, and every client tests the shared model with its own statistics, which have
seen only its labels. This script does the same in plain loops, with the data, batch size, learning rate and, except for
the normalisation, the network of Table 1. It also tests the model with the pooled statistics of all clients. Run the
command again to continue after a stop.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pfedbayes.data import DataConfig, Shards, load_shards
from pfedbayes.data.config import SplitRule
from pfedbayes.errors import UserError
from pfedbayes.nets import vgg

CHOSEN, STEPS, BATCH, RATE = 10, 20, 100, 0.01  # as in Table 1


def network(seed: int) -> nn.Module:
    """Return the VGG of Table 1 with batch normalisation after every convolution."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for layer in vgg():
        layers.append(layer)
        if isinstance(layer, nn.Conv2d):
            layers.append(nn.BatchNorm2d(layer.out_channels))
    for part in nn.Sequential(*layers).modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
            nn.init.zeros_(part.bias)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def outputs(net: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs for images in bytes, in bfloat16 as in Table 1."""
    with torch.autocast("cpu", torch.bfloat16):
        answers: Tensor = net((x.float() * (2 / 255) - 1).contiguous(memory_format=torch.channels_last))
    return answers.float()


def train(net: nn.Module, shards: Shards, client: int, draws: torch.Generator) -> None:
    """Take the local steps of a client."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    own = shards.train[client]
    for _ in range(STEPS):
        rows = own[torch.randperm(len(own), generator=draws)[:BATCH]]
        optimizer.zero_grad()
        cross_entropy(outputs(net, shards.x[rows]), shards.y[rows]).backward()
        optimizer.step()


def pooled(statistics: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the means and variances of the pooled data of all clients."""
    joint = {name: torch.stack([own[name] for own in statistics]).mean(0) for name in statistics[0]}
    for name in [name for name in joint if name.endswith("running_mean")]:
        means = torch.stack([own[name] for own in statistics])
        joint[name.replace("mean", "var")] += means.var(0, correction=0)
    return joint


@torch.no_grad()
def accuracy(net: nn.Module, shards: Shards, statistics: list[dict[str, Tensor]]) -> float:
    """Return the accuracy in percent over the test images of all clients, each with its statistics."""
    net.eval()
    right = 0
    for own, rows in zip(statistics, shards.test, strict=True):
        net.load_state_dict(own, strict=False)
        for part in rows.split(500):
            right += int((outputs(net, shards.x[part]).argmax(-1) == shards.y[part]).sum())
    return 100 * right / sum(map(len, shards.test))


def main() -> None:
    """Train, and print a line for every test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("small", "medium", "large"), default="large")
    parser.add_argument(
        "--split", choices=get_args(SplitRule), default="stratified", help="how images are assigned, see data.split"
    )
    parser.add_argument("--rounds", type=int, default=800)
    parser.add_argument("--every", type=int, default=20, help="rounds between tests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        shards = load_shards(DataConfig(name="cifar10", size=args.size, split=args.split), args.data_dir)
    except UserError as error:
        parser.error(str(error))
    net = network(args.seed)
    shared = {name: value.detach().clone() for name, value in net.named_parameters()}
    fresh = {name: value.clone() for name, value in net.named_buffers() if value.is_floating_point()}
    statistics = [{name: value.clone() for name, value in fresh.items()} for _ in shards.train]
    args.out.mkdir(parents=True, exist_ok=True)
    state_file = args.out / f"{args.size}-{args.split}-{args.seed}.safetensors"
    done = 0
    if state_file.exists():
        saved = load_file(state_file)
        done = int(saved["round"])
        shared = {name: saved[f"shared.{name}"] for name in shared}
        statistics = [{name: saved[f"{i}.{name}"] for name in fresh} for i in range(len(statistics))]
    for round in range(done + 1, args.rounds + 1):
        draws = torch.Generator().manual_seed(args.seed * 10**6 + round)
        chosen = torch.randperm(len(statistics), generator=draws)[:CHOSEN].tolist()
        total = {name: torch.zeros_like(value) for name, value in shared.items()}
        for client in chosen:
            net.load_state_dict(shared | statistics[client], strict=False)
            train(net, shards, client, draws)
            statistics[client] = {name: value.clone() for name, value in net.named_buffers() if name in fresh}
            for name, value in net.named_parameters():
                total[name] += value.detach() / CHOSEN
        shared = total
        if round % args.every and round != args.rounds:
            continue
        net.load_state_dict(shared, strict=False)
        own, joint = accuracy(net, shards, statistics), accuracy(net, shards, [pooled(statistics)] * len(statistics))
        print(f"round {round}: {own:.2f} % with own statistics, {joint:.2f} % with pooled statistics", flush=True)
        clients = {f"{i}.{name}": value for i, its in enumerate(statistics) for name, value in its.items()}
        named = {f"shared.{name}": value.contiguous() for name, value in shared.items()}
        partial = state_file.with_suffix(".new")
        save_file({"round": torch.tensor(round), **named, **clients}, partial)
        partial.replace(state_file)


if __name__ == "__main__":
    main()
