"""The experiment behind docs/results/theory.md: functions, slopes, one small measurement, the page."""

import dataclasses
import json
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.rate import __main__ as command
from benchmarks.rate.functions import draw_functions
from benchmarks.rate.measure import CLIENTS, measure
from benchmarks.rate.units import CHANGED, MAIN, Unit
from pfedbayes.files.checksums import dump_json
from pfedbayes.paper import rate, theory
from pfedbayes.paper.log_log_slope import errors_of, fit, slope
from pfedbayes.paper.rate import CHANGES


class TestFunctions:
    @pytest.mark.parametrize(("smoothness", "dimension"), [(1.0, 1), (2.0, 1), (1.0, 2)])
    def test_they_have_mean_square_one_before_they_are_mixed(self, smoothness, dimension):
        f = draw_functions(np.random.default_rng(1), smoothness, dimension, 3, difference=0.0)
        x = np.random.default_rng(2).uniform(-1, 1, (10_000, dimension))
        assert np.mean(f(0, x) ** 2) == pytest.approx(1, abs=0.06)
        np.testing.assert_allclose(f(0, x[:9]), f(2, x[:9]))

    def test_clients_differ_as_much_as_asked(self):
        """Mean square of f^i - f^j is 2 difference^2 / (1 + difference^2), for own parts that do not overlap."""
        f = draw_functions(np.random.default_rng(3), 1.0, 1, 40, difference=0.5)
        x = np.linspace(-1, 1, 2000)[:, None]
        values = np.stack([f(i, x) for i in range(40)])
        gaps = [np.mean((values[i] - values[j]) ** 2) for i in range(40) for j in range(i)]
        assert np.mean(gaps) == pytest.approx(2 * 0.25 / 1.25, rel=0.15)

    @pytest.mark.parametrize("smoothness", [1.0, 2.0])
    def test_what_lies_beyond_a_frequency_falls_with_the_smoothness(self, smoothness):
        """The mean square beyond K falls like K^(-2 beta): that is what makes the rate."""
        f = draw_functions(np.random.default_rng(4), smoothness, 1, 400, difference=1e6)
        energy = (f.cosines**2 + f.sines**2).mean(0)
        cuts = np.array([2.5, 4.5, 8.5])  # halfway between frequencies, where a sum is most like an integral
        tails = np.array([energy[f.frequencies[:, 0] > cut].sum() for cut in cuts])
        assert fit(cuts, tails) == pytest.approx(-2 * smoothness, abs=0.25)


class TestSlopes:
    sizes = (50, 200, 800, 3200)

    def errors(self, exponent, replicates=8, noise=0.2, seed=1):
        generator = np.random.default_rng(seed)
        level = 3.0 * np.array(self.sizes) ** exponent
        shared = np.exp(noise * generator.standard_normal((replicates, 1, len(self.sizes))))
        own = np.exp(noise * generator.standard_normal((replicates, 10, len(self.sizes))))
        return level * shared * own

    def test_a_power_is_found_exactly(self):
        assert fit(self.sizes, self.errors(-0.8, noise=0.0)[0, 0]) == pytest.approx(-0.8, rel=1e-12)
        found = slope(self.sizes, self.errors(-0.8, noise=0.0))
        assert found == pytest.approx((-0.8, -0.8, -0.8), rel=1e-12)

    def test_intervals_hold_the_truth_about_as_often_as_they_say(self):
        """With 8 replicates percentile intervals are a little too short: about 90 % instead of 95."""
        held = 0
        for seed in range(100):
            found = slope(self.sizes, self.errors(-0.6, seed=seed), resamples=400)
            held += found.low <= -0.6 <= found.high
        assert 80 <= held <= 99

    def test_common_noise_of_a_replicate_widens_them(self):
        """Clients of one replicate are not independent: to take them so would give a far shorter interval."""
        errors = self.errors(-0.6)
        apart = slope(self.sizes, errors.reshape(-1, 1, len(self.sizes)))
        together = slope(self.sizes, errors)
        assert together.high - together.low > 1.5 * (apart.high - apart.low)

    def test_only_replicates_that_are_whole_count(self):
        records = [
            {"size": size, "replicate": r, "clients": [{"l2": 10 * r + i + size} for i in range(2)]}
            for r, size in ((1, 100), (1, 50), (2, 50), (3, 50), (3, 100))
        ]
        sizes, errors = errors_of(records, "l2")
        assert sizes == [50, 100]
        np.testing.assert_array_equal(errors, [[[60, 110], [61, 111]], [[80, 130], [81, 131]]])


