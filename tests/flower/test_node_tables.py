"""Tables on nodes of their own: preprocessing fitted from summaries alone, and the engine's numbers."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from flwr.cli.build import build_fab_from_disk
from grids import FakeGrid, run_config

from federations import EXACT, difference
from pfedbayes import DataConfig, Federation, UserError, load_shards
from pfedbayes.files.checksums import dump_json
from pfedbayes.flower import client_app
from pfedbayes.flower.apps import write_app
from pfedbayes.flower.server import serving
from pfedbayes.flower.settings import from_run_config

DOCS = Path(__file__).parents[2] / "docs" / "federation.md"
SITES = 3


def write_tables(folder: Path) -> None:
    """A table for each site; one site never saw a category that others have, one has missing cells."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for site in range(SITES):
        age = rng.normal(50 + 5 * site, 10, 40)
        ward = rng.choice(["a", "b", "c"][: 2 + (site > 0)], 40)
        outcome = np.where(age + rng.normal(0, 5, 40) > 55, "ill", "well")
        lines = [
            f"{'' if site == 2 and k % 7 == 0 else round(a, 3)},{w},{o}"
            for k, (a, w, o) in enumerate(zip(age, ward, outcome, strict=True))
        ]
        (folder / f"site{site}.csv").write_text("\n".join(["age,ward,outcome", *lines, ""]))


def documented(start: str) -> str:
    """The block of the documentation that begins like this."""
    return next(
        block for block in re.findall(r"```\w+\n(.*?)```", DOCS.read_text(), re.DOTALL) if block.startswith(start)
    )


def test_the_documented_way_equals_the_engine_on_all_tables(tmp_path, monkeypatch):
    write_tables(tmp_path / "data")
    app = tmp_path / "app"
    (app / "federation").mkdir(parents=True)
    task = documented("from pathlib import Path\n\nfrom pfedbayes import Classification, DataConfig")
    task = task.replace('"/data/patients.csv"', 'os.environ["TABLE"]')
    (app / "federation" / "task.py").write_text("import os\n" + task)

    def shell(command: str, **environment: str) -> None:
        done = subprocess.run(
            ["bash", "-ec", command.replace("python ", f"{sys.executable} ")],
            cwd=app, env=os.environ | environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    for site in range(SITES):
        command = documented('python -c "from federation.task import DATA')
        own = command.replace("DATA, 0, 'Hospital A'", f"DATA, {site}, 'site{site}'").replace(
            "-0.json", f"-{site}.json"
        )
        shell(own, TABLE=str(tmp_path / "data" / f"site{site}.csv"))
    shell(documented('python -c "from pathlib import Path; from pfedbayes.data import ClientSummary'))
    summaries = "".join(path.read_text() for path in app.glob("summary-*.json"))
    assert len(summaries) < 2500, "a summary holds no rows"
    ages = re.findall(r"^\d+\.\d+", "\n".join(path.read_text() for path in (tmp_path / "data").iterdir()), re.MULTILINE)
    assert len(set(ages) & set(re.findall(r"\d+\.\d+", summaries))) <= len(ages) / 4

    monkeypatch.setenv("TABLE", "")
    space: dict = {"__file__": str(app / "federation" / "task.py"), "__name__": "task"}
    exec(compile((app / "federation" / "task.py").read_text(), "task.py", "exec"), space)  # noqa: S102

    def load_data(client, clients):
        space["DATA"] = dataclasses.replace(space["DATA"], path=str(tmp_path / "data" / f"site{client}.csv"))
        return space["load_data"](client, clients)

    config = run_config(tmp_path, federation__clients=SITES)
    del config["training.participants"]
    grid = FakeGrid(config, SITES)
    grid.app = client_app(load_data, space["make_model"])
    settings = from_run_config(config)
    with serving(grid, settings, space["make_model"](settings.method)) as server:
        server.run()

    together = DataConfig(name="files", path=str(tmp_path / "data"), target="outcome", test_fraction=0.2)
    engine = Federation(
        load_shards(together), space["make_model"](settings.method), settings.method, settings.training,
        plan=dataclasses.replace(EXACT, over="loop"),
    )  # fmt: skip
    for _ in engine.rounds():
        pass
    assert difference(server.state.servers[0], engine.servers[0]) < 1e-10

    # Other numbers for the same columns are another preprocessing, and not gone on with.
    fitted = app / "federation" / "preprocessing.json"
    changed = re.sub(r'"mean": [1-9][\d.]*', '"mean": 1.5', fitted.read_text(), count=1)
    fitted.write_text(dump_json(json.loads(changed)))
    grid.run_config = config | {"training.rounds": 4, "federation.attempts": 1}
    settings = from_run_config(grid.run_config)
    with pytest.raises(UserError), serving(grid, settings, space["make_model"](settings.method)) as server:
        server.run()
    assert "was made with preprocessing = " in (tmp_path / "run" / "federation.jsonl").read_text()


def test_a_missing_table_is_one_line(tmp_path):
    from pfedbayes.data import summarise_client

    with pytest.raises(UserError, match=r"nowhere\.csv does not exist: correct the path"):
        summarise_client(DataConfig(name="files", path=str(tmp_path / "nowhere.csv"), target="y"), 0, "A")


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of Flower
def test_results_do_not_travel_with_the_app(tmp_path):
    app = tmp_path / "app"
    write_app(app)
    before = sent(app)
    assert "federation/task.py" in before
    for name in ("runs/federation/rounds.jsonl", "states/client-0/left.json", "federation/preprocessing.json"):
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text("{}")
    assert sent(app) == before | {"federation/preprocessing.json"}


def sent(app: Path) -> set[str]:
    """The files that Flower sends to the nodes."""
    return set(zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))).namelist())
