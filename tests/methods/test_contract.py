"""What every method in METHODS has to keep. A new method is covered by being listed there."""

import dataclasses
import functools

import pytest
import torch
from safetensors.torch import load, save

from federations import (
    EXACT,
    SIZES,
    TRAINING,
    Inputs,
    client_states,
    copy,
    difference,
    federation,
    first_server,
    make_shards,
    model_for,
    one_of,
    same_bits,
    stacked_inputs,
    train_alone,
    trained,
)
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.errors import Diverged
from pfedbayes.maths.likelihoods import Classification
from pfedbayes.maths.random import choose
from pfedbayes.maths.trees import finite_rows, leaves, pick, stack, tree_map
from pfedbayes.methods import METHODS, FedProx, Hierarchical

ROUNDING = 1e-10
PLANS = {
    "vmap": EXACT,
    "loop": dataclasses.replace(EXACT, over="loop"),
    "vmap-chunk1": dataclasses.replace(EXACT, chunk=1),
    "vmap-chunk3": dataclasses.replace(EXACT, chunk=3),
}


OPTIONS = {"fedprox, first anchor": FedProx(eta=0.1, prox=0.5, anchor="first")}  # its clients have a memory


@pytest.fixture(params=[*METHODS, *OPTIONS])
def method(request):
    return OPTIONS.get(request.param) or METHODS[request.param]()


@pytest.fixture(params=PLANS)
def plan(request, method):
    plan = PLANS[request.param]
    if plan.over == "vmap" and method.needs.loop:
        pytest.skip("runs by loop only")
    return plan


@pytest.fixture(params=["all", "chosen"])
def training(request, method):
    return some_take_part(method, train=request.param)


def some_take_part(method, participants=TRAINING.participants, **others):
    """A training in which some clients are silent, if the method can do without them."""
    everybody = method.needs.all_clients or (method.needs.tied and others.get("train") == "all")
    return dataclasses.replace(TRAINING, participants=None if everybody else participants, **others)


def run_alone(method, inputs):
    return client_round(method, model_for(method), *inputs)


def run_together(method, inputs):
    if method.needs.loop:
        return stack([run_alone(method, one_of(inputs, i)) for i in range(len(SIZES))])
    return client_round(method, model_for(method), *inputs, over=torch.func.vmap)


def default_plan(method):
    return PLANS["vmap" if not method.needs.loop else "loop"]


alone_result = functools.cache(train_alone)


@functools.cache
def default_result(method, training):
    """A federation after its rounds; not to be trained further."""
    return trained(method, training=training, plan=default_plan(method))


def as_float32(leaf):
    return leaf.float() if leaf.is_floating_point() else leaf


def test_together_in_turn_in_chunks_and_alone_agree(method, training, plan):
    result = trained(method, training=training, plan=plan)
    clients = client_states(result)
    alone = alone_result(method, TRAINING.rounds, training)
    assert difference(result.servers[0], alone.server) < ROUNDING
    assert clients.keys() == alone.clients.keys()
    for i, client in clients.items():
        assert difference(client, alone.clients[i]) < ROUNDING


def test_every_client_learns_from_its_data(method):
    shards = make_shards()
    flipped = dataclasses.replace(shards, y=(shards.y + 1) % 3)
    one, other = (run_together(method, stacked_inputs(method, shards=data)) for data in (shards, flipped))
    changed = [(a != b).view(len(SIZES), -1).any(1) for a, b in zip(leaves(one), leaves(other), strict=True)]
    assert torch.stack(changed).any(0).all()


def test_one_client_alone_is_one_row_of_all_together(method):
    inputs = stacked_inputs(method)
    together = run_together(method, inputs)
    for i in range(len(SIZES)):
        assert difference(pick(together, i), run_alone(method, one_of(inputs, i))) < ROUNDING


def test_a_method_that_need_not_be_mapped_gives_the_same_without(method):
    if method.needs.mapped:
        pytest.skip("has to be mapped")
    inputs = stacked_inputs(method)
    assert difference(client_round(method, model_for(method), *inputs), run_together(method, inputs)) < ROUNDING


def test_what_fills_up_small_batches_changes_nothing(method):
    plain = run_together(method, stacked_inputs(method, filler=0.0))
    assert same_bits(plain, run_together(method, stacked_inputs(method, filler=-1000.0)))


def test_nan_in_one_clients_data_stays_with_that_client(method):
    shards = make_shards()
    clean = run_together(method, stacked_inputs(method, shards=shards))
    shards.x[shards.train[2]] = torch.nan
    poisoned = run_together(method, stacked_inputs(method, shards=shards))
    assert finite_rows(poisoned).tolist() == [True, True, False, True, True]
    others = [0, 1, 3, 4]
    assert same_bits(pick(poisoned, others), pick(clean, others))


