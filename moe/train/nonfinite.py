"""Non-finite losses and gradients: the exception, and the search for their origin."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe.parallel import json_collectives
from moe.parallel.stages import stage_of
from moe.tasks.task import RankBatch
from moe.train.signals import Signals
from moe.train.step import step as take_step
from moe.train.train_state import TrainState


class NonFiniteLoss(RuntimeError):
    """Training diverged: names the step, the part of the model and the last good checkpoint."""

    def __init__(self, step: int, last_checkpoint: str | None, location: str | None = None) -> None:
        self.step, self.last_checkpoint, self.location = step, last_checkpoint, location
        super().__init__(
            f"loss or gradient of step {step} is not finite, first in {location or 'no single layer'}; the last "
            f"good checkpoint is {last_checkpoint or 'none'}; lower train.optimizer.peak_lr, warm up longer "
            "or clip harder (train.clip_norm)"
        )

    def __reduce__(self) -> tuple[type["NonFiniteLoss"], tuple[int, str | None, str | None]]:
        return type(self), (self.step, self.last_checkpoint, self.location)


Finding = tuple[tuple[int, ...], str]
"""(position in the order of the search, which is that of pipeline stages first, description)"""


def first_fault(state: TrainState, batch: RankBatch[Any]) -> str | None:
    """First parameter, module output or gradient with a non-finite value, or None. Collective.

    Repeats the forward pass of the batch, checking module outputs in order, and on a GPU, which has begun the next
    step, the whole step. All ranks get the earliest finding of any rank, since all-to-all spreads non-finite values.
    """
    # Ranks agree after each check: the forward pass is collective, so all ranks run it or none.
    checks = (
        partial(_parameter_fault, state),
        partial(_output_fault, state, batch),
        partial(_gradient_fault, state, batch),
    )
    for check in checks:
        findings = [finding for finding in json_collectives.all_gather_json(check()) if finding is not None]
        if findings:
            return str(min(findings)[1])
    return None


def _parameter_fault(state: TrainState) -> Finding | None:
    for position, parameter in enumerate(state.stored_parameters):
        if not _finite(parameter.local):
            return (stage_of(state.model, parameter.name), position), f"parameter {parameter.name}"
    return None


def _gradient_fault(state: TrainState, batch: RankBatch[Any]) -> Finding | None:
    """Find the first non-finite gradient, from the last layer on, since its gradients are computed first."""
    if state.found_inf is not None:
        take_step(state, batch, Signals())  # its gradients again, which the next step's have replaced; updates nothing
    for position, parameter in enumerate(reversed(state.shards.parameters)):
        if parameter.local.grad is not None and not _finite(parameter.local.grad):
            return (-stage_of(state.model, parameter.name), position), f"the gradient of {parameter.name}"
    return None


@torch.no_grad()
def _output_fault(state: TrainState, batch: RankBatch[Any]) -> Finding | None:
    pass_number, position, finding = 0, 0, None

    def look(name: str, output: object) -> None:
        nonlocal position, finding
        position += 1
        tensors = output if isinstance(output, tuple) else (output,)
        if finding is None and not all(_finite(tensor) for tensor in tensors if isinstance(tensor, Tensor)):
            finding = (pass_number, stage_of(state.model, name), position), f"the output of {name}"

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: look(name, output))
        for name, module in state.model.named_modules()
        if name
    ]
    try:
        micro_batches = state.task.with_estimates(state.model, batch, state.layout).micro_batches
        for micro_batch in micro_batches:
            pass_number += 1
            state.task.loss(state.model, micro_batch)
    finally:
        for hook in hooks:
            hook.remove()
    return finding


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
