"""Pages of a log of ten million lines: the newest lines, a rare text and a rare level, page after page for a minute.

The log is on a local disk, in segments of a megabyte from four writers. Each page reads and searches a bounded part; a
search reads on by the cursor of the page before. Times are those of HTTP requests, on a machine that others use too.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from benchmarks import results
from service.control.report.log_pages import PAGE_BYTES, PAGE_S
from tests.service.control_plane import ControlPlane
from tests.service.silent_run import Run
from tests.service.test_streams import write_log

NUM_WRITERS, NUM_SEGMENTS, LINES_PER_SEGMENT = 4, 250, 10_000
NUM_LINES = NUM_WRITERS * NUM_SEGMENTS * LINES_PER_SEGMENT
SEARCH_S = 40.0
BEGAN = datetime(2026, 1, 31, tzinfo=UTC)
NEEDLE_SEGMENTS = (3, 120, 247)
"""Segments of the first writer with a line that is searched for, and one of level `error`."""
QUERIES: dict[str, dict[str, Any]] = {
    "newest lines": {},
    "a text of three lines": {"grep": "needle"},
    "errors, of which there are three": {"level": "error", "worker": "g0.rank-0"},
    "errors among lines that look like one": {"level": "error", "worker": "g0.rank-1"},
}


def write_segments(storage: Path) -> int:
    """Write the log; returns its bytes."""
    num_bytes = 0
    text = "".join(
        f"STAMP.{line * 100:06d}Z info    step {line:05d} of a second: the loss went down as it should, {line}\n"
        for line in range(LINES_PER_SEGMENT)
    )
    for segment in range(NUM_SEGMENTS):
        for writer in range(NUM_WRITERS):
            stamp = (BEGAN + timedelta(seconds=segment)).strftime("%Y-%m-%dT%H:%M:%S")
            lines = text.replace("STAMP", stamp)
            if writer == 0 and segment in NEEDLE_SEGMENTS:
                lines = lines.replace("info    step 00500", "error   needle    ", 1)
            if writer == 1:
                lines = lines.replace("the loss went down as it should", "no time or level: Z error is text")
            write_log(storage, f"a1.g0.rank-{writer}", segment, lines)
            num_bytes += len(lines)
    return num_bytes


def pages_of(plane: ControlPlane, job_id: str, query: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cursor = None
    while True:
        page = plane.http.get(f"/v1/jobs/{job_id}/logs/lines", params=query | ({"cursor": cursor} if cursor else {}))
        page.raise_for_status()
        yield page.json()
        if (cursor := page.json()["next_cursor"]) is None:
            return


def measure(plane: ControlPlane, job_id: str, query: dict[str, Any]) -> dict[str, Any]:
    """Of the first page, and of the pages down to the log's beginning, if anything is searched for, for `SEARCH_S`."""
    process = psutil.Process(plane.process.pid)
    seconds, num_lines, cpu_began = [], 0, process.cpu_times()
    began = time.perf_counter()
    for page in pages_of(plane, job_id, query):
        seconds.append(time.perf_counter() - began)
        num_lines += len(page["items"])
        assert page["next_cursor"] is None or page["searched_to"] is not None
        if not query or sum(seconds) >= SEARCH_S:
            break
        began = time.perf_counter()
    cpu = process.cpu_times()
    cpu_s = cpu.user + cpu.system - cpu_began.user - cpu_began.system
    return {
        "first_page_s": seconds[0], "slowest_page_s": max(seconds), "num_pages": len(seconds), "num_lines": num_lines,
        "is_searched_to_the_beginning": page["next_cursor"] is None, "all_pages_s": sum(seconds), "server_cpu_s": cpu_s,
        "server_memory_mb": process.memory_info().rss / 1e6,
    }  # fmt: skip


def measure_tail(plane: ControlPlane, job_id: str) -> dict[str, float]:
    began = time.perf_counter()
    answer = plane.http.get(f"/v1/jobs/{job_id}/logs", params={"tail": 200})
    answer.raise_for_status()
    assert len(answer.text.splitlines()) == 200
    return {"tail_s": time.perf_counter() - began}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, closing(ControlPlane(Path(folder)).start()) as plane:
        run = Run(plane)
        num_bytes = write_segments(run.storage)
        memory_mb = plane.memory_bytes() / 1e6
        pages = {}
        for name, query in QUERIES.items():
            pages[name] = figures = measure(plane, run.id, query)
            print(f"{name}: {figures}", flush=True)
        tail = measure_tail(plane, run.id)
        run.end()
    print(f"the last 200 lines as text: {tail['tail_s']:.2f} s; memory before all: {memory_mb:.0f} MB")
    all_figures = {"num_lines": NUM_LINES, "num_bytes": num_bytes, "page_bytes": PAGE_BYTES, "page_s": PAGE_S,
               "memory_mb_before": memory_mb, "pages": pages, **tail}  # fmt: skip
    print(f"written to {results.write('log_pages', all_figures)}")


if __name__ == "__main__":
    main()
