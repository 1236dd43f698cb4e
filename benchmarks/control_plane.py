"""Speed and memory of the control plane with 10,000 stored jobs: prints a table and writes it as JSON.

    python -m benchmarks.control_plane [--jobs 10000] [--clients 8] [--streams 100]

The control plane is a separate process that this one drives over HTTP. No job runs, because its cluster cannot be
reached, as when Ray is down: only the cost of the control plane itself is measured.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import results
from moe.plan import Calibration
from service.control.launcher.launcher import ClusterFacts, Launcher, LauncherUnavailable, Observation
from service.control.report.tokens import hash_token
from service.wire.launch import Launch

SPEC = {
    "name": "bench",
    "labels": {"team": "bench"},
    "model": {"preset": "gshard-tiny"},
    "data": {"corpus": "catalogs"},
    "train": {"num_steps": 1000, "batch_tokens": 1024},
}
SECONDS_EACH = 10.0
NUM_STEPS = 100
PACE_S = 0.05
"""Seconds between two steps of the run whose events are timed."""


class NoCluster(Launcher):
    """A cluster that cannot be reached."""

    def cluster(self) -> ClusterFacts:
        raise LauncherUnavailable("no cluster in this benchmark")

    def submit(self, launch: Launch) -> None:
        raise LauncherUnavailable("no cluster in this benchmark")

    def observe(self, submission_id: str) -> Observation:
        raise LauncherUnavailable("no cluster in this benchmark")

    def stop(self, submission_id: str) -> None:
        raise LauncherUnavailable("no cluster in this benchmark")

    def calibrate(self) -> Calibration:
        raise LauncherUnavailable("no cluster in this benchmark")

    def dashboard_url(self, submission_id: str) -> str | None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        from service.control.server import serve
        from service.settings import Settings

        serve(Settings(**json.loads(args.serve)), NoCluster())
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), args.jobs, args.clients, args.streams)
    show(figures)
    results.write("control_plane", figures)


def measure(folder: Path, num_jobs: int, clients: int, streams: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = json.dumps({"state_dir": str(folder), "port": port})
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.control_plane", "--serve", settings])
    url = f"http://127.0.0.1:{port}"
    try:
        await_ready(url, server)
        process = psutil.Process(server.pid)
        figures: dict[str, Any] = {"jobs": num_jobs, "clients": clients, "streams": streams}
        figures["rss_empty_mb"] = rss_mb(process)
        figures["fsync"] = fsync_times(folder)
        start_s = time.perf_counter()
        asyncio.run(flood(url, clients, num_jobs))
        figures["fill_jobs_per_s"] = round(num_jobs / (time.perf_counter() - start_s), 1)
        figures["post_job"] = request_times(process, url, clients, post)
        figures["list_20"] = request_times(process, url, clients, list_page)
        figures["list_20_by_label"] = request_times(process, url, clients, list_by_label)
        figures["get_job"] = request_times(process, url, clients, get_one(url))
        figures["rss_jobs_mb"] = rss_mb(process)
        figures["record_to_event"], figures["rss_streams_mb"] = follow_a_run(url, folder, process, streams)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    return figures


Request = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]


async def post(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/v1/jobs", json=SPEC)


async def list_page(client: httpx.AsyncClient) -> httpx.Response:
    return await client.get("/v1/jobs", params={"limit": 20})


async def list_by_label(client: httpx.AsyncClient) -> httpx.Response:
    return await client.get("/v1/jobs", params={"limit": 20, "label": "team=bench", "state": "queued"})


def get_one(url: str) -> Request:
    job_id = newest_job(url)

    async def get(client: httpx.AsyncClient) -> httpx.Response:
        return await client.get(f"/v1/jobs/{job_id}")

    return get


def newest_job(url: str) -> str:
    return str(httpx.get(f"{url}/v1/jobs", trust_env=False).json()["items"][0]["id"])


def request_times(process: psutil.Process, url: str, clients: int, request: Request) -> dict[str, float]:
    """Times that clients measure, and the CPU time of the control plane per request, which hardly depends on the
    machine's load."""
    before = sum(process.cpu_times()[:2])
    times = asyncio.run(load(url, clients, request))
    used_s = sum(process.cpu_times()[:2]) - before
    return {**summary(times), "cpu_ms_each": round(1000 * used_s / len(times), 2)}


async def load(url: str, clients: int, request: Request) -> list[float]:
    """Milliseconds of the requests that each client sends one after another for `SECONDS_EACH`."""
    until = time.perf_counter() + SECONDS_EACH
    times: list[float] = []

    async def request_repeatedly() -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            while time.perf_counter() < until:
                start_s = time.perf_counter()
                answer = await request(client)
                times.append(1000 * (time.perf_counter() - start_s))
                answer.raise_for_status()

    await asyncio.gather(*(request_repeatedly() for _ in range(clients)))
    return times


