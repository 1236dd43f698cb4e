"""Checks of this machine for Shardyard, without importing torch or Ray."""

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from service.cli.view.amounts import num_bytes

if TYPE_CHECKING:
    from service.settings import Settings

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
RAY_SERIES = "2.60"
DEMO_MEMORY_BYTES = 6 * 1024**3
ROOMY_DISK_BYTES = 5 * 1024**3
PATIENCE_S = 8.0
"""Longest wait for an answer of the control plane, its cluster, or the GPUs' driver, which are asked side by side."""


@dataclass(frozen=True)
class Finding:
    """Result of one check. `fault`: nothing works until it is fixed; `note`: something works less well."""

    what: str
    verdict: Literal["ok", "note", "fault"]
    detail: str
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_machine(settings: "Settings", url: str, state_dir: Path | None) -> Iterator[Finding]:
    """All findings, cheap ones first. `url`: of the client's control plane; `state_dir`: folder to check instead of
    its own."""
    with ThreadPoolExecutor() as pool:
        pending_gpus = pool.submit(check_gpus)
        pending_service, pending_cluster = pool.submit(ask_service, url), pool.submit(ask_cluster, url)
        yield check_python()
        yield check_torch()
        yield check_ray()
        yield from check_corpus()
        yield check_cores()
        yield check_memory()
        yield pending_gpus.result()
        service, cluster = pending_service.result(), pending_cluster.result()
    if state_dir is None and isinstance(service, dict) and _is_local(url):
        state_dir = Path(service["state_dir"])
    yield check_state_dir(state_dir or settings.state_dir)
    yield check_kubectl()
    yield from check_control_plane(settings, url, service, cluster)


def check_python() -> Finding:
    version = platform.python_version()
    if sys.version_info < MIN_PYTHON:
        minimum = ".".join(map(str, MIN_PYTHON))
        return Finding("Python", "fault", version, f"must be {minimum} or later; recreate the environment with it")
    return Finding("Python", "ok", f"{version} in {sys.prefix}")


def check_torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", "fault", "not installed", "run 'make setup', or pip install torch")
    release, _, build = version.partition("+")
    numbers = tuple(int(part) for part in release.split(".")[:2])
    if numbers < MIN_TORCH:
        minimum = ".".join(map(str, MIN_TORCH))
        return Finding("torch", "fault", version, f"must be {minimum} or later; run 'make setup'")
    return Finding("torch", "ok", f"{release} ({build or 'the default build'})")


def check_ray() -> Finding:
    version = _version("ray")
    if version is None:
        return Finding("Ray", "fault", "not installed", "run 'make setup', or pip install 'ray[default,train]'")
    if not version.startswith(f"{RAY_SERIES}."):
        return Finding("Ray", "fault", version, f"must be {RAY_SERIES}; run 'make setup'")
    return Finding("Ray", "ok", version)


def check_corpus() -> Iterator[Finding]:
    missing = [name for name in ("pycountry", "Django") if _version(name) is None]
    if missing:
        yield Finding(
            "corpus",
            "note",
            f"{' and '.join(missing)} not installed; the catalogs corpus needs them",
            "run 'make setup'",
        )
    else:
        yield Finding("corpus", "ok", f"catalogs of pycountry {_version('pycountry')} and Django {_version('Django')}")


def check_cores() -> Finding:
    cores = available_cores()
    if cores < 2:
        return Finding("cores", "note", f"{cores:g}", "the demo's two workers share the cores there are")
    return Finding("cores", "ok", f"{cores:g}")


def check_memory() -> Finding:
    available = available_memory_bytes()
    if available is None:
        return Finding("memory", "note", "not measured on this system")
    description = f"{num_bytes(available)} available"
    if available < DEMO_MEMORY_BYTES:
        return Finding(
            "memory", "note", description, f"the demo needs {num_bytes(DEMO_MEMORY_BYTES)}; close other programs"
        )
    return Finding("memory", "ok", description)


