"""Flipped bits: what is accepted nevertheless has to give the same answers."""

from ..bases import PREDICTIONS
from ..damage import flip_bits
from ..trials import Trial, Workshop
from .folders import RUNS, uses


def bit_flip(shop: Workshop) -> Trial:
    """One to three flipped bits in a file of a run folder, a newcomer's file or an exported file."""
    rng = shop.rng
    if rng.random() < 0.4:
        name = rng.choice(RUNS)
        run = shop.copy(name)
        path = rng.choice(sorted(path for path in run.rglob("*") if path.is_file()))
        return Trial(f"{name}: {flip_bits(rng, path)}", uses(shop, run, name), keep_if_refused=[run])
    which = rng.choice([*PREDICTIONS, "export", "export"])
    source, *rest = PREDICTIONS[which]
    run = shop.copy(source)
    rest[-1] = str(shop.bases.path(rest[-1]))
    files = [run] if run.is_file() else sorted(path for path in run.rglob("*") if path.is_file())
    read = [path for path in files if path.suffix in (".safetensors", ".bin") or path.name == "run.json"]
    title = flip_bits(rng, rng.choice(read), most=2)
    command = ["predict", str(run), *rest]
    return Trial(
        f"{source}: {title}", [command], keep_if_refused=[run], same_output=shop.bases.text(f"{which}.printed")
    )
