"""A federation on Flower gives the engine's numbers, for every method that it can carry."""

import dataclasses

import pytest
from grids import CLIENTS, FakeGrid, own_data, run_config, serve

from federations import EXACT, client_states, difference, federation, make_shards, model_for
from pfedbayes import UserError, runs
from pfedbayes.flower import client_app, load_node
from pfedbayes.flower.settings import from_run_config
from pfedbayes.maths.trees import leaves, pick
from pfedbayes.methods import METHODS

ROUNDING = 1e-10
LOOP = dataclasses.replace(EXACT, over="loop")
CARRIED = [name for name in METHODS if not METHODS[name]().needs.pooled_data]


def by_engine(config, shards=None):
    """The engine's run of the same settings, and its scores by evaluated round."""
    settings = from_run_config(config)
    shards = shards or make_shards()
    result = federation(settings.method, training=settings.training, plan=LOOP, shards=shards)
    scores = {}
    for round in result.rounds():
        if settings.training.evaluates(round):
            scores[round] = result.evaluate(**settings.evaluation.after(round, settings.training.rounds))
    return result, scores


def assert_same_scores(logged, expected):
    for which, table in expected.items():
        assert (table is None) == (getattr(logged, which) is None)
        for way, metrics in (table or {}).items():
            for name, values in metrics.items():
                assert logged.scores(which)[way][name] == [pytest.approx(row, rel=1e-9) for row in values], (
                    which,
                    way,
                    name,
                )


@pytest.mark.parametrize("train", ["all", "chosen"])
@pytest.mark.parametrize("name", CARRIED)
def test_same_numbers_as_the_engine(tmp_path, name, train):
    others = {"training__train": train}
    config = run_config(tmp_path, name, **others)
    if METHODS[name]().needs.all_clients or (METHODS[name]().needs.tied and train == "all"):
        del config["training.participants"]
    grid = FakeGrid(config)
    server = serve(grid)
    engine, scores = by_engine(config)
    assert difference(server.state.servers[0], engine.servers[0]) < ROUNDING
    run = runs.read_run(tmp_path / "run")
    assert [record.round for record in run.rounds] == list(scores) == [2, 3]
    for record in run.rounds:
        assert_same_scores(record, scores[record.round])
    assert run.summary.rounds == 3
    states = client_states(engine)
    for i in range(CLIENTS):
        folder = tmp_path / "states" / f"client-{i}"
        assert (i in states) == bool(list(folder.glob("*.safetensors")))
        if METHODS[name].about.personal and i in states:
            node = load_node(folder, own_data(i), model_for)
            assert difference(tuple(leaves(pick(node.client_states([0]), 0))), states[i]) < ROUNDING
            x = make_shards().x[:7]
            if not METHODS[name].about.stochastic:
                assert difference(node.predict("personal", 0, x), engine.predict("personal", i, x)) < ROUNDING


def test_options_of_server_and_prediction_travel_too(tmp_path):
    config = run_config(
        tmp_path,
        training__server_optimizer="adam",
        training__server_rate=0.1,
        method__samples=2,
        evaluation__sampling="activations",
        evaluation__label_prior=True,
        evaluation__estimators='["mc10"]',
    )
    server = serve(FakeGrid(config))
    engine, scores = by_engine(config)
    assert difference(server.state.servers[0], engine.servers[0]) < ROUNDING
    for record in runs.read_run(tmp_path / "run").rounds:
        assert_same_scores(record, scores[record.round])


def test_views_and_rarely_scored_averages_travel_too(tmp_path):
    rows = make_shards()
    images = dataclasses.replace(rows, x=rows.x[:, None, None])
    config = run_config(
        tmp_path,
        training__flip=True,
        training__shift=1,
        training__rounds=5,
        training__evaluate_every=1,
        evaluation__average_every=2,
    )
    grid = FakeGrid(config)
    grid.app = client_app(lambda client, clients: own_data(client, shards=images), model_for)
    server = serve(grid)
    engine, scores = by_engine(config, images)
    assert difference(server.state.servers[0], engine.servers[0]) < ROUNDING
    logged = {record.round: record for record in runs.read_run(tmp_path / "run").rounds}
    assert ["mc10" in logged[round].personal for round in range(1, 6)] == [False, True, False, True, True]
    for round, record in logged.items():
        assert_same_scores(record, scores[round])
    plain = by_engine(
        {name: value for name, value in config.items() if name not in ("training.flip", "training.shift")}, images
    )
    assert difference(plain[0].servers[0], engine.servers[0]) > 1e-3


def test_pooled_training_cannot_travel(tmp_path):
    with pytest.raises(UserError, match="Pooled needs the data of all clients in one place"):
        from_run_config(run_config(tmp_path, "pooled"))
