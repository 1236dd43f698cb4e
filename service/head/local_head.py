"""A local Ray head, for `shardyard up`, the demo and tests.

Several may run side by side: each has its own folder, ports and token, and stopping one touches only its processes.
It is detached: a restarted control plane finds it by the state file. Dead parts can be restarted at the same
dashboard address.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from service.head.dashboard import Dashboard, DashboardError
from service.head.head_processes import HeadProcesses
from service.head.processes import Process
from service.head.ray_start import LocalHeadError, Node, end_session, free_ports, ray_environment, ray_start
from service.head.record import (
    changing,
    in_words,
    read_record,
    record_file,
    restore_record,
    write_private,
    write_record,
)
from service.signals import defer_signals
from service.wire.node_folder import temp_folder

READABLE = (2, 3)
"""Record versions whose heads this release can use; others it can only stop."""
START_TIMEOUT_S = 300.0
STOP_GRACE_S = 3.0
CANNOT_START = "the Ray head cannot be started"
MANY_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray variable: if 0, Ray's processes use 127.0.0.1 as their node's address, not the outward one, which changes with
the network, and listen on loopback only. No other nodes can join then."""
LONGEST_FOLDER = 36
"""Ray's socket paths are 71 bytes longer; an AF_UNIX path holds 107."""


