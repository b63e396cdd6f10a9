"""A real federation on loopback: TLS, node keys, three nodes, two rounds, and the engine's numbers."""

import contextlib
import runpy
import socket
import ssl

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from deployment import Deployment
from safetensors.torch import load_file
from test_equality import assert_same_scores

from federations import difference
from pfedbayes import Plan, load_shards, runs
from pfedbayes.data import DataConfig
from pfedbayes.engine.federation import Federation
from pfedbayes.flower.settings import from_run_config

CONFIG = {
    "method__name": "pfedbayes",
    "method__zeta": 1.0,
    "training__rounds": 2,
    "training__local_steps": 5,
    "federation__dtype": "float64",
    "federation__wire": "float64",
    "federation__robust": "none",
}


def by_engine(tmp_path, config=CONFIG):
    """The same federation in one process, and its scores by round."""
    settings = from_run_config({name.replace("__", "."): value for name, value in config.items()} | {
        "federation.clients": 3, "training.batch_size": 100, "training.evaluate_every": 1, "training.seed": 1,
    })  # fmt: skip
    task = runpy.run_path(str(tmp_path / "app" / "federation" / "task.py"))
    plan = Plan(over="loop", dtype="float64", threads=1)
    shards = load_shards(DataConfig(clients=3))
    model = task["make_model"](settings.method)
    federation = Federation(shards, model, settings.method, settings.training, plan=plan)
    scores = {round: federation.evaluate() for round in federation.rounds()}
    return federation, scores


def answer_to_plain_http(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            return plain.recv(64)
    return b""


@pytest.mark.timeout(500)
def test_three_nodes_with_certificates_and_keys_equal_the_engine(tmp_path):
    with Deployment(tmp_path, nodes=3) as deployment:
        deployment.superlink()
        deployment.register()
        stranger = deployment.supernode(0, key=3, name="stranger")
        for i in range(3):
            deployment.supernode(i)
        run = deployment.run(federation__out=str(tmp_path / "run"), **CONFIG)
        federation, scores = by_engine(tmp_path)

        with pytest.raises(ssl.SSLCertVerificationError):
            ssl.create_default_context().wrap_socket(
                socket.create_connection(("127.0.0.1", deployment.port)), server_hostname="127.0.0.1"
            )
        assert b"HTTP" not in answer_to_plain_http(deployment.port)
        assert stranger.wait(200) != 0
        assert "Failed to activate SuperNode" in deployment.log("stranger")
        assert run.wait(300) == 0, deployment.log("run")

        result = runs.read_run(tmp_path / "run")
        assert result.summary is not None, deployment.log("run")
        server = load_file(tmp_path / "run" / runs.STATE)["server.0"]
        assert difference(server, federation.servers[0]) < 1e-10
        assert [record.round for record in result.rounds] == [1, 2]
        for record in result.rounds:
            assert_same_scores(record, scores[record.round])
        assert result.info.clients == ["site 0", "site 1", "site 2"]
        journal = result.journal
        size = federation.servers[0].nbytes
        assert all(3 * size < line.down < 3.1 * size for line in journal)
    assert not deployment.living()
    assert not deployment.answers()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_trusted_entities_refuse_every_app_that_is_not_from_flower_hub(tmp_path):
    # Flower 1.41 keeps no signatures of an app that `flwr run` sends. docs/federation.md says so: change it with this.
    key = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (tmp_path / "trusted.yaml").write_text(f'fpk_me: "{key.decode()}"\n')
    with Deployment(tmp_path, nodes=1) as deployment:
        deployment.superlink()
        deployment.register()
        deployment.supernode(0, None, "", "--trusted-entities", str(tmp_path / "trusted.yaml"))
        run = deployment.run(federation__out=str(tmp_path / "run"), federation__min_replies=1, federation__wait=20.0)
        run.wait(300)
        assert "App verification is not supported by the connected SuperLink" in deployment.log("supernode-0")
        assert "The FAB could not be verified" in deployment.log("run")
        assert not list((tmp_path / "state-0").glob("*")), "the app ran"
