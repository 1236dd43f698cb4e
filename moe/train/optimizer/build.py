"""The optimizer a spec asks for, and its state under names that no layout changes."""

from collections.abc import Iterator
from typing import assert_never

import torch
from torch import Tensor, nn

from moe.parallel import Layout, LocalParameter, ParameterShard, keep_buffers, values_changed
from moe.spec import AdafactorSpec, AdamWSpec, OptimizerSpec
from moe.train.optimizer.adafactor import Adafactor, slot_part


def build_optimizer(
    spec: OptimizerSpec, parameters: list[LocalParameter], layout: Layout
) -> torch.optim.Optimizer:
    """The optimizer over what this rank holds and trains, its state allocated, so that a checkpoint loads into it.
    Parameters get the buffers that it keeps up to date."""
    keep_buffers(parameters, layout)
    trainable = [parameter for parameter in parameters if parameter.local.requires_grad]
    optimizer: torch.optim.Optimizer
    match spec:
        case AdamWSpec():
            optimizer = _adamw(spec, [parameter.local for parameter in trainable])
        case AdafactorSpec():
            optimizer = Adafactor(spec, trainable, layout)
        case _:
            assert_never(spec)
    optimizer.register_step_post_hook(lambda *_: values_changed(parameters))
    return optimizer


def _adamw(spec: AdamWSpec, parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(
        parameters,
        lr=spec.peak_lr,
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Make the next update use this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Make the optimizer count `step` updates done: every parameter has had one a step."""
    for state in optimizer.state.values():
        state["step"].fill_(step)


def moments(
    optimizer: torch.optim.Optimizer, parameters: list[LocalParameter]
) -> Iterator[tuple[str, str, Tensor, ParameterShard]]:
    """(parameter's name, slot's name, local tensor, its part of the whole slot) of everything remembered between
    updates but their count."""
    for parameter in parameters:
        for slot, tensor in optimizer.state.get(parameter.local, {}).items():
            if slot != "step":
                yield parameter.name, slot, tensor, slot_part(slot, parameter.part)
