"""Run cases, all or one:

python -m tests.fuzz --cases 5000 --workers 2
python -m tests.fuzz --family table --seed 17
"""

import argparse
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from . import families
from .bases import Bases
from .families import FAMILIES
from .forks import in_child, preload, spread
from .judge import Verdict, judge
from .trials import digest, perform

SECONDS = 20.0  # a case that takes longer hangs


def run_case(family: str, seed: int, root: Path, bases: Bases, show: bool = False) -> Verdict:
    """Run one case in a folder of its own; show: print what it printed."""
    folder = root / f"{family}-{seed}"
    folder.mkdir()
    generator = FAMILIES[family][0]
    ended = in_child(lambda: perform(generator, f"{family} {seed}", folder, bases), folder, SECONDS)
    verdict = judge(family, seed, folder, ended)
    shutil.rmtree(folder, ignore_errors=True)
    if show:
        print(f"{verdict.commands}\n--- stdout\n{ended.out[-6000:]}\n--- stderr\n{ended.err[-6000:]}")
        print(f"--- {verdict.seconds:.2f} s, failures: {verdict.failures}")
    return verdict


def summary(verdicts: list[Verdict]) -> str:
    """Return the table of families and the failures, those of one place together."""
    lines = [f"{'family':<14}{'cases':>7}{'refused':>9}{'accepted':>10}{'failures':>10}{'seconds each':>14}"]
    for family in [*FAMILIES, "all"]:
        own = [each for each in verdicts if family in (each.family, "all")]
        if own:
            bad, good = (
                sum(bool(each.failures) for each in own),
                sum(each.accepted and not each.failures for each in own),
            )
            each_took = sum(each.seconds for each in own) / len(own)
            lines.append(f"{family:<14}{len(own):>7}{len(own) - good - bad:>9}{good:>10}{bad:>10}{each_took:>14.2f}")
    places = Counter(failure for each in verdicts for failure in each.failures)
    for failure, count in places.most_common():
        first = next(each for each in verdicts if failure in each.failures)
        lines.append(
            f"{count:>4} x {failure}   e.g. --family {first.family} --seed {first.seed}: {first.commands[:300]!r}"
        )
    return "\n".join(lines)


def main() -> int:
    """Return 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=500, help="the number of cases")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--part", default="1/1", help="2/3: the second third of the cases")
    parser.add_argument("--family", choices=FAMILIES, help="only cases of this family")
    parser.add_argument("--seed", type=int, help="with --family: run this one case and show all of it")
    parser.add_argument("--bases", type=Path, help="keep the good files that cases begin with here")
    options = parser.parse_args()
    preload()
    os.environ.update(OMP_NUM_THREADS="1", COLUMNS="120")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        root = Path(name).resolve()
        bases = Bases(options.bases or root / "bases")
        bases.ensure()
        if options.seed is not None:
            return int(bool(run_case(options.family, options.seed, root, bases, show=True).failures))
        part, of = map(int, options.part.split("/"))
        cases = (
            families.cases(options.cases) if not options.family else [(options.family, k) for k in range(options.cases)]
        )
        before = digest(bases.root)
        verdicts: list[Verdict] = []
        start = time.monotonic()
        mine = cases[part - 1 :: of]
        for verdict in spread(mine, lambda case: run_case(*case, root, bases), options.workers):
            verdicts.append(verdict)
            for failure in verdict.failures:
                print(f"{verdict.family} {verdict.seed}: {failure}", file=sys.stderr)
            if len(verdicts) % 100 == 0:
                bad = sum(bool(each.failures) for each in verdicts)
                print(f"{len(verdicts)} cases, {bad} failures, {time.monotonic() - start:.0f} s", file=sys.stderr)
        print(summary(verdicts))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{time.monotonic() - start:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of processor time")
        if len(verdicts) != len(mine):
            print(f"only {len(verdicts)} cases came back")
            return 1
        if before != digest(bases.root):
            print("a case has changed the good files")
            return 1
        return int(any(verdict.failures for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
