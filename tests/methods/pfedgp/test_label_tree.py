import itertools

import pytest
import torch
from pfedgp_inputs import blobs

from federations import randn
from pfedbayes.methods.pfedgp.label_tree import MAX_ENUMERATED, build_tree, members, pad_splits, two_means


class TestTree:
    def test_five_labels_make_four_nodes_and_every_label_has_its_own_path(self):
        z, y = blobs([5, 4, 3, 6, 2])
        splits = build_tree(z, 2 * y + 1, 10)
        assert splits.shape == (4, 2, 10)
        assert not splits.all(1).any()
        assert splits[0].any(0).nonzero()[:, 0].tolist() == [1, 3, 5, 7, 9]
        paths = {tuple((splits[:, 0, c].int() - splits[:, 1, c].int()).tolist()) for c in (1, 3, 5, 7, 9)}
        assert len(paths) == 5

    def test_children_part_what_their_parent_sent_them(self):
        splits = build_tree(*blobs([5, 4, 3, 6, 2]), 5)
        sides = {frozenset(side.nonzero()[:, 0].tolist()) for side in splits.flatten(0, 1)}
        groups = [frozenset(split.any(0).nonzero()[:, 0].tolist()) for split in splits]
        assert groups[0] == frozenset(range(5))
        assert all(group in sides for group in groups[1:])
        assert len(sides) == 8

    def test_the_lower_label_of_two_goes_left(self):
        z, y = blobs([5, 4])
        assert build_tree(z, 7 - 4 * y, 8).tolist() == [[[k == 3 for k in range(8)], [k == 7 for k in range(8)]]]

    def test_similar_labels_part_last(self):
        means = torch.tensor([[0.0, 0], [5, 5], [0, 1], [5, 6], [0, 9]], dtype=torch.float64)
        splits = build_tree(means.repeat(3, 1), torch.arange(5).repeat(3), 5)
        first = [side.nonzero()[:, 0].tolist() for side in splits[0]]
        assert first == [[0, 2], [1, 3, 4]]

    def test_one_label_needs_no_node(self):
        assert build_tree(randn(4, 3), torch.full((4,), 2), 5).shape == (0, 2, 5)

    def test_members_are_the_rows_that_reach_a_node(self):
        z, y = blobs([5, 4, 3])
        for split, (rows, left) in zip(build_tree(z, y, 3), members(y, build_tree(z, y, 3)), strict=True):
            assert sorted(set(y[rows[left]].tolist())) == split[0].nonzero()[:, 0].tolist()
            assert sorted(set(y[rows[~left]].tolist())) == split[1].nonzero()[:, 0].tolist()
            assert len(rows) == sum((5, 4, 3)[c] for c in split.any(0).nonzero()[:, 0].tolist())


def test_the_trees_of_a_run_depend_on_this():
    assert MAX_ENUMERATED == 12


class TestTwoMeans:
    @staticmethod
    def within(points, inside):
        return sum(float((part - part.mean(0)).square().sum()) for part in (points[inside], points[~inside]))

    # Of the twelve points no pair is such that the best clusters lie around it.
    @pytest.mark.parametrize(("count", "width", "seeds"), [(2, 3, 10), (3, 3, 10), (5, 3, 10), (8, 3, 10), (12, 30, 1)])
    def test_no_bipartition_is_better(self, count, width, seeds):
        for seed in range(seeds):
            points = randn(count, width, seed=seed)
            found = two_means(points)
            assert found[0]
            rest = itertools.product([True, False], repeat=count - 1)
            others = [torch.tensor([True, *bits]) for bits in rest if not all(bits)]
            least = min(self.within(points, inside) for inside in others)
            assert self.within(points, found) == pytest.approx(least, rel=1e-9)

    @pytest.mark.parametrize("count", [5, 40])
    def test_two_clusters_are_found_however_many_the_points(self, count):
        side = torch.arange(count) % 3 == 0
        points = randn(count, 3, seed=1) + 20 * side[:, None]
        assert torch.equal(two_means(points), side)

    @pytest.mark.parametrize("count", [4, 20])
    def test_equal_points_still_part(self, count):
        inside = two_means(torch.ones(count, 3, dtype=torch.float64))
        assert inside.any()
        assert not inside.all()


@pytest.mark.parametrize("nodes", [0, 1, 3])
def test_trees_are_padded_to_one_node_less_than_there_are_classes(nodes):
    splits = torch.ones(nodes, 2, 4, dtype=torch.bool)
    padded = pad_splits(splits)
    assert padded.shape == (3, 2, 4)
    assert padded[:nodes].all()
    assert not padded[nodes:].any()
