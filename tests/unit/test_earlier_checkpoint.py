"""A run continues from a checkpoint of an earlier release: its steps are those that the earlier release would have
made."""

import json
import shutil
from pathlib import Path

import pytest

from moe.spec import JobSpec
from moe.train.checkpoint.spec_changes import SPEC
from tests.parity.gloo_ranks import Pools
from tests.unit.train_runs import corpus, course, prepare_pairs, rewrite, run

KEPT = Path(__file__).parents[1] / "golden" / "checkpoint"
"""Of the commit 8f91a9a: step 2 of 4 in float64, and the loss and gradient norm of each step of its own whole run."""
STEP = KEPT / "checkpoints" / "step-00000002.a1.g0"


def resume(spec: JobSpec, folder: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each later step."""
    _, recorder = run(spec, folder / "storage", folder / "cache", attempt=2)
    return [(step["loss"], step["grad_norm"]) for step in course(recorder)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_checkpoint_of_an_earlier_release_goes_on(tmp_path: Path, workers: int) -> None:
    """In one process, and with its experts on two. The checkpoint's spec and state are rewritten for a corpus in
    another folder."""
    body, storage = json.loads((STEP / SPEC).read_text()), tmp_path / "storage"
    body["data"]["paths"] = corpus(tmp_path)["paths"]
    spec = JobSpec.parse({**body, "parallel": {"expert": workers}})
    key = prepare_pairs(spec, tmp_path / "cache").key
    state = json.loads((STEP / "run.json").read_text())
    state["data"]["prepared"] = key
    shutil.copytree(KEPT, storage)
    rewrite(storage, SPEC, lambda _: json.dumps(body).encode())
    rewrite(storage, "run.json", lambda _: json.dumps(state).encode())

    pools = Pools()
    actual = resume(spec, tmp_path) if workers == 1 else pools[workers].run(resume, spec, tmp_path)[0]
    pools.close()
    expected = [tuple(step) for step in json.loads((KEPT / "losses.json").read_text())]
    assert actual == [pytest.approx(step, rel=1e-10) for step in expected[2:]]
