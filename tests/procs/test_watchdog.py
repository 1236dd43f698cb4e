"""A run that lives and gets nowhere is noticed, and one that only takes its time is not."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from moe.spec import JobSpec
from service.run.spool import Seals, Spool
from service.run.watchdog import Watchdog


class Run:
    """Rank 0 of one group, as its sealed records show it."""

    def __init__(self, tmp_path: Path, group: int) -> None:
        self._spool = Spool(tmp_path / f"node-{group}", "jsonl")
        self._seals = Seals(str(tmp_path / "storage"), "metrics", f"a1.g{group}")

    def says(self, kind: str, **data: object) -> None:
        line = json.dumps({"seq": self._spool.num_lines, "kind": kind, "data": data}).encode() + b"\n"
        self._spool.append(lambda _seq: line)
        self._spool.roll()
        for segment in self._spool.complete():
            self._seals.seal(segment)


def _spec(num_steps: int, **changes: Any) -> JobSpec:
    train = {"num_steps": num_steps, "batch_tokens": 1024, **changes.pop("train", {})}
    return JobSpec.parse(
        {"name": "small", "model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"},
         "train": train, **changes}
    )  # fmt: skip


def test_only_silence_between_the_first_step_and_the_last_counts(tmp_path: Path) -> None:
    watchdog = Watchdog(str(tmp_path / "storage"), 1, _spec(num_steps=10), patience_s=0)
    run = Run(tmp_path, 0)
    assert watchdog.stalled(group_runs=True) is None
    run.says("started", group=0)
    assert watchdog.stalled(group_runs=True) is None  # it prepares data, or builds the model
    run.says("metric", step=1, step_s=0.0)
    watchdog.stalled(group_runs=True)
    assert watchdog.stalled(group_runs=True) is None  # what storage did not take before may be on its way
    stuck = watchdog.stalled(group_runs=True)
    assert stuck is not None
    assert "no step after step 1" in stuck
    run.says("metric", step=10, step_s=0.0)
    for _ in range(3):
        assert watchdog.stalled(group_runs=True) is None  # it evaluates


def test_a_segment_of_tiny_lines_takes_no_more_room_than_it_has_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "storage/metrics/a1.g0"
    folder.mkdir(parents=True)
    line = b'{"kind":""}\n'
    (folder / "segment-00000000.jsonl").write_bytes(line * ((1 << 20) // len(line)))
    watchdog = Watchdog(str(tmp_path / "storage"), 1, _spec(num_steps=10))
    tracemalloc.start()
    try:
        assert watchdog.stalled(group_runs=True) is None
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_a_slow_step_has_its_time(tmp_path: Path) -> None:
    watchdog = Watchdog(str(tmp_path / "storage"), 1, _spec(num_steps=10), patience_s=0)
    Run(tmp_path, 0).says("metric", step=1, step_s=60.0)
    for _ in range(3):
        assert watchdog.stalled(group_runs=True) is None


@pytest.mark.parametrize(
    "due",
    [{"checkpoint": {"every_steps": 4}}, {"train": {"evaluation": {"every_steps": 5}}}],
    ids=["checkpoint", "evaluation"],
)
def test_checkpoints_and_evaluations_take_what_they_take(tmp_path: Path, due: dict[str, Any]) -> None:
    watchdog = Watchdog(str(tmp_path / "storage"), 1, _spec(num_steps=10, **due), patience_s=0)
    run = Run(tmp_path, 0)
    run.says("metric", step=4, step_s=0.0)  # a checkpoint may be waited for; step 5 ends with an evaluation
    for _ in range(3):
        assert watchdog.stalled(group_runs=True) is None
    run.says("metric", step=5, step_s=0.0)
    watchdog.stalled(group_runs=True)
    watchdog.stalled(group_runs=True)
    assert watchdog.stalled(group_runs=True) is not None


def test_storage_that_takes_nothing_is_no_sign_of_a_stuck_run(tmp_path: Path) -> None:
    watchdog = Watchdog(str(tmp_path / "storage"), 1, _spec(num_steps=10), patience_s=0)
    run = Run(tmp_path, 0)
    run.says("metric", step=1, step_s=0.0)
    watchdog.stalled(group_runs=True)
    metrics = tmp_path / "storage/metrics"
    (metrics / ".probe").mkdir()  # nothing can be written under that name
    for _ in range(3):
        with pytest.raises(OSError, match="probe"):
            watchdog.stalled(group_runs=True)
    (metrics / ".probe").rmdir()
    assert watchdog.stalled(group_runs=True) is None
    assert watchdog.stalled(group_runs=True) is not None
    assert [path.name for path in metrics.iterdir()] == ["a1.g0"]


def test_a_group_that_is_made_anew_starts_afresh(tmp_path: Path) -> None:
    watchdog = Watchdog(str(tmp_path / "storage"), 1, _spec(num_steps=10), patience_s=0)
    Run(tmp_path, 0).says("metric", step=4, step_s=0.0)
    watchdog.stalled(group_runs=True)
    assert watchdog.stalled(group_runs=False) is None
    Run(tmp_path, 1).says("started", group=1)
    for _ in range(3):
        assert watchdog.stalled(group_runs=True) is None
