"""Bounds on what nodes send: they know what they bound, and nothing that is sent grows the run folder."""

import json
import stat
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from grids import FakeGrid, run_config, serve
from malice import with_facts
from test_attacks import everybody, lying
from test_faults import LIAR, change_facts, change_upload, journal

from federations import difference
from pfedbayes import UserError, runs
from pfedbayes.flower.bounds import refuse_unusable, refuse_wild
from pfedbayes.flower.combine import combine, limited
from pfedbayes.flower.messages import FACTS, LARGEST_COUNT, RAW, Refused, content, facts_of
from pfedbayes.flower.settings import FederationConfig, from_run_config
from pfedbayes.flower.state import StateFolder
from pfedbayes.methods.base import Limits
from pfedbayes.methods.fedavg import FedAvg
from pfedbayes.methods.pfedbayes import PFedBayes
from pfedbayes.report import write


def filled(row, value):
    def function(upload):
        upload[row] = value
        return upload

    return change_upload(function)


# Poison


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (filled(1, -9999.0), "its rho has an entry of magnitude 1e+04, more than federation.largest_rho = 30"),
        (filled(1, 31.0), "its rho has an entry of magnitude 31"),
        (
            filled(0, 120.0),
            "its distance from the server has an entry of magnitude 120, more than federation.largest_step = 100",
        ),
    ],
)
def test_an_upload_that_would_brick_the_others_is_refused(tmp_path, change, reason):
    server = serve(lying(FakeGrid(everybody(tmp_path)), change))
    taken = [entry for entry in journal(tmp_path) if entry.attempt]
    assert [(entry.taken, entry.uploads) for entry in taken] == [(True, 4)] * 3
    assert all(reason in entry.refused["site 2"] for entry in taken)
    assert bool(server.state.servers[0].isfinite().all())


def test_robust_averaging_is_the_default_where_plain_averages_are_taken(tmp_path):
    def rule(method="pfedbayes", **others):
        config = run_config(tmp_path, method, **others)
        del config["federation.robust"], config["training.participants"]
        settings = from_run_config(config)
        return settings.federation.rule(settings.method)

    assert rule() == rule("fedavg") == "median-norm"
    assert rule(federation__secure=True) == rule(federation__privacy_noise=1.0) == "none"
    assert rule("bnfed") == rule("heurfedamp") == "none"


def test_the_journal_says_how_uploads_were_made_robust(tmp_path):
    for robust, expected in (("auto", "median-norm"), ("none", "none")):
        folder = tmp_path / robust
        folder.mkdir()
        serve(FakeGrid(everybody(folder, training__rounds=1, federation__robust=robust)))
        assert [entry.robust for entry in journal(folder)] == [expected, None]


# Sizes


@pytest.mark.parametrize("robust", ["auto", "none", "median-norm", "trimmed-mean"])
def test_a_claimed_size_does_not_own_an_average(robust):
    server, uploads = torch.zeros(6).double(), list(torch.eye(6)[:5].double())
    sizes = torch.tensor([20.0, 30.0, 25.0, 1e12, 22.0]).double()
    after = combine(FedAvg(), FederationConfig(5, robust=robust), server, uploads, sizes, torch.arange(5))
    most = 0.75 if robust == "none" else 0.25
    assert float(after[3]) <= most