@pytest.mark.parametrize("last_good", [0, 1])
def test_divergence_names_round_and_client_and_leaves_everything_as_it_was(method, training, last_good):
    shards = make_shards()
    broken = federation(method, training, default_plan(method), shards=shards)
    for _ in range(last_good):
        broken.train_round()
    bad = int(choose(training.seed, last_good + 1, broken.num_clients, broken.participants)[-1])
    broken.x[shards.train[bad]] = torch.nan
    before = {name: tensor.clone() for name, tensor in broken.tensors().items()}

    with pytest.raises(Diverged, match=rf"round {last_good + 1}: site {bad} "):
        broken.train_round()
    after = broken.tensors()
    assert broken.round == last_good
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_functions_are_pure(method):
    inputs = stacked_inputs(method)
    kept = copy((inputs.client, inputs.received, inputs.shard)), [copy(step) for step in inputs.steps]
    first, second = run_together(method, inputs), run_together(method, inputs)
    assert same_bits(first, second)
    assert same_bits((inputs.client, inputs.received, inputs.shard), kept[0])
    assert all(same_bits(step, old) for step, old in zip(inputs.steps, kept[1], strict=True))

    upload, ids, sizes = first[1], torch.arange(len(SIZES)), inputs.shard.size
    server = first_server(method, model_for(method), TRAINING.seed)
    old_server, old_upload = copy(server), copy(upload)
    merged = [method.aggregate(server, upload, sizes, ids) for _ in range(2)]
    assert same_bits(*merged)
    left = method.leave(server, 1, pick(first[0], 1))
    assert [leaf.shape for leaf in leaves(left)] == [leaf.shape for leaf in leaves(server)]
    assert same_bits((server, upload), (old_server, old_upload))


def test_equal_settings_give_equal_bits_and_another_seed_gives_others(method):
    training = some_take_part(method)
    first, second = default_result(method, training), trained(method, training=training, plan=default_plan(method))
    assert same_bits(first.servers, second.servers)
    other = default_result(method, dataclasses.replace(training, seed=4))
    assert not same_bits(first.servers, other.servers)


def test_state_survives_the_disk_and_goes_on_to_the_same_bits(method, training):
    settings = {"training": training, "plan": default_plan(method)}
    first, second = trained(method, rounds=1, **settings), federation(method, **settings)
    second.restore(load(save(first.tensors())), round=1)
    for _ in second.rounds():
        pass
    expected, actual = default_result(method, training).tensors(), second.tensors()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_saved_state_is_a_copy_that_later_rounds_leave_alone(method, training):
    going = trained(method, rounds=1, training=training, plan=default_plan(method))
    saved = going.tensors()
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    going.train_round()
    assert all(torch.equal(saved[name], kept[name]) for name in kept)


def test_clients_are_enrolled_when_first_chosen(method):
    training = some_take_part(method, participants=2, train="chosen")
    running, met = federation(method, training, default_plan(method)), []
    for round in running.rounds():
        chosen = choose(training.seed, round, running.num_clients, running.participants)
        met += [i for i in chosen.tolist() if i not in met]
        assert running.tensors()["enrolled"].tolist() == met


def test_several_seeds_at_once_are_the_separate_runs(method, training):
    seeds = (4, TRAINING.seed)
    together = trained(method, training=training, plan=default_plan(method), seeds=seeds)
    clients = client_states(together)
    for s, seed in enumerate(seeds):
        single = default_result(method, dataclasses.replace(training, seed=seed))
        assert difference(together.servers[s], single.servers[0]) < ROUNDING
        for i, client in client_states(single).items():
            assert difference(clients[s * together.num_clients + i], client) < ROUNDING


def test_predictions_come_as_a_stack_of_outputs(method):
    result = default_result(method, some_take_part(method))
    x = torch.zeros(7, 3, dtype=torch.float64)
    for which in result.models():
        assert result.predict(which, 0, x, samples=None).shape == (1, 7, 3)
        assert result.predict(which, 0, x, samples=4).shape == (4 if method.about.stochastic else 1, 7, 3)


def test_evaluation_has_every_client_and_none_for_a_model_the_method_lacks(method):
    training = some_take_part(method, participants=1)
    evaluated = trained(method, 1, training=training, plan=default_plan(method)).evaluate(samples=3)
    assert set(evaluated) == {"personal", "shared"}
    for which, estimators in evaluated.items():
        assert (estimators is not None) == getattr(method.about, which)
        for metrics in (estimators or {}).values():
            values = torch.tensor(list(metrics.values()))
            assert values.shape == (len(Classification().metrics), 1, len(SIZES))
            assert values.isfinite().all()


def test_float32_agrees_loosely_with_float64(method):
    inputs = stacked_inputs(method)
    client, received, shard = tree_map(as_float32, (inputs.client, inputs.received, inputs.shard))
    rough = run_together(method, Inputs(client, received, shard, [tree_map(as_float32, step) for step in inputs.steps]))
    assert {leaf.dtype for leaf in leaves(rough)} <= {torch.float32, torch.int64}
    # The large steps of Hierarchical enlarge rounding errors.
    assert difference(rough, run_together(method, inputs)) < (1e-3 if isinstance(method, Hierarchical) else 1e-4)


def test_fields_are_plain_frozen_values(method):
    assert dataclasses.replace(method) == method
    assert hash(method) == hash(dataclasses.replace(method))
    assert all(isinstance(value, int | float | bool | str | None) for value in dataclasses.asdict(method).values())
    assert method.about.title
    assert method.about.reference
    assert method.about.learns
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.about = None
