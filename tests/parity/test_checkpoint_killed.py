"""A rank killed in the middle of a run: nothing half-committed counts, and the next group takes the same course."""

import os
import time

import pytest
import torch.distributed as dist

from moe.interface import LOOPBACK, listen_on
from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from tests.parity.gloo_ranks import many_with_torch
from tests.unit.language_runs import documents, language_job
from tests.unit.train_runs import corpus, course, job, run

_DEADLINE_S = 300
_OFTEN = {"checkpoint": {"every_steps": 3, "keep": 2}, "parallel": {"expert": 2}}


def translation(folder):
    return job(corpus(folder), workers=2, train={"num_steps": 30}, **_OFTEN)


def language(folder):
    return language_job(documents(folder / "data"), num_steps=30, workers=2, **_OFTEN)


def work(rank, spec, storage, cache, rendezvous, answer):
    listen_on(LOOPBACK)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        run(spec, storage, cache, group=0)
    except RuntimeError as error:
        answer.send(str(error))
    os._exit(1)  # a group with a dead rank does not take part in its own shutdown


def start(spec, storage, cache, rendezvous):
    """Two processes of a run, which the test may kill, and where they say what went wrong."""
    context = many_with_torch()
    ours, theirs = context.Pipe()
    given = (spec, str(storage), str(cache), str(rendezvous), theirs)
    workers = [context.Process(target=work, args=(rank, *given)) for rank in range(2)]
    for worker in workers:
        worker.start()
    theirs.close()
    return workers, ours


def course_of(spec, storage, cache, group):
    """(steps, first log line) of a run on these ranks to its end."""
    outcome, recorder = run(spec, storage, cache, group=group)
    assert outcome.kind == "succeeded"
    return course(recorder), [line["message"] for line in recorder.logs]


@pytest.mark.parametrize("made", [translation, language])
def test_a_killed_rank_costs_only_the_steps_since_the_last_commit(ranks, tmp_path, made):
    spec = made(tmp_path)
    storage, cache = tmp_path / "killed", tmp_path / "cache"
    undisturbed, _ = ranks[2].run(course_of, spec, tmp_path / "whole", cache, 0)[0]

    workers, answer = start(spec, storage, cache, tmp_path / "rendezvous")
    try:
        checkpoints, deadline = Folder(f"{storage}/checkpoints"), time.monotonic() + _DEADLINE_S
        while len(markers.committed(checkpoints)) < 2:
            assert time.monotonic() < deadline
            assert workers[1].is_alive(), answer.poll() and answer.recv()
            time.sleep(0.005)
        workers[1].kill()
        assert answer.poll(_DEADLINE_S), "the survivor waits for ever"
        assert "rank 0 of 2" in answer.recv()
    finally:
        for worker in workers:
            worker.kill()
            worker.join()

    resumed_at = markers.order(markers.committed(checkpoints)[0])[0]
    rest, logs = ranks[2].run(course_of, spec, storage, cache, 1)[0]
    assert logs[0].startswith(f"resumed at step {resumed_at} from ")
    assert rest == undisturbed[resumed_at:]
    names = checkpoints.names()
    assert [name for name in names if name.endswith(markers.SUFFIX)] == [
        f"step-00000027.a1.g1{markers.SUFFIX}", f"step-00000030.a1.g1{markers.SUFFIX}",
    ]  # fmt: skip
    assert len(names) == 4  # nothing is left of what the killed group had not committed
