import itertools
import math

import numpy as np
import pytest
import torch

from pfedbayes.maths import random
from pfedbayes.maths.random import Purpose, choose, key, keys, normal, normals, philox, philox_normals, ragged_normals

CPU = torch.device("cpu")
COUNT = 100_000


def draw(seed: int, count: int = COUNT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return normal((count,), seed, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_standard_normal(dtype):
    g = draw(key(1, Purpose.TRAINING, 1, 0, 0), dtype=dtype).double()
    assert abs(g.mean()) < 5 / math.sqrt(COUNT)
    assert abs(g.std() - 1) < 5 / math.sqrt(2 * COUNT)
    # Kolmogorov-Smirnov: sqrt(n) times the largest gap between the two distributions exceeds 1.95 once in 1,000.
    cdf = 0.5 * (1 + torch.erf(g.sort().values / math.sqrt(2)))
    assert (cdf - (torch.arange(COUNT) + 0.5) / COUNT).abs().max() * math.sqrt(COUNT) < 1.95


def test_equal_names_give_equal_draws_and_different_names_different_ones():
    name = (1, Purpose.TRAINING, 2, 3, 4)
    assert torch.equal(draw(key(*name)), draw(key(*name)))
    others = [(2, *name[1:]), (1, Purpose.INIT, *name[2:]), (*name[:2], 3, 2, 4), (*name[:4], 5), name[:4]]
    for other in others:
        correlation = (draw(key(*name)) * draw(key(*other))).mean()
        assert abs(correlation) < 5 / math.sqrt(COUNT)


def test_draws_made_together_are_each_alone():
    keys = [key(1, Purpose.TRAINING, 1, client) for client in range(3)]
    together = normals((4, 5), keys, torch.float64, CPU)
    assert torch.equal(together, torch.stack([normal((4, 5), each, torch.float64, CPU) for each in keys]))


def test_keys_are_63_bits_and_distinct():
    names = itertools.product(range(4), Purpose, range(10), range(10), range(10))
    keys = [key(*name) for name in names]
    keys += [key(seed, purpose, counter) for seed in range(4) for purpose in Purpose for counter in range(10)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= value < 2**63 for value in keys)


def test_the_names_of_draws_mean_the_same_in_every_version():
    """Runs are repeated, resumed and spread over machines by name: the numbers below never change."""
    assert [purpose.value for purpose in Purpose] == list(range(7))
    assert key(1, Purpose.TRAINING, 2, 3, 4) == 785214486471784572
    assert key(2, Purpose.CHOICE) == 2626483144544590216
    assert key(-1, Purpose.INIT, 5) == 6082680587491763050
    assert choose(1, 3, 10, 4).tolist() == [2, 7, 8, 9]
    drawn = philox_normals((3,), torch.tensor([2**40 + 5]), torch.float64)[0].tolist()
    assert drawn == pytest.approx([0.6519478199417044, 1.3432382713411377, -1.4109842118747193], rel=1e-12)


def test_the_order_of_a_name_counts():
    assert key(2, Purpose.CHOICE, 5) != key(1, Purpose.TRAINING, 5)
    assert key(1, Purpose.TRAINING, 5, 6) != key(1, Purpose.TRAINING, 6, 5)


def test_a_draw_neither_reads_nor_moves_the_global_generator():
    torch.manual_seed(1)
    first, before = draw(5), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(draw(5), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [50, 40_000])  # few are drawn in turn, many by several threads
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_stacked_draws_equal_separate_ones(count, threads):
    torch.set_num_threads(threads)
    out = normals((2, count), [7, 8, 7], torch.float32, CPU)
    assert torch.equal(out[1], normal((2, count), 8, torch.float32, CPU))
    assert torch.equal(out[0], out[2])


@pytest.mark.parametrize(
    ("threads", "rows", "width", "shares"),
    [
        (1, 4, 1 << 14, [4]), (2, 4, (1 << 14) - 1, [4]), (2, 4, 1 << 14, [2, 2]), (3, 4, 1 << 14, [2, 2]),
        (2, 5, 1 << 14, [3, 2]), (4, 2, 1 << 15, [1, 1]), (4, 1, 1 << 16, [1]),
    ],
)  # fmt: skip
def test_many_draws_are_shared_by_threads(monkeypatch, threads, rows, width, shares):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    fill, filled = random._fill, []
    monkeypatch.setattr(random, "_fill", lambda part, seeds: filled.append(list(seeds)) or fill(part, seeds))
    out = normals((width,), range(rows), torch.float32, CPU)
    assert sorted(filled) == [part.tolist() for part in np.split(np.arange(rows), np.cumsum(shares)[:-1])]
    assert torch.equal(out[rows - 1], normal((width,), rows - 1, torch.float32, CPU))


def test_rows_beyond_a_size_are_zero_and_others_do_not_depend_on_it():
    found = ragged_normals((4, 3), [7, 8, 9], [2, 4, 0], torch.float64, CPU)
    assert found.shape == (3, 4, 3)
    assert torch.equal(found[0, :2], normal((2, 3), 7, torch.float64, CPU))
    assert torch.equal(found[1], normal((4, 3), 8, torch.float64, CPU))
    assert not found[0, 2:].any()
    assert not found[2].any()


def test_keys_of_many_names_are_those_of_each():
    many = keys(np.array([[3], [4]]), Purpose.TRAINING, 9, np.array([[0, 1, 70_000]]), 2)
    assert many.tolist() == [[key(seed, Purpose.TRAINING, 9, i, 2) for i in (0, 1, 70_000)] for seed in (3, 4)]


class TestPhilox:
    # The known answers that its authors publish with their library.
    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            ((0, 0, 0), (0xFF1DAE59, 0x6CD10DF2)),
            ((0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), (0x2C3F628B, 0xAB4FD7AD)),
            ((0x243F6A88, 0x85A308D3, 0x13198A2E), (0xDD7CE038, 0xF62A4C12)),
        ],
    )
    def test_known_answers(self, words, expected):
        assert tuple(int(word) for word in philox(*(torch.tensor([word]) for word in words))) == expected

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_draws_are_standard_normal_and_independent(self, dtype):
        names = torch.from_numpy(keys(1, Purpose.TRAINING, 1, np.arange(3), 0))
        g = philox_normals((COUNT,), names, dtype).double()
        assert g.mean(1).abs().max() < 5 / math.sqrt(COUNT)
        assert (g.std(1) - 1).abs().max() < 5 / math.sqrt(2 * COUNT)
        cdf = 0.5 * (1 + torch.erf(g.sort().values / math.sqrt(2)))
        assert (cdf - (torch.arange(COUNT) + 0.5) / COUNT).abs().max() * math.sqrt(COUNT) < 1.95
        half = COUNT // 2
        for left, right in [(g[0], g[1]), (g[1], g[2]), (g[0, :half], g[0, half:]), (g[0, 1:], g[0, :-1])]:
            assert abs((left * right).mean()) < 5 / math.sqrt(half)
            assert abs((left.square() * right.square()).mean() - 1) < 5 * math.sqrt(8 / half)

    def test_a_draw_does_not_depend_on_the_others(self):
        names = torch.tensor([5, 2**62 + 3, 11])
        together = philox_normals((3, 7), names, torch.float64)
        assert torch.equal(together[1], philox_normals((3, 7), names[1:2], torch.float64)[0])
        assert together.shape == (3, 3, 7)


