"""Who may be which client: only the node with the key that the roster names, and only it or the operator can leave."""

import base64
import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import Message
from grids import FakeGrid, serve
from test_faults import journal
from test_malicious_node import guarded, public_key, write_roster

from pfedbayes import UserError, runs
from pfedbayes.flower.enrolment import read_roster
from pfedbayes.flower.keys import fingerprint, make_keys
from pfedbayes.flower.messages import PROTOCOL, content
from pfedbayes.flower.state import StateFolder
from pfedbayes.report.federation import journal_lines


def rogue(grid, node, config, says=None):
    """Add a node with a valid key of its own; says: what it answers to the server's first question."""
    grid.nodes = {node: config} | grid.nodes
    grid.keys[node] = public_key()
    if says is not None:
        honest = grid.meddle

        def meddle(client, message, reply):
            mine = message.metadata.dst_node_id == node and message.metadata.message_type == "query"
            return (
                Message(content({"protocol": PROTOCOL, **says}), reply_to=message)
                if mine
                else honest(client, message, reply)
            )

        grid.meddle = meddle
    return grid


def test_a_fingerprint_is_that_of_ssh_keygen(tmp_path):
    make_keys(tmp_path / "keys", ["localhost"], 2)
    entries = read_roster(tmp_path / "keys" / "roster.toml", 2)
    for i in range(2):
        line = (tmp_path / "keys" / f"node-{i}.pub").read_bytes()
        pem = load_ssh_public_key(line).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        assert fingerprint(pem) == entries[i].key
        digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
        assert entries[i].key == "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def test_only_simulated_nodes_have_no_key():
    assert fingerprint(b"x" * 32) is None
    assert fingerprint(b"") is None
    odd = ec.generate_private_key(ec.SECP256K1()).public_key()  # OpenSSH knows no such curve
    assert fingerprint(odd.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).startswith("SHA256:")


@pytest.mark.parametrize("away", [True, False])
@pytest.mark.parametrize(
    "says", [None, {"client": 0, "left": True}, {"client": 0, "name": "site 0", "train_size": 9, "test_size": 1}]
)
def test_a_node_that_is_not_in_the_roster_takes_nobodys_place(tmp_path, says, away):
    grid = rogue(guarded(tmp_path, training__rounds=1), 7, {"partition-id": 0, "name": "site 0"}, says)
    honest = grid.nodes.pop(100) if away else None
    server = serve(grid)
    assert not server.members[0].left
    assert (server.members[0].node is None) == away
    assert "is not in the roster" in journal(tmp_path)[0].refused["node 7"]
    if away:
        assert (0, "query") not in grid.asked, "a stranger is not even asked"
        grid.nodes[100] = honest
        grid.run_config |= {"training.rounds": 2}
        assert serve(grid).members[0].taken == 1


@pytest.mark.parametrize("says", [{"client": 0, "left": True}, {"client": 0, "train_size": 9, "test_size": 1}])
def test_a_member_of_the_roster_takes_no_other_members_place(tmp_path, says):
    grid = guarded(tmp_path, training__rounds=1)
    grid.meddle = lambda client, message, reply: (
        Message(content({"protocol": PROTOCOL, **says}), reply_to=message)
        if client == 2 and message.metadata.message_type == "query"
        else reply
    )
    del grid.nodes[100]  # the honest client 0 is away
    server = serve(grid)
    assert not server.members[0].left
    assert server.members[0].node is None
    assert "client 0, which has another key" in journal(tmp_path)[0].refused["node 102"]


def test_without_a_roster_real_nodes_are_refused_with_the_remedy(tmp_path):
    grid = guarded(tmp_path, training__rounds=1)
    del grid.run_config["federation.roster"]
    with pytest.raises(UserError, match=r"is in no roster: set federation.roster .* or federation.enrol"):
        serve(grid)


