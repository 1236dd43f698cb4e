"""Time from the end of a step on the worker to its event at a client of the stream, for the demo's job.

Both are on this machine and use the same clock: a metric's `time` is the end of its step, and the client's time is that
of receiving the event.
"""

import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path

from benchmarks import results
from benchmarks.launch_time import EXAMPLE, serve
from moe.spec import read_job

STEPS = 400


def delays_s() -> list[float]:
    """Delay in seconds of each of the first `STEPS` steps' events."""
    delays: list[float] = []
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as (client, _head):
        job = client.submit(read_job(EXAMPLE))
        events = job.events()
        for event in events:
            if event.kind == "metric":
                delays.append(time.time() - datetime.fromisoformat(event.data["time"]).timestamp())
            if len(delays) == STEPS:
                break
        events.close()
        job.cancel()
        job.wait(120)
    return delays


def main() -> None:
    delays = sorted(delays_s())
    figures = {
        "steps": len(delays),
        "p50_s": round(statistics.median(delays), 3),
        "p95_s": round(delays[int(0.95 * len(delays))], 3),
        "max_s": round(delays[-1], 3),
        "limit_p95_s": 1.0,
    }
    print(
        f"end of a step to its event at a client: median {figures['p50_s']:.3f} s, 95th percentile "
        f"{figures['p95_s']:.3f} s, at most {figures['max_s']:.3f} s over {figures['steps']} steps (limit 1 s)"
    )
    print(f"written to {results.write('stream_delay', figures)}")


if __name__ == "__main__":
    main()