def test_choice_is_a_sorted_set_of_clients_that_depends_on_seed_and_round():
    chosen = choose(seed=1, round=3, num_clients=20, count=8)
    assert len(set(chosen.tolist())) == 8
    assert chosen.tolist() == sorted(chosen.tolist())
    assert set(chosen.tolist()) <= set(range(20))
    assert np.array_equal(chosen, choose(1, 3, 20, 8))
    assert not np.array_equal(chosen, choose(1, 4, 20, 8))
    assert not np.array_equal(chosen, choose(2, 3, 20, 8))


def test_everybody_is_chosen_when_all_take_part():
    assert choose(1, 1, 5, 5).tolist() == [0, 1, 2, 3, 4]


def test_clients_are_chosen_equally_often():
    rounds, num_clients, count = 2000, 10, 3
    times = np.bincount(
        np.concatenate([choose(1, round, num_clients, count) for round in range(rounds)]), minlength=num_clients
    )
    share = count / num_clients
    assert np.abs(times - rounds * share).max() < 5 * math.sqrt(rounds * share * (1 - share))


def test_numbers_count_modulo_two_to_the_64th():
    for number, same in ((2**64 + 5, 5), (-1, 2**64 - 1), (-(2**64) - 3, 2**64 - 3)):
        assert key(number, Purpose.CHOICE, 7) == key(same, Purpose.CHOICE, 7)
        assert key(7, Purpose.CHOICE, number) == key(7, Purpose.CHOICE, same)
