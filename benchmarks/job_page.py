"""The page of a job: its first paint with 100,000 steps, and what 50 open pages of a running job cost the service.

Times are those of a real Chromium on the same machine, which takes most of the processor itself: on a busy machine they
say little, and the processor time of the control plane's process, printed beside them, says more. Open pages are
streams as the page of a job opens them; the share of a core is what they add to the same run without any.
"""

import tempfile
import threading
import time
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
from pydantic_core import to_json

from benchmarks import results
from benchmarks.recording import record_of
from service.control.report.hub import Hub
from service.control.report.ingest import Ingest
from service.control.report.tokens import TokenMint
from service.control.store.database import Database
from service.control.store.jobs import insert_job, set_columns
from service.wire.events import Record
from tests.service.control_plane import ControlPlane, spec
from tests.service.silent_run import Run, record
from tests.web.browser import open_browser

NUM_STEPS, NUM_PAGES = 100_000, 50
STEPS_PER_S, RUN_S = 20, 30
JOB = "job-benchmarkaaa"
LIMITS = {"first_paint_s": 1.0, "share_of_core": 0.05}
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime / 1000"
STREAM = "events?interval_s=2&loads=false"


def fill(database: Database) -> None:
    """A finished job of `NUM_STEPS` steps."""
    values = {
        "id": JOB, "owner": "me", "name": "long", "spec": to_json(spec()).decode(), "storage": "/nowhere",
        "state": "running", "reason": "", "num_steps": NUM_STEPS, "created_at": 0, "updated_at": 0, "queued_at": 0,
        "attempt": 1, "launch": "submitted",
    }  # fmt: skip
    with database.write() as tx:
        number = insert_job(tx, values, {}).number
    ingest = Ingest(database, Hub(), TokenMint(b"key"), on_phase=lambda: None)
    for first in range(0, NUM_STEPS, 5000):
        records = [
            Record(kind="metric", time=datetime.now(UTC), data=record_of(step + 1).to_plain())
            for step in range(first, first + 5000)
        ]
        ingest.take_over(JOB, 1, "group-0", first, records)
    with database.write() as tx:
        set_columns(tx, number, {"state": "succeeded", "launch": None, "finished_at": 1})


class Usage:
    """Processor time of the control plane's process."""

    def __init__(self, plane: ControlPlane) -> None:
        self._process = psutil.Process(plane.process.pid)
        self.began = self.cpu_s()

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def spent_s(self) -> float:
        return self.cpu_s() - self.began


def measure_job_page(plane: ControlPlane, browser: Any) -> list[dict[str, float]]:
    """Opened twice: after the control plane's start, and again."""
    figures = []
    for _ in range(2):
        context = browser.new_context()
        page, usage = context.new_page(), Usage(plane)
        began = time.perf_counter()
        page.goto(f"{plane.url}/jobs/{JOB}")
        page.wait_for_selector('[data-chart="Loss"] .u-over')
        drawn_s = time.perf_counter() - began
        figures.append({"first_paint_s": page.evaluate(PAINT), "curves_s": drawn_s, "server_cpu_s": usage.spent_s()})
        context.close()
    return figures


def measure_open_pages(plane: ControlPlane, num_pages: int) -> dict[str, float]:
    """Processor share of the control plane while a job records steps, with so many pages of it open."""
    run = Run(plane)
    received = [0] * num_pages

    def read(place: int) -> None:
        with httpx.stream("GET", f"{plane.url}/v1/jobs/{run.id}/{STREAM}", timeout=None) as answer:
            for data in answer.iter_raw():
                received[place] += len(data)

    threads = [threading.Thread(target=read, args=(place,)) for place in range(num_pages)]
    for thread in threads:
        thread.start()
    while not all(received):  # the first events of each
        time.sleep(0.05)
    usage, began = Usage(plane), time.perf_counter()
    for seq in range(0, STEPS_PER_S * RUN_S, STEPS_PER_S):
        records = [record("metric", **record_of(step + 1).to_plain()) for step in range(seq, seq + STEPS_PER_S)]
        assert run.send(seq, *records).status_code == 200
        time.sleep(max(0.0, began + seq / STEPS_PER_S + 1 - time.perf_counter()))
    elapsed_s, cpu_s = time.perf_counter() - began, usage.spent_s()
    run.end()
    for thread in threads:
        thread.join()
    return {"share_of_core": cpu_s / elapsed_s, "kilobytes_per_page": sum(received) / max(1, num_pages) / 1000}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plane = ControlPlane(Path(folder)).start()
        stack.callback(plane.close)
        plane.terminate()
        with closing(Database(f"sqlite:///{plane.database}")) as database:
            fill(database)
        plane.start()
        browser = stack.enter_context(open_browser())
        job_page = measure_job_page(plane, browser)
        browser.close()
        without, with_pages = (measure_open_pages(plane, number) for number in (0, NUM_PAGES))
    share = with_pages["share_of_core"] - without["share_of_core"]
    for name, figures in zip(("after the start", "again"), job_page, strict=True):
        paints = f"first paint {figures['first_paint_s']:.2f} s, curves drawn {figures['curves_s']:.2f} s"
        cpu_s = figures["server_cpu_s"]
        print(f"a job of {NUM_STEPS:,} steps, {name}: {paints}, {cpu_s:.2f} s of the server's processor time")
    print(f"{NUM_PAGES} open pages of a job with {STEPS_PER_S} steps/s: {share:.1%} of a core more than the "
          f"{without['share_of_core']:.1%} without them")  # fmt: skip
    figures = {
        "num_steps": NUM_STEPS, "num_pages": NUM_PAGES, "steps_per_s": STEPS_PER_S,
        "job_page_after_start": job_page[0], "job_page_again": job_page[1],
        "without_pages": without, "with_pages": with_pages, "added_share_of_core": share, "limits": LIMITS,
    }  # fmt: skip
    print(f"written to {results.write('job_page', figures)}")


if __name__ == "__main__":
    main()
