"""Files that are written piece by piece are those that safetensors writes at once."""

import io
import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.files import tensors as tensor_files
from pfedbayes.files.tensors import TYPES, Rows, open_tensors, write_tensors

WIDTHS = {name: dtype.itemsize for dtype, name in TYPES.items()}
ABOUT = {"round": "3", "words": 'quoted " and größer'}


def written(tensors) -> bytes:
    file = io.BytesIO()
    write_tensors(file, tensors, ABOUT)
    return file.getvalue()


def parts(content: bytes) -> dict[str, Any]:
    """Type, shape and bytes of every tensor, and the words about them; the tensors lie side by side and aligned."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header, end = json.loads(content[8:begin]), begin
    found = {"__metadata__": header.pop("__metadata__")}
    found["__metadata__"].pop("checksum", None)
    for name, part in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = (begin + offset for offset in part["data_offsets"])
        assert start == end
        assert start % WIDTHS[part["dtype"]] == 0
        found[name], end = (part["dtype"], part["shape"], content[start:stop]), stop
    assert end == len(content)
    return found


@pytest.fixture(params=[1, 100, 2**26])
def _pieces(request, monkeypatch):
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", request.param)


@pytest.mark.usefixtures("_pieces")
class TestContent:
    def test_every_type_and_shape_is_as_safetensors_has_it(self):
        shapes = {"none": (), "empty": (0, 3), "one": (1,), "odd": (5, 3)}
        tensors = {
            f"{name}.{dtype}": (10 * torch.randn(shape)).abs().to(dtype)
            for dtype in TYPES
            for name, shape in shapes.items()
        }
        content = written(tensors)
        assert parts(content) == parts(save(tensors, ABOUT))
        back = load(content)
        assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())

    def test_rows_are_those_of_the_copy(self):
        stacked = {
            "q": torch.randn(9, 4, 3),
            "steps": torch.arange(9),
            "seen": torch.rand(9) < 0.5,
            "": torch.ones(9, 0),
        }
        rows = torch.tensor([7, 0, 3, 8, 1])
        copies = {name: tensor[rows] for name, tensor in stacked.items()}
        taken = {name: Rows(tensor[0], len(rows), copies[name].__getitem__) for name, tensor in stacked.items()}
        assert written(taken) == written(copies)
        assert parts(written(copies)) == parts(save(copies, ABOUT))

    def test_tensors_that_lie_otherwise_in_memory(self):
        base = torch.arange(12.0).reshape(3, 4)
        tensors = {"turned": base.t(), "every other": base[:, ::2], "same": base}
        copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        assert parts(written(tensors)) == parts(save(copies, ABOUT))

    def test_nothing_at_all(self, tmp_path):
        (tmp_path / "file").write_bytes(written({}))
        with open_tensors(tmp_path / "file", "remedy") as file:
            assert (file.names, file.about, file.checked) == (frozenset(), ABOUT, True)


def test_a_checkpoint_that_fails_half_way_leaves_the_one_before(tmp_path, monkeypatch):
    writer = runs.Writer(tmp_path / "run")
    writer.checkpoint({"a": torch.zeros(3)}, round=1, seconds=0.0)
    before = sorted(path.name for path in writer.folder.iterdir())

    def lost(part):
        raise RuntimeError("lost")

    missing = Rows(torch.zeros(2), 2, lost)
    with pytest.raises(RuntimeError, match="lost"):
        writer.checkpoint({"a": torch.ones(3), "b": missing}, round=2, seconds=0.0)
    written = []

    def full_after_the_header(file, *arguments):
        written.append(file.write(b"header"))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pfedbayes.runs.folder.write_tensors", full_after_the_header)
    with pytest.raises(UserError, match=r"No space left on device.*--resume"):
        writer.checkpoint({"a": torch.ones(3)}, round=2, seconds=0.0)
    assert written
    assert sorted(path.name for path in writer.folder.iterdir()) == before
    assert runs.read_checkpoint(writer.folder).round == 1
    writer.close()


@pytest.mark.slow
def test_a_checkpoint_takes_little_memory_beside_the_states(tmp_path):
    """A gigabyte of states, in a process whose memory nothing else has used."""
    script = """
        import re
        import sys
        from pathlib import Path
        import torch
        from pfedbayes import runs
        from pfedbayes.engine.population import HOST, DevicePopulation

        def used():
            status = Path("/proc/self/status").read_text()
            return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])

        clients = torch.randperm(1000).tolist()
        population, before = DevicePopulation(1000, HOST), used()
        for start in range(0, 1000, 50):
            population.put(clients[start : start + 50], torch.rand(50, 250_000))
        rested = used()
        writer = runs.Writer(Path(sys.argv[1]))
        writer.checkpoint(population.checkpoint(Path("unused")), 1, 0.0)
        print(rested - before, used() - rested)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    states, more = map(int, done.stdout.split())
    assert states > 0.99e9
    assert more < 2 * tensor_files.PIECE_BYTES
