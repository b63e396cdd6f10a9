"""The tables of the page on speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.ours import EAGER, Job, plan_for
from benchmarks.race import Contender, Section, Turns
from benchmarks.work import Work
from pfedbayes.engine.plan import Plan, has_compiler
from pfedbayes.errors import UserError

PLANS: dict[str, dict[str, Any]] = {
    "default plan": {},
    "eager": EAGER,
    "not compiled": {"compile": False},  # a GPU still replays a graph
    "compiled": {"compile": True},
    "TF32": {"precision": "tf32"},
    "full precision": {"precision": "full"},
    "vmap, eager": {"over": "vmap", **EAGER},
    "loop, eager": {"over": "loop", **EAGER},
}


@dataclass(frozen=True)
class Amount:
    """How much is measured."""

    turns: Turns
    local_steps: int
    clients: tuple[int, ...]
    """Numbers of clients to compare."""


FULL = Amount(Turns(repeats=9, warm_up=3, seconds=1.0), local_steps=20, clients=(10, 100, 1000, 10000))
QUICK = Amount(Turns(repeats=2, warm_up=1, seconds=0.2), local_steps=2, clients=(10, 30))


def by_plans(work: Work, names: list[str]) -> list[Contender]:
    """Return the package with these plans, without impossible and duplicate ones."""
    seen: list[Plan] = []
    contenders = []
    for name in names:
        settings = PLANS[name]
        if (settings.get("compile") and not has_compiler(work.device)) or (
            "precision" in settings and work.device == "cpu"
        ):
            continue
        plan = plan_for(work, settings)
        if plan in seen:
            continue
        seen.append(plan)
        title = f"ours, {name} ({', '.join(plan.describe()[1:])})" if name == "default plan" else f"ours, {name}"
        # Another precision gives other results.
        contenders.append(Contender(title, "ours", work, {"plan": settings}, same="precision" not in settings))
    return contenders


def loops(name: str, kind: str, work: Work) -> list[Contender]:
    """Return a loop over clients with all cores and, on a CPU, also with one thread, which suits small steps."""
    contenders = [Contender(name, kind, work, same=True)]
    if work.device == "cpu":
        contenders.append(Contender(f"{name}, one thread", kind, work, {"threads": 1}, same=True))
    return contenders


def products(name: str, work: Work, **options: Any) -> list[Contender]:
    """Return the matrix products alone; none on a GPU, where Python launches them more slowly than the package."""
    return [Contender(name, "products", work, options)] if work.device == "cpu" else []


def one_plan(device: str) -> dict[str, Any]:
    """Return options for works of different size: the default plan compiles only long runs."""
    return {"plan": {"compile": has_compiler(device)}}


def pfedbayes(device: str, amount: Amount) -> Section:
    work = Work("pfedbayes", device, local_steps=amount.local_steps)
    naive = loops("plain loops (examples/naive_pfedbayes.py)", "naive", work)
    return Section(
        "pFedBayes",
        f"MNIST, 10 clients, the MLP 784-100-10, batches of 100, {amount.local_steps} local steps, all clients train.",
        [*by_plans(work, ["default plan", "eager", "not compiled", "compiled", "TF32"]), *naive],
        amount.turns,
    )


def fedavg(device: str, amount: Amount) -> Section:
    work = Work("fedavg", device, local_steps=amount.local_steps)
    others = [
        *loops("plain PyTorch loop", "plain", work),
        Contender(
            "plain PyTorch loop, DataLoader, one thread", "plain", work, {"threads": 1, "loader": True}, same=True
        ),
        Contender("pfl 0.6", "pfl_fedavg", work, needs="pfl", same=True),
        Contender("pfl 0.6, one thread", "pfl_fedavg", work, {"threads": 1}, needs="pfl", same=True),
        Contender("Flower 1.41, simulation", "flower", work, needs="flwr", same=True),
        Contender("Flower 1.41, simulation, DataLoader", "flower", work, {"loader": True}, needs="flwr", same=True),
        Contender(
            "Flower 1.41, simulation, replies asked for every ms",
            "flower",
            work,
            {"pull_interval": 0.001},
            needs="flwr",
            same=True,
        ),
        *products("matrix products of a round alone", work),
    ]
    return Section(
        "FedAvg",
        "The same data, network and amount of training. All contenders use the same batches and the same start. "
        "Batches are slices of tensors or, for DataLoader, assembled by torch example by example.",
        [*by_plans(work, ["default plan", "eager", "not compiled", "compiled"]), *others],
        amount.turns,
    )


def vgg(device: str, amount: Amount) -> Section:
    clients, steps = (20, amount.local_steps) if device == "cuda" else (4, 2)
    work = Work("pfedbayes", device, data="images", clients=clients, local_steps=steps, batch_size=50)
    return Section(
        "pFedBayes, VGG",
        f"Random 32 x 32 colour images, {clients} clients, batches of 50, {steps} local steps.",
        by_plans(work, ["default plan", "vmap, eager", "loop, eager", "full precision"]),
        amount.turns,
    )


def seeds(device: str, amount: Amount) -> Section:
    mlp = Work("pfedbayes", device, local_steps=amount.local_steps)
    plan = one_plan(device)
    ways: dict[str, tuple[Work, dict[str, Any]]] = {"MLP": (mlp, plan)}
    if device == "cuda":
        images = dataclasses.replace(mlp, data="images", clients=20, batch_size=50)
        ways["VGG"] = (images, plan)
        ways["VGG in bfloat16"] = (images, {"plan": {**plan["plan"], "precision": "bf16"}})
    contenders = [
        Contender(
            f"{net}, {count}", "ours", dataclasses.replace(work, seeds=number), options, beside=f"{net}, one seed"
        )
        for net, (work, options) in ways.items()
        for count, number in (("one seed", 1), ("five seeds at once", 5))
    ]
    return Section(
        "Five seeds at once",
        "pFedBayes. The ratio refers to one seed of the same network: at 0.2 five seeds take as long as one, at 1 as "
        "long as five runs in turn.",
        contenders,
        amount.turns,
    )


def evaluation(device: str, amount: Amount) -> Section:
    work = Work("pfedbayes", device, local_steps=amount.local_steps)
    jobs: list[tuple[str, Job, dict[str, Any]]] = [
        ("a training round", "train", {}),
        ("a training round, eager", "train", EAGER),
        ("mean network", "mean", {}),
        ("all estimators, ten weight samples", "mc10", {}),
        ("all estimators, ten samples of the activations", "activations", {}),
    ]
    return Section(
        "Evaluation",
        "Personal and shared model on all 47,500 test images of the MNIST federation, compared with a training round.",
        [
            *(Contender(name, "ours", work, {"plan": plan, "job": job}) for name, job, plan in jobs),
            *products("matrix products of the mean networks alone", work, job="mean"),
        ],
        amount.turns,
    )


def scale(device: str, amount: Amount) -> Section:
    steps = amount.local_steps
    contenders = []
    for clients in amount.clients:
        chosen = min(clients, 100)
        work = Work("pfedbayes", device, data="many", clients=clients, chosen=chosen, local_steps=steps)
        contenders.append(Contender(f"{clients:,} clients, {chosen} a round", "ours", work, one_plan(device)))
    # Several rounds per turn: a GPU receives a round while it still works on the one before. Many warm-up rounds on a
    # GPU: locking memory for clients that train for the first time is slow.
    each, before = 4, 300 if device == "cuda" else amount.turns.warm_up
    turns = Turns(repeats=min(amount.turns.repeats, 4), warm_up=before, rounds=each)
    rounds = before + turns.repeats * each
    met = clients * (1 - (1 - chosen / clients) ** rounds)  # of the last contender's
    return Section(
        "Number of clients",
        f"pFedBayes on rows of MNIST, {steps} local steps. Only clients that took part have a state: about "
        f"{met:,.0f} of {clients:,} after these {rounds} rounds, {before} of which are not timed.",
        contenders,
        turns,
    )


def long(device: str, amount: Amount) -> Section:
    mnist = Work("pfedbayes", device)
    images = dataclasses.replace(mnist, data="images", clients=20, batch_size=50)
    works = {
        "MNIST, one seed": mnist,
        "MNIST, five seeds": dataclasses.replace(mnist, seeds=5),
        "VGG, 20 clients": images,
    }
    return Section(
        "Runs of 800 rounds",
        "Complete runs without evaluation, timed after compilation.",
        [Contender(name, "ours", work, {"plan": {}}) for name, work in works.items()],
        Turns(repeats=1, warm_up=amount.turns.warm_up, rounds=800),
    )


Maker = Callable[[str, Amount], Section]
SECTIONS: dict[str, Maker] = {
    maker.__name__: maker for maker in (pfedbayes, fedavg, vgg, seeds, evaluation, scale, long)
}


def chosen(device: str, amount: Amount, only: list[str], full: bool) -> dict[str, Callable[[], Section]]:
    """Return the sections to measure, by name; long runs only on request."""
    names = only or [name for name in SECTIONS if name != "long" or full]
    if "long" in names and device != "cuda":
        raise UserError("runs of 800 rounds need a GPU: add --device cuda, or leave them out")
    return {name: partial(SECTIONS[name], device, amount) for name in names}
