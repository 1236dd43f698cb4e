"""A Ray head of this machine's own, for `shardyard up`, the demo and tests.

Several may run side by side, beside any other Ray: each has its own folder, ports and token, and stopping one
touches nothing but the processes it started. It is detached: the control plane may die and start again, and
finds it by the state file. What dies of it can be started again: the dashboard alone, which nothing trains through,
and else all of it, at the same dashboard address.
"""

import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from service.launch.dashboard import Dashboard, DashboardError
from service.launch.processes import Process, descendants, session_members, signal_all
from service.launch.ray_start import LocalHeadError, Node, end_session, free_ports, ray_environment, ray_start
from service.signals import held_back

STATE_VERSION = 2
START_TIMEOUT_S = 120.0
STOP_GRACE_S = 3.0
MANY_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Where this is 0, on any system, Ray's processes take 127.0.0.1 for their node's address and not for the outward one,
which changes with the network; all of them then listen on loopback alone. No node joins them then: hence the next."""
LONGEST_FOLDER = 36
"""Ray's sockets lie 71 bytes below it, and an AF_UNIX path holds 107."""


@dataclass(frozen=True)
class LocalHead:
    """A running head; `start` and `find` return one."""

    state_file: Path
    address: str
    """Where drivers connect: host:port."""
    token_path: Path
    folder: Path
    """Holds the temporary folders of its nodes, out of reach of other users: Ray opens its own to all."""
    num_cpus: int
    num_gpus: int
    nodes: tuple[Node, ...]
    """What `ray start` left, without the dashboard."""
    dashboard: Dashboard

    @property
    def dashboard_url(self) -> str:
        return self.dashboard.url

    @classmethod
    def find(cls, state_dir: Path | str) -> "LocalHead | None":
        """The head that was started with this state folder, if all that jobs run on still runs."""
        head = cls.recorded(state_dir)
        return head if head is not None and head.running() else None

    @classmethod
    def recorded(cls, state_dir: Path | str) -> "LocalHead | None":
        """The head that was started last with this state folder and not stopped, whatever is left of it."""
        return cls._read(_state_file(state_dir))

    @classmethod
    def start(
        cls,
        state_dir: Path | str,
        *,
        num_cpus: int,
        num_gpus: int = 0,
        timeout_s: float = START_TIMEOUT_S,
        dashboard_port: int | None = None,
        abort: list[int] | None = None,
    ) -> "LocalHead":
        """A head with these logical resources; the one that runs already, if there is one. A number that comes into
        `abort` from another thread ends it, as a signal does.

        Raises LocalHeadError with the end of Ray's output when it does not come up. A signal that comes
        meanwhile ends it, and is then delivered.
        """
        if (running := cls.find(state_dir)) is not None:
            return running
        state_file = _state_file(state_dir)
        state_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (remains := cls._read(state_file)) is not None:
            remains.stop()  # some of it died: the rest would hold memory and answer nobody
        free_port, metrics_port, client_port = free_ports(3)
        dashboard_port = dashboard_port or free_port
        token_path = state_file.with_name("token")
        _write_private(token_path, secrets.token_hex(32))
        environment = {"DASHBOARD_METRIC_PORT": str(metrics_port), MANY_NODES: "0"}
        with held_back(abort) as signals:
            folder = _short_folder()
            try:
                node = ray_start(
                    signals,
                    folder / "n0",
                    token_path,
                    "--head",
                    "--port=0",
                    "--dashboard-host=127.0.0.1",
                    f"--dashboard-port={dashboard_port}",
                    "--include-dashboard=true",
                    f"--ray-client-server-port={client_port}",  # unused, but cannot be left out
                    "--node-ip-address=127.0.0.1",
                    f"--num-cpus={num_cpus}",
                    f"--num-gpus={num_gpus}",
                    timeout_s=timeout_s,
                    environment=environment,
                )
                node, dashboard = _apart(node, f"http://127.0.0.1:{dashboard_port}", environment)
            except LocalHeadError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            head = cls(
                state_file=state_file,
                address=(folder / "n0" / "ray_current_cluster").read_text().strip(),
                token_path=token_path,
                folder=folder,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                nodes=(node,),
                dashboard=dashboard,
            )
            head._write()
            if signals:  # too late to end it sooner
                head.stop()
        return head

    def add_node(
        self, *, num_cpus: int, num_gpus: int = 0, timeout_s: float = START_TIMEOUT_S
    ) -> "LocalHead":
        """The head with one more node, with resources and an address of its own, on this machine.

        Raises LocalHeadError with the end of Ray's output, and of the head's, when it does not come up.
        """
        with held_back() as signals:
            try:
                node = ray_start(
                    signals,
                    self.folder / f"n{len(self.nodes)}",
                    self.token_path,
                    f"--address={self.address}",
                    f"--node-ip-address=127.0.0.{1 + len(self.nodes)}",
                    f"--num-cpus={num_cpus}",
                    f"--num-gpus={num_gpus}",
                    timeout_s=timeout_s,
                    environment={MANY_NODES: "1"},
                )
            except LocalHeadError as error:
                raise LocalHeadError("\n".join([str(error), *self._last_words()])) from None
            head = replace(self, nodes=(*self.nodes, node))
            head._write()
        return head

    def running(self) -> bool:
        """Whether every process that jobs run on is still there."""
        return all(node.running() for node in self.nodes)

    def dead_parts(self) -> list[str]:
        """Names of the processes that jobs run on and that are gone."""
        return sorted(each.name for node in self.nodes for each in node.processes if each.find() is None)

    def with_dashboard(self, timeout_s: float = START_TIMEOUT_S, abort: Sequence[int] = ()) -> "LocalHead":
        """The head with its dashboard, started again if that is gone; jobs run on all the while.

        Raises LocalHeadError with the end of what it said when it does not come up.
        """
        if self.dashboard.running():
            return self
        folder = self.folder / "n0"
        try:
            dashboard = self.dashboard.start(
                {**ray_environment(self.token_path), **self.dashboard.environment}, folder
            )
            head = replace(self, dashboard=dashboard)
            head._write()
            dashboard.await_answer(folder, timeout_s, abort)
        except DashboardError as error:
            raise LocalHeadError(str(error)) from None
        return head

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the head, all its nodes, workers and drivers, and removes Ray's folder; nothing else is touched.

        Drivers and workers are asked first and have `grace_s` to end.
        """
        recorded = self._read(self.state_file)
        if recorded is not None and recorded != self and recorded.folder == self.folder:
            recorded.stop(grace_s)  # it got more nodes than this value of it knows
            return
        deadline = time.monotonic() + grace_s
        living = set(self._processes())
        signal_all(living, signal.SIGTERM)
        while living and time.monotonic() < deadline:
            time.sleep(0.05)
            # Looked up again each time: a raylet may have started a worker in between.
            living = {process for process in living | set(self._processes()) if process.find()}
        while living:
            signal_all(living, signal.SIGKILL)
            time.sleep(0.02)
            living = {process for process in living | set(self._processes()) if process.find()}
        shutil.rmtree(self.folder, ignore_errors=True)
        self.state_file.unlink(missing_ok=True)

    def last_words(self, part: str = "gcs_server") -> list[str]:
        """What a part of it (`gcs_server`, `raylet`) said last."""
        log = self.folder / "n0" / "session_latest" / "logs" / f"{part}.out"
        return log.read_text(errors="replace").splitlines()[-10:] if log.is_file() else []

    def _last_words(self) -> list[str]:
        """How the head is, and what its GCS said last, for whoever cannot reach it."""
        said = self.last_words()
        return [
            f"{'all' if self.running() else 'not all'} of the head's processes live; its GCS said:",
            *said,
        ]

    def _processes(self) -> Iterator[Process]:
        """Everything that came out of the head: its sessions, and what its processes have as children.

        Drivers of jobs have sessions of their own, and are found as descendants of their supervisors.
        """
        roots = {self.dashboard.process} if self.dashboard.running() else set()
        for node in self.nodes:
            recorded = {process for process in (*node.processes, *node.others) if process.find()}
            roots |= recorded | (set(session_members(node.session)) if recorded else set())
        for root in roots:
            yield root
            if (found := root.find()) is not None:
                yield from descendants(found)

    @classmethod
    def _read(cls, state_file: Path) -> "LocalHead | None":
        try:
            given = json.loads(state_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        if given.pop("version", None) != STATE_VERSION:
            return None
        nodes = tuple(
            Node(
                node["session"],
                *(tuple(Process(**each) for each in node[kind]) for kind in ("processes", "others")),
            )
            for node in given.pop("nodes")
        )
        shown = given.pop("dashboard")
        shown |= {"process": Process(**shown["process"]), "command": tuple(shown["command"])}
        dashboard = Dashboard(**shown)
        token_path, folder = Path(given.pop("token_path")), Path(given.pop("folder"))
        return cls(
            state_file=state_file,
            token_path=token_path,
            folder=folder,
            nodes=nodes,
            dashboard=dashboard,
            **given,
        )

    def _write(self) -> None:
        given: dict[str, Any] = {"version": STATE_VERSION, **asdict(self)}
        del given["state_file"]
        _write_private(self.state_file, json.dumps(given, default=str, indent=2))


def _apart(node: Node, url: str, environment: dict[str, str]) -> tuple[Node, Dashboard]:
    """The head's node without its dashboard, and with what jobs run on told apart; and the dashboard.

    Raises LocalHeadError, with all of them ended, when it has died already."""
    commands = {process: process.command() for process in node.processes}
    found = [each for each, command in commands.items() if any("/dashboard.py" in word for word in command)]
    if not found:
        end_session(node.session)
        raise LocalHeadError("Ray's dashboard died as soon as it was started")
    others = tuple(each for each, command in commands.items() if "ray.util.client.server" in command)
    needed = tuple(each for each in node.processes if each not in (*found, *others))
    return Node(node.session, needed, others), Dashboard(found[0], commands[found[0]], url, environment)


def _state_file(state_dir: Path | str) -> Path:
    return Path(state_dir).expanduser().absolute() / "ray" / "head.json"


def _short_folder() -> Path:
    """A new folder whose path is short enough for Ray's sockets, readable by this user only."""
    parent = tempfile.gettempdir()
    if len(parent) > LONGEST_FOLDER - len("/shardyard-12345678"):
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="shardyard-", dir=parent))


def _write_private(path: Path, text: str) -> None:
    """Replaces the file in one step; only its owner ever could read it."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.replace(path)