def test_sizes_that_differ_moderately_count_as_they_are():
    sizes = torch.tensor([4.0, 1.0, 2.0, 3.0, 7.0])
    assert torch.equal(limited(sizes, FedAvg(), FederationConfig(5, robust="none")), sizes)
    assert limited(sizes, FedAvg(), FederationConfig(5)).tolist() == [3.0, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("size", [10**12, True, -1, 2.5, None, "9" * 5000])
def test_an_impossible_size_is_refused(tmp_path, size):
    serve(lying(FakeGrid(everybody(tmp_path, training__rounds=1)), change_facts(size=size)))
    assert "its size is" in journal(tmp_path)[0].refused["site 2"]


# Replies of any length and kind


def arrays(count):
    def change(message, reply):
        record = ArrayRecord({f"{k}" * 99: Array("float64", (0,), RAW, b"") for k in range(count)})
        return Message(content(facts_of(reply), upload=record), reply_to=message)

    return change


def raw_facts(value):
    return lambda message, reply: Message(RecordDict({FACTS: ConfigRecord({FACTS: value})}), reply_to=message)


def text_of(**changes):
    """Facts as any JSON that Python writes."""

    def change(message, reply):
        text = json.dumps(facts_of(reply) | changes)
        return Message(RecordDict({FACTS: ConfigRecord({FACTS: text})}), reply_to=message)

    return change


HOSTILE = {
    "long error": change_facts(error="x" * 5_000_000),
    "error with lines": change_facts(error="\x1b[2J\nroot: all is well\r\x00"),
    "error that is no text": change_facts(error={"a": [1] * 100_000}),
    "half a surrogate pair": text_of(error="\ud800"),
    "long method": change_facts(method="y" * 1_000_000),
    "long nonce": change_facts(nonce="z" * 1_000_000),
    "NaN": text_of(size=float("nan")),
    "infinity": text_of(round=float("inf")),
    "many digits": raw_facts('{"protocol": ' + "9" * 5000 + "}"),
    "deep": raw_facts('{"protocol":' * 5000),
    "long": raw_facts('"' + "x" * 2_000_000 + '"'),
    "bytes": raw_facts(b"\xff\xfe"),
    "a number": raw_facts(3),
    "a list": raw_facts(["a"]),
    "no object": raw_facts("[]"),
    "true for a number": change_facts(client=True, round=True),
    "many arrays": arrays(10_000),
    "odd shape": lambda message, reply: Message(
        content(facts_of(reply), upload=ArrayRecord({"upload": Array("float64", (-1,) * 9999, RAW, b"")})),
        reply_to=message,
    ),
    "long types": lambda message, reply: Message(
        content(facts_of(reply), upload=ArrayRecord({"upload": Array("f" * 10**6, (2, 31), "s" * 10**6, b"")})),
        reply_to=message,
    ),
    "error without reason": lambda message, reply: Message(Error(2, " \n "), reply_to=message),
    "long report of Flower": lambda message, reply: Message(Error(2, "\x1b" + "x" * 10**6), reply_to=message),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reply_becomes_one_short_line(tmp_path, name):
    serve(lying(FakeGrid(everybody(tmp_path, training__rounds=1)), HOSTILE[name]))
    first = journal(tmp_path)[0]
    assert (first.taken, first.uploads) == (True, 4)
    reason = first.refused["site 2"]
    assert len(reason) < 500
    assert reason.isprintable()
    page = write([tmp_path / "run"], tmp_path / "page.html")
    assert page.stat().st_size < 2_000_000


def test_a_reply_that_flower_cannot_read_costs_nobody_else_theirs(tmp_path):
    grid = FakeGrid(everybody(tmp_path, training__rounds=1))
    pull = grid.pull_messages
    grid.pull_messages = lambda ids: [explode(reply) for reply in pull(ids)]

    def explode(reply):
        if reply.metadata.message_type == "train" and reply.has_content() and facts_of(reply).get("client") == LIAR:
            raise ValueError("Mismatch in children object IDs")
        return reply

    serve(grid)
    assert journal(tmp_path)[0].uploads == 4
    assert "a malformed message (Mismatch in children" in journal(tmp_path)[0].refused["site 2"]


def test_a_reply_whose_content_is_no_record_is_refused(tmp_path):
    reply = Message(content({"protocol": 2}), 1, "train")
    reply.__dict__["_content"] = ArrayRecord({})
    with pytest.raises(Refused, match="no facts"):
        facts_of(reply)


@pytest.mark.parametrize("name", ["\ud800", "a\x00b\x1b[31m", "x" * 10**6, "", 5, None, ["a"]])
def test_a_name_of_any_kind_is_one_short_line(tmp_path, name):
    def meddle(client, message, reply):
        if client != LIAR or message.metadata.message_type != "query":
            return reply
        return Message(with_facts(reply, name=name), reply_to=message)

    grid = FakeGrid(everybody(tmp_path, training__rounds=1))
    grid.meddle = meddle
    server = serve(grid)
    names = [member.name for member in server.members]
    assert all(0 < len(each) <= 90 and each.isprintable() for each in names)
    write([tmp_path / "run"], tmp_path / "page.html")


def test_invented_estimators_are_not_logged(tmp_path):
    invented = {f"estimator {k}": {"accuracy": [[1.0]]} for k in range(2000)}
    change = change_facts(scores={"personal": invented, "shared": invented | {"mean": {"nll": [[1e300]]}}})
    serve(lying(FakeGrid(everybody(tmp_path, training__rounds=1)), change, trains=False))
    (record,) = runs.read_run(tmp_path / "run").rounds
    assert set(record.personal) == {"one", "mc10", "mean"}
    assert record.shared["mean"]["nll"][0][LIAR] is None
    assert (tmp_path / "run" / runs.LOG).stat().st_size < 10_000


@pytest.mark.parametrize("wrong", [{"count": 1e15}, {"count": -1.0}, {"confidence": 7.0}, {"accuracy": -0.1}])
def test_impossible_calibration_is_left_out(tmp_path, wrong):
    diagram = {name: [wrong.get(name, 0.5)] * 15 for name in ("confidence", "accuracy", "count")}
    change = change_facts(reliability={"personal": diagram, "shared": diagram})
    serve(lying(FakeGrid(everybody(tmp_path, training__rounds=1)), change, trains=False))
    counts = runs.read_run(tmp_path / "run").summary.reliability["personal"].count
    assert sum(counts) == 9 + 5 + 13 + 4


# Answers to other questions


def test_an_answer_from_before_is_refused(tmp_path):
    kept = []

    def replay(message, reply):
        kept.append(reply.content)
        return Message(kept[0], reply_to=message)

    serve(lying(FakeGrid(everybody(tmp_path)), replay))
    assert [entry.uploads for entry in journal(tmp_path) if entry.attempt] == [5, 4, 4]


def test_a_nonce_is_new_in_every_message(tmp_path):
    grid, seen = FakeGrid(everybody(tmp_path)), []
    grid.meddle = lambda client, message, reply: (seen.append(facts_of(message).get("nonce")), reply)[1]
    serve(grid)
    nonces = [nonce for nonce in seen if nonce]
    assert len(nonces) == len(set(nonces)) == 20
    assert all(len(nonce) == 32 for nonce in nonces)


# Files


def test_only_the_nodes_user_reads_its_state(tmp_path):
    (tmp_path / "states" / "client-0").mkdir(parents=True)
    (tmp_path / "states" / "client-0").chmod(0o755)  # made by somebody before
    serve(FakeGrid(everybody(tmp_path, training__rounds=1)))
    StateFolder(tmp_path / "states" / "client-1").leave()
    for folder in (tmp_path / "states").iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_shared_model_that_nobody_could_train_from_is_not_taken(tmp_path):
    rates = {"training__server_optimizer": "momentum", "training__server_rate": 1e9}
    with pytest.raises(UserError, match="was not taken, for the shared model: it has an entry of magnitude"):
        serve(FakeGrid(everybody(tmp_path, **rates)))
    with pytest.raises(Refused, match="its rho has an entry of magnitude 40"):
        refuse_unusable(PFedBayes(), FederationConfig(5), torch.full((2, 3), -40.0))


def test_honest_uploads_pass_the_bounds(tmp_path):
    server = serve(FakeGrid(everybody(tmp_path)))
    assert all(not entry.refused for entry in journal(tmp_path))
    (tmp_path / "wide").mkdir()
    bounds = {f"federation__{name}": 1e9 for name in ("largest", "largest_rho", "largest_step")}
    assert (
        difference(server.state.servers[0], serve(FakeGrid(everybody(tmp_path / "wide", **bounds))).state.servers[0])
        == 0
    )
    assert isinstance(server.method, PFedBayes)


class TestOneUpload:
    """The borders of each bound, by hand."""

    config = FederationConfig(3, largest=8.0, largest_rho=4.0, largest_step=2.0)
    limits = Limits(8.0, 4.0, 2.0, 100, 4)
    alone = SimpleNamespace(about=SimpleNamespace(averages=False, gaussian=False, mean_only=False))

    def refused(self, method, upload, reason, server=0.0):
        with pytest.raises(Refused, match=reason):
            refuse_wild(method, self.config, torch.full((2, 2), server), upload, self.limits)

    @pytest.mark.parametrize("counts", [[0], [0, LARGEST_COUNT], [5, 3], []])
    def test_counts_that_can_be(self, counts):
        refuse_wild(self.alone, self.config, (), (torch.tensor(counts, dtype=torch.int64),), self.limits)

    @pytest.mark.parametrize("counts", [[-1], [LARGEST_COUNT + 1], [3, -1], [0, 3, LARGEST_COUNT + 1]])
    def test_counts_that_cannot_be(self, counts):
        self.refused(self.alone, (torch.tensor(counts),), f"impossible counts: {min(counts)} to {max(counts)}")

    def test_numbers_up_to_the_largest(self):
        refuse_wild(self.alone, self.config, (), (torch.tensor([8.0, -8.0]), torch.empty(0)), self.limits)
        for value in (8.001, -8.001):
            upload = (torch.zeros(1), torch.tensor([0.0, value]))
            self.refused(self.alone, upload, r"^upload\.1 has an entry of magnitude 8")
        for value in (torch.nan, torch.inf):
            self.refused(self.alone, torch.tensor([0.0, value]), "^upload is not finite$")

    def test_rho_and_the_distance_from_the_server(self):
        gaussian, plain = PFedBayes(), FedAvg()
        for upload, reason in (
            ([[7.0, 0.0], [0.0, 4.0]], None),
            ([[7.0, 0.0], [0.0, -4.001]], "its rho has an entry of magnitude 4"),
        ):
            server = torch.tensor(upload)
            if reason is None:
                refuse_wild(gaussian, self.config, server, server, self.limits)
            else:
                with pytest.raises(Refused, match=reason):
                    refuse_wild(gaussian, self.config, server, server, self.limits)
                refuse_wild(plain, self.config, server, server, self.limits)
        near = torch.tensor([[2.0, -2.0], [0.0, 0.0]])
        refuse_wild(gaussian, self.config, torch.zeros(2, 2), near, self.limits)
        refuse_wild(self.alone, self.config, torch.zeros(2, 2), 3 * near, self.limits)
        for sign in (1.001, -1.001):
            self.refused(gaussian, sign * near, "its distance from the server has an entry of magnitude 2")
        self.refused(plain, torch.full((2, 2), 7.0), "its distance from the server has an entry of magnitude 14", -7.0)
