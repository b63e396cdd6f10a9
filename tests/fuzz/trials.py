"""A trial: bad input in a folder of its own, the commands that meet it, and what must still hold afterwards."""

import hashlib
import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .bases import Bases
from .forks import command, library

Command = list[str] | Callable[[], object]  # of the command line, or of the library


@dataclass
class Trial:
    """What a generator has made."""

    title: str
    """What is bad."""
    commands: list[Command]
    """Called one after another until one is refused."""
    keep: list[Path] = field(default_factory=list)
    """Files and folders that no command may change."""
    keep_if_refused: list[Path] = field(default_factory=list)
    """Files and folders that a refused command may not change."""
    must_accept: bool = False
    """Whether a refusal is a failure."""
    same_output: str | None = None
    """If all commands are accepted, what the last one has to print: damage must not change answers."""


@dataclass
class Workshop:
    """What a generator works with."""

    rng: random.Random
    folder: Path
    """The working directory of the commands. Whatever they write elsewhere is a failure."""
    bases: Bases
    canary: Path
    """A file that nobody creates, unless something from outside is run."""

    def copy(self, name: str, to: str | None = None) -> Path:
        """Copy a base into the folder."""
        return self.bases.copy(name, self.folder / (to or Path(name).name))

    def outside(self, name: str = "secret.txt") -> Path:
        """Create a file outside of the working directory that nobody may change."""
        path = self.folder.parent / "outside" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("not yours\n")
        return path


Generator = Callable[[Workshop], Trial]


def perform(generator: Generator, seed: str, folder: Path, bases: Bases) -> int:
    """Make a trial in a folder and carry it out; return the exit code. Findings go to the file `problems`."""
    work = folder / "work"
    for path in (work, folder / "home", folder / "tmp"):
        path.mkdir()
    os.environ.update(HOME=str(folder / "home"), TMPDIR=str(folder / "tmp"))
    os.chdir(work)
    shop = Workshop(random.Random(seed), work, bases, folder / "canary")
    trial = generator(shop)
    commands = [each if isinstance(each, list) else getattr(each, "__name__", "function") for each in trial.commands]
    (folder / "trial").write_text(
        "\n".join([trial.title, *map(ascii, commands)]) + f"\n{trial.same_output is not None}\n", errors="replace"
    )
    others = [path for path in folder.iterdir() if path.name not in NOT_GUARDED]
    before = {path: digest(path) for path in [*trial.keep, *trial.keep_if_refused, *others]}
    code = 0
    for each in trial.commands:
        end = (folder / "stdout").stat().st_size
        code = command(*each) if isinstance(each, list) else library(each)
        if code:
            break
    printed = (folder / "stdout").read_bytes()[end:].decode(errors="replace")
    problems = []
    if shop.canary.exists():
        problems.append("something from outside was run")
    new = [path.name for path in folder.iterdir() if path.name not in NOT_GUARDED and path not in others]
    problems += [f"written outside: {name}" for name in new if name != "canary"]
    problems += [f"written into the home folder: {path.name}" for path in (folder / "home").iterdir()]
    problems += [f"left in TMPDIR: {path.name}" for path in (folder / "tmp").iterdir() if path.name[:5] != "torch"]
    guarded = [*trial.keep, *others, *(trial.keep_if_refused if code else [])]
    for path in guarded:
        problems += [f"lost or changed: {where}" for where in difference(before[path], digest(path))]
    if trial.must_accept and code:
        problems.append("refused as a whole")
    if trial.same_output is not None and not code and printed != trial.same_output:
        problems.append("accepted with other answers")
    (folder / "problems").write_text("".join(f"{problem}\n" for problem in problems), errors="replace")
    return code


NOT_GUARDED = {"work", "home", "tmp", "stdout", "stderr", "trial", "problems"}


def digest(path: Path) -> dict[str, str]:
    """Return what lies at a path and below, by name, without the files that lock folders."""
    found: dict[str, str] = {}
    for each in [path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else [])]:
        if each.name == ".lock":
            continue
        try:
            mode = each.lstat().st_mode
        except FileNotFoundError:
            continue
        kind = stat.filemode(mode)[0]
        if kind == "-":
            kind = hashlib.sha256(each.read_bytes()).hexdigest()
        elif kind == "l":
            kind = f"-> {each.readlink()}"
        found[f"{path.name}/{each.relative_to(path)}"] = kind
    return found


def difference(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return what is gone, new or different."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))[:5]
