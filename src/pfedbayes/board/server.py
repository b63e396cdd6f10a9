"""The web server of the board: it answers this machine alone, and changes nothing.

A page of another site could send a browser here by a name that resolves to this machine (DNS rebinding). So every
request has to name the address at which the board was started. Addresses name runs by keys and never by paths.
"""

from __future__ import annotations

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from pfedbayes.board import pages
from pfedbayes.board.finding import Finder, now
from pfedbayes.errors import UserError
from pfedbayes.files.reading import read_bytes
from pfedbayes.runs.folder import REPORT

HOST = "127.0.0.1"
MOST_COMPARED = 8
LONGEST_TARGET = 4000  # characters of an address
LARGEST_REPORT = 50_000_000  # bytes
OWN = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; img-src data:; " \
      "frame-ancestors 'none'; form-action 'self'; base-uri 'none'"  # fmt: skip
REPORTS = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # a file may have been exchanged
HTML, SCRIPT = "text/html; charset=utf-8", "text/javascript; charset=utf-8"


class Board(ThreadingHTTPServer):
    """A server of pages about the runs below some folders."""

    daemon_threads = True

    def __init__(self, folders: list[Path], port: int) -> None:
        self._finder, self._lock = Finder(folders), Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UserError(
                f"cannot listen on port {port} ({error.strerror or error}): choose another --port"
            ) from None

    @property
    def address(self) -> str:
        """Where a browser finds the board."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def names(self) -> set[str]:
        """What a request may call this server."""
        return {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def page(self, target: str) -> tuple[HTTPStatus, str, str, bytes]:
        """Return status, type, policy and content of an address."""
        parts = urlsplit(target)
        first, _, key = parts.path.strip("/").partition("/")
        if first == "board.js":
            return HTTPStatus.OK, SCRIPT, OWN, resources.files(__package__).joinpath("board.js").read_bytes()
        with self._lock:
            found = self._finder.find()
        if first == "" and not key:
            return _html(pages.overview(list(found.values()), now()))
        if first == "compare":
            asked = parse_qs(parts.query, max_num_fields=100).get("run", [])[:MOST_COMPARED]
            return _html(pages.comparison([found[each] for each in dict.fromkeys(asked) if each in found]))
        shown = found.get(key)
        if first == "run" and shown is not None:
            return _html(pages.one_run(shown, now()))
        if first == "report" and shown is not None and shown.run is not None:
            try:
                content = read_bytes(shown.run.folder / REPORT, follow=False, largest=LARGEST_REPORT)
            except (OSError, ValueError):
                return _missing()
            return HTTPStatus.OK, HTML, REPORTS, content
        return _missing()


def _html(page: str) -> tuple[HTTPStatus, str, str, bytes]:
    return HTTPStatus.OK, HTML, OWN, page.encode()


def _missing() -> tuple[HTTPStatus, str, str, bytes]:
    return HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", OWN, b"there is no such page"


class _Handler(BaseHTTPRequestHandler):
    server: Board
    server_version, sys_version = "pfedbayes", ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer with a page."""
        if self.headers.get("Host", "") not in self.server.names:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", OWN, b"open the board at the address that it has printed")
        elif len(self.path) > LONGEST_TARGET:
            self._send(HTTPStatus.REQUEST_URI_TOO_LONG, "text/plain", OWN, b"the address is too long")
        else:
            try:
                answer = self.server.page(self.path)
            except ValueError:  # an address that is no address
                answer = _missing()
            self._send(*answer)

    def do_HEAD(self) -> None:
        """Answer without the page."""
        self.do_GET()

    def _send(self, status: HTTPStatus, kind: str, policy: str, content: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind, "Content-Length": str(len(content)), "Content-Security-Policy": policy,
            "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }  # fmt: skip
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the page asks every few seconds."""


def open_board(folders: list[Path], port: int = 0) -> Board:
    """Return a board that listens; port 0 chooses a free one. Call `serve_forever`."""
    return Board(folders, port)