def check_gpus() -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding("GPUs", "ok", "none (no nvidia-smi); training uses CPUs")
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding("GPUs", "fault", "nvidia-smi does not respond", "check the driver: nvidia-smi, dmesg")
    if answer.returncode != 0:
        output = (answer.stdout + answer.stderr).strip().splitlines()[:1]
        return Finding(
            "GPUs", "note", "".join(output) or "nvidia-smi failed", "training uses CPUs until the driver works"
        )
    names = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    build = (_version("torch") or "").partition("+")[2]
    if names and build == "cpu":
        return Finding("GPUs", "note", f"{len(names)} x {names[0]}", "this torch is a CPU build; install a CUDA build")
    return Finding("GPUs", "ok", f"{len(names)} x {names[0]}" if names else "none")


def check_state_dir(state_dir: Path) -> Finding:
    existing = next(folder for folder in (state_dir, *state_dir.parents) if folder.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding("state", "fault", f"{existing} is not writable", "set SHARDYARD_STATE_DIR to a writable folder")
    free = shutil.disk_usage(existing).free
    description = f"{state_dir}, {num_bytes(free)} free"
    if free < ROOMY_DISK_BYTES:
        return Finding("state", "note", description, "checkpoints and prepared corpora go there; free some space")
    return Finding("state", "ok", description)


def check_kubectl() -> Finding:
    path = shutil.which("kubectl")
    return Finding("kubectl", "ok", path or "not found; needed for Kubernetes only")


def ask_service(url: str) -> dict[str, Any] | Exception:
    """Setup of the control plane at `url`, or the request's error."""
    from service.client import Client, ClientError

    try:
        with Client(url) as client:
            return client.service(PATIENCE_S)
    except ClientError as error:
        return error


def ask_cluster(url: str) -> dict[str, Any] | Exception:
    """Facts about the cluster of the control plane at `url`, or the request's error."""
    from service.client import Client, ClientError, Unreachable

    try:
        with Client(url) as client:
            return client.cluster(PATIENCE_S)
    except Unreachable as error:
        return ClientError(f"the cluster has not answered the control plane: {error.cause}")
    except ClientError as error:
        return error


def check_control_plane(
    settings: "Settings", url: str, service: dict[str, Any] | Exception, cluster: dict[str, Any] | Exception
) -> Iterator[Finding]:
    if isinstance(service, Exception):
        address = f"{settings.host}:{settings.port}"
        if not _is_free(settings.host, settings.port):
            yield Finding("port", "fault", f"{address} is in use by another program", "use 'shardyard up --port N'")
        else:
            yield Finding("port", "ok", f"{address} is free")
        yield Finding("service", "note", str(service))
        return
    yield Finding("service", "ok", f"a control plane is running at {url}")
    if isinstance(cluster, Exception):
        yield Finding("cluster", "fault", str(cluster))
    else:
        description = f"{cluster['num_nodes']} node(s), {cluster['cpus']:g} CPUs, {cluster['gpus']:g} GPUs"
        yield Finding("cluster", "ok", description)
        for entry in cluster.get("unreachable", ()):
            yield Finding("cluster", "fault", f"{entry['cluster']}: {entry['reason']}")


def num_usable_gpus() -> int:
    """GPUs that this machine's torch can use, as far as known without importing it."""
    if shutil.which("nvidia-smi") is None or (_version("torch") or "").endswith("+cpu"):
        return 0
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return 0
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines()) if answer.returncode == 0 else 0


def available_cores() -> float:
    """Cores available to this process by affinity and cgroup quota."""
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    quota = _read(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
"""Page cache and file system caches, which the kernel drops when processes need memory, as in `MemAvailable`."""


def available_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory available to new processes, within the limit of the control group; None off Linux."""
    fields = dict(line.split(":", 1) for line in _read(Path("/proc/meminfo")).splitlines() if ":" in line)
    if "MemAvailable" not in fields:
        return None
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _read(cgroup / "memory.max").strip()
    current = _read(cgroup / "memory.current").strip()
    if limit.isdigit() and current.isdigit():
        statistics = dict(line.split() for line in _read(cgroup / "memory.stat").splitlines())
        reclaimable = sum(int(statistics.get(name, 0)) for name in _RECLAIMABLE)
        available = min(available, max(int(limit) - int(current) + reclaimable, 0))
    return available


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _is_local(url: str) -> bool:
    from service.settings import is_loopback

    return is_loopback(urlsplit(url).hostname or "")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
