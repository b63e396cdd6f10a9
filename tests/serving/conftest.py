import pytest
from clinics import clinics, train


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """Runs of one file for a label and for a number; the file is gone, as are the federations' rows."""
    folder = tmp_path_factory.mktemp("home")
    clinics().to_csv(folder / "clinics.csv", index=False)
    train(folder, "outcome", ["patient", "cost"])
    train(folder, "cost", ["patient", "outcome"])
    (folder / "clinics.csv").unlink()
    new = clinics(60, ("north",), seed=1).drop(columns=["hospital", "cost"])
    new.to_csv(folder / "new.csv", index=False)
    clinics(120, ("west",), seed=2).to_csv(folder / "west.csv", index=False)
    return folder


@pytest.fixture
def command(home, monkeypatch, in_process):
    """`pfedbayes …` in this process, in the folder of the run."""
    monkeypatch.chdir(home)
    return in_process


@pytest.fixture
def run(command):
    def call(*arguments):
        done = command(*arguments)
        assert done.code == 0, done.err
        return done

    return call
