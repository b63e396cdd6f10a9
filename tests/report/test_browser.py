"""The report and the documentation, looked at in a real browser."""

import functools
import json
import re
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from pfedbayes import report
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from test_site import build

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--virtual-time-budget=5000", "--enable-logging=stderr", "--v=0",
)  # fmt: skip
PAGES = (
    "index", "own_data", "choosing", "methods", "report", "uncertainty", "theory", "design", "api", "contributing",
    "examples/four_hospitals", "examples/schools", "examples/mnist", "results/table1", "results/speed",
)  # fmt: skip


class Browser:
    """A headless Chromium, started anew for every page, in a folder for its pictures."""

    def __init__(self, folder):
        self.program = next(filter(None, map(shutil.which, NAMES)), None)
        assert self.program, "no browser to look with: install chromium (apt install chromium)"
        self.folder = folder

    def look(self, url, name, width=1280, height=1800, dark=False):
        """A picture and the rendered page; it must say nothing on the console and ask nothing of other servers."""
        picture, log = self.folder / f"{name}.png", self.folder / f"{name}.net.json"
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        flags = [*QUIET, *scheme, f"--window-size={width},{height}", f"--user-data-dir={self.folder / 'profile'}"]
        seen = self._run([*flags, f"--log-net-log={log}", f"--screenshot={picture}", "--dump-dom", url])
        said = [line for line in seen.stderr.splitlines() if "CONSOLE" in line]
        assert not said, (url, said)
        elsewhere = requests(log) - {"127.0.0.1"}
        assert not elsewhere, (url, elsewhere)
        return Image.open(picture).convert("RGB"), seen.stdout

    def _run(self, flags):
        done = subprocess.run([self.program, *flags], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done


def requests(log):
    """The servers that pages asked for something; what the browser asks for itself has no page as its initiator."""
    content = log.read_text()
    try:
        events = json.loads(content)["events"]
    except json.JSONDecodeError:  # the browser was gone before it had closed the list
        events = json.loads(content.rstrip().rstrip(",") + "]}")["events"]
    asked = [event["params"] for event in events if "url" in event.get("params", {})]
    by_pages = [each["url"] for each in asked if each.get("initiator", "not an origin") != "not an origin"]
    return set(re.findall(r"^https?://([^/:]+)", "\n".join(by_pages), re.MULTILINE))


def assert_drawn(picture):
    """Not blank: many colours, and ink from the top of the page to somewhere below its middle."""
    pixels = np.asarray(picture)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    rows = np.flatnonzero((pixels != pixels[:, :1]).any((1, 2)))
    assert rows[0] < 150
    assert rows[-1] > len(pixels) // 3


def assert_rendered(page):
    """No template, no undefined value and no picture that is missing is left in the page."""
    visible = re.sub(r"<(script|style|pre|code)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert "</html>" in page
    for sign in ("{{", "{%", "Undefined", "[object Object]", ">None<", ">nan<", ":::"):
        assert sign not in visible, sign


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    return Browser(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of the documentation on a server of its own."""
    site = build(tmp_path_factory.mktemp("site"))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", site
        server.shutdown()


@pytest.mark.parametrize("page", PAGES)
def test_the_documentation_is_drawn(browser, served, page):
    address, _ = served
    picture, text = browser.look(f"{address}/{page}.html", page.replace("/", "_"))
    assert_drawn(picture)
    assert_rendered(text)


def test_the_documentation_can_be_read_and_searched_from_the_disk(browser, served):
    _, site = served
    _, text = browser.look(f"{(site / 'theory.html').as_uri()}?q=conformal", "searched")
    assert re.search(r"\d+ matching document", text)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Reports of a short run on images, of one on a regression, and of both side by side."""
    folder = tmp_path_factory.mktemp("runs")
    small = ["training.rounds=3", "training.evaluate_every=1", "execution.compile=false"]
    images = ["data.train_per_label=20", "data.test_per_label=20"]
    runs = {"images": images, "regression": ["data.name=regression", "data.clients=4", "data.examples=200"]}
    for name, settings in runs.items():
        list(execute(read_experiment(None, [*small, *settings]), folder / name, [1, 2]))
    written = {name: report.write([folder / name], folder / f"{name}.html") for name in runs}
    return written | {"both": report.write([folder / name for name in runs], folder / "both.html")}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["images", "regression", "both"])
@pytest.mark.parametrize("width", [1280, 420])
def test_the_report_is_drawn(browser, reports, name, width, dark):
    picture, text = browser.look(reports[name].as_uri(), f"report_{name}_{width}_{dark}", width, 2600, dark)
    assert_drawn(picture)
    assert_rendered(text)
    assert text.count("<svg") >= 2
    assert (np.asarray(picture)[0, 0].mean() < 100) == dark


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("elsewhere", '<img src="http://127.0.0.2:9/x.png">text'),
        ("error", "<script>missing()</script>text"),
        ("blank", ""),
        ("template", "{{ title }}"),
    ],
)
def test_what_is_wrong_with_a_page_is_seen(browser, tmp_path, name, body):
    page = tmp_path / f"{name}.html"
    page.write_text(f"<html><body>{body}</body></html>")
    with pytest.raises(AssertionError):
        look_at(browser, page)


def look_at(browser, page):
    picture, text = browser.look(page.as_uri(), page.stem)
    assert_rendered(text)
    assert_drawn(picture)
