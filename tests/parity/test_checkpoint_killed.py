"""A rank killed in the middle of a run: nothing half-committed counts, and the next group takes the same course."""

import subprocess
import sys
import time

from moe.train import marker as markers
from moe.train.folder import Folder
from tests.unit.train_runs import corpus, course, job, run

_DEADLINE_S = 90
_WORKER = """
import sys
import torch.distributed as dist
from moe.spec import JobSpec
from tests.unit.train_runs import run
rank, rendezvous, spec, storage, cache = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=2)
run(JobSpec.model_validate_json(spec), storage, cache, group=0)
"""


def start(spec, storage, cache, rendezvous):
    """Two processes of a run, which the test may kill."""
    arguments = [str(rendezvous), spec.model_dump_json(), str(storage), str(cache)]
    return [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(rank), *arguments], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]


def course_of(spec, storage, cache, group):
    """(steps, first log line) of a run on these ranks to its end."""
    outcome, recorder = run(spec, storage, cache, group=group)
    assert outcome.kind == "succeeded"
    return course(recorder), [line["message"] for line in recorder.logs]


def test_a_killed_rank_costs_only_the_steps_since_the_last_commit(ranks, tmp_path):
    spec = job(
        corpus(tmp_path),
        workers=2,
        expert=2,
        train={"num_steps": 60},
        checkpoint={"every_steps": 3, "keep": 2},
    )
    storage, cache = tmp_path / "killed", tmp_path / "cache"
    undisturbed, _ = ranks[2].run(course_of, spec, tmp_path / "whole", cache, 0)[0]

    workers = start(spec, storage, cache, tmp_path / "rendezvous")
    try:
        checkpoints, deadline = Folder(f"{storage}/checkpoints"), time.monotonic() + _DEADLINE_S
        while len(markers.committed(checkpoints)) < 2:
            assert time.monotonic() < deadline
            assert workers[1].poll() is None, workers[1].communicate()
            time.sleep(0.005)
        workers[1].kill()
        _, errors = workers[0].communicate(timeout=_DEADLINE_S)  # the survivor does not wait for ever
        assert workers[0].returncode != 0
        assert "RuntimeError" in errors
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()

    resumed_at = markers.order(markers.committed(checkpoints)[0])[0]
    rest, logs = ranks[2].run(course_of, spec, storage, cache, 1)[0]
    assert logs[0].startswith(f"resumed at step {resumed_at} from ")
    assert rest == undisturbed[resumed_at:]
    names = checkpoints.names()
    assert [name for name in names if name.endswith(markers.SUFFIX)] == [
        f"step-00000057.a1.g1{markers.SUFFIX}", f"step-00000060.a1.g1{markers.SUFFIX}",
    ]  # fmt: skip
    assert len(names) == 4  # nothing is left of what the killed group had not committed
