"""Detect heart disease in four hospitals (920 patients, UCI): from a CSV file to predictions that may abstain.

    python examples/four_hospitals.py [FOLDER] [options of pfedbayes run]

Four hospitals train together, and Cleveland gets new patients. Then the script starts again with three hospitals, and
Switzerland joins later.
"""

import csv
import shlex
import subprocess
import sys
from pathlib import Path

DATA = Path(__file__).parent / "heart.csv"
NEWCOMER = "switzerland"
COMMANDS = (
    "pfedbayes run --data hospitals.csv --target disease --client-column hospital --out run",
    "pfedbayes predict run --client cleveland --input cleveland_new.csv --error 0.2 -o cleveland_predicted.csv",
    "pfedbayes run --data three.csv --target disease --client-column hospital --out three",
    "pfedbayes personalize three --data switzerland.csv",
    "pfedbayes predict three --client switzerland --input switzerland_new.csv --error 0.2 -o switzerland_predicted.csv",
)

Rows = list[dict[str, str]]


def write(path: Path, rows: Rows, without: tuple[str, ...] = ()) -> None:
    """Write a table, without some of its columns."""
    columns = [name for name in rows[0] if name not in without]
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)


def write_tables(folder: Path) -> dict[str, Rows]:
    """Write the tables and return the new patients of Cleveland and of Switzerland: every fifth and every third.

    hospitals.csv: the other patients of all hospitals. three.csv: without Switzerland. switzerland.csv: the rest.
    cleveland_new.csv, switzerland_new.csv: the new patients, without hospital and disease.
    """
    with DATA.open(newline="") as file:
        patients = list(csv.DictReader(file))
    at = {name: [each for each in patients if each["hospital"] == name] for name in ("cleveland", NEWCOMER)}
    new = {"cleveland": at["cleveland"][::5], NEWCOMER: at[NEWCOMER][::3]}
    held_out = {id(each) for rows in new.values() for each in rows}
    known = [each for each in patients if id(each) not in held_out]
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "hospitals.csv", known)
    write(folder / "three.csv", [each for each in known if each["hospital"] != NEWCOMER])
    write(folder / f"{NEWCOMER}.csv", [each for each in known if each["hospital"] == NEWCOMER])
    for name, rows in new.items():
        write(folder / f"{name}_new.csv", rows, without=("hospital", "disease"))
    return new


def compare(folder: Path, name: str, patients: Rows) -> str:
    """Return how the predictions agree with the diagnoses."""
    with (folder / f"{name}_predicted.csv").open(newline="") as file:
        pairs = [(row, patient["disease"]) for row, patient in zip(csv.DictReader(file), patients, strict=True)]
    answers = [row["label"] == truth for row, truth in pairs if row["abstain"] == "false"]
    covered = sum(truth in row["conformal_set"].split("|") for row, truth in pairs)
    return (
        f"{name}: {len(pairs)} new patients, {len(answers)} of them answered, {sum(answers)} of these right; "
        f"{covered} of {len(pairs)} conformal sets hold the truth"
    )


def main(folder: Path, options: list[str]) -> None:
    """Run the commands as you would type them, then compare the predictions with the diagnoses."""
    new = write_tables(folder)
    for command in COMMANDS:
        words = [*shlex.split(command), *(options if command.startswith("pfedbayes run") else [])]
        print("$", shlex.join(words), flush=True)
        subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)
    print("$ # what was found out later")
    for name, patients in new.items():
        print(compare(folder, name, patients))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "four_hospitals"), sys.argv[2:])
