import re

from pfedbayes import runs
from pfedbayes.runs import provenance


def test_code_is_told_apart_by_its_files(tmp_path, monkeypatch):
    assert re.fullmatch("[0-9a-f]{16}", runs.describe_code()["source"])
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "runs" / "provenance.py"))
    found = set()
    for name, text in (("runs.py", "a"), ("runs.py", "b"), ("other.py", "b")):
        (tmp_path / name).write_text(text)
        found.add(runs.describe_code()["source"])
    assert len(found) == 3
