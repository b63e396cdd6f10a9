"""Predict how long patients with advanced lung cancer live, in 18 institutions of which most have few patients.

    python examples/survival.py [FOLDER] [options of pfedbayes run]

The data are those of the North Central Cancer Treatment Group (Loprinzi et al. 1994), from the package lifelines. One
institution joins later, and the largest one has new patients.
"""

import csv
import shlex
import subprocess
import sys
from pathlib import Path

from lifelines.datasets import load_lung

COMMANDS = (
    "pfedbayes run --data patients/known.csv --target days --event died --client-column institution --out run",
    "pfedbayes predict run --client 1 --input patients/new.csv --at 180,365 -o patients/predicted.csv",
    "pfedbayes personalize run --data patients/newcomer.csv --client 12",
)
LARGEST, NEWCOMER = "1", "12"


def read() -> list[dict[str, str]]:
    """Return the patients whose institution is known."""
    lines = load_lung().to_csv(index=False).splitlines()
    names = {"inst": "institution", "time": "days", "status": "died"}
    patients = [{names.get(name, name): cell for name, cell in row.items()} for row in csv.DictReader(lines)]
    known = [patient for patient in patients if patient["institution"]]
    return [patient | {"institution": str(int(float(patient["institution"])))} for patient in known]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows to a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def write_tables(folder: Path) -> list[tuple[float, bool]]:
    """Write the tables of known patients, of the largest institution's new ones, and of the one that joins later.

    Every third patient of the largest institution is new. Return the days and the deaths of these.
    """
    patients = read()
    new = [patient for patient in patients if patient["institution"] == LARGEST][::3]
    held_out = {id(patient) for patient in new}
    write(folder / "known.csv", [p for p in patients if p["institution"] != NEWCOMER and id(p) not in held_out])
    write(folder / "newcomer.csv", [patient for patient in patients if patient["institution"] == NEWCOMER])
    truth = [(float(patient.pop("days")), patient.pop("died") == "1") for patient in new]
    write(folder / "new.csv", new)
    return truth


def main(folder: Path, options: list[str]) -> None:
    """Run the commands as you would type them, and compare the predictions with what happened."""
    truth = write_tables(folder / "patients")
    for k, command in enumerate(COMMANDS):
        words = [*shlex.split(command), *(options if k == 0 else [])]
        print("$", shlex.join(words), flush=True)
        subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)
    print("$ # what happened to the new patients")
    with (folder / "patients" / "predicted.csv").open(newline="") as file:
        predicted = list(csv.DictReader(file))
    past = sum(days >= float(row["conformal_lower"]) for row, (days, _) in zip(predicted, truth, strict=True))
    print(f"{past} of {len(truth)} new patients were alive at their lower bound")
    rows = sorted(zip(predicted, truth, strict=True), key=lambda pair: -float(pair[0]["risk"]))
    print("risk   median  alive after 180 and 365 days  what happened")
    for row, (days, died) in rows:
        chances = "  ".join(f"{100 * float(row[name]):3.0f} %" for name in ("survival_180", "survival_365"))
        happened = f"{'died' if died else 'seen alive'} after {days:.0f} days"
        print(f"{float(row['risk']):.3f}  {float(row['median']):6.0f}  {chances:>28}  {happened}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "survival"), sys.argv[2:])
