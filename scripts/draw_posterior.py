"""Draw what a personal posterior is: docs/assets/posterior.svg.

    python scripts/draw_posterior.py            train the small federation (seconds), then draw it
    python scripts/draw_posterior.py --no-run   draw it again from docs/assets/posterior.json

Three clients fit a line y = a x + b with Algorithm 1. They have different data and different amounts of it. The left
panel shows the Gaussians over (a, b), the other panels show the lines that each client draws from its own Gaussian.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import pfedbayes

FOLDER = Path(__file__).parents[1] / "docs" / "assets"
SIZES = (5, 20, 100)
SLOPES = (1.6, 0.4, 1.0)
INTERCEPTS = (0.9, -0.3, -1.0)
NOISE = 0.5
REACH = 2.0  # inputs lie between -REACH and REACH
BAND = 1.645  # standard deviations to each side that hold 90 % of a Gaussian

STYLE = """
svg { font: 13px system-ui, sans-serif; background: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0;
  --c0: #0072b2; --c1: #d55e00; --c2: #00805d; }
@media (prefers-color-scheme: dark) { svg { background: #14171b; --ink: #e6e9ed; --soft: #a0a9b4; --line: #3a414a;
  --c0: #56b4e9; --c1: #ff9f5a; --c2: #3fd0a4; } }
text { fill: var(--soft); } .title { fill: var(--ink); font-weight: 600; }
.frame { fill: none; stroke: var(--line); }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .shared { color: var(--soft); }
.label { fill: currentColor; font-weight: 600; }
.area { fill: currentColor; fill-opacity: .2; stroke: currentColor; stroke-opacity: .5; }
.inner { fill: currentColor; fill-opacity: .3; }
.shared .area, .shared .inner { fill-opacity: .1; stroke-dasharray: 5 4; }
.band { fill: currentColor; fill-opacity: .22; } .line { fill: none; stroke: currentColor; stroke-width: 2; }
.shared .line { stroke-dasharray: 5 4; stroke-width: 1.5; }
.pull { fill: none; stroke: currentColor; stroke-width: 1.2; stroke-dasharray: 2 3; }
.cross { fill: none; stroke: currentColor; stroke-width: 2; } .dot { fill: currentColor; fill-opacity: .75; }
"""


def compute(rounds: int = 50) -> dict[str, Any]:
    """Train three clients with Algorithm 1 and return the moments of all Gaussians over (a, b), and the data."""
    data = make_data()
    shards = pfedbayes.Shards.from_arrays(train=data, names=[f"{size} examples" for size in SIZES])
    model = pfedbayes.Model(pfedbayes.Net(torch.nn.Linear(1, 1)), pfedbayes.Regression(sigma_eps=NOISE))
    method = pfedbayes.PFedBayes(zeta=1.0, rho0=-1.0, eta_personal=0.03, eta_global=0.03, samples=4)
    training = pfedbayes.Training(rounds=rounds, local_steps=20, batch_size=20)
    federation = pfedbayes.Federation(shards, model, method, training)
    for _ in federation.rounds():
        pass
    clients = [
        {
            "x": [round(float(value), 3) for value in x[:, 0]],
            "y": [round(float(value), 3) for value in y[:, 0]],
            "alone": np.round(np.polyfit(x[:, 0], y[:, 0], 1), 3).tolist(),
            **moments(federation, "personal", client),
        }
        for client, (x, y) in enumerate(data)
    ]
    return {"clients": clients, "shared": moments(federation, "shared", 0)}


def make_data() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return x (n, 1) and y (n, 1) of each client: points around a line of its own."""
    rng = np.random.default_rng(3)
    data = []
    for size, slope, intercept in zip(SIZES, SLOPES, INTERCEPTS, strict=True):
        x = rng.uniform(-REACH, REACH, (size, 1)).astype("float32")
        y = slope * x + intercept + NOISE * rng.normal(size=(size, 1))
        data.append((x, y.astype("float32")))
    return data


def moments(
    federation: pfedbayes.Federation, model: Literal["personal", "shared"], client: int
) -> dict[str, list[float]]:
    """Return mean and standard deviation of (a, b), from lines that a model draws."""
    outputs = federation.predict(model, client, torch.tensor([[0.0], [1.0]]), samples=20_000)[..., 0]
    lines = torch.stack([outputs[:, 1] - outputs[:, 0], outputs[:, 0]])
    return {
        "mean": [round(value, 3) for value in lines.mean(1).tolist()],
        "deviation": [round(value, 3) for value in lines.std(1).tolist()],
    }


def draw(found: dict[str, Any]) -> str:
    """Return the SVG of what `compute` found."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 380" role="img">',
        "<title>A shared prior and three personal posteriors</title>",
        "<desc>Left: Gaussians over slope and intercept. Right: data, mean line and 90 % band of each client.</desc>",
        f"<style>{STYLE}</style>",
        *draw_weights(found),
    ]
    for k, client in enumerate(found["clients"]):
        parts += draw_client(k, client, found["shared"], left=404 + 186 * k)
    return "\n".join([*parts, "</svg>", ""])


def draw_weights(found: dict[str, Any]) -> list[str]:
    """Draw the Gaussians over slope a (to the right) and intercept b (upwards), as 1 and 2 standard deviations."""
    across, up = scale(0.05, 2.0, 46, 374), scale(-1.4, 1.4, 330, 40)
    parts = [
        '<text class="title" x="46" y="22">Weights: one Gaussian per client</text>',
        '<rect class="frame" x="46" y="40" width="328" height="290"/>',
        *(f'<text x="{across(a):.0f}" y="348" text-anchor="middle">{a:g}</text>' for a in (0.5, 1.0, 1.5)),
        *(f'<text x="40" y="{up(b) + 4:.0f}" text-anchor="end">{b:g}</text>' for b in (-1.0, 0.0, 1.0)),
        '<text x="210" y="368" text-anchor="middle">slope a</text>',
        '<text x="14" y="185" text-anchor="middle" transform="rotate(-90 14 185)">intercept b</text>',
    ]
    gaussians = [("shared", found["shared"], "shared prior"), *(
        (f"c{k}", client, f"{len(client['x'])} examples") for k, client in enumerate(found["clients"])
    )]  # fmt: skip
    for kind, gaussian, label in gaussians:
        (a, b), (wide, high) = gaussian["mean"], gaussian["deviation"]
        x, y = across(a), up(b)
        rx, ry = across(a + wide) - x, y - up(b + high)
        parts.append(f'<g class="{kind}">')
        for times, name in ((2, "area"), (1, "inner")):
            shape = f'cx="{x:.1f}" cy="{y:.1f}" rx="{times * rx:.1f}" ry="{times * ry:.1f}"'
            parts.append(f'<ellipse class="{name}" {shape}/>')
        if "alone" in gaussian:
            own_x, own_y = across(gaussian["alone"][0]), up(gaussian["alone"][1])
            parts.append(f'<path class="pull" d="M{own_x:.1f} {own_y:.1f}L{x:.1f} {y:.1f}"/>')
            parts.append(f'<path class="cross" d="M{own_x - 5:.1f} {own_y - 5:.1f}l10 10m0 -10l-10 10"/>')
        place = f'x="{x + 2 * rx + 6:.1f}" y="{y + 8:.1f}"'
        if kind == "c1":  # to the right of it is the shared prior
            place = f'x="{x + 2 * rx - 18:.1f}" y="{y + 2 * ry + 16:.1f}" text-anchor="end"'
        parts.append(f'<text class="label" {place}>{label}</text></g>')
    parts.append('<text x="54" y="58">✕ fit to its own data alone</text>')
    return parts


def draw_client(k: int, client: dict[str, Any], shared: dict[str, Any], left: float) -> list[str]:
    """Draw a client's data, the mean of its lines with the band that holds 90 % of them, and the shared mean line."""
    across, up = scale(-REACH, REACH, left, left + 172), scale(-4.6, 4.6, 330, 40)
    steps = [REACH * (i / 10 - 1) for i in range(21)]
    (a, b), (wide, high) = client["mean"], client["deviation"]
    half = [BAND * float(np.hypot(high, wide * x)) for x in steps]
    upper = [(across(x), up(a * x + b + h)) for x, h in zip(steps, half, strict=True)]
    lower = [(across(x), up(a * x + b - h)) for x, h in zip(steps, half, strict=True)]
    title = "Predictions: its data and the lines it draws" if k == 0 else ""
    return [
        f'<text class="title" x="{left}" y="22">{title}</text>' if title else "",
        f'<rect class="frame" x="{left}" y="40" width="172" height="290"/>',
        f'<g class="shared"><path class="line" d="{path(line(shared, across, up))}"/></g>',
        f'<g class="c{k}"><path class="band" d="{path(upper + lower[::-1])}Z"/>',
        f'<path class="line" d="{path(line(client, across, up))}"/>',
        *(
            f'<circle class="dot" cx="{across(x):.1f}" cy="{up(y):.1f}" r="{3.4 if len(client["x"]) < 50 else 2.2}"/>'
            for x, y in zip(client["x"], client["y"], strict=True)
        ),
        f'<text class="label" x="{left + 10}" y="60">{len(client["x"])} examples</text></g>',
        f'<text x="{left + 86}" y="348" text-anchor="middle">x</text>',
    ]


def line(gaussian: dict[str, Any], across: Callable[[float], float], up: Callable[[float], float]) -> list[Any]:
    """Return the two ends of a Gaussian's mean line."""
    a, b = gaussian["mean"]
    return [(across(x), up(a * x + b)) for x in (-REACH, REACH)]


def path(points: Sequence[tuple[float, float]]) -> str:
    """Return points as the data of an SVG path."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the map from values between low and high to pixels between start and end."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def main() -> None:
    """Compute where asked to, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-run", action="store_true", help="only draw, from posterior.json")
    if not parser.parse_args().no_run:
        (FOLDER / "posterior.json").write_text(json.dumps(compute()) + "\n")
    (FOLDER / "posterior.svg").write_text(draw(json.loads((FOLDER / "posterior.json").read_text())))


if __name__ == "__main__":
    main()
