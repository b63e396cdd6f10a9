"""Whether a case ended as it should: accepted, or refused in one line."""

import re
from pathlib import Path
from typing import NamedTuple

from .forks import Ended

FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
LINE = "pfedbayes: "
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Verdict(NamedTuple):
    """What came of a case."""

    family: str
    seed: int
    accepted: bool
    failures: list[str]
    """One line each, the same for the same defect."""
    seconds: float
    commands: str


def judge(family: str, seed: int, folder: Path, ended: Ended) -> Verdict:
    """Compare how a case ended with how it should end."""
    trial = folder / "trial"
    commands = trial.read_text(errors="replace") if trial.exists() else ""
    failures = _failures(folder, ended, commands) if commands else [f"fuzzer: {_place(ended.err)}"]
    return Verdict(family, seed, ended.code == 0, [each[:200] for each in failures[:5]], ended.seconds, commands[:400])


def _failures(folder: Path, ended: Ended, commands: str) -> list[str]:
    if ended.code is None:
        return [f"hang: {_stuck(ended.err)}"]
    if ended.code < 0:
        return [f"signal {-ended.code}"]
    failures = []
    if "Traceback (most recent call last)" in ended.err:
        failures.append(f"traceback: {_place(ended.err)}")
    elif ended.code not in (0, 2) and not (ended.code == 1 and "'sweep'" in commands):
        failures.append(f"exit code {ended.code}: {(ended.err.strip().splitlines() or [''])[-1][:100]}")
    elif ended.code == 2 and not _is_usage(ended.err):
        failures += _refusal(ended.err)
    if warned := re.search(r"^.*?(\w*Warning): .*$", ended.err, re.MULTILINE):
        failures.append(f"warning: {warned[0][-160:]}")
    problems = folder / "problems"
    return failures + (problems.read_text(errors="replace").splitlines() if problems.exists() else [])


def _is_usage(err: str) -> bool:
    return err.startswith("Usage: ") and "Error" in err


def _refusal(err: str) -> list[str]:
    """Return what is wrong with a refusal: it has to be the last line, and the only one of its kind."""
    lines = err.rstrip("\n").split("\n")
    said = [line for line in lines if line.startswith(LINE.rstrip())]
    listed = lines[lines.index(said[0]) + 1 :] if said else []  # several problems of one file
    if len(said) != 1 or not all(re.match(r"  (\d+\.|…) ", line) for line in listed):
        return [f"{len(said)} lines of refusal, the last is: {lines[-1][:100]}"]
    if CONTROL.search(said[0]):
        return ["control characters in the message"]
    if not re.search(": |must ", said[0].removeprefix(LINE)):
        return [f"no remedy: {said[0][:160]}"]
    return []


def _stuck(err: str) -> str:
    """Return the innermost line of our code of a process that hangs."""
    frames = re.findall(r'File "[^"]*/(pfedbayes/[^"]+)", line (\d+) in', err.rpartition("Timeout (")[2])
    return "{}:{}".format(*frames[0]) if frames else "elsewhere"


def _place(err: str) -> str:
    """Return the last line of the last traceback, and the last line of our code in it."""
    part = err.rpartition("Traceback (most recent call last)")[2]
    lines = part.rstrip().splitlines() or [""]
    last = next((line for line in reversed(lines) if re.match(r"[A-Za-z_.]+(:|$)", line)), lines[-1])
    frames = [frame for frame in FRAME.findall(part) if "/pfedbayes/" in frame[0]]
    where = "{}:{}".format(frames[-1][0].rpartition("/pfedbayes/")[2], frames[-1][1]) if frames else "elsewhere"
    return f"{where} {last[:110]}"
