"""A SuperLink and SuperNodes on this machine, in processes of their own, with certificates and keys."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from pfedbayes.flower.apps import write_app
from pfedbayes.flower.keys import make_keys

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Deployment:
    """Starts and stops the processes; on leaving, all that it or its children have started is gone."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, nodes
        self.port, self.mark = free_port(), uuid.uuid4().hex
        self.processes: list[subprocess.Popen] = []
        self.links: list[subprocess.Popen] = []
        self.supernodes: dict[int, subprocess.Popen] = {}
        make_keys(folder / "keys", ["127.0.0.1", "localhost"], nodes + 1)  # the last one is not in the roster
        whole = self.key("roster.toml").read_text()
        self.key("roster.toml").write_text(whole[: whole.rindex("[[client]]")])
        write_app(folder / "app")
        self.home = folder / "home"
        self.home.mkdir()
        (self.home / "config.toml").write_text(
            f'[superlink.tls]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{self.key("ca.crt")}"\n'
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def key(self, name: str) -> Path:
        return self.folder / "keys" / name

    def environment(self) -> dict[str, str]:
        own = {
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
            "PFEDBAYES_TEST": self.mark,
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        return os.environ | own

    def start(self, name: str, *command: str) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                cwd=self.folder,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def superlink(self) -> subprocess.Popen:
        certificates = ["--ssl-certfile", self.key("server.crt"), "--ssl-keyfile", self.key("server.key")]
        process = self.start(
            "superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(self.port),
            *map(str, certificates), "--ssl-ca-certfile", str(self.key("ca.crt")), "--enable-supernode-auth",
            "--database", str(self.folder / "link.db"), "--disable-runtime-dependency-installation",
        )  # fmt: skip
        self.links.append(process)
        self.until(self.answers, 60, "the SuperLink answers")
        return process

    def answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def register(self, keys: int | None = None) -> None:
        """Register the first `keys` keys; by default, those in the roster."""
        registrations = [
            self.start(f"register-{i}", "flwr", "supernode", "register", str(self.key(f"node-{i}.pub")), "tls")
            for i in range(keys or self.nodes)
        ]
        for i, process in enumerate(registrations):
            assert process.wait(60) == 0, self.log(f"register-{i}")

    def supernode(self, number: int, key: int | None = None, name: str = "", *options: str) -> subprocess.Popen:
        private = str(self.key(f"node-{number if key is None else key}"))
        security = ["--root-certificates", str(self.key("ca.crt")), "--auth-supernode-private-key", private]
        process = self.start(
            name or f"supernode-{number}", "flower-supernode", "--superlink", f"127.0.0.1:{self.port}", *security,
            "--node-config", f'partition-id={number} name="site {number}" state-dir="{self.state(number)}"',
            "--port", str(free_port()), *options,
        )  # fmt: skip
        if not name:
            self.supernodes[number] = process
        return process

    def keep_nodes(self) -> None:
        """Start again the nodes that have ended, as a supervisor does."""
        for number, process in list(self.supernodes.items()):
            if process.poll() is not None:
                self.supernode(number)

    def state(self, number: int) -> Path:
        return self.folder / f"state-{number}"

    def run(self, **settings: object) -> subprocess.Popen:
        """Start the app; `a__b` stands for a.b. The log is followed until the run ends."""
        settings = {"federation__clients": self.nodes, "federation__roster": str(self.key("roster.toml"))} | settings
        quoted = {name: f'"{value}"' if isinstance(value, str) else value for name, value in settings.items()}
        config = " ".join(f"{name.replace('__', '.')}={value}" for name, value in quoted.items())
        return self.start("run", "flwr", "run", str(self.folder / "app"), "tls", "--stream", "-c", config)

    def living(self) -> list[int]:
        """The processes that carry this deployment's mark, children of children included."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"PFEDBAYES_TEST={self.mark}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def until(self, condition, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {seconds} s"
            time.sleep(0.1)
