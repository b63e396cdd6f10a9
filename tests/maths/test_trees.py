from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pfedbayes.maths.trees import (
    concat,
    fill,
    finite_rows,
    group_by_shapes,
    leaves,
    misfit,
    named_leaves,
    pick,
    stack,
    tree_map,
)


class Inner(NamedTuple):
    count: Tensor
    values: Tensor


class Outer(NamedTuple):
    inner: Inner
    pair: tuple[Tensor, Tensor]


def tree(k: float = 0.0) -> Outer:
    return Outer(Inner(torch.tensor(int(k)), torch.tensor([k, -k])), (torch.full((2, 2), k), torch.tensor([k])))


def same(left: Outer, right: Outer) -> bool:
    return type(left) is type(right) and all(map(torch.equal, leaves(left), leaves(right)))


def test_tree_map_keeps_the_types_and_takes_several_trees():
    total = tree_map(lambda a, b: a + b, tree(1), tree(2))
    assert isinstance(total, Outer)
    assert isinstance(total.inner, Inner)
    assert same(total, tree(3))


def test_trees_of_different_shape_are_refused():
    with pytest.raises(ValueError, match="zip"):
        tree_map(lambda a, b: a, (torch.zeros(1), torch.zeros(1)), (torch.zeros(1),))


def test_trees_with_tensors_of_the_same_shapes_are_alike():
    longer = tree(1)._replace(pair=(torch.zeros(2, 2), torch.zeros(3)))
    assert group_by_shapes([tree(1), longer, tree(2), longer, tree(3)]) == [[0, 2, 4], [1, 3]]
    assert group_by_shapes([]) == []


def test_leaves_have_dotted_names():
    assert [name for name, _ in named_leaves(tree(), "clients")] == [
        "clients.inner.count",
        "clients.inner.values",
        "clients.pair.0",
        "clients.pair.1",
    ]
    assert dict(named_leaves(torch.zeros(2), "server")).keys() == {"server"}
    assert leaves(()) == []


def test_fill_puts_named_tensors_back():
    assert same(fill(tree(0), dict(named_leaves(tree(5), "x")), "x"), tree(5))


def test_stack_pick_and_concat_fit_together():
    stacked = stack([tree(0), tree(1), tree(2)])
    assert same(pick(stacked, 1), tree(1))
    assert same(concat([pick(stacked, slice(0, 2)), pick(stacked, slice(2, 3))]), stacked)
    assert same(pick(stacked, [2, 0]), stack([tree(2), tree(0)]))
    assert stack([(), ()]) == ()
    assert concat([stacked]) is stacked


@pytest.mark.parametrize("poison", [[torch.nan], [torch.inf], [-torch.inf], [torch.inf, -torch.inf]])
def test_finite_rows_finds_the_poisoned_rows_and_no_others(poison):
    stacked = stack([tree(float(k)) for k in range(4)])
    stacked.pair[0][2].view(-1)[: len(poison)] = torch.tensor(poison)
    assert finite_rows(stacked, torch.zeros(4, 3)).tolist() == [True, True, False, True]


def test_a_misfit_is_missing_or_of_another_shape_or_type():
    expected = {"a": torch.zeros(2), "b": torch.zeros(3)}
    fitting = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}
    assert misfit(fitting, expected) is None
    for other in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        assert misfit(fitting | {"b": other}, expected) == "b"
    assert misfit({"a": torch.ones(2)}, expected) == "b"


def test_leaves_without_entries_are_finite():
    empty = torch.empty(2, 0)
    assert finite_rows((empty, torch.tensor([1.0, float("nan")]))).tolist() == [True, False]
