"""Predict exam scores of pupils in 139 London schools: a regression with one model per school.

    python examples/schools.py school.csv [FOLDER] [options of pfedbayes run]

school.csv holds the ILEA school data: one row per pupil, with the columns `score` and `school` and 28 numbers. The file
is not bundled, because its licence is not stated. One school joins later, and another one has new pupils.
"""

import csv
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

COMMANDS = (
    "pfedbayes run --data pupils/known.csv --target score --client-column school --out run",
    "pfedbayes predict run --client {school} --input pupils/new.csv -o pupils/predicted.csv",
    "pfedbayes personalize run --data pupils/newcomer.csv --client {newcomer}",
)


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows to a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def write_tables(source: Path, folder: Path) -> tuple[str, str, list[float]]:
    """Write the tables of known pupils, of the largest school's new pupils, and of the school that joins later.

    Every sixth pupil of the largest school is new. The school of median size joins later. Return the names of
    both schools and the scores of the new pupils.
    """
    pupils = read(source)
    schools = [name for name, _ in Counter(pupil["school"] for pupil in pupils).most_common()]
    largest, newcomer = schools[0], schools[len(schools) // 2]
    new = [pupil for pupil in pupils if pupil["school"] == largest][::6]
    held_out = {id(pupil) for pupil in new}
    write(folder / "known.csv", [each for each in pupils if each["school"] != newcomer and id(each) not in held_out])
    write(folder / "newcomer.csv", [each for each in pupils if each["school"] == newcomer])
    truth = [float(pupil.pop("score")) for pupil in new]
    write(folder / "new.csv", new)
    return largest, newcomer, truth


def main(source: Path, folder: Path, options: list[str]) -> None:
    """Run the commands as you would type them, let a school join, and compare the predictions with the scores."""
    school, newcomer, truth = write_tables(source, folder / "pupils")
    for k, command in enumerate(COMMANDS):
        words = [*shlex.split(command.format(school=school, newcomer=newcomer)), *(options if k == 0 else [])]
        print("$", shlex.join(words), flush=True)
        subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)
    print("$ # the scores of the new pupils")
    predicted = read(folder / "pupils" / "predicted.csv")
    inside = [
        float(row["conformal_lower"]) <= score <= float(row["conformal_upper"])
        for row, score in zip(predicted, truth, strict=True)
    ]
    print(f"{school}: {sum(inside)} of {len(inside)} new pupils lie within their conformal interval")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "schools"), sys.argv[3:])
