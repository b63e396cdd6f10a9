from pathlib import Path

import pytest

from pfedbayes import runs
from pfedbayes.errors import UserError


def test_a_file_that_is_no_run_is_named_and_nobody_is_told_to_resume(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to \S+/file/table\.md \(Not a directory\)") as caught:
        runs.write_file(tmp_path / "file" / "table.md", "")
    assert "resume" not in str(caught.value)


@pytest.mark.parametrize("name", ["folder", "."])
def test_a_folder_is_not_written_over(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is a folder: give the name of a file"):
        runs.write_file(Path(name), "")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]
