"""Progress of preparing data, on its way from the process that prepares."""

import json
from pathlib import Path

from service.run.preparation import PreparationProgress
from tests.procs.receiver import Receiver
from tests.procs.recording import recorder


def test_progress_is_recorded_at_each_stage_and_seldom_within_one(tmp_path: Path, node: Path) -> None:
    now = 1_000.0
    receiver = Receiver().start()
    try:
        run = recorder(receiver.url, str(tmp_path / "storage"), "driver")
        progress = PreparationProgress(run, lambda: now)
        for tenth in range(100):
            now = 1_000.0 + tenth / 10
            progress("reading", tenth / 200, 1_000 * tenth)
        progress("encoding", 0.5, 0)
        progress("encoding", None, 7_000)
        now += 2.5
        progress("encoding", None, 12_000)
        run.close()
        told = [record["data"] for record in receiver.records["driver"] if record["kind"] == "log"]
    finally:
        receiver.stop()
    assert [data["preparing"]["stage"] for data in told] == ["reading"] * 5 + ["encoding"] * 2
    assert told[1]["preparing"] == {"stage": "reading", "share": 0.1, "num_done": 20_000, "seconds": 2.0}
    assert told[1]["message"] == "preparing data: reading, 10%"
    assert told[-1]["message"] == "preparing data: encoding, 12,000 texts"
    assert json.loads(json.dumps(told)) == told
