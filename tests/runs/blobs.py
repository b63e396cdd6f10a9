"""A small experiment for the tests of runs."""

BLOBS = [
    "data.name=blobs", "data.clients=3", "data.examples=40", "net.hidden=[6]", "training.batch_size=8",
    "training.local_steps=2", "training.rounds=4", "training.evaluate_every=2",
]  # fmt: skip


def same_bits(one, other):
    a, b = one.tensors(), other.tensors()
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)
