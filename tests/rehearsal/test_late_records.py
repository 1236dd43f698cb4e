"""The host reads a step's record when the next step is launched, and a step that is not finite updates nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.spec import AdafactorSpec, AdamWSpec, MuonSpec
from tests.parity.combinations import ROUTERS, model_of, train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees
from tests.rehearsal.divergence import DIVERGES_AT, Divergence, diverge, diverging_runs
from tests.unit.train_runs import corpus, job

OPTIMIZERS = {
    "adamw": AdamWSpec(name="adamw", peak_lr=1e-2, weight_decay=0.1),
    "moments in bfloat16": AdamWSpec(name="adamw", peak_lr=1e-2, moments="bfloat16", weight_decay=0.1),
    "moments in 8 bits": AdamWSpec(name="adamw", peak_lr=1e-2, moments="8bit", weight_decay=0.1),
    "moments on the host": AdamWSpec(name="adamw", peak_lr=1e-2, offload=True),
    "adafactor": AdafactorSpec(name="adafactor", peak_lr=1e-2, weight_decay=0.1),
    "muon": MuonSpec(name="muon", peak_lr=1e-2, weight_decay=0.1),
}
WITH_STATE = ("sigmoid with bias, in groups", "softmax, balanced over the batch")
"""Routers whose state changes at the end of a step: a bias, and loads."""
PARTS = ("loss", "encoder_norm.weight")
LAYOUTS = (
    Degrees(micro_batch_groups=2), Degrees(data=2, fsdp=2, expert_fsdp=2), Degrees(expert=2),
    Degrees(expert=2, tensor=2),
)  # fmt: skip


def cases() -> Iterator[Any]:
    for number, optimizer in enumerate(OPTIMIZERS):
        for place, degrees in enumerate(LAYOUTS):
            dtype, router = ("bfloat16", "float64")[place % 2], WITH_STATE[(number + place) % 2]
            yield pytest.param(optimizer, dtype, router, PARTS[place // 2], degrees, id=f"{optimizer}, {degrees}")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("optimizer", "dtype", "router", "part", "degrees"), [*cases()])
def test_a_device_decides_as_the_host_does(
    ranks: Pools, optimizer: str, dtype: str, router: str, part: str, degrees: Degrees
) -> None:
    """Bit for bit, also after a further step that is finite."""
    train = train_of(dtype, optimizer=OPTIMIZERS[optimizer], ema_decay=0.5, clip_norm=0.1)
    by_device, by_host = (
        ranks[degrees.workers].run(diverge, model_of(**ROUTERS[router]), train, degrees, part, device_decides)
        for device_decides in (True, False)
    )
    for late, immediate in zip(by_device, by_host, strict=True):
        assert_equal(late, immediate)
        assert not late.records[-1].is_finite
        assert late.records[DIVERGES_AT - 2].is_finite
        is_waiting = optimizer == "moments on the host"
        assert (late.num_waits > 0) == is_waiting, late.num_waits
    assert len({divergence.fault for divergence in by_device}) == 1
    assert "gradient of" in (by_device[0].fault or "")


def assert_equal(late: Divergence, immediate: Divergence) -> None:
    assert [repr(record) for record in late.records] == [repr(record) for record in immediate.records]  # nan == nan
    assert late.fault == immediate.fault
    assert late.tensors.keys() == immediate.tensors.keys()
    for name, tensor in late.tensors.items():
        assert torch.equal(tensor, immediate.tensors[name]), name


def test_a_run_that_diverges_ends_as_on_a_cpu(ranks: Pools, tmp_path: Path) -> None:
    spec = job(corpus(tmp_path), train={"num_steps": 50, "dtype": "float64"}, checkpoint={"every_steps": 2})
    (results,) = ranks[1].run(diverging_runs, spec, tmp_path)
    cpu, device = results.values()
    assert cpu["error"] == device["error"]
    assert cpu["error"]["step"] == DIVERGES_AT
    assert cpu["error"]["last_checkpoint"] == f"step-{DIVERGES_AT - 1:08d}.a1.g0"
    for result in (cpu, device):
        assert [step["step"] for step in result["steps"]] == list(range(1, DIVERGES_AT))
    # Records are read when the next step is launched; before a checkpoint also the last, with only its update to do.
    assert cpu["backlogs"] == []
    is_step = [backlog > 3 * min(device["backlogs"]) for backlog in device["backlogs"]]
    assert is_step == [True, False] * 2, device["backlogs"]
