"""The board over HTTP: what it shows, whom it answers, and what it never reads."""

import dataclasses
import http.client
import re
import shutil
import subprocess
import threading

import pytest

from pfedbayes.board import finding, open_board
from pfedbayes.board.finding import Finder
from pfedbayes.errors import UserError
from pfedbayes.files.typed import from_json
from pfedbayes.runs import Writer
from pfedbayes.runs.schema import FederationInfo, JournalEntry

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def serve():
    """Start a board; ask(board, path) returns status, headers and text."""
    boards = []

    def start(*folders):
        boards.append(board := open_board(list(folders)))
        threading.Thread(target=board.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return board

    yield start
    for board in boards:
        board.shutdown()
        board.server_close()


def ask(board, path, host=None, method="GET"):
    line = http.client.HTTPConnection("127.0.0.1", board.server_port, timeout=20)
    line.putrequest(method, path, skip_host=True)
    line.putheader("Host", host or f"127.0.0.1:{board.server_port}")
    line.endheaders()
    answer = line.getresponse()
    text = answer.read().decode()
    line.close()
    return answer.status, dict(answer.getheaders()), text


def keys(text):
    return re.findall(r'href="/run/(\w+)"', text)


def test_runs_are_listed_compared_and_opened(tmp_path, serve, make_run, save_run):
    first = save_run(make_run("first"))
    second = save_run(make_run("second", method="fedavg", finished=False, rounds=5))
    (first / "report.html").write_text("<h1>the report</h1>")
    board = serve(tmp_path)
    status, headers, text = ask(board, "/")
    assert status == 200
    assert all(words in text for words in ("first", "second", "finished", "training", "200/200", "50/50"))
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    by_name = dict(re.findall(r'href="/run/(\w+)">(\w+)<', text))
    assert set(by_name.values()) == {"first", "second"}
    key = {name: key for key, name in by_name.items()}
    _, _, one = ask(board, f"/run/{key['first']}")
    assert one.count("<svg") >= 2
    assert all(words in one for words in ("Accuracy by round", "client-3", "training rows", f"/report/{key['first']}"))
    _, _, both = ask(board, f"/compare?run={key['first']}&run={key['second']}&run=nobody")
    assert all(words in both for words in ("pFedBayes (first)", "FedAvg (second)"))
    assert "<svg" in both
    assert "Choose at least two" in ask(board, f"/compare?run={key['first']}")[2]
    status, headers, text = ask(board, f"/report/{key['first']}")
    assert (status, text) == (200, "<h1>the report</h1>")
    assert headers["Content-Security-Policy"].startswith("sandbox;")
    assert ask(board, f"/report/{key['second']}")[0] == 404
    assert second.is_dir()


def test_a_run_that_grows_is_read_again(tmp_path, serve, make_run, save_run):
    run = make_run("live", finished=False, rounds=10)
    config = {**run.sections, "training": {"rounds": 400, "batch_size": 50}}
    save_run(dataclasses.replace(run, sections=config, rounds=run.rounds[:4]))
    board = serve(tmp_path)
    text = ask(board, "/")[2]
    assert "40/400" in text
    assert "about 18 s" in text  # 2 s for 40 rounds
    shutil.rmtree(tmp_path / "live")
    save_run(dataclasses.replace(run, sections=config))
    assert "100/400" in ask(board, "/")[2]


def test_a_federation_shows_nodes_and_refusals(tmp_path, serve, make_run, save_run):
    entry = {
        "round": 7, "attempt": 1, "seconds": 70.0, "down": 1e6, "up": 1e6, "replies": 2, "uploads": 1, "taken": True,
        "refused": {"client-1": f"the update is too large {EVIL}"}, "left": [],
    }  # fmt: skip
    run = make_run("nodes", clients=3, finished=False)
    info = dataclasses.replace(run.info, federation=FederationInfo("abc", {"federation.privacy_delta": 1e-5}, []))
    writer = Writer(save_run(dataclasses.replace(run, info=info)))
    writer.append(from_json(JournalEntry, entry))
    writer.close()
    board = serve(tmp_path)
    text = ask(board, "/")[2]
    assert "2 of 3" in text
    page = ask(board, f"/run/{keys(text)[0]}")[2]
    assert "Refused uploads" in page
    assert "round 7, attempt 1" in page
    assert EVIL not in page
    assert "&lt;script&gt;alert(1)" in page


def test_names_are_escaped_everywhere(tmp_path, serve, make_run, save_run):
    save_run(make_run("a&b<i>", clients=[f"{EVIL}{k}" for k in range(3)]))
    board = serve(tmp_path)
    text = ask(board, "/")[2]
    assert "a&amp;b&lt;i&gt;" in text
    page = ask(board, f"/run/{keys(text)[0]}")[2]
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "evil.example:{port}", "[::1]:{port}"])
def test_other_names_of_this_machine_are_refused(tmp_path, serve, host):
    board = serve(tmp_path)
    status, _, text = ask(board, "/", host.format(port=board.server_port))
    assert status == 403
    assert "runs" not in text
    assert ask(board, "/", f"localhost:{board.server_port}")[0] == 200


