"""Change single places of the core files, one at a time, and count how many of these mutations the tests catch.

    python scripts/mutate.py --sample 100 --seed 1      # a random sample
    python scripts/mutate.py --only trust/conformal     # the mutations whose description contains this text
    python scripts/mutate.py --list                     # print the mutations and run nothing
    python scripts/mutate.py --results results.json     # all of them, for hours; continues where it was interrupted

The working tree is not touched. A process that has imported torch and pytest, but not pfedbayes, forks for every
mutation. The child imports the mutated source of one module instead of its file, and runs tests up to the first
failure. A mutation is caught if a test fails, or if the tests take much longer than without it.

`mutate.toml` says which files are mutated and which tests belong to each of them. These tests run once without a
mutation; a mutation is then shown only to the tests that have called the mutated function, the fastest first. The same
table names the mutations that no test on a CPU can notice, with the reason. They do not count.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mutations import Mutation, mutations

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "pfedbayes"
TABLE = Path(__file__).with_suffix(".toml")
# Imported before forking, to save time. Nothing of pfedbayes: the children import it with the mutation.
PRELOADED = (
    "torch", "torch.func", "torch._dynamo", "torch.testing", "scipy.stats", "scipy.optimize", "scipy.integrate",
    "safetensors.torch", "typer", "rich.console", "rich.table", "rich.progress", "jinja2", "pytest", "hypothesis",
    "hypothesis.strategies", "pandas", "pyarrow.parquet", "sklearn.metrics", "torchmetrics", "PIL.Image", "flwr.app",
    "flwr.serverapp", "flwr.clientapp", "lifelines.utils", "statsmodels.discrete.discrete_model",
    "statsmodels.miscmodels.ordinal_model",
)  # fmt: skip
MEMORY = 12 << 30  # bytes of address space of a child
FAILED_TO_RUN = 99  # exit code of a child that did not get as far as pytest


class Table(NamedTuple):
    """The content of mutate.toml."""

    files: list[str]
    """Files that are mutated, as paths below src/pfedbayes; * and ** as in a shell."""
    tests: dict[str, list[str]]
    """Test files, as patterns below tests/, that belong to the files of a pattern besides the one that mirrors them."""
    equivalent: list[dict[str, str]]
    """Mutations that change nothing: the file and the reason; perhaps the part of the line that they lie in, the
    function, the change."""


def read_table() -> Table:
    """Read mutate.toml."""
    return Table(**tomllib.loads(TABLE.read_text()))


def all_mutations(table: Table) -> list[Mutation]:
    """Return the mutations of all files of the table."""
    paths = sorted({path for pattern in table.files for path in SOURCE.glob(pattern) if path.stem != "__init__"})
    return [each for path in paths for each in mutations(str(path.relative_to(SOURCE)), path.read_bytes())]


def explains(entry: dict[str, str], mutation: Mutation) -> bool:
    """Return whether an entry of the table says why this mutation changes nothing."""
    function = mutation.scope[0] if mutation.scope else None
    part, place = entry.get("line", mutation.text).encode(), mutation.column - 1
    return (
        fnmatch.fnmatch(mutation.file, entry["file"])
        and any(found.start() <= place < found.end() for found in re.finditer(re.escape(part), mutation.text.encode()))
        and entry.get("function", function) == function
        and entry.get("change", mutation.change) == mutation.change
    )


def tests_of(table: Table, file: str) -> list[Path]:
    """Return the test files that belong to a file."""
    path = Path(file)
    mirror = ROOT / "tests" / path.with_name(f"test_{path.name}")
    others = [name for pattern, names in table.tests.items() if fnmatch.fnmatch(file, pattern) for name in names]
    return sorted({*filter(Path.exists, [mirror]), *(path for name in others for path in (ROOT / "tests").glob(name))})


# Running tests in a child


class Calls:
    """A pytest plugin that notes how long each test takes and which functions of the package it calls."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self._called: set[CodeType] = set()
        self._by_fixture: dict[str, set[CodeType]] = {}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._called.add(frame.f_code)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
        """Watch a test with its fixtures. What a fixture of a module has called counts for all tests that use it."""
        start = time.process_time()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        self._called = set()
        yield
        sys.setprofile(None)
        called = self._called.union(*(self._by_fixture.get(name, ()) for name in item.fixturenames))
        places = {(code.co_filename, code.co_firstlineno) for code in called if str(SOURCE) in code.co_filename}
        calls = sorted((str(Path(file).relative_to(SOURCE)), line) for file, line in places)
        self.tests[item.nodeid] = {"seconds": time.process_time() - start, "calls": calls}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        """Watch a fixture that several tests share."""
        outer, self._called = self._called, set()
        yield
        if fixturedef.scope != "function":
            self._by_fixture[fixturedef.argname] = self._called
        self._called |= outer


