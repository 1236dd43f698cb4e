"""Steps on the rehearsal device of which one is not finite."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from moe.parallel import Layout, buffers_of
from moe.records import StepRecord
from moe.spec import JobSpec, TrainSpec, TranslationModelSpec
from moe.tasks.task import Loss
from moe.tasks.translation import TranslationTask
from moe.train.nonfinite import NonFiniteLoss, first_fault
from moe.train.optimizer.build import moments
from moe.train.recorder import MemoryRecorder
from moe.train.signals import Signals
from moe.train.step import step
from moe.train.train_state import TrainState
from tests.parity.trajectory import Degrees, Shape, rank_batch, state_of
from tests.rehearsal.device import BACKLOGS, WAITS, register
from tests.unit import train_runs

DIVERGES_AT = 3
"""Number of the step that is not finite, from 1."""


@dataclass(frozen=True)
class Divergence:
    """Results of steps up to the divergence, and of another one that was launched before its record was read."""

    records: list[StepRecord]
    """Up to the one that is not finite."""
    tensors: dict[str, Tensor]
    """What checkpoints contain, and narrow copies of weights, as they are at the end."""
    fault: str | None
    num_waits: int
    """Waits of the host in a step, without those of its layers."""


def diverge(
    model: TranslationModelSpec,
    train: TrainSpec,
    degrees: Degrees,
    part: str,
    device_decides: bool,
    device: str | None = None,
) -> Divergence:
    """Steps in which, on rank 0 only, `part` of a step is infinite: the loss, or the gradient of a parameter. Unless
    the device decides whether to update, the host does, by the step's record. `device`: the rehearsed one if None."""
    plan, shape = degrees.plan(num_groups=4), Shape(groups=4)
    layout = Layout.build(plan, register() if device is None else device)
    state = state_of(model, train, layout)
    if not device_decides:
        state = replace(state, found_inf=None)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        _make_infinite(state, part)
    results, batches = [], []
    for number in range(1, DIVERGES_AT + 1 + device_decides):
        batches.append(rank_batch(layout, plan, shape, model.source_vocab_size, number))
        with WAITS.count() as waits:
            results.append(step(state, batches[-1], Signals()))
    num_waits = sum(number for (_, place), number in waits.items() if "moe/dispatch" not in place)
    tensors = _tensors_of(state)
    records = [result.record for result in results[:DIVERGES_AT]]
    fault = first_fault(state, batches[DIVERGES_AT - 1])
    layout.close()
    return Divergence([_without_traffic(record) for record in records], tensors, fault, num_waits)


def _make_infinite(state: TrainState, part: str) -> None:
    """Make a part of step `DIVERGES_AT` infinite."""
    task_loss, current = state.task.loss, {"step": 0}

    def loss(model: nn.Module, micro_batch: Any) -> Loss:
        current["step"] = micro_batch.context.step
        result = task_loss(model, micro_batch)
        return _infinite_loss(result, current["step"]) if part == "loss" else result

    state.task.loss = loss  # type: ignore[method-assign]
    for parameter in state.parameters:
        if parameter.name == part:
            parameter.parameter.register_hook(
                lambda gradient: gradient * float("inf") if current["step"] == DIVERGES_AT else gradient
            )


def _tensors_of(state: TrainState) -> dict[str, Tensor]:
    tensors = {parameter.name: parameter.local for parameter in state.parameters}
    tensors |= dict(state.model.named_buffers())
    for name, slot, tensor, _ in moments(state.optimizer, state.parameters):
        tensors[f"{slot}.{name}"] = tensor
    if state.average is not None:
        tensors |= {f"ema.{index}": tensor for index, tensor in enumerate(state.average.tensors)}
    for parameter in state.parameters:
        buffers = buffers_of(parameter.parameter)
        if buffers is not None and (copy := buffers.begin_refresh(parameter.parameter)) is not None:
            tensors[f"narrow.{parameter.name}"] = copy
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _without_traffic(record: StepRecord) -> StepRecord:
    layers = tuple(replace(layer, all_to_all_s=None, waiting_s=None) for layer in record.layers)
    return replace(record, layers=layers)


def diverging_runs(spec: JobSpec, folder: Path) -> dict[str, dict[str, Any]]:
    """Error, recorded steps and backlogs of a run whose loss is infinite in step `DIVERGES_AT`, on the CPU and on the
    device."""
    results, task_loss = {}, TranslationTask.loss

    def loss(task: TranslationTask, model: nn.Module, micro_batch: Any) -> Loss:
        return _infinite_loss(task_loss(task, model, micro_batch), micro_batch.context.step + 1)

    for device in ("cpu", str(register())):
        recorder = MemoryRecorder()
        BACKLOGS.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TranslationTask, "loss", loss)
            try:
                train_runs.run(spec, folder / device, folder / "cache", device=device, recorder=recorder)
            except NonFiniteLoss as error:
                results[device] = {
                    "error": vars(error), "steps": train_runs.course(recorder),
                    "backlogs": [number for place, number in BACKLOGS if "totals" in place],
                }  # fmt: skip
    return results


def _infinite_loss(loss: Loss, step: int) -> Loss:
    return replace(loss, objective=loss.objective * float("inf")) if step == DIVERGES_AT else loss
