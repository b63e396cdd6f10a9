"""The default method for tables on Flower: the engine's numbers, interruptions, newcomers and malicious nodes."""

import dataclasses

import pytest
import torch
from flwr.app import Message
from tables import SITES, model_of, own_rows, serve_tables, table_config, table_grid, table_shards
from test_equality import ROUNDING, assert_same_scores
from test_faults import journal

from federations import EXACT, client_states, difference
from pfedbayes import Federation, UserError, runs
from pfedbayes.flower import load_node
from pfedbayes.flower.messages import content, facts_of, from_arrays, to_arrays
from pfedbayes.flower.rollback import rollback
from pfedbayes.flower.settings import from_run_config
from pfedbayes.flower.state import StateFolder
from pfedbayes.maths.optim import Adam
from pfedbayes.maths.trees import leaves, pick
from pfedbayes.methods.hierarchical import Upload
from pfedbayes.report import write

ROGUE = 2


def engine_of(config, task="classification"):
    """Return the engine's federation of the same settings before its first round."""
    settings = from_run_config(config)
    plan = dataclasses.replace(EXACT, over="loop")
    return Federation(
        table_shards(task), model_of(task)(settings.method), settings.method, settings.training, plan=plan
    )


def same_bits(one, other):
    return all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


@pytest.mark.parametrize("task", ["classification", "regression", "survival"])
def test_tables_give_the_numbers_of_the_engine(tmp_path, task):
    config = table_config(tmp_path)
    server = serve_tables(table_grid(config, task), task)
    engine = engine_of(config, task)
    settings, scores = from_run_config(config), {}
    assert settings.method.anneal == 12
    for round in engine.rounds():
        if settings.training.evaluates(round):
            scores[round] = engine.evaluate(**settings.evaluation.after(round, 3))
    assert difference(server.server, engine.servers[0]) < ROUNDING
    for record in runs.read_run(tmp_path / "run").rounds:
        assert_same_scores(record, scores[record.round])
    states = client_states(engine)
    for i in range(SITES):
        node = load_node(tmp_path / "states" / f"client-{i}", own_rows(i, task=task), model_of(task))
        assert difference(tuple(leaves(pick(node.client_states([0]), 0))), states[i]) < ROUNDING
        assert node.predict("personal", 0, table_shards(task).x[:5], samples=3).isfinite().all()
        assert node.predict("shared", 0, table_shards(task).x[:5], samples=3).isfinite().all()
    page = write([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert all(name in page for name in table_shards(task).names)


@pytest.mark.parametrize("robust", ["none", "auto"])
def test_a_stopped_federation_continues_to_the_same_bits(tmp_path, robust):
    others = {"federation__robust": robust, "training__rounds": 4, "training__evaluate_every": 1}
    (tmp_path / "whole").mkdir()
    whole = serve_tables(table_grid(table_config(tmp_path / "whole", **others)))
    grid = table_grid(table_config(tmp_path, **others))

    class Killed(Exception):
        pass

    def kill(client, message, reply):
        if message.metadata.group_id == "3" and client == 1:
            raise Killed
        return reply

    grid.meddle = kill
    with pytest.raises(Killed):
        serve_tables(grid)
    grid.meddle = lambda client, message, reply: reply
    again = serve_tables(grid)
    assert same_bits(again.server, whole.server)
    assert rollback(tmp_path / "run", 2) == 4
    assert same_bits(serve_tables(grid).server, whole.server)


def test_more_rounds_need_the_schedule_that_the_federation_began_with(tmp_path):
    config = table_config(tmp_path)
    serve_tables(table_grid(config))
    config |= {"training.rounds": 4}
    with pytest.raises(UserError, match=r"method\.anneal = 12 and is now 16: set method\.anneal = 12"):
        serve_tables(table_grid(config))
    server = serve_tables(table_grid(config | {"method.anneal": 12}))
    assert server.round == 4


def test_lost_late_and_new_nodes_do_not_disturb_the_gradient(tmp_path):
    """After everybody has taken part in a round, the server's gradient is the mean of that round's gradients alone."""
    config = table_config(tmp_path, training__rounds=4, federation__min_replies=2)
    grid = table_grid(config)
    newcomer = grid.nodes.pop(103)

    def meddle(client, message, reply):
        lost = client == 1 and message.metadata.group_id == "2" and message.metadata.message_type == "train"
        if message.metadata.group_id == "2":
            grid.nodes[103] = newcomer
        return None if lost else reply

    grid.meddle = meddle
    server = serve_tables(grid)
    assert [entry.uploads for entry in journal(tmp_path) if entry.attempt] == [3, 2, 4, 4]
    gradients = []
    for i in range(SITES):
        node = load_node(tmp_path / "states" / f"client-{i}", own_rows(i), model_of())
        gradients.append(pick(node.client_states([0]), 0).gradient)
    assert torch.allclose(server.server.gradient, torch.stack(gradients).mean(0), rtol=1e-9)


def test_a_client_that_leaves_does_not_stop_the_others(tmp_path):
    config = table_config(tmp_path, training__rounds=3)
    serve_tables(table_grid(config | {"method.anneal": 16}))
    StateFolder(tmp_path / "states" / "client-0").leave()
    server = serve_tables(table_grid(config | {"method.anneal": 16, "training.rounds": 4}))
    assert server.round == 4
    assert [member.left for member in server.members] == [True, False, False, False]


# Malicious nodes


def upload_of(message, template):
    return from_arrays(message.content["upload"], template, "upload")


def forged(function):
    """Return a meddling grid function: the rogue's upload is replaced by function(upload, honest ones so far)."""

    def install(grid, server_template):
        def meddle(client, message, reply):
            if client != ROGUE or "upload" not in reply.content:
                return reply
            upload = upload_of(reply, server_template)
            arrays = to_arrays(function(upload), "upload", torch.float64)
            return Message(content(facts_of(reply), upload=arrays), reply_to=message)

        grid.meddle = meddle

    return install


def template(config):
    """Return an upload of the right structure."""
    size = model_of()(from_run_config(config).method).net.num_params
    gaussian, one, number = torch.zeros(2, size).double(), torch.zeros(size).double(), torch.zeros(()).double()
    return Upload(gaussian, Adam(gaussian, gaussian, number, number), gaussian, one, number)


def momentum(upload, **changes):
    return upload._replace(momentum=upload.momentum._replace(**changes))


IMPOSSIBLE = {
    "rho": (lambda u: u._replace(shared=torch.stack([u.shared[0], u.shared[1] - 99])), "its rho has an entry"),
    "far": (lambda u: u._replace(shared=torch.stack([u.shared[0] + 101, u.shared[1]])), "distance from the server"),
    "square": (lambda u: u._replace(square=u.square + 1e5), "its deviation from the shared model"),
    "negative square": (lambda u: u._replace(square=u.square - 1e3), "a mean of squares is negative"),
    "negative moments": (lambda u: momentum(u, square=-u.momentum.square - 1), "a mean of squares is negative"),
    "weight": (lambda u: momentum(u, mean_weight=u.momentum.mean_weight + 1), "not between 0 and 1"),
    "gradient": (lambda u: u._replace(gradient=u.gradient + 1e8), "its gradient has an entry"),
    "moments": (lambda u: momentum(u, mean=u.momentum.mean + 1e8), "its mean of gradients has an entry"),
    "squares": (lambda u: momentum(u, square=u.momentum.square + 1e16), "its mean of squared gradients"),
    "steps": (lambda u: u._replace(steps=u.steps + 1), "5 local steps instead of 4"),
    "nan": (lambda u: u._replace(gradient=u.gradient * torch.nan), "upload.gradient is not finite"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_upload_that_cannot_be_is_refused_by_name(tmp_path, name):
    change, reason = IMPOSSIBLE[name]
    config = table_config(tmp_path, training__rounds=1)
    grid = table_grid(config)
    forged(change)(grid, template(config))
    server = serve_tables(grid)
    first = journal(tmp_path)[0]
    assert (first.taken, first.uploads) == (True, 3)
    assert reason in first.refused["site 2"]
    assert all(bool(leaf.isfinite().all()) for leaf in leaves(server.server))


BELIEVABLE = {
    "flipped": lambda u: u._replace(gradient=-u.gradient, shared=-u.shared),
    "far within bounds": lambda u: u._replace(shared=torch.stack([u.shared[0] + 90, u.shared[1] - 20])),
    "large gradient": lambda u: u._replace(gradient=u.gradient + 1e6),
    "large moments": lambda u: momentum(u, mean=u.momentum.mean + 1e5, square=u.momentum.square + 1e12),
    "large square": lambda u: u._replace(square=u.square + 9e3),
}


def attacked(tmp_path, name, robust):
    """Return the losses of the shared model without and with an attack, and how far the shared means are from zero."""
    losses, largest = [], []
    for folder, attack in ((tmp_path / "honest", None), (tmp_path / "attacked", name)):
        folder.mkdir(parents=True)
        config = table_config(folder, training__rounds=12, training__evaluate_every=12, federation__robust=robust)
        grid = table_grid(config)
        if attack:
            forged(BELIEVABLE[attack])(grid, template(config))
        server = serve_tables(grid)
        assert [entry.uploads for entry in journal(folder) if entry.attempt] == [4] * 12
        (nll,) = runs.read_run(folder / "run").rounds[-1].scores("shared")["mc10"]["nll"]
        losses.append([loss for i, loss in enumerate(nll) if i != ROGUE])
        largest.append(float(server.server.shared[0].abs().max()))
    return losses, largest


@pytest.mark.parametrize("name", BELIEVABLE)
def test_a_lie_within_the_bounds_does_not_spoil_the_others(tmp_path, name):
    (before, after), (small, large) = attacked(tmp_path, name, "median-norm")
    assert all(bad < good + 0.25 for good, bad in zip(before, after, strict=True))
    assert large < 3 * small + 1


def test_without_robust_averaging_a_lie_spoils_the_others(tmp_path):
    (before, after), _ = attacked(tmp_path, "flipped", "none")
    assert all(bad > good + 0.25 for good, bad in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["secure", "privacy_noise"])
def test_options_that_need_one_scale_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="models and gradients, which differ in size"):
        from_run_config(table_config(tmp_path, **{f"federation__{name}": {"secure": True, "privacy_noise": 1.0}[name]}))
