"""A client without one of the labels: its predictions are gated by the shared model, from the run and from its file."""

import json
import runpy
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load

import pfedbayes as package
from pfedbayes.errors import UserError
from pfedbayes.maths.ranking import auroc
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.serving import portable
from pfedbayes.serving.export import MeanNetwork, export
from pfedbayes.serving.options import Options
from pfedbayes.serving.portable import client_bytes, read_client
from pfedbayes.trust.calibration import guarantee, menus, scores_at
from pfedbayes.trust.gate import NO_SUMMARIES, judged, share_of_others

EXAMPLE = Path(__file__).parents[2] / "examples" / "load_export.py"
SHORT = [
    "method.name=pfedbayes", "method.zeta=0.001", "method.eta_personal=0.02", "method.eta_global=0.02",
    "training.rounds=30", "training.evaluate_every=30", "training.local_steps=10", "evaluation.alone=false",
    "net.name=mlp", "net.hidden=[16]",
]  # fmt: skip


def animals(size, sites, kinds=("cat", "dog", "owl"), seed=0):
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, len(kinds), size)
    centres = np.array([[2.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]])
    x = centres[kind] + rng.normal(0, 0.7, (size, 2))
    return pandas.DataFrame(
        {"a": x[:, 0], "b": x[:, 1], "site": rng.choice(sites, size), "kind": np.array(kinds)[kind]}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gated")
    table = pandas.concat([animals(300, ["zoo", "farm"]), animals(150, ["attic"], kinds=("cat", "dog"), seed=1)])
    table.to_csv(folder / "animals.csv", index=False)
    data = [f"data.path={folder / 'animals.csv'}", "data.target=kind", "data.client_column=site", "data.validation=0.2"]
    for _ in execute(read_experiment(None, [*data, *SHORT]), folder / "run", [1]):
        pass
    return folder / "run"


@pytest.fixture(scope="module")
def new():
    table = animals(200, ["attic"], seed=2)
    return table.drop(columns=["kind", "site"]), table["kind"].to_numpy()


def accuracy(client, new, **options):
    rows, kinds = new
    return float((client.predict(rows, **options)["label"] == kinds).mean())


def auroc_of(score, positive):
    return float(auroc(torch.from_numpy(score[~positive]), torch.from_numpy(score[positive])))


def test_it_is_the_default_where_a_label_is_missing(run, new):
    client = package.open_client(run, "attic")
    assert client.which == "gated"
    assert "gated by the shared model" in client.title
    assert any("--others" in line for line in client.statements())
    assert {package.open_client(run, name).which for name in ("zoo", "farm")} == {"personal"}
    for name in ("personal", "joined"):
        assert package.open_client(run, "attic", model=name).which == "personal"
    assert package.open_client(run, "attic", model="shared").which == "shared"
    personal = package.open_client(run, "attic", model="personal")
    assert accuracy(client, new) > accuracy(personal, new) + 0.1
    strange = client.predict(new[0])["strangeness"]
    assert auroc_of(strange, new[1] == "owl") > 0.9
    out = client.predict(new[0])
    assert sum(out[f"p_{kind}"] for kind in ("cat", "dog", "owl")) == pytest.approx(1, abs=1e-5)
    assert out["aleatoric"] + out["epistemic"] == pytest.approx(out["entropy"], abs=1e-5)


def test_a_client_with_all_labels_may_ask_for_its_gate(run, new):
    ours, gated = (package.open_client(run, "zoo", model=model) for model in ("personal", "gated"))
    assert gated.predict(new[0])["p_owl"] == pytest.approx(ours.predict(new[0])["p_owl"], abs=1e-5)
    assert gated.own.odd.tolist() == pytest.approx(ours.own.odd.tolist(), abs=1e-4)


def test_the_share_is_estimated_from_the_rows_or_given(run, new):
    rows, kinds = new
    client = package.open_client(run, "attic")
    out = client.predict(rows)
    share = float((kinds == "owl").mean())
    assert client.predict(rows, others=share)["p_owl"] == pytest.approx(out["p_owl"], abs=0.05)
    assert client.predict(rows, others=0.0)["p_owl"].max() < 1e-6
    assert client.predict(rows, others=1.0)["p_owl"].min() > 1 - 1e-6
    with pytest.raises(UserError, match="--others is 2: give a share"):
        client.predict(rows, others=2)
    own = rows[kinds != "owl"]
    assert client.predict(own)["p_owl"].mean() < client.predict(own, others=share)["p_owl"].mean()


def test_guarantees_are_those_of_the_gated_predictions(run, new):
    client = package.open_client(run, "attic")
    assert client.gated.own.true.shape == client.own.odd.shape
    usual = client.gated.usual_share()
    assert usual == pytest.approx(share_of_others(client.gated.own.evidence, client.gated.gate.usual))
    assert 0 < usual < 0.2
    few, many = (judged(client.gated.own, share).true.mean() for share in (0.01, 0.9))
    assert few > many  # where others are frequent, own labels are less probable
    found, offered = client.promises(Options(others=0.9))
    rows = [scores_at(each, 0.9) for each in (client.gated.own, client.gated.of_all)]
    assert found.sets == guarantee(*rows, 0.9, None).sets
    assert offered == menus(*rows)
    assert client.promises(Options()) == client.promises(Options(others=usual))


def test_a_file_predicts_the_same_without_the_run(run, new, tmp_path):
    client = package.open_client(run, "attic")
    export(client, tmp_path / "attic.safetensors")
    again = package.open_client(tmp_path / "attic.safetensors")
    assert (again.which, again.title) == ("gated", client.title)
    expected, found = client.predict(new[0]), again.predict(new[0])
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert again.statements() == client.statements()
    for model in ("personal", "shared", "alone"):
        with pytest.raises(UserError, match="holds the model of attic, gated by the shared model: leave"):
            package.open_client(tmp_path / "attic.safetensors", model=model)
    example = runpy.run_path(str(EXAMPLE))
    about, weights = example["load"](tmp_path / "attic.safetensors")
    rows = [{name: str(value) for name, value in row.items()} for row in new[0].to_dict("records")]
    chances, spread = example["predict"](about, weights, example["encode"](about, rows))
    assert chances[:, 2].numpy() == pytest.approx(expected["p_owl"], abs=1e-4)
    assert spread.shape == chances.shape


def test_the_mean_network_is_gated_too(run):
    client = package.open_client(run, "attic")
    x = torch.randn(50, *client.preprocessing.shape, generator=torch.Generator().manual_seed(0))
    found = MeanNetwork(client)(x)
    assert found.sum(1).numpy() == pytest.approx(1, abs=1e-5)
    personal = MeanNetwork(package.open_client(run, "attic", model="personal"))(x)
    assert (found[:, 2] - personal[:, 2]).abs().max() > 0.1


def test_a_newcomer_without_a_label_is_gated(run, new, tmp_path):
    animals(60, ["loft"], kinds=("cat", "dog"), seed=4).drop(columns="site").to_csv(tmp_path / "loft.csv", index=False)
    joined = package.join(run, tmp_path / "loft.csv", steps=30, certify=False)
    assert joined.client.which == "gated"
    assert joined.client.gated.of_all == NO_SUMMARIES
    assert accuracy(joined.client, new) > 0.8


@pytest.fixture
def forged(run, monkeypatch, tmp_path):
    """Return a function that reads the client's file with other metadata or tensors."""
    content = client_bytes(package.open_client(run, "attic"))
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = json.loads(header["__metadata__"]["client"])

    def read(tensors=None, **changes):
        changed = {name: values for name, values in (load(content) | (tensors or {})).items() if values is not None}
        monkeypatch.setattr(portable, "read_safetensors", lambda *_: (changed, about | changes))
        return read_client(tmp_path / "attic.safetensors", "cpu")

    return read


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("gate.own", None, "its gates are missing"),
        ("gate.own", torch.ones(1, 4, dtype=torch.bool), "its gates are missing"),
        ("gate.own", torch.ones(2, 3, dtype=torch.bool), "its gates are missing"),
        ("gate.own", torch.ones(1, 3), "its gates are missing"),
        ("gate.usual", torch.tensor([1.5]).double(), "its gates hold numbers"),
        ("gate.weight", torch.tensor([torch.nan]).double(), "its gates hold numbers"),
        ("gate.bias", torch.full((3,), torch.inf), "its gates hold numbers"),
        ("gated.own.true", None, "the scores gated.own are missing"),
        ("gated.own.true", torch.zeros(2, 2), "the scores gated.own are missing"),
        ("gated.own.lacking", torch.zeros(3), "the scores gated.own are missing"),
        ("gated.of_all.top", torch.tensor(0.5), "the scores gated.of_all are missing"),
        ("shared.mean", None, "the mean of its weights is missing"),
        ("shared.deviation", torch.zeros(3).half(), "its weights have another shape"),
        ("shared.deviation", torch.zeros(3), "its weights have another shape"),
    ],
)
def test_files_with_other_tensors_are_refused(forged, name, value, reason):
    with pytest.raises(UserError, match=reason):
        forged({name: value})


