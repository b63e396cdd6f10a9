"""The app that a user copies, the keys, and the commands that write them."""

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from command_line import pfedbayes
from pfedbayes import UserError
from pfedbayes.flower.keys import make_keys
from pfedbayes.flower.settings import from_run_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "federation"


def files(folder):
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def test_the_command_writes_the_example(tmp_path):
    done = pfedbayes("federation", "new", "app", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "app") == files(EXAMPLE)
    again = pfedbayes("federation", "new", "app", cwd=tmp_path)
    assert again.returncode == 2
    assert "app is not empty: give a new folder" in again.stderr


def test_the_examples_run_config_is_understood():
    config = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    flat = {f"{section}.{name}": value for section, values in config.items() for name, value in values.items()}
    assert from_run_config(flat).federation.clients == 3


def test_keys_fit_each_other_and_are_private(tmp_path):
    done = pfedbayes(
        "federation", "keys", "keys", "--host", "10.0.0.5", "--host", "link.example", "--nodes", "2", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "keys"
    ca, server = (x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("ca.crt", "server.crt"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["link.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5"]
    for i in range(2):
        private = load_ssh_private_key((folder / f"node-{i}").read_bytes(), None)
        assert load_ssh_public_key((folder / f"node-{i}.pub").read_bytes()) == private.public_key()
        assert (folder / f"node-{i}").stat().st_mode & 0o077 == 0
    assert (folder / "server.key").stat().st_mode & 0o077 == 0
    with pytest.raises(UserError, match=r"ca.key exists already"):
        make_keys(folder, ["x"], 1)


@pytest.mark.parametrize(
    "host", ["", "\udcff", "é", "a" * 300, "a b", "http://x", "a..b", "-a", "a\n", "x/24", ".".join("a" * 200)]
)
def test_a_host_that_is_none_is_refused(tmp_path, host):
    with pytest.raises(UserError, match="neither an address nor a host name"):
        make_keys(tmp_path / "keys", ["link.example", host], 1)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("nodes", [0, 10**9])
def test_absurdly_many_nodes_are_refused(tmp_path, nodes):
    with pytest.raises(UserError, match="give 1 to"):
        make_keys(tmp_path / "keys", ["link.example"], nodes)


def test_leave_wants_a_folder(tmp_path):
    done = pfedbayes("federation", "leave", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no folder nowhere" in done.stderr


def test_without_flwr_the_package_works_and_says_what_is_missing():
    script = """
        import sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {"flwr", "cryptography"}:
                    raise ImportError(name)

        sys.meta_path.insert(0, Refuse())
        import pfedbayes.cli, pfedbayes.runs.execute, pfedbayes.report
        try:
            from pfedbayes.flower import Node
        except pfedbayes.UserError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "flwr is not installed: pip install 'pfedbayes[flower]'", done.stderr