@dataclass(frozen=True)
class LocalHead:
    """A running head; returned by `start` and `find`."""

    state_file: Path
    address: str
    """Address (host:port) for drivers."""
    token_path: Path
    folder: Path
    """Private parent of the nodes' temporary folders: Ray opens its own to all."""
    num_cpus: int
    num_gpus: int
    nodes: tuple[Node, ...]
    """Processes that `ray start` left running, except the dashboard."""
    dashboard: Dashboard

    @property
    def dashboard_url(self) -> str:
        return self.dashboard.url

    @classmethod
    def find(cls, state_dir: Path | str) -> "LocalHead | None":
        """This state folder's head, if all processes that jobs need run."""
        head = cls.from_record(state_dir)
        return head if head is not None and head.running() else None

    @classmethod
    def from_record(cls, state_dir: Path | str) -> "LocalHead | None":
        """This state folder's last head that was not stopped, dead or alive."""
        return cls._read(record_file(state_dir))

    @classmethod
    def start(
        cls, state_dir: Path | str, *, num_cpus: int, num_gpus: int = 0, timeout_s: float = START_TIMEOUT_S
    ) -> "LocalHead":
        """Start a head with these logical resources, or return the one that runs or is starting. A signal meanwhile
        stops it. Raises LocalHeadError with the end of Ray's output if it does not come up."""
        state_file = record_file(state_dir)
        with in_words(CANNOT_START), changing(state_file):
            if (running := cls.find(state_dir)) is not None:
                return running
            _end_recorded(state_file)  # parts of it died: the rest is useless and holds memory
            return cls._start(state_file, num_cpus=num_cpus, num_gpus=num_gpus, timeout_s=timeout_s)

    def restart(self, *, timeout_s: float = START_TIMEOUT_S, abort: list[int]) -> "LocalHead":
        """Restart the whole head at its dashboard address, unless another process has. Another thread can stop it by
        adding to `abort`. Raises LocalHeadError as `start`, and if somebody has stopped the head."""
        with in_words(CANNOT_START), changing(self.state_file, abort):
            self.newest()
            if (running := self.find(self.state_file.parent.parent)) is not None:
                return running
            _end_recorded(self.state_file)
            port = urlsplit(self.dashboard_url).port
            return self._start(
                self.state_file, num_cpus=self.num_cpus, num_gpus=self.num_gpus, timeout_s=timeout_s,
                dashboard_port=port, abort=abort,
            )  # fmt: skip

    @classmethod
    def _start(
        cls,
        state_file: Path,
        *,
        num_cpus: int,
        num_gpus: int,
        timeout_s: float,
        dashboard_port: int | None = None,
        abort: list[int] | None = None,
    ) -> "LocalHead":
        free_port, metrics_port, client_port = free_ports(3)
        dashboard_port = dashboard_port or free_port
        token_path = state_file.with_name("token")
        write_private(token_path, secrets.token_hex(32))
        environment = {"DASHBOARD_METRIC_PORT": str(metrics_port), MANY_NODES: "0"}
        with defer_signals(abort) as signals:
            folder, before = _short_folder(), read_record(state_file)
            nodes: tuple[Node, ...] = ()
            try:
                # Recorded first, so that after a SIGKILL of this process its children can be found.
                write_record(state_file, {"folder": folder})
                node = ray_start(
                    signals,
                    folder / "n0",
                    token_path,
                    "--head",
                    "--port=0",
                    "--dashboard-host=127.0.0.1",
                    f"--dashboard-port={dashboard_port}",
                    "--include-dashboard=true",
                    f"--ray-client-server-port={client_port}",  # unused, but required
                    "--node-ip-address=127.0.0.1",
                    f"--num-cpus={num_cpus}",
                    f"--num-gpus={num_gpus}",
                    timeout_s=timeout_s,
                    environment=environment,
                )
                nodes = (node,)
                node, dashboard = _split_dashboard(node, f"http://127.0.0.1:{dashboard_port}", environment)
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
                head.record()
            except (LocalHeadError, OSError):
                HeadProcesses(folder, nodes).end(STOP_GRACE_S)
                shutil.rmtree(folder, ignore_errors=True)
                # If that fails, the record names a removed folder without processes.
                with suppress(OSError):
                    restore_record(state_file, before)
                raise
            if signals:  # came after `ray_start`
                head._end()
                restore_record(state_file, before)
        return head

    def add_node(self, *, num_cpus: int, num_gpus: int = 0, timeout_s: float = START_TIMEOUT_S) -> "LocalHead":
        """Add a node with its own resources and address on this machine; returns the new head. Raises LocalHeadError
        with the end of Ray's and the head's output."""
        with changing(self.state_file), defer_signals() as signals:
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
            head.record()
        return head

    def running(self) -> bool:
        """Whether all processes that jobs need are alive, with their files."""
        return all(node.running() for node in self.nodes) and self.has_files()

    def has_files(self) -> bool:
        """Whether the head's folder still has its sockets, which workers need."""
        folder = self.folder / "n0"
        session = folder / "session_latest"
        has_sockets = not os.path.lexists(session) or (session / "sockets" / "plasma_store").exists()
        return (folder / "ray_current_cluster").exists() and has_sockets

    def newest(self) -> "LocalHead":
        """The head as currently recorded, perhaps restarted by another process. Raises LocalHeadError if it was
        stopped."""
        head = self._read(self.state_file)
        if not self.state_file.exists() or (head and head.dashboard_url != self.dashboard_url):
            raise LocalHeadError("its Ray head was stopped")
        return head or self

    def dead_parts(self) -> list[str]:
        """Names of dead processes that jobs need."""
        return sorted(process.name for node in self.nodes for process in node.processes if process.find() is None)

    def with_dashboard(self, timeout_s: float = START_TIMEOUT_S, abort: Sequence[int] = ()) -> "LocalHead":
        """The head with its dashboard, restarted if dead, while jobs continue. Raises LocalHeadError if it does not
        come up, or the head was stopped."""
        with in_words("its dashboard cannot be started again"), changing(self.state_file, abort):
            head = self.newest()
            return head if head.dashboard.running() else head._start_dashboard(timeout_s, abort)

    def _start_dashboard(self, timeout_s: float, abort: Sequence[int]) -> "LocalHead":
        folder = self.folder / "n0"
        try:
            dashboard = self.dashboard.start(
                {**ray_environment(self.token_path, self.folder), **self.dashboard.environment},
                folder,
                record=lambda new_dashboard: replace(self, dashboard=new_dashboard).record(),
            )
            dashboard.await_answer(folder, timeout_s, abort)
        except DashboardError as error:
            raise LocalHeadError(str(error)) from None
        return replace(self, dashboard=dashboard)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop the head with all nodes, workers and drivers, and remove Ray's folder. Drivers and workers get
        SIGTERM and `grace_s`."""
        with changing(self.state_file):
            head = self._read(self.state_file)
            if head is not None and head.folder == self.folder:
                head._end(grace_s)  # nodes may have been added since
                self.state_file.unlink()
            else:
                self._end(grace_s)

    @staticmethod
    def stop_recorded(state_dir: Path | str, grace_s: float = STOP_GRACE_S) -> bool:
        """Stop what is left of this state folder's recorded head, of any release; False without a record."""
        state_file = record_file(state_dir)
        if not state_file.exists():
            return False
        with changing(state_file):
            _end_recorded(state_file, grace_s)
            state_file.unlink(missing_ok=True)
        return True

    def _end(self, grace_s: float = STOP_GRACE_S) -> None:
        HeadProcesses(self.folder, self.nodes, self.dashboard.process).end(grace_s)
        shutil.rmtree(self.folder, ignore_errors=True)

    def last_words(self, part: str = "gcs_server") -> list[str]:
        """Last log lines of a part (`gcs_server`, `raylet`)."""
        log = self.folder / "n0" / "session_latest" / "logs" / f"{part}.out"
        return log.read_text(errors="replace").splitlines()[-10:] if log.is_file() else []

    def _last_words(self) -> list[str]:
        """State of the head and last lines of its GCS."""
        lines = self.last_words()
        return [f"{'all' if self.running() else 'not all'} of the head's processes are alive; GCS log:", *lines]

    @classmethod
    def _read(cls, state_file: Path) -> "LocalHead | None":
        record = read_record(state_file)
        if record is None or record.pop("version", None) not in READABLE or "address" not in record:
            return None
        nodes = tuple(
            Node(
                node["session"],
                *(tuple(Process(**fields) for fields in node[kind]) for kind in ("processes", "others")),
            )
            for node in record.pop("nodes")
        )
        dashboard_fields = record.pop("dashboard")
        dashboard_fields |= {
            "process": Process(**dashboard_fields["process"]),
            "command": tuple(dashboard_fields["command"]),
        }
        dashboard = Dashboard(**dashboard_fields)
        token_path, folder = Path(record.pop("token_path")), Path(record.pop("folder"))
        return cls(
            state_file=state_file, token_path=token_path, folder=folder, nodes=nodes, dashboard=dashboard, **record
        )

    def record(self) -> None:
        """Write the head's record, by which other processes find it."""
        fields: dict[str, Any] = asdict(self)
        del fields["state_file"]
        write_record(self.state_file, fields)


