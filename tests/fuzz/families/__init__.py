"""The generators by family, each with its share of the cases."""

from ..trials import Generator
from . import (
    arguments,
    arrays,
    configs,
    exports,
    flips,
    folders,
    images,
    nodes,
    options,
    replies,
    summaries,
    sweeps,
    tables,
    tuning,
)

# Shares of the cases; what they add up to does not matter.
FAMILIES: dict[str, tuple[Generator, int]] = {
    "config": (configs.config, 9),
    "set": (configs.override, 9),
    "arguments": (arguments.arguments, 12),
    "table": (tables.table, 12),
    "arrays": (arrays.arrays, 5),
    "images": (images.images, 4),
    "run-folder": (folders.run_folder, 14),
    "bit-flip": (flips.bit_flip, 8),
    "export": (exports.export, 9),
    "sweep": (sweeps.sweep, 6),
    "tune": (tuning.tuning, 6),
    "options": (options.options, 5),
    "paper": (sweeps.paper, 2),
    "summary": (summaries.summary, 2),
    "reply": (replies.reply, 3),
    "secure-reply": (replies.secure_reply, 2),
    "node": (nodes.node, 2),
    "federation": (nodes.federation, 1),
}


def cases(count: int) -> list[tuple[str, int]]:
    """Return the family and the seed of so many cases. Fewer cases are the beginning of more."""
    total = sum(share for _, share in FAMILIES.values())
    due = dict.fromkeys(FAMILIES, 0.0)
    taken = dict.fromkeys(FAMILIES, 0)
    found = []
    for _ in range(count):
        for name, (_, share) in FAMILIES.items():
            due[name] += share / total
        name = max(due, key=due.__getitem__)
        found.append((name, taken[name]))
        due[name] -= 1
        taken[name] += 1
    return found
