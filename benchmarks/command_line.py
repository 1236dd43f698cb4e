"""CPU time of commands that only read: how long a user waits for them on a machine that is busy with training.

They query a fake control plane with one page of jobs, so that only the command itself is measured.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from benchmarks import results

LIMIT_S = 0.4
RUNS = 15
JOB = {
    "id": "job-aaaaaaaaaaaa", "name": "translate-100-to-english", "state": "running", "reason": "", "step": 1_200,
    "num_steps": 2_200, "created_at": "2026-01-31T12:00:05.000000Z", "attempt": 1, "storage": "/storage/job",
    "last_metric": {"step": 1_200, "loss": 2.5, "tokens_per_s": 11_640.0, "lr": 2.5e-3},
}  # fmt: skip
COMMANDS = (("--help",), ("ls",), ("show", "job-aaaaaaaaaaaa"))


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body: dict[str, Any] = {"items": [JOB] * 20, "next_cursor": "bjE", "total": 2_004}
        data = json.dumps(body if self.path.startswith("/v1/jobs?") else JOB).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    seconds: dict[str, dict[str, float]] = {}
    with _serving() as url:
        for words in COMMANDS:
            runs = sorted(cpu_seconds(words, url) for _ in range(RUNS))
            seconds[words[0]] = {"least": round(runs[0], 3), "median": round(runs[RUNS // 2], 3)}
            print(f"shardyard {' '.join(words):<25} {runs[0]:.3f} s least, {runs[RUNS // 2]:.3f} s median of CPU "
                  f"(limit {LIMIT_S:g})", flush=True)  # fmt: skip
    print(results.write("command_line", {"limit_s": LIMIT_S, "runs": RUNS, "cpu_s": seconds}))


def cpu_seconds(words: tuple[str, ...], url: str) -> float:
    """User and system time of one run; its output is discarded."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "service.cli.main", *words],
            {**os.environ, "SHARDYARD_URL": url},
            file_actions=[(os.POSIX_SPAWN_DUP2, nowhere, 1)],
        )
        _, status, usage = os.wait4(pid, 0)
    finally:
        os.close(nowhere)
    if status:
        raise RuntimeError(f"shardyard {' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
    return usage.ru_utime + usage.ru_stime


@contextmanager
def _serving() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    main()
