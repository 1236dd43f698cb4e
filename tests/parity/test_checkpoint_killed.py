"""A rank killed in the middle of a run: only committed checkpoints count, and the next group takes the same course."""

import os
import time
from contextlib import contextmanager
from random import Random

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from moe.export.hub import save_checkpoint_as_folder
from moe.interchange.expand import expand
from moe.interface import LOOPBACK, listen_on
from moe.spec import JobSpec
from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.parts import StoredParts
from tests.interchange.test_jobs import mixtral, stored_in
from tests.parity.gloo_ranks import forkserver_with_torch
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


@contextmanager
def two_ranks(spec, storage, cache, rendezvous):
    """(processes of a run, one of which the test kills, and a pipe on which a rank reports its error)"""
    context = forkserver_with_torch()
    parent_pipe, child_pipe = context.Pipe()
    arguments = (spec, str(storage), str(cache), str(rendezvous), child_pipe)
    workers = [context.Process(target=work, args=(rank, *arguments)) for rank in range(2)]
    for worker in workers:
        worker.start()
    child_pipe.close()
    try:
        yield workers, parent_pipe
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def await_committed(checkpoints, has_come, worker, answer):
    """Poll for committed checkpoints: a marker on storage notifies nobody."""
    deadline = time.monotonic() + _DEADLINE_S
    while not has_come(markers.list_committed(checkpoints)):
        assert time.monotonic() < deadline
        assert worker.is_alive(), answer.poll() and answer.recv()
        time.sleep(0.005)


def newest_step(checkpoints):
    return markers.order(markers.list_committed(checkpoints)[0])[0]


def course_of(spec, storage, cache, group):
    """(steps, first log line) of a run on these ranks to its end."""
    outcome, recorder = run(spec, storage, cache, group=group)
    assert outcome.kind == "succeeded"
    return course(recorder), [line["message"] for line in recorder.logs]


@pytest.mark.slow
@pytest.mark.parametrize("build_job", [translation, language])
def test_a_killed_rank_costs_only_the_steps_since_the_last_commit(ranks, tmp_path, build_job):
    spec = build_job(tmp_path)
    storage, cache = tmp_path / "killed", tmp_path / "cache"
    expected_course, _ = ranks[2].run(course_of, spec, tmp_path / "whole", cache, 0)[0]
    checkpoints = Folder(f"{storage}/checkpoints")
    with two_ranks(spec, storage, cache, tmp_path / "rendezvous") as (workers, answer):
        await_committed(checkpoints, lambda names: len(names) >= 2, workers[1], answer)
        workers[1].kill()
        assert answer.poll(_DEADLINE_S), "the survivor waits for ever"
        assert "rank 0 of 2" in answer.recv()

    resumed_at = newest_step(checkpoints)
    rest, logs = ranks[2].run(course_of, spec, storage, cache, 1)[0]
    assert logs[0].startswith(f"resumed at step {resumed_at} from ")
    assert rest == expected_course[resumed_at:]
    names = checkpoints.names()
    assert [name for name in names if name.endswith(markers.SUFFIX)] == [
        f"step-00000027.a1.g1{markers.SUFFIX}", f"step-00000030.a1.g1{markers.SUFFIX}",
    ]  # fmt: skip
    assert len(names) == 4  # nothing is left that the killed group had not committed


def fine_tune(folder):
    """A job that trains an adapter with dropout on experts and attention of two ranks."""
    mixtral(folder / "hub", dtype=torch.float32)
    raw_job = {
        "name": "fine-tune", "data": documents(folder / "data"),
        "model": {"from": str(folder / "hub"), "moe": {"group_tokens": 128}},
        "adapter": {"rank": 2, "dropout": 0.2},
        "train": {"num_steps": 12, "batch_tokens": 256, "optimizer": {"name": "adamw", "peak_lr": 1e-2}},
        "resources": {"num_workers": 2}, "parallel": {"expert": 2}, "checkpoint": {"every_steps": 1, "keep": 3},
    }  # fmt: skip
    return JobSpec.parse(expand(raw_job, None))


def adapter_of(storage, folder):
    """Tensors of the adapter of a finished run."""
    save_checkpoint_as_folder(str(stored_in(storage, 12)), folder)
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.grid) for seed in range(1, 6))])
def test_a_killed_fine_tune_goes_on_to_the_same_losses_and_adapter(ranks, tmp_path, seed):
    random, spec = Random(f"killed {seed}"), fine_tune(tmp_path)
    storage, cache = tmp_path / "killed", tmp_path / "cache"
    expected_course, _ = ranks[2].run(course_of, spec, tmp_path / "whole", cache, 0)[0]
    step, looks, rank = random.randint(1, 9), random.randint(0, 200), random.randint(0, 1)
    checkpoints = Folder(f"{storage}/checkpoints")
    with two_ranks(spec, storage, cache, tmp_path / "rendezvous") as (workers, answer):
        has_come = lambda names: names and markers.order(names[0])[0] >= step  # noqa: E731
        await_committed(checkpoints, has_come, workers[rank], answer)
        for _ in range(looks):  # at some point within a step or while its files are written
            markers.list_committed(checkpoints)
        workers[rank].kill()
        workers[rank].join()

    resumed_at = newest_step(checkpoints)
    assert step <= resumed_at < 12
    step_folder = Folder(str(stored_in(storage, resumed_at)))
    assert all(name.endswith(("_lora_a", "_lora_b")) for name in StoredParts(step_folder).names())
    rest, logs = ranks[2].run(course_of, spec, storage, cache, 1)[0]
    assert any(line.startswith(f"resumed at step {resumed_at} from ") for line in logs)
    assert rest == expected_course[resumed_at:]
    actual, expected = adapter_of(storage, tmp_path / "ours"), adapter_of(tmp_path / "whole", tmp_path / "theirs")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