def test_the_net_keeps_to_the_corollary():
    for size in (50, 3200):
        unit = Unit("", 1.0, 1, size)
        allowed = unit.budget * size ** (1 / 3)
        s = unit.setting
        assert s.num_params <= allowed < dataclasses.replace(s, width=s.width + 1).num_params


@pytest.fixture(scope="module")
def uncompiled():
    """Short runs are not worth a compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.rate.measure.has_compiler", lambda device: False)
        yield


def test_more_data_lower_the_error_and_the_numbers_fit_together(uncompiled):
    few, many = (measure(Unit("", 2.0, 1, size, rounds=20, eta=0.02), 1, "cpu") for size in (20, 500))
    for name in ("hellinger", "l2", "l2_of_mean"):
        assert rate.mean(many, name) < 0.7 * rate.mean(few, name)
    assert len(few["clients"]) == CLIENTS
    for client in few["clients"]:
        assert client["l2_of_mean"] < client["l2"]
        assert client["hellinger"] < client["l2"] / 8
        assert client["kl"] > 0


def test_a_measurement_can_be_repeated(uncompiled):
    one, other = (measure(Unit("", 1.0, 1, 20, rounds=1), 1, "cpu") for _ in range(2))
    assert {**one, "seconds": 0} == {**other, "seconds": 0}


def made_up(unit, replicate):
    """A record as `measure` gives it, with errors that follow the minimax rate."""
    level = unit.size ** theory.rate_exponent(unit.smoothness, unit.dimension) * (1 + 0.1 * replicate)
    client = {"hellinger": level / 10, "l2": level, "l2_of_mean": level / 2, "log_ratio": 1.0, "kl": 5.0, "sigma": 0.1}
    found = {"width": unit.setting.width, "replicate": replicate, "clients": [client] * 3, "seconds": 1.0}
    return dataclasses.asdict(unit) | found


class TestCommand:
    @pytest.fixture
    def measured(self, monkeypatch):
        """The command with made-up measurements; what was asked for is listed."""
        asked = []

        def missing(units, replicates, records, device):
            for unit, numbers in command.to_do(units, replicates, records).items():
                asked.extend((unit, r) for r in numbers)
                yield [made_up(unit, r) for r in numbers]

        monkeypatch.setattr(command, "missing", missing)
        return asked

    def test_it_writes_the_page_the_chart_and_the_measurements_and_goes_on_where_it_was(self, tmp_path, measured):
        command.main(["--out", str(tmp_path), "--replicates", "2", "--sizes", "50", "400"])
        first = len(measured)
        assert first == 2 * (4 + 2 * len(CHANGES))
        command.main(["--out", str(tmp_path), "--replicates", "2", "--sizes", "50", "400", "3200"])
        assert {unit.size for unit, _ in measured[first:]} == {3200}
        text = (tmp_path / "theory.md").read_text()
        one, two = re.findall(r"^### (β = .)\n\n.*slope.*\n.*\n((?:\|.*\n)+)", text, re.MULTILINE)
        assert (one[0], two[0]) == ("β = 1", "β = 2")
        assert "| L2 error of the mean prediction | -0.67 [-0.67, -0.67] | -0.67 |" in one[1]
        assert "| squared Hellinger distance | -0.80 [-0.80, -0.80] | -0.80 |" in two[1]
        assert all(f"| {change} | " in text for change in CHANGES)
        ElementTree.parse(tmp_path / "theory.svg")  # noqa: S314
        assert len(json.loads((tmp_path / "theory.json").read_text())["records"]) == len(measured)

    def test_when_nothing_is_left_to_measure_the_page_is_written_again(self, tmp_path, measured):
        out = tmp_path / "new"
        asked = ["--out", str(out), "--replicates", "1"]
        command.main(asked)
        written = {path: path.read_text() for path in out.iterdir()}
        done = len(measured)
        (out / "theory.md").unlink()
        command.main(asked)
        assert {path: path.read_text() for path in out.iterdir()} == written
        assert len(measured) == done

    def test_what_was_cut_short_goes_on_and_is_shown_as_far_as_it_is(self, tmp_path, measured):
        asked = ["--out", str(tmp_path), "--replicates", "1", "--sizes", "50", "100"]
        command.main(asked)
        path = tmp_path / "theory.json"
        kept = json.loads(path.read_text())
        smooth = [record for record in kept["records"] if record["series"] == "β = 2"]
        changed = [record for record in kept["records"] if record["series"] in CHANGES]
        path.write_text(dump_json(kept | {"records": smooth + changed}))
        tables = rate.page(rate.read_records(path)).tables
        assert [[title for title, _ in table.blocks] for table in tables] == [["β = 2"], [""], *[["β = 2"]] * 2]
        path.write_text(dump_json(kept | {"records": changed}))
        before = len(measured)
        command.main(asked)
        assert {unit.series for unit, _ in measured[before:]} == {"β = 1", "β = 2"}

    def test_sizes_that_no_curve_has_are_refused(self, tmp_path):
        with pytest.raises(command.UserError, match="choose from 50, 100"):
            command.main(["--out", str(tmp_path), "--sizes", "7"])

    def test_replicates_of_changed_curves_are_few(self):
        todo = command.to_do([*MAIN, *CHANGED], 5, [])
        assert {len(numbers) for unit, numbers in todo.items() if unit.series in CHANGES} == {3}
        assert {len(numbers) for unit, numbers in todo.items() if unit.series not in CHANGES} == {5}


class TestPage:
    kept = json.loads((command.FOLDER / "theory.json").read_text())

    def table(self, caption):
        return next(table for table in rate.page(self.kept).tables if table.caption == caption)

    def test_slopes_are_those_of_the_measurements(self):
        rows = dict(dict(self.table("The rate").blocks)["β = 2"])
        sizes, errors = errors_of([r for r in self.kept["records"] if r["series"] == "β = 2"], "l2_of_mean")
        by_hand = np.polyfit(np.log(sizes), np.log(errors.mean((0, 1))), 1)[0]
        assert math.isclose(float(rows["L2 error of the mean prediction"][0].split(" ")[0]), by_hand, abs_tol=0.005)

    def test_the_bound_is_as_vacuous_as_it_says(self):
        table = self.table("The bound at the paper's sizes")
        assert "Theorem 1 is vacuous at 3 of the paper's 3 training-set sizes." in rate.page(self.kept).lead
        at = table.heads.index("Theorem 1")
        ((_, rows),) = table.blocks
        assert [float(cells[at]) > 1000 for _, cells in rows] == [True] * 3

    def test_the_theory_in_words_quotes_the_slopes_of_the_page(self):
        """docs/theory.md quotes the Hellinger distance, of which the theorem speaks."""
        words = " ".join((command.FOLDER.parent / "theory.md").read_text().split()).replace("−", "-")
        page = (command.FOLDER / "theory.md").read_text()
        slopes = re.findall(r"^\| squared Hellinger distance \| (\S+ \[.*?\]) \|", page, re.MULTILINE)
        assert len(slopes) == 2
        assert all(found in words for found in slopes)
