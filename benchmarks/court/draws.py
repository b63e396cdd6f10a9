"""Make the draws from the exact posteriors of cases C, D and E, by NUTS.

    python -m benchmarks.court.draws [--datasets 6]

Needs numpyro, the extra `court`, in an environment of its own: JAX wants a newer NumPy. The draws are small files in
benchmarks/court/draws, so that nobody else needs it. A data set is kept only if the chains agree (R-hat < 1.01), have
more than 400 effective draws, and no divergences; in E, whose weights are not identified, R-hat is that of predictions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.court.cases import NETWORK, NOISE, WIDE, Data, Name, num_weights, simulate

FOLDER = Path(__file__).with_name("draws")
CHECKSUMS = "checksums.json"
KEPT = {"C": 2000, "D": 1000, "E": 500}
SHOWN = 50  # held-out rows at which E's predictions are kept


def model_of(name: Name, data: Data) -> Any:
    """Return the case as a numpyro model."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    x, y = np.concatenate(data.x), np.concatenate(data.y)
    client = np.repeat(np.arange(len(data.x)), [len(each) for each in data.y])

    def pooled() -> None:
        theta = numpyro.sample("theta", dist.Normal(0, WIDE).expand([x.shape[1]]))
        numpyro.sample("y", dist.Bernoulli(logits=x @ theta), obs=y)

    def hierarchical() -> None:
        w = numpyro.sample("w", dist.Normal(0, WIDE).expand([x.shape[1]]))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([len(data.x), x.shape[1]]))
        theta = numpyro.deterministic("theta", w + tau * z)
        numpyro.sample("y", dist.Bernoulli(logits=(x * theta[client]).sum(-1)), obs=y)

    def net() -> None:
        theta = numpyro.sample("theta", dist.Normal(0, 1).expand([num_weights()]))
        inputs, hidden, _ = NETWORK
        first, bias, second, last = jnp.split(theta, np.cumsum([hidden * inputs, hidden, hidden]))

        def outputs(rows: Any) -> Any:
            return jnp.tanh(rows @ first.reshape(hidden, inputs).T + bias) @ second + last

        numpyro.deterministic("outputs", outputs(data.held_out[:SHOWN]))
        numpyro.sample("y", dist.Normal(outputs(x), NOISE), obs=y)

    return {"C": pooled, "D": hierarchical, "E": net}[name]


def sample(name: Name, number: int, steps: int) -> dict[str, np.ndarray] | None:
    """Return thinned draws of a data set's posterior, or None if the chains cannot be trusted."""
    import jax
    from numpyro.diagnostics import summary
    from numpyro.infer import MCMC, NUTS

    jax.config.update("jax_enable_x64", True)
    kernel = NUTS(model_of(name, simulate(name, number)), target_accept_prob=0.95)
    chains = MCMC(
        kernel, num_warmup=steps // 2, num_samples=steps, num_chains=2, chain_method="sequential", progress_bar=False
    )
    chains.run(jax.random.PRNGKey(number), extra_fields=("diverging",))
    grouped = chains.get_samples(group_by_chain=True)
    wanted = {"C": ("theta",), "D": ("theta", "w", "tau"), "E": ("outputs",)}[name]
    found = summary({key: np.asarray(grouped[key]) for key in wanted}, group_by_chain=True)
    r_hat = max(float(np.max(each["r_hat"])) for each in found.values())
    effective = min(float(np.min(each["n_eff"])) for each in found.values())
    diverging = int(np.sum(np.asarray(chains.get_extra_fields()["diverging"])))
    trusted = r_hat < 1.01 and effective > 400 and not diverging
    print(f"{name}{number}: R-hat {r_hat:.4f}, {effective:.0f} effective draws, {diverging} divergences", flush=True)
    if not trusted:
        return None
    rows = np.linspace(0, 2 * steps - 1, KEPT[name]).astype(int)
    flat = {key: np.asarray(grouped[key]).reshape(2 * steps, *grouped[key].shape[2:]) for key in wanted}
    return {key: each[rows].astype(np.float32) for key, each in flat.items()}


def main() -> None:
    """Sample the data sets that have no file yet."""
    from safetensors.numpy import save_file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4000, help="draws of each of two chains")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for number in range(options.datasets):
        for name in ("C", "D", "E"):
            path = FOLDER / f"{name}{number}.safetensors"
            if path.exists():
                continue
            start = time.monotonic()
            draws = sample(name, number, options.steps)
            if draws is not None:
                save_file(draws, path)
                print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)
            sums = {
                each.name: hashlib.sha256(each.read_bytes()).hexdigest()
                for each in sorted(FOLDER.glob("*.safetensors"))
            }
            (FOLDER / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n")


if __name__ == "__main__":
    main()
