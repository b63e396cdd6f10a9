import json
import os
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


def test_a_copy_without_git_has_the_commit_of_its_manifest(tmp_path, monkeypatch):
    package = tmp_path / "src" / "pfedbayes"
    (package / "runs").mkdir(parents=True)
    code = package / "runs" / "provenance.py"
    code.write_text("one = 1")
    monkeypatch.setattr(provenance, "__file__", str(code))
    assert runs.describe_code()["commit"] is None
    manifest = tmp_path / provenance.MANIFEST
    manifest.write_text(json.dumps({"commit": "1a2b3c4", "digest": provenance.digest_of_code(tmp_path)}))
    assert runs.describe_code()["commit"] == "1a2b3c4"
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "new.toml").write_text("")
    assert runs.describe_code()["commit"] == "1a2b3c4-dirty"
    digest = provenance.digest_of_code(tmp_path)
    forged = ["1a2b3c4\n<script>", "\x1b[31m", "", "a" * 101, ["1a2b3c4"], 7, None]
    for broken in ("[]", "{", '{"commit": "1a2b3c4"}', "[" * 100_000, '{"commit": "1a2b3c4", "digest": 1}',
                   *(json.dumps({"commit": commit, "digest": digest}) for commit in forged)):  # fmt: skip
        manifest.write_text(broken)
        assert runs.describe_code()["commit"] is None
    manifest.unlink()
    os.mkfifo(manifest)
    assert runs.describe_code()["commit"] is None
    manifest.unlink()
    manifest.symlink_to(tmp_path / "elsewhere.json")
    manifest.resolve().write_text(json.dumps({"commit": "1a2b3c4", "digest": digest}))
    assert runs.describe_code()["commit"] is None


def test_a_manifest_beside_an_installed_package_does_not_describe_it(tmp_path, monkeypatch):
    code = tmp_path / "site-packages" / "pfedbayes" / "runs" / "provenance.py"
    code.parent.mkdir(parents=True)
    code.touch()
    monkeypatch.setattr(provenance, "__file__", str(code))
    manifest = {"commit": "1a2b3c4", "digest": provenance.digest_of_code(tmp_path)}
    (tmp_path / provenance.MANIFEST).write_text(json.dumps(manifest))
    assert runs.describe_code()["commit"] is None