def _end_recorded(state_file: Path, grace_s: float = STOP_GRACE_S) -> None:
    if (record := read_record(state_file)) is not None:
        remains = HeadProcesses.of_record(record)
        remains.end(grace_s)
        shutil.rmtree(remains.folder, ignore_errors=True)


def _split_dashboard(node: Node, url: str, environment: dict[str, str]) -> tuple[Node, Dashboard]:
    """Split off the dashboard, and separate the processes that jobs need. Raises LocalHeadError, after ending all,
    if the dashboard is dead."""
    commands = {process: process.command() for process in node.processes}
    dashboard_processes = [
        process for process, command in commands.items() if any("/dashboard.py" in word for word in command)
    ]
    if not dashboard_processes:
        end_session(node.session)
        raise LocalHeadError("Ray's dashboard died right after its start")
    client_processes = tuple(process for process, command in commands.items() if "ray.util.client.server" in command)
    job_processes = tuple(
        process for process in node.processes if process not in (*dashboard_processes, *client_processes)
    )
    return Node(node.session, job_processes, client_processes), Dashboard(
        dashboard_processes[0], commands[dashboard_processes[0]], url, environment
    )


def _short_folder() -> Path:
    """A new private folder with a path short enough for Ray's sockets."""
    parent = str(temp_folder())
    if len(os.fsencode(parent)) > LONGEST_FOLDER - len("/shardyard-12345678"):
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="shardyard-", dir=parent))
