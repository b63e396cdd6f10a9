"""The trained models of an estimator: a run folder of its own, like that of `pfedbayes run`."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from pfedbayes import runs
from pfedbayes.data import Preprocessing
from pfedbayes.errors import UserError
from pfedbayes.files.reading import open_regular, reading
from pfedbayes.files.writing import writing
from pfedbayes.runs.calibration import read_calibration
from pfedbayes.runs.saving import read_preprocessing
from pfedbayes.serving.client import Client
from pfedbayes.serving.export import export
from pfedbayes.serving.newcomers import Joined, join
from pfedbayes.serving.open import newcomer_file, open_client
from pfedbayes.trust.joining import Verdict


class FittedRun:
    """A run folder in a temporary folder, which goes with the object. A copy, or a pickle, carries its files."""

    def __init__(self, trusted: bool = False) -> None:
        self.folder = Path(mkdtemp(prefix="pfedbayes-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._trusted = trusted
        self._clients: dict[str | None, Client] = {}

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """How inputs and targets are encoded."""
        return read_preprocessing(self.folder)

    def client(self, name: str | None) -> Client:
        """Return the model with which a group predicts; None for the shared model."""
        if name not in self._clients:
            personal = name is not None and runs.read_info(self.folder).method.personal
            self._clients[name] = open_client(self.folder, name, not personal, trust_module=self._trusted)
        return self._clients[name]

    def names(self) -> list[str]:
        """Return the groups of the run, then the newcomers."""
        trained = list(read_calibration(self.folder).names)
        folder = newcomer_file(self.folder, "x").parent
        return [*trained, *sorted({path.stem for path in folder.glob("*.safetensors")} - set(trained))]

    def verdicts(self) -> list[Verdict]:
        """Return what joining bought each group, by cross-validation; empty if no models were trained alone."""
        summary = runs.read_run(self.folder, log_bytes=0).summary
        return [one.folds for one in (summary.joining if summary else None) or []]

    def join(self, rows: Mapping[str, Any], name: str, **options: Any) -> Joined:
        """Train a model for a newcomer and keep it in the folder."""
        joined = join(self.folder, rows, name, trust_module=self._trusted, **options)
        path = newcomer_file(self.folder, name)
        path.parent.mkdir(exist_ok=True)
        export(joined.client, path)
        self._clients[name] = joined.client
        return joined

    def save(self, folder: Path) -> None:
        """Copy the files to a new or an empty folder."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise UserError(f"{folder} holds other files: give an empty or a new folder")
        _copy(self.folder, folder)

    @classmethod
    def load(cls, folder: Path, trusted: bool) -> FittedRun:
        """Return a copy of a saved run. trusted: whether to import the code that it names for its network."""
        with reading(folder, "give a folder that an estimator has saved"):
            if not folder.is_dir():
                raise UserError(f"{folder} is not a folder: give one that an estimator has saved")
            found = cls(trusted)
            _copy(folder, found.folder)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return the files of the folder."""
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        files = {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}
        return {"files": files, "trusted": self._trusted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Write the files to a new folder."""
        FittedRun.__init__(self, state["trusted"])
        for name, content in state["files"].items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)


def _copy(source: Path, target: Path) -> None:
    """Copy the regular files of a run folder, and of the folders in it; follow no link."""
    for path in sorted(source.rglob("*")):
        if path.is_symlink() or not path.is_file() or path.name.startswith("."):
            continue
        to = target / path.relative_to(source)
        with reading(path, "save the estimator again"), open_regular(path, follow=False) as file, writing(to):
            to.parent.mkdir(exist_ok=True)
            with to.open("wb") as out:
                shutil.copyfileobj(file, out)
