"""Copies the experiments and examples into the package when it is built; pyproject.toml holds everything else."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = {"experiments": "*.*", "examples": "*.*"}  # files of a folder, without the folders in it


class BuildWithExamples(build_py):
    """Builds the package with `pfedbayes/shipped`, which `pfedbayes experiments` reads."""

    def run(self) -> None:
        """Copy the modules, then the files."""
        super().run()
        if self.editable_mode:
            return  # the package finds them in the repository
        for folder, pattern in SHIPPED.items():
            target = Path(self.build_lib, "pfedbayes", "shipped", folder)
            target.mkdir(parents=True, exist_ok=True)
            for path in sorted((ROOT / folder).glob(pattern)):
                shutil.copy(path, target)


setup(cmdclass={"build_py": BuildWithExamples})
