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

import pfedbayes

DATA = Path(__file__).parent / "heart.csv"
NEWCOMER = "switzerland"
COMMANDS = (
    "pfedbayes run --data hospitals.csv --target disease --client-column hospital --out run",
    "pfedbayes predict run --client cleveland --input cleveland_new.csv --error 0.2 -o cleveland_predicted.csv",
    "pfedbayes run --data three.csv --target disease --client-column hospital --out three",
)
TRAINS = (0, 2)  # the commands that take options of pfedbayes run

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


def compare(name: str, predicted: Rows, patients: Rows) -> str:
    """Return how predictions agree with the diagnoses."""
    pairs = [(row, patient["disease"]) for row, patient in zip(predicted, patients, strict=True)]
    answers = [row["label"] == truth for row, truth in pairs if str(row["abstain"]).lower() == "false"]
    covered = sum(truth in row["conformal_set"].split("|") for row, truth in pairs)
    return (
        f"{name}: {len(pairs)} new patients, {len(answers)} of them answered, {sum(answers)} of these right; "
        f"{covered} of {len(pairs)} conformal sets hold the truth"
    )


def main(folder: Path, options: list[str]) -> None:
    """Run the commands as you would type them, let Switzerland join, and compare predictions with diagnoses."""
    new = write_tables(folder)
    for k, command in enumerate(COMMANDS):
        words = [*shlex.split(command), *(options if k in TRAINS else [])]
        print("$", shlex.join(words), flush=True)
        subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)
    print("$ # Switzerland joins")
    joined = pfedbayes.join(folder / "three", folder / f"{NEWCOMER}.csv")
    columns = joined.client.predict(folder / f"{NEWCOMER}_new.csv", error=0.2)
    predicted = {NEWCOMER: [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]}
    print(*joined.describe(), *joined.client.statements(error=0.2), sep="\n")
    print("$ # what was found out later")
    with (folder / "cleveland_predicted.csv").open(newline="") as file:
        predicted["cleveland"] = list(csv.DictReader(file))
    for name, patients in new.items():
        print(compare(name, predicted[name], patients))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "four_hospitals"), sys.argv[2:])
