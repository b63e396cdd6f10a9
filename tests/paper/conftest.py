import shutil

import pytest
from made_records import FOLDER


@pytest.fixture
def folder(tmp_path):
    """A folder of results that holds the paper's numbers alone."""
    shutil.copy(FOLDER / "paper.json", tmp_path)
    return tmp_path