def test_first_come_binds_a_client_to_the_key_it_came_with(tmp_path):
    grid = guarded(tmp_path, training__rounds=1, federation__enrol="first-come")
    del grid.run_config["federation.roster"]
    serve(grid)
    keys = runs.read_run(tmp_path / "run").info.federation.keys
    assert keys == [fingerprint(grid.keys[100 + i]) for i in range(5)]
    grid.run_config |= {"training.rounds": 2}
    honest, key = grid.nodes.pop(100), grid.keys.pop(100)
    for says in ({"client": 0, "left": True}, {"client": 0, "train_size": 9, "test_size": 1}):
        other = rogue(FakeGrid(grid.run_config), 7, {"partition-id": 0}, says)
        other.nodes = {7: other.nodes[7], **grid.nodes}
        other.keys |= grid.keys
        assert not serve(other).members[0].left
        grid.run_config |= {"training.rounds": grid.run_config["training.rounds"] + 1}
    grid.nodes[100], grid.keys[100] = honest, key
    assert serve(grid).members[0].taken == 2


def test_nobody_leaves_before_having_joined(tmp_path):
    grid = guarded(tmp_path, training__rounds=1, federation__enrol="first-come")
    del grid.run_config["federation.roster"]
    rogue(grid, 7, {"partition-id": 0}, {"client": 0, "left": True})
    server = serve(grid)
    assert not server.members[0].left
    assert server.members[0].node == 100


def test_the_node_itself_and_the_operator_can_end_a_membership(tmp_path):
    grid = guarded(tmp_path, training__rounds=1)
    serve(grid)
    StateFolder(tmp_path / "states" / "client-1").leave()
    write_roster(tmp_path, grid, client_3="left = true\n")
    grid.run_config |= {"training.rounds": 2}
    server = serve(grid)
    assert [i for i, member in enumerate(server.members) if member.left] == [1, 3]
    assert runs.read_run(tmp_path / "run").info.federation.left == ["site 1", "site 3"]


def test_the_roster_states_names_and_sizes(tmp_path):
    grid = guarded(tmp_path, training__rounds=1)
    write_roster(tmp_path, grid, client_0='name = "Hospital A"\n', client_2="train_size = 3\n")
    server = serve(grid)
    assert server.members[0].name == "Hospital A"
    assert "the roster states at most 3" in journal(tmp_path)[0].refused["node 102"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "must hold [[client]] tables"),
        ("client = 3", "must hold [[client]] tables"),
        ("[" * 5000, "is no roster"),
        ('[[client]]\nnumber = "a"\nkey = "SHA256:a"', "client[0]: number is 'a', not a whole number"),
        ("[[client]]\nnumber = 0", "client[0]: key is missing"),
        ('[[client]]\nnumber = 0\nkey = "MD5:a"', "no fingerprint"),
        ('[[client]]\nnumber = 9\nkey = "SHA256:a"', "client 9 is not between 0 and"),
        ('[[client]]\nnumber = 0\nkey = "SHA256:a"\nsize = 3', "unknown key size"),
        ('[[client]]\nnumber = 0\nkey = "SHA256:a"\n[[client]]\nnumber = 0\nkey = "SHA256:b"', "the same number"),
        ('[[client]]\nnumber = 0\nkey = "SHA256:a"\n[[client]]\nnumber = 1\nkey = "SHA256:a"', "the same key"),
    ],
)
def test_a_roster_that_is_none_is_one_line(tmp_path, text, line):
    (tmp_path / "roster.toml").write_text(text)
    with pytest.raises(UserError) as error:
        read_roster(tmp_path / "roster.toml", 5)
    assert line in str(error.value)
    assert "roster.toml" in str(error.value)
    with pytest.raises(UserError, match="cannot read"):
        read_roster(tmp_path / "nowhere.toml", 5)


def test_an_auditor_reads_who_joined_who_was_refused_and_what_was_averaged(tmp_path, in_process):
    grid = rogue(guarded(tmp_path, training__rounds=1), 7, {"partition-id": 0})
    serve(grid)
    text = "\n".join(journal_lines(runs.read_run(tmp_path / "run")))
    for i in range(5):
        assert f"site {i} joined with {fingerprint(grid.keys[100 + i])}" in text
    assert f"refused node 7: its key ({fingerprint(grid.keys[7])}) is not in the roster" in text
    assert "round 1, attempt 1: averaged (median-norm) from site 0, site 1, site 2, site 3, site 4" in text
    printed = in_process("federation", "journal", tmp_path / "run")
    assert printed.out.strip().endswith(text)