def test_numbers_that_scores_cannot_be_are_refused(forged):
    own = forged().gated.own
    for name, value in (("true", 2.0), ("top", torch.nan), ("evidence", torch.nan)):
        with pytest.raises(UserError, match=r"the scores gated\.own are not numbers that they can be"):
            forged({f"gated.own.{name}": torch.full_like(own.true, value)})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("inputs.sizes", torch.tensor([-1]), "the numbers of components of its inputs are wrong"),
        ("inputs.sizes", torch.tensor([10**9]), "the numbers of components of its inputs are wrong"),
        ("inputs.sizes", torch.tensor([1.0]), "the numbers of components of its inputs are wrong"),
        ("inputs.mean", torch.zeros(1, 99), "the mean of its inputs have another shape"),
        ("inputs.components", None, "the components of its inputs have another shape"),
        ("inputs.rest", torch.tensor([0.0]), "a variance of its inputs is not positive"),
        ("inputs.rest", torch.tensor([torch.inf]), "the rest of its inputs have another shape"),
        ("strange", None, "the scores of its strangeness are missing"),
        ("strange", torch.zeros(4, 3), "the scores of its strangeness are missing"),
        ("strange", torch.full((4, 2), torch.nan), "the scores of its strangeness are missing"),
    ],
)
def test_files_with_another_reference_are_refused(forged, name, value, reason):
    with pytest.raises(UserError, match=reason):
        forged({name: value})


def test_early_files_have_no_strangeness(forged, new):
    client = forged({"inputs.sizes": None})
    assert client.reference is None
    assert "strangeness" not in client.predict(new[0])


@pytest.mark.parametrize("changes", [{"which": "personal"}, {"shared_seed": None}])
def test_half_a_gate_is_refused(forged, changes):
    with pytest.raises(UserError, match="it holds a part of a gated model"):
        forged(**changes)
    with pytest.raises(UserError, match="the seed of the shared model"):
        forged(shared_seed=-1)