async def flood(url: str, clients: int, num_jobs: int) -> None:
    """Post jobs as fast as the clients can."""
    left = num_jobs

    async def post_jobs() -> None:
        nonlocal left
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            while left > 0:
                left -= 1
                (await post(client)).raise_for_status()

    await asyncio.gather(*(post_jobs() for _ in range(clients)))


def follow_a_run(url: str, folder: Path, process: psutil.Process, streams: int) -> tuple[dict[str, float], float]:
    """Milliseconds from posting a step to its event in each stream that follows the job, and the memory afterwards."""
    job_id, token = newest_job(url), secrets.token_hex()
    with closing(sqlite3.connect(folder / "shardyard.db")) as database, database:
        # State of a job whose first attempt was launched.
        database.execute(
            "UPDATE jobs SET state = 'running', attempt = 1, launch = 'submitted', token_hash = ? WHERE id = ?",
            (hash_token(token), job_id),
        )
    send_times: dict[int, float] = {}
    times: list[float] = []
    all_open = threading.Event()

    async def receive() -> None:
        still_closed = streams
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=None, limits=limits) as client:

            async def follow() -> None:
                nonlocal still_closed
                async with client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
                    still_closed -= 1
                    if still_closed == 0:
                        all_open.set()
                    async for line in answer.aiter_lines():
                        if not line.startswith("data: "):
                            continue
                        step = json.loads(line[6:])["data"].get("step")
                        if step is not None:
                            times.append(1000 * (time.perf_counter() - send_times[step]))
                        if step == NUM_STEPS:
                            return

            await asyncio.gather(*(follow() for _ in range(streams)))

    def send() -> None:
        all_open.wait()
        layers = [{"layer": layer, "load": [100] * 8, "rejected": 0.01, "dropped": 0.02} for layer in (1, 3)]
        headers = {"authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, trust_env=False, headers=headers) as client:
            for step in range(1, NUM_STEPS + 1):
                data = {"step": step, "loss": 1.0, "lr": 1e-3, "tokens_per_s": 1e4, "layers": layers}
                record = {"kind": "metric", "time": "2026-01-01T00:00:00Z", "data": data}
                body = {"attempt": 1, "writer": "group-0", "first_seq": step - 1, "records": [record]}
                send_times[step] = time.perf_counter()
                client.post(f"/internal/v1/jobs/{job_id}/records", json=body).raise_for_status()
                time.sleep(PACE_S)

    sender = threading.Thread(target=send)
    sender.start()
    asyncio.run(receive())
    sender.join()
    return summary(times), rss_mb(process)


def summary(times_ms: Sequence[float]) -> dict[str, float]:
    sorted_ms = sorted(times_ms)
    return {
        "count": len(sorted_ms),
        "p50_ms": round(sorted_ms[len(sorted_ms) // 2], 2),
        "p95_ms": round(sorted_ms[int(0.95 * len(sorted_ms))], 2),
        "p99_ms": round(sorted_ms[int(0.99 * len(sorted_ms))], 2),
        "max_ms": round(sorted_ms[-1], 2),
    }


def fsync_times(folder: Path) -> dict[str, float]:
    """Milliseconds that this disk takes to make 4 KB durable: a lower bound for every POST."""
    times = []
    with (folder / "fsync").open("wb") as file:
        for _ in range(200):
            file.write(b"x" * 4096)
            file.flush()
            start_s = time.perf_counter()
            os.fsync(file.fileno())
            times.append(1000 * (time.perf_counter() - start_s))
    return summary(times)


def rss_mb(process: psutil.Process) -> float:
    return round(process.memory_info().rss / 1e6, 1)


def await_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/readyz", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise SystemExit("the control plane did not start")


def show(figures: dict[str, Any]) -> None:
    table = Table(title=f"control plane, {figures['jobs']:,} jobs, {figures['clients']} clients")
    for column in ("what", "p50 ms", "p95 ms", "p99 ms", "CPU ms each", "limit (p95)"):
        table.add_column(column, justify="left" if column == "what" else "right")
    rows = (
        ("POST /v1/jobs", "post_job", "100"),
        ("GET /v1/jobs, 20 rows", "list_20", "40"),
        ("the same, by label and state", "list_20_by_label", ""),
        ("GET /v1/jobs/{id}", "get_job", ""),
        (f"a record to its event, {figures['streams']} streams", "record_to_event", "1000"),
        ("fsync of 4 KB on this disk", "fsync", ""),
    )
    for label, key, limit in rows:
        times = figures[key]
        table.add_row(
            label,
            *(f"{times[name]:.1f}" for name in ("p50_ms", "p95_ms", "p99_ms")),
            str(times.get("cpu_ms_each", "")),
            limit,
        )
    console = Console()
    console.print(table)
    console.print(
        f"resident: {figures['rss_empty_mb']} MB empty, {figures['rss_jobs_mb']} MB after the jobs, "
        f"{figures['rss_streams_mb']} MB with {figures['streams']} streams (limit 250 MB)"
    )


if __name__ == "__main__":
    main()
