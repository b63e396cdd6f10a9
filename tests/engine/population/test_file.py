"""Populations in a file: full disks, kills, foreign files."""

import concurrent.futures
import errno
import multiprocessing
import os
import random
import time

import pytest
import torch
from population_states import SIZE, Kept, fresh, in_file, state, states

from federations import same_bits
from pfedbayes.engine.population import HOST, FilePopulation
from pfedbayes.engine.population import file as file_module
from pfedbayes.errors import UserError


@pytest.mark.parametrize("seed", range(8))
def test_a_file_remembers_what_a_dict_would_through_checkpoints_and_kills(tmp_path, seed):
    """Puts, checkpoints, checkpoints that were not finished, and kills in any order."""
    draw, path = random.Random(seed), tmp_path / "clients.bin"
    population, now = in_file(path), {}
    saved, checkpoint, changed, most = {}, population.checkpoint(path), set(), 0
    for number in range(120):
        if draw.random() < 0.6:
            clients = draw.sample(range(SIZE), draw.randint(1, 4))
            population.put(clients, states([100 * number + client for client in clients]))
            now.update({client: 100 * number + client for client in clients})
            changed.update(clients)
            most = max(most, len(now) + len(changed & saved.keys()))
            # Four more than are in use: a round's states are written before the rows they leave are free.
            assert population.rows <= most + 4
        elif (action := draw.random()) < 0.4:
            checkpoint, saved, changed = population.checkpoint(path), dict(now), set()
            population.saved()
        elif action < 0.6:
            population.checkpoint(path)  # and killed before it was written
        else:
            population.close()
            population, now, changed = in_file(path), dict(saved), set()
            population.restore(list(saved), checkpoint, path)
        assert population.enrolled == list(now)
        if now:
            assert same_bits(population.get(list(now), fresh), states(list(now.values())))
    assert path.stat().st_size <= population.rows * sum(leaf.nbytes for leaf in state(0))


def test_a_put_that_fails_half_way_keeps_nothing_of_it(tmp_path, monkeypatch):
    population = in_file(tmp_path / "clients.bin")
    population.put([1, 2, 3], states([10, 20, 30]))
    write, calls = os.pwritev, []

    def full_after_two_rows(*arguments):
        calls.append(arguments)
        if len(calls) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", full_after_two_rows)
    with pytest.raises(UserError, match=r"clients.bin \(No space left on device\).*--resume"):
        population.put([3, 2, 1], states([31, 21, 11]))
    assert len(calls) >= 7  # rows are written several at a time
    assert same_bits(population.get([1, 2, 3], fresh), states([10, 20, 30]))
    monkeypatch.setattr(os, "pwritev", write)
    population.put([2], states([22]))
    assert same_bits(population.get([1, 2, 3], fresh), states([10, 22, 30]))


