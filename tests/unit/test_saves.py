"""What a job shows of its checkpoints while they are written and while they fail."""

from datetime import UTC, datetime

from service.control.report.saves import Saves
from service.wire.events import Record

TIME = datetime(2026, 1, 1, tzinfo=UTC)


def after(saves: Saves, *results: tuple[int, str | None]) -> Saves:
    """Saves after checkpoints of these steps, with the reason of those that failed."""
    for number, (step, reason) in enumerate(results):
        kind = "checkpoint" if reason is None else "checkpoint_failed"
        data = {"step": step, "name": f"step-{step}", "size_bytes": 7} if reason is None else {"reason": reason}
        saves = saves.after(Record(writer="group-0", seq=number, time=TIME, kind=kind, data=data), step)
    return saves


def test_consecutive_failures_are_counted_until_a_checkpoint_is_written() -> None:
    saves = after(Saves(), (10, "disk full"), (20, "disk full"))
    assert saves.failed is not None
    assert (saves.failed.num_failed, saves.failed.step, saves.committed) == (2, 20, None)
    assert "20" in saves.trouble()
    saves = after(saves, (30, None))
    assert saves.committed is not None
    assert (saves.committed.step, saves.trouble()) == (30, "")
    saves = after(saves, (40, "disk full"))
    assert saves.failed is not None
    assert saves.failed.num_failed == 1, "the failures before step 30 were of another series"
    assert "30" in saves.trouble()
