"""Mini-batches and augmented images are found by name."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

from execution_plans import COMPILED, ON_GPU, PHILOX, agree, needs_compiler, needs_gpu
from federations import (
    EXACT,
    TRAINING,
    difference,
    federation,
    make_model,
    make_shards,
    randn,
    same_bits,
    trained,
)
from pfedbayes.data import positions
from pfedbayes.engine.backend.batches import advance, lay_out
from pfedbayes.engine.backend.local_training import LocalTraining, Views
from pfedbayes.engine.participation import choose
from pfedbayes.errors import UserError
from pfedbayes.maths.random import Purpose, key
from pfedbayes.methods import METHODS, FedAvg, PFedBayes
from pfedbayes.nets import mlp


class TestPhilox:
    def test_a_clients_noise_does_not_depend_on_how_clients_are_trained(self):
        by_loop = trained(PFedBayes(), plan=dataclasses.replace(PHILOX, over="loop"))
        assert agree(trained(PFedBayes(), plan=PHILOX), by_loop)

    def test_it_is_other_noise_than_torchs(self):
        assert difference(trained(PFedBayes(), 1, plan=PHILOX).servers, trained(PFedBayes(), 1).servers) > 1e-4

    def test_methods_without_noise_do_not_care(self):
        assert agree(trained(FedAvg(), plan=PHILOX), trained(FedAvg()))


def batches(ours):
    """The mini-batches of round 1, from where the clients have read to."""
    return lay_out(ours.setup, 1, choose(ours.setup, 1), ours.state.cursors)


def test_full_batches_whose_order_does_not_matter_are_the_training_sets_of_every_step():
    ours = federation(METHODS["hierarchical"](), dataclasses.replace(TRAINING, participants=None))
    found = batches(ours)
    assert found.names.shape == (TRAINING.local_steps, 5)
    assert found.rows.shape == (1, 1, 5, 23)
    for own, rows in zip(ours.shards.train, found.rows[0, 0], strict=True):
        assert rows.tolist() == own.tolist() + own[:1].tolist() * (23 - len(own))


def test_rows_are_those_of_the_clients_stream_from_its_cursor_on():
    ours = federation(METHODS["perfedavg"](), dataclasses.replace(TRAINING, train="all"), seeds=(7, 9))
    per_step, steps = 2, TRAINING.local_steps
    cursors = np.arange(10) * 5
    chosen = choose(ours.setup, 3)
    found = lay_out(ours.setup, 3, chosen, cursors)
    for member in chosen.members:
        seed, client = (7, 9)[member // 5], member % 5
        own = ours.shards.train[client].numpy()
        batch = min(len(own), TRAINING.batch_size)
        stream = own[positions(seed, client, len(own), int(cursors[member]), steps * per_step * batch)]
        place = chosen.members.index(member)
        assert (found.rows[:, :, place, :batch].ravel() == stream).all()
        assert (found.rows[:, :, place, batch:] == own[0]).all()
        names = [key(seed, Purpose.TRAINING, 3, client, step) for step in range(steps)]
        assert found.names[:, place].tolist() == names
        after = advance(ours.setup, cursors, [member])
        assert after[member] == cursors[member] + steps * per_step * batch
        assert (np.delete(after, member) == np.delete(cursors, member)).all()


class TestViews:
    FLIPPED = dataclasses.replace(TRAINING, flip=True)
    MOVED = dataclasses.replace(TRAINING, flip=True, shift=1)

    def federation_of_images(self, method, symmetric=False, **others):
        """Clients whose examples are images of 3 x 4 pixels, each its own mirror image if asked for."""
        shards = make_shards(features=12)
        x = shards.x.view(-1, 1, 3, 4)
        shards = dataclasses.replace(shards, x=(x + x.flip(-1)) / 2 if symmetric else x)
        model = make_model(mlp([12, 4, 3], "tanh"))
        return trained(method, shards=shards, model=model, **{"training": self.FLIPPED} | others)

    def test_the_odd_view_of_two_is_the_mirror_image(self):
        x, y = randn(5, 2, 3, 4), torch.arange(5)
        local = LocalTraining(FedAvg(), make_model(), x, y, EXACT, Views(flip=True))
        batch = local._gather(x, y, torch.tensor([[6, 7, 1]]), torch.ones(1, 3))
        assert batch.x[0].equal(torch.stack([x[3], x[3].flip(-1), x[0].flip(-1)]))
        assert batch.y.tolist() == [[3, 3, 0]]

    def test_targets_of_several_numbers_keep_their_shape(self):
        x, y = randn(5, 3), randn(5, 2)
        batch = LocalTraining(FedAvg(), make_model(), x, y, EXACT)._gather(
            x, y, torch.tensor([[4, 0]]), torch.ones(1, 2)
        )
        assert batch.y.equal(y[[4, 0]][None])

    @pytest.mark.parametrize("flip", [False, True])
    def test_every_view_is_an_image_moved_over_a_canvas_that_repeats_its_edge(self, flip):
        x = randn(2, 2, 4, 5)
        views = Views(flip, shift=2)
        seen, rows = views.apply(x, torch.arange(2 * views.count))
        assert rows.tolist() == [0] * views.count + [1] * views.count
        canvas = functional.pad(x, (2, 2, 2, 2), mode="replicate")
        moved = [canvas[:, :, up : up + 4, left : left + 5] for up in range(5) for left in range(5)]
        expected = torch.stack([side for one in moved for side in ([one, one.flip(-1)] if flip else [one])], 1)
        assert len({image.numpy().tobytes() for image in seen}) == len(seen)
        assert {image.numpy().tobytes() for image in seen} == {
            image.numpy().tobytes() for image in expected.flatten(0, 1)
        }
        assert seen[rows == 0].flatten(1).unique(dim=0).equal(expected[0].flatten(1).unique(dim=0))

    def test_views_are_numbered_from_up_and_left_to_down_and_right(self):
        x = torch.arange(9.0).view(1, 1, 3, 3)
        seen, _ = Views(shift=1).apply(x, torch.tensor([0, 2, 4, 7]))
        assert seen[:, 0].tolist() == [
            [[4, 5, 5], [7, 8, 8], [7, 8, 8]],  # up and left
            [[3, 3, 4], [6, 6, 7], [6, 6, 7]],  # up and right
            [[0, 1, 2], [3, 4, 5], [6, 7, 8]],  # not at all
            [[0, 1, 2], [0, 1, 2], [3, 4, 5]],  # down
        ]

    def test_half_of_the_images_are_mirrored_and_every_draw_has_its_name(self):
        one = self.federation_of_images(FedAvg(), seeds=(1, 2))
        rows = batches(one).rows
        assert 0.35 < (rows % 2).mean() < 0.65
        plain = self.federation_of_images(FedAvg(), seeds=(1, 2), training=TRAINING)
        assert (rows // 2 == batches(plain).rows).all()
        alone = batches(self.federation_of_images(FedAvg(), seeds=(2,)))
        assert (alone.rows == rows[:, :, rows.shape[2] // 2 :]).all()  # the second seed's half
        steps = (rows % 2).reshape(len(rows), -1)
        assert len({step.tobytes() for step in steps}) == len(steps)

    def test_a_view_is_drawn_by_its_name(self):
        moved = dataclasses.replace(self.MOVED, rounds=1)
        ours = self.federation_of_images(METHODS["perfedavg"](), seeds=(7, 9), training=moved)
        chosen = choose(ours.setup, 3)
        rows = lay_out(ours.setup, 3, chosen, ours.state.cursors).rows
        for (step, batch, place, example), row in np.ndenumerate(rows):
            seed, client = (7, 9)[chosen.members[place] // 5], chosen.members[place] % 5
            assert row % 18 == key(seed, Purpose.VIEW, 3, client, step, batch, example) % 18

    def test_all_views_come_about_equally_often(self):
        rows = batches(self.federation_of_images(FedAvg(), seeds=tuple(range(40)), training=self.MOVED)).rows
        counts = np.bincount((rows % 18).ravel(), minlength=18) / rows.size
        assert abs(counts - 1 / 18).max() < 5 * (1 / 18 / rows.size) ** 0.5

    @pytest.mark.parametrize("method", [PFedBayes(), FedAvg(), METHODS["perfedavg"]()])
    @pytest.mark.parametrize("training", [FLIPPED, MOVED])
    def test_results_do_not_depend_on_how_clients_are_trained(self, method, training):
        run = partial(self.federation_of_images, method, training=training)
        together = run()
        assert agree(together, run(plan=dataclasses.replace(EXACT, over="loop")))
        assert agree(together, run(plan=dataclasses.replace(EXACT, chunk=2)))
        assert difference(together.servers, self.federation_of_images(method, training=TRAINING).servers) > 1e-4

    @needs_compiler
    def test_results_are_those_without_a_compiler(self):
        run = partial(self.federation_of_images, PFedBayes(), training=self.MOVED)
        assert agree(run(), run(plan=COMPILED))

    def test_images_that_are_their_own_mirror_images_train_as_without(self):
        with_flips, without = (
            self.federation_of_images(PFedBayes(), symmetric=True, training=training)
            for training in (self.FLIPPED, TRAINING)
        )
        assert same_bits(with_flips.servers, without.servers)

    def test_what_is_no_image_is_refused(self):
        with pytest.raises(UserError, match=r"training\.flip and \.shift are for images"):
            federation(FedAvg(), training=self.MOVED)

    def test_images_do_not_leave_the_picture(self):
        self.federation_of_images(FedAvg(), training=dataclasses.replace(self.MOVED, shift=2))
        with pytest.raises(UserError, match=r"training\.shift=3 moves images of 3 x 4 pixels out of sight"):
            self.federation_of_images(FedAvg(), training=dataclasses.replace(self.MOVED, shift=3))

    @needs_gpu
    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_gpu_replays_them(self, compiled):
        plan = dataclasses.replace(ON_GPU, graph=True, compile=compiled)
        run = partial(self.federation_of_images, PFedBayes(), training=self.MOVED)
        assert agree(run(plan=plan), run(plan=PHILOX))
