"""Methods one after another in one simulation by Flower, a subfolder for each: `python simulate.py FOLDER [METHOD…]`.

Default: all methods of the package. A METHOD may be an import path.
"""

import sys
from importlib import import_module
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from grids import own_data, run_config

from federations import make_shards, model_for
from pfedbayes.flower import client_app
from pfedbayes.flower.messages import facts_of
from pfedbayes.flower.server import serving
from pfedbayes.flower.settings import from_run_config
from pfedbayes.methods import METHODS
from pfedbayes.runs.naming import make_imported

NODES = 4
CARRIED = [name for name in METHODS if not METHODS[name]().needs.pooled_data]


def four_of_five():
    shards = make_shards()
    return shards.__class__(
        shards.x, shards.y, *(getattr(shards, name)[:NODES] for name in ("train", "test", "validation", "names")),
        shards.num_classes,
    )  # fmt: skip


def import_code(method: str) -> None:
    """Import the module of an import path, as an app does that uses it."""
    if ":" in method:
        import_module(method.partition(":")[0])


def config_of(folder: Path, method: str) -> dict:
    import_code(method)
    config = run_config(folder / method, method, federation__clients=NODES, federation__timeout=120.0)
    if make_imported(method, {}).needs.all_clients:
        del config["training.participants"]
    return config | {"federation.wait": 60.0}


def main(folder: Path, methods: list[str]) -> None:
    configs = {method: config_of(folder, method) for method in methods}
    by_digest = {from_run_config(config).digest(): config for config in configs.values()}
    own = client_app(own_data, model_for)
    clients, server = ClientApp(), ServerApp()

    def handle(message: Message, context: Context) -> Message:
        config = by_digest[facts_of(message)["digest"]]
        import_code(config["method.name"])
        return own(message, Context(context.run_id, context.node_id, context.node_config, context.state, config))

    def serve_all(grid: Grid, context: Context) -> None:
        for config in configs.values():
            settings = from_run_config(config)
            with serving(grid, settings, model_for(settings.method)) as running:
                running.run()

    clients.query()(handle)
    clients.train()(handle)
    server.main()(serve_all)
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, clients, num_supernodes=NODES, backend_config=backend)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or CARRIED)