@pytest.mark.parametrize(
    "path", ["/run/../../etc/passwd", "/report/%2e%2e", "/run/", "/x", "//[", "/report/" + "a" * 5000, "/board.html"]
)
def test_other_addresses_lead_nowhere(tmp_path, serve, make_run, save_run, path):
    save_run(make_run("first"))
    assert ask(serve(tmp_path), path)[0] in (404, 414)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(tmp_path, serve, method):
    assert ask(serve(tmp_path), "/", method=method)[0] == 501


def test_links_large_reports_and_damaged_runs(tmp_path, serve, make_run, save_run, monkeypatch):
    place, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    place.mkdir()
    outside = save_run(make_run("outside"))
    (place / "linked").symlink_to(outside)
    damaged = shutil.copytree(outside, place / "damaged")
    (damaged / "run.json").write_text(f'{{"format": "{EVIL}"}}')
    fine = shutil.copytree(outside, place / "deep" / "er" / "fine")
    shutil.copytree(outside, place / "1" / "2" / "3" / "4" / "too deep")
    elsewhere.write_text("secret")
    (fine / "report.html").symlink_to(elsewhere)
    board = serve(place)
    text = ask(board, "/")[2]
    assert "linked" not in text
    assert "too deep" not in text
    assert "unreadable" in text
    assert EVIL not in text
    key = next(key for key, name in re.findall(r'href="/run/(\w+)">(\w+)<', text) if name == "fine")
    assert ask(board, f"/report/{key}")[0] == 404
    monkeypatch.setattr(finding, "MOST_RUNS", 1)
    assert len(keys(ask(board, "/")[2])) == 1


def test_it_listens_on_this_machine_alone(tmp_path, serve):
    board = serve(tmp_path)
    assert board.server_address[0] == "127.0.0.1"
    with pytest.raises(UserError, match=f"cannot listen on port {board.server_port}"):
        open_board([tmp_path], board.server_port)
    with pytest.raises(UserError, match="is not a folder"):
        Finder([tmp_path / "nowhere"])
    assert "There are no runs yet" in ask(board, "/")[2]
    assert "refresh" in ask(board, "/board.js")[2]
    assert ask(board, "/", method="HEAD")[2] == ""


def test_a_run_that_writes_nothing_for_long_is_silent(tmp_path, make_run, save_run):
    save_run(make_run("first", finished=False))
    (shown,) = Finder([tmp_path]).find().values()
    assert shown.state(shown.changed + 100) == "training"
    assert shown.state(shown.changed + 130) == "silent"
    assert shown.seconds_left(shown.changed + 130) is None


@pytest.mark.slow
def test_chromium_shows_the_board(tmp_path, serve, make_run, save_run):
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    assert program, "no browser to look with: install chromium (apt install chromium)"
    save_run(make_run("first", finished=False))
    board = serve(tmp_path)
    picture = tmp_path / "board.png"
    key = keys(ask(board, "/")[2])[0]
    done = subprocess.run(
        [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--window-size=1200,1400", "--enable-logging=stderr",
         "--virtual-time-budget=8000", f"--user-data-dir={tmp_path / 'profile'}",
         f"--screenshot={picture}", "--dump-dom", f"{board.address}run/{key}"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    assert "Accuracy by round" in done.stdout
    assert picture.stat().st_size > 10_000
