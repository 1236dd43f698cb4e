"""Cost of recording a step: its record and the call, and the processor time of the threads behind it.

Records are those of the demo's model (two MoE layers of eight experts), one every 50 ms, with the control plane
down: the sender then retries, which costs it most. The limit is 1% of a 50 ms step.
"""

import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import results
from moe.records import LayerRecord, StepRecord
from service.run.recorder import SpoolRecorder

STEP_S, STEPS = 0.05, 400


def record_of(step: int) -> StepRecord:
    """The record of a step as the demo's training loop makes it."""
    layers = tuple(
        LayerRecord(
            layer=layer, load=tuple(130 + expert for expert in range(8)), max_over_mean=1.234567,
            rejected=0.1234567, dropped=0.01234567, entropy=1.234567, aux_loss=1.0123456789, z_loss=4.0123456789,
            all_to_all_bytes=1234567, all_to_all_s=0.00123456789, waiting_s=0.00123456789,
        )
        for layer in (1, 3)
    )  # fmt: skip
    return StepRecord(
        step=step, loss=4.123456789 / step, nll=3.987654321 / step, aux_loss=1.0123456789, z_loss=4.0123456789,
        layers=layers, grad_norm=1.23456789, lr=0.00123456789, tokens=947, step_s=0.05, tokens_per_s=12345.678,
        data_s=0.00001234, time=datetime.now(UTC).isoformat(),
    )  # fmt: skip


def main() -> None:
    calls_s = []
    with tempfile.TemporaryDirectory() as storage:
        recorder = SpoolRecorder(
            job_id=f"job-bench{Path(storage).name[-8:]}", attempt=1, storage=storage, token="none",
            events_url="http://127.0.0.1:9", name="g0.rank-0", speaks=True, sweeps=True,
        )  # fmt: skip
        cpu_began, thread_began = time.process_time(), time.thread_time()
        due = time.perf_counter()
        for step in range(1, STEPS + 1):
            began = time.perf_counter()
            recorder.metric(record_of(step))
            calls_s.append(time.perf_counter() - began)
            due += STEP_S
            time.sleep(max(0.0, due - time.perf_counter()))
        behind_s = (time.process_time() - cpu_began) - (time.thread_time() - thread_began)
        recorder.close(patience_s=0.1)
    calls_s.sort()
    figures = {
        "records": STEPS,
        "call_ms_median": 1e3 * statistics.median(calls_s),
        "call_ms_p99": 1e3 * calls_s[int(0.99 * STEPS)],
        "call_share_of_50_ms_step": statistics.mean(calls_s) / STEP_S,
        "background_cpu_ms_a_step": 1e3 * behind_s / STEPS,
        "background_cpu_share_of_50_ms_step": behind_s / STEPS / STEP_S,
        "limit_share": 0.01,
    }
    print(f"recording a step: {figures['call_ms_median']:.3f} ms (99th percentile {figures['call_ms_p99']:.3f} ms), "
          f"{figures['call_share_of_50_ms_step']:.2%} of a 50 ms step; behind it "
          f"{figures['background_cpu_share_of_50_ms_step']:.2%} of a core (limit for the step: 1%)")  # fmt: skip
    print(f"written to {results.write('recording', figures)}")


if __name__ == "__main__":
    main()