def test_an_interrupt_leaves_nobody_writing(monkeypatch):
    population, write, written = in_file(), os.pwritev, []

    def slow(*arguments):
        time.sleep(0.02)
        written.append(arguments)
        return write(*arguments)

    def interrupted(tasks):
        monkeypatch.setattr("pfedbayes.engine.population.file.wait", concurrent.futures.wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwritev", slow)
    monkeypatch.setattr("pfedbayes.engine.population.file.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        population.put(list(range(SIZE)), states(list(range(SIZE))))
    before = len(written)
    time.sleep(0.2)
    assert len(written) == before < 3 * SIZE
    assert population.enrolled == []


def test_a_forked_process_has_threads_of_its_own():
    population = in_file()
    population.put([1], states([1]))
    child = multiprocessing.get_context("fork").Process(target=population.put, args=([2], states([2])))
    child.start()
    child.join(timeout=30)
    assert child.exitcode == 0


def test_reads_and_writes_that_do_less_than_asked_are_gone_on_with(monkeypatch):
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: read(file, [parts[0][:5]], offset))
    monkeypatch.setattr(os, "pwritev", lambda file, parts, offset: write(file, [parts[0][:3]], offset))
    population = in_file()
    population.put([1, 2], states([10, 20]))
    assert same_bits(population.get([2, 1], fresh), states([20, 10]))


def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(UserError, match="No space left on device"):
        in_file(tmp_path / "clients.bin").put([1], states([10]))


def test_a_pipe_or_a_link_is_not_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("pipe", "link"):
        with pytest.raises(UserError, match="cannot write"):
            in_file(tmp_path / name).put([1], states([10]))
    assert not (tmp_path / "elsewhere").exists()


def test_an_unwritable_folder_is_one_clear_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        in_file(tmp_path / "file" / "clients.bin").put([1], states([10]))
    monkeypatch.setattr(file_module.tempfile, "TemporaryFile", lambda: (tmp_path / "file" / "x").open("wb"))
    with pytest.raises(UserError, match="TMPDIR"):
        in_file().put([1], states([10]))


class TestForeignFiles:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "clients.bin"

    @pytest.fixture
    def checkpoint(self, path):
        population = in_file(path)
        population.put([1, 2], states([10, 20]))
        checkpoint = population.checkpoint(path)
        population.close()
        return checkpoint

    def refused(self, path, checkpoint, own, match="does not belong"):
        population = in_file(path if own else None)
        with pytest.raises(UserError, match=match):
            population.restore([1, 2], checkpoint, path)
        assert population.enrolled == []

    @pytest.mark.parametrize("own", [True, False])
    def test_another_files_rows_are_refused(self, path, checkpoint, own):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        self.refused(path, checkpoint, own)
        path.write_bytes(content[:-1])
        self.refused(path, checkpoint, own)
        path.write_bytes(content)
        in_file(path if own else None).restore([1, 2], checkpoint, path)

    @pytest.mark.parametrize("row", [0, 1])
    def test_damage_to_any_row_is_noticed(self, path, checkpoint, row):
        content = bytearray(path.read_bytes())
        content[row * len(content) // 2 + 3] ^= 1
        path.write_bytes(content)
        population = in_file(path)
        read = [lambda: population.restore([1, 2], checkpoint, path), lambda: population.get([1, 2], fresh)]
        if row == 0:  # the last row is looked at at once, the others when they are read
            read.pop(0)()
        with pytest.raises(UserError):
            read[0]()

    @pytest.mark.parametrize("rows", [[-1, 0], [0, -1], [0, 2], [0]])
    def test_rows_that_are_not_there_are_refused(self, path, checkpoint, rows):
        assert len(checkpoint["witness"]) == 2  # bytes per row, and the checksum of one
        self.refused(path, checkpoint | {"rows": torch.tensor(rows)}, own=True)

    @pytest.mark.parametrize("own", [True, False])
    def test_a_checkpoint_is_forced_to_disk_as_a_whole(self, path, monkeypatch, own):
        population, synced = in_file(path if own else None), []
        population.put([1, 2], states([10, 20]))
        monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
        population.checkpoint(path)
        assert synced == [path.stat().st_size] == [2 * sum(leaf.nbytes for leaf in state(0))]

    def test_a_copy_that_fails_leaves_nothing(self, path, monkeypatch):
        population = in_file()
        population.put([1, 2], states([10, 20]))

        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left"):
            population.checkpoint(path)
        assert list(path.parent.iterdir()) == []

    def test_pinned_rows_are_not_written_to(self, path):
        population = in_file(path)
        for values in ([10, 20], [11, 21]):
            population.put([1, 2], states(values))
            rows = population.checkpoint(path)["rows"].tolist()
            population.saved()
        assert rows == [2, 3]
        population.pin([0])
        population.put([3, 4], states([30, 40]))
        assert population.checkpoint(path)["rows"].tolist() == [2, 3, 1, 4]

    @pytest.mark.timeout(20)
    def test_neither_links_nor_pipes_are_read(self, path, checkpoint, tmp_path):
        link, pipe = tmp_path / "link.bin", tmp_path / "pipe.bin"
        link.symlink_to(path)
        os.mkfifo(pipe)
        for odd in (link, pipe):
            with pytest.raises(UserError):
                in_file().restore([1, 2], checkpoint, odd)

    def test_rows_of_another_width_are_refused(self, path, checkpoint):
        population = FilePopulation(Kept(torch.zeros(2, 1), torch.tensor(0), torch.tensor([True])), HOST, path)
        with pytest.raises(UserError, match="does not belong"):
            population.restore([1, 2], checkpoint, path)

    def test_a_missing_file_is_named(self, path, checkpoint):
        path.unlink()
        self.refused(path, checkpoint, own=False, match=r"cannot read .*clients.bin \(No such file")
        self.refused(path, checkpoint, own=True)

    def test_one_writes_or_several_read(self, path, checkpoint):
        first, second = in_file(), in_file()
        first.restore([1, 2], checkpoint, path)
        second.restore([1, 2], checkpoint, path)
        self.refused(path, checkpoint, own=True, match="in use")
        first.close()
        second.close()
        writer = in_file(path)
        writer.restore([1, 2], checkpoint, path)
        self.refused(path, checkpoint, own=False, match="in use")

    def test_a_reader_trains_on_without_a_change_to_the_file(self, path, checkpoint):
        content, reader = path.read_bytes(), in_file()
        reader.restore([1, 2], checkpoint, path)
        reader.put([2, 3], states([21, 30]))
        reader.put([2], states([22]))
        assert same_bits(reader.get([1, 2, 3], fresh), states([10, 22, 30]))
        assert path.read_bytes() == content
        copy = reader.checkpoint(path)  # takes the place of the file it reads from
        again = in_file()
        again.restore(reader.enrolled, copy, path)
        assert same_bits(again.get([1, 2, 3], fresh), states([10, 22, 30]))
