"""A lock keeps other processes out, and ends with its file."""

import subprocess
import sys
import textwrap

from pfedbayes.files.locking import lock


def test_one_writer_or_several_readers(tmp_path):
    path = tmp_path / "a"
    path.touch()
    with path.open("rb") as one, path.open("rb") as two, path.open("r+b") as writer:
        assert lock(one, shared=True)
        assert lock(two.fileno(), shared=True)
        assert not lock(writer)
        one.close()
        assert not lock(writer)
        two.close()
        assert lock(writer)
        with path.open("rb") as late:
            assert not lock(late, shared=True)
    with path.open("r+b") as again:
        assert lock(again, wait=True)


def test_the_package_is_imported_where_posix_is_missing(tmp_path):
    """As on Windows: no fcntl, and no flags that only POSIX has."""
    script = """
        import os, sys, sysconfig, torch
        sysconfig.get_config_vars()
        for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):
            delattr(os, name)
        sys.modules["fcntl"] = None
        sys.platform = "win32"
        import types
        held = set()
        def locking(descriptor, kind, size):
            key = os.fstat(descriptor).st_ino
            if key in held:
                raise OSError("held")
            held.add(key)
        sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
        import importlib.util
        from pfedbayes.files import locking as ours
        from pfedbayes.files.writing import open_to_write
        from pathlib import Path
        import pfedbayes.engine.population.file
        with open_to_write(Path("x")) as one, open_to_write(Path("x")) as two:
            assert ours.lock(one) and not ours.lock(two)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