class EndAtFailure:
    """A pytest plugin that ends the process at the first failure, without pytest's own clearing up."""

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """End the process if a test has failed."""
        if report.failed:
            os._exit(1)


class Mutant(importlib.machinery.SourceFileLoader):
    """Imports the mutated source of a module instead of its file."""

    def __init__(self, mutation: Mutation) -> None:
        path = SOURCE / mutation.file
        name = ".".join(["pfedbayes", *Path(mutation.file).with_suffix("").parts])
        super().__init__(name, str(path))
        self._code = compile(mutation.apply(path.read_bytes()), str(path), "exec")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the specification of the mutated module, None for others."""
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        """Return the mutated code."""
        return self._code


def run_tests(tests: Sequence[str], folder: Path, mutation: Mutation | None, calls: Calls | None) -> int:
    """Run tests in this process; return pytest's exit code. With a mutation, the process may end here."""
    os.environ["PYTHONPATH"] = str(SOURCE.parent)
    os.environ["CXX"] = "none"  # tests that need a compiler are skipped: they take minutes
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    sys.path.insert(0, str(SOURCE.parent))
    if mutation is not None:
        sys.meta_path.insert(0, Mutant(mutation))
    options = ["-q", "-x", "--tb=short", f"--rootdir={ROOT}", f"--basetemp={folder / 'tmp'}", "--hypothesis-seed=0"]
    options += ["-Wignore::pytest.PytestAssertRewriteWarning"]  # of plugins that were imported before forking
    options += [f"-p{name}" for name in ("no:cacheprovider", "no:xdist", "no:anyio")]
    return int(pytest.main([*options, *tests], plugins=[calls] if calls else [EndAtFailure()]))


def waited(pid: int) -> float:
    """Return for how many seconds a process was ready to run, but had no core; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class Child:
    """A forked process that runs tests."""

    def __init__(self, tests: Sequence[str], folder: Path, seconds: float, mutation: Mutation | None) -> None:
        self.mutation, self.folder, self._until = mutation, folder, time.monotonic() + 20 * seconds
        folder.mkdir()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._live(tests, int(seconds))

    def _live(self, tests: Sequence[str], seconds: int) -> None:
        code = FAILED_TO_RUN
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(log, stream)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            calls = Calls() if self.mutation is None else None
            code = run_tests(tests, self.folder, self.mutation, calls)
            if calls:
                (self.folder / "calls.json").write_text(json.dumps(calls.tests))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def ended(self) -> bool:
        """Return whether the process has ended; end it after too long a time, without that on a busy machine."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self.late = not pid and time.monotonic() > self._until + waited(self.pid)
        if self.late:
            os.waitpid(self.pid, 0) if self._kill() else None
        self.code = 1 if self.late else os.waitstatus_to_exitcode(status)
        if pid or self.late:
            self._kill()
        return bool(pid) or self.late

    def _kill(self) -> bool:
        """End what the process has started, and the process itself."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def log(self) -> str:
        """Return what the tests have printed."""
        return (self.folder / "log").read_text(errors="replace")


def run_all(
    jobs: Sequence[tuple[Sequence[str], float, Mutation | None]], processes: int, home: Path
) -> Iterator[Child]:
    """Run (tests, seconds of CPU time, mutation) in forked processes; yield each when it has ended."""
    waiting, running, number = list(jobs)[::-1], list[Child](), 0
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                tests, seconds, mutation = waiting.pop()
                running.append(Child(tests, home / str(number), seconds, mutation))
                number += 1
            time.sleep(0.02)
            for child in [each for each in running if each.ended()]:
                running.remove(child)
                yield child
                shutil.rmtree(child.folder, ignore_errors=True)
    finally:
        for child in running:
            child._kill()
            os.waitpid(child.pid, 0)


# Results


class Results:
    """What is known so far, in a file if there is one: the calls of all tests, and which mutations were caught.

    It is valid for one state of the source. Mutations that survived are tried again.
    """

    def __init__(self, path: Path | None) -> None:
        digest = hashlib.sha256()
        for source in sorted(SOURCE.rglob("*.py")):
            digest.update(source.read_bytes())
        empty: dict[str, Any] = {"source": digest.hexdigest(), "tests": {}, "caught": []}
        self._path = path
        self._content = json.loads(path.read_text()) if path is not None and path.exists() else empty
        if self._content["source"] != empty["source"]:
            self._content = empty
        self.tests: dict[str, Any] = self._content["tests"]
        self.caught: list[str] = self._content["caught"]

    def save(self) -> None:
        """Write the file, if there is one."""
        if self._path is not None:
            self._path.write_text(json.dumps(self._content))


def measure_tests(files: Sequence[Path], results: Results, processes: int, home: Path) -> dict[Path, dict[str, Any]]:
    """Run test files without a mutation; return for each file its tests with their time and calls."""
    keys = {file: f"{file.relative_to(ROOT)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files}
    new = {str(file): key for file, key in keys.items() if key not in results.tests}
    for child in run_all([([file], 1800.0, None) for file in new], processes, home):
        if child.code:
            raise SystemExit(f"tests fail without a mutation:\n{child.log()}")
        found = json.loads((child.folder / "calls.json").read_text())
        name = next(iter(found)).split("::")[0]
        results.tests[new[str(ROOT / name)]] = found
        results.save()
        print(f"{name}: {len(found)} tests, {sum(each['seconds'] for each in found.values()):.0f} s", flush=True)
    return {file: results.tests[key] for file, key in keys.items()}


def tests_for(mutation: Mutation, tests: dict[str, Any]) -> tuple[list[str], float]:
    """Return the tests that call the mutated function, the fastest first, and the CPU time that they may take."""
    _, first, last = mutation.scope or ("", 0, 0)
    calls = {
        name: each["seconds"]
        for name, each in tests.items()
        if not mutation.scope or any(file == mutation.file and first <= line <= last for file, line in each["calls"])
    }
    return sorted(calls, key=lambda name: calls[name]), 10 + 3 * sum(calls.values())


def run_mutations(chosen: Sequence[Mutation], table: Table, results: Results, processes: int) -> list[Mutation]:
    """Run the tests on mutations; return those that survive."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # children need not look through all that was imported
    survivors, jobs = [], []
    home = Path(tempfile.mkdtemp(prefix="mutate-"))
    sys.pycache_prefix = str(home / "pycache")
    try:
        new = [each for each in chosen if str(each) not in results.caught]
        measured = measure_tests(
            sorted({test for file in {each.file for each in new} for test in tests_of(table, file)}),
            results, processes, home,
        )  # fmt: skip
        for mutation in new:
            of_file = {name: each for file in tests_of(table, mutation.file) for name, each in measured[file].items()}
            tests, seconds = tests_for(mutation, of_file)
            if tests:
                jobs.append((tests, seconds, mutation))
            else:
                survivors.append(mutation)
                print(f"no test    {mutation}", flush=True)
        for child in run_all(jobs, processes, home):
            assert child.mutation is not None  # noqa: S101, only the runs without a mutation have none
            if child.code == FAILED_TO_RUN:
                raise SystemExit(f"{child.mutation}: the tests could not be run\n{child.log()}")
            if child.code == 0:
                survivors.append(child.mutation)
            else:
                results.caught.append(str(child.mutation))
                results.save()
            outcome = "late" if child.late else "caught" if child.code else "SURVIVED"  # late: it hangs
            print(f"{outcome:<10} {child.mutation}", flush=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return survivors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 1 if fewer mutations than `--at-least` are caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", default="", help="mutations whose description (file:line: old -> new) contains this")
    parser.add_argument("--sample", type=int, help="how many mutations to draw; all if not given")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--processes", type=int, default=2, help="how many mutations to run at once")
    parser.add_argument("--results", type=Path, help="a file to keep what was caught, so that a run can be continued")
    parser.add_argument("--at-least", type=float, default=95.0, help="percentage that must be caught")
    options = parser.parse_args(arguments)

    table = read_table()
    everything = [each for each in all_mutations(table) if options.only in str(each)]
    counted = [each for each in everything if not any(explains(entry, each) for entry in table.equivalent)]
    chosen = counted
    if options.sample is not None and options.sample < len(counted):
        chosen = random.Random(options.seed).sample(counted, options.sample)  # noqa: S311
    if options.list:
        print(*chosen, sep="\n")
        return 0
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that children and temporary files are removed
    survivors = run_mutations(chosen, table, Results(options.results), options.processes)
    lost, total = (Counter(str(Path(each.file).parent) for each in group) for group in (survivors, chosen))
    for folder in sorted(total):
        print(f"{folder:<20}{total[folder] - lost[folder]:>5} of {total[folder]:>4} caught")
    score = 100 * (1 - len(survivors) / max(1, len(chosen)))
    print(
        f"{score:.1f} %: {len(chosen) - len(survivors)} of {len(chosen)} mutations caught, {len(survivors)} survived; "
        f"{len(everything) - len(counted)} of all {len(everything)} change nothing that a test could notice"
    )
    return int(score < options.at_least)


if __name__ == "__main__":
    sys.exit(main())
