"""Build an optimizer from its spec, update parameters with it, and iterate over its state by name."""

from collections.abc import Iterator
from typing import assert_never

import torch
from torch import Tensor

from moe.parallel import Layout, LocalParameter, ParameterShard, keep_buffers, scale_gradients, values_changed
from moe.spec import AdafactorSpec, AdamWSpec, MuonSpec, OptimizerSpec
from moe.train.optimizer.adafactor import Adafactor, slot_part
from moe.train.optimizer.fused_adamw import FusedAdamW, kernel_supports
from moe.train.optimizer.muon import Muon
from moe.train.optimizer.parameter_groups import group_parameters, param_groups
from moe.train.optimizer.quantized_moments import SCALE, QuantizedMomentsAdamW, scale_part
from moe.train.optimizer.stored_moments import StoredMomentsAdamW


def build_optimizer(spec: OptimizerSpec, parameters: list[LocalParameter], layout: Layout) -> torch.optim.Optimizer:
    """Optimizer of this rank's trainable parameters, with state allocated for loading a checkpoint.

    Parameters get the buffers that the optimizer keeps up to date.
    """
    keep_buffers(parameters, layout)
    trainable = [parameter for parameter in parameters if parameter.local.requires_grad]
    optimizer: torch.optim.Optimizer
    match spec:
        case AdamWSpec() if spec.moments == "8bit":
            optimizer = QuantizedMomentsAdamW(spec, trainable, layout, on_host=spec.offload)
        case AdamWSpec() if spec.moments == "bfloat16" or (spec.offload and layout.device.type != "cpu"):
            optimizer = StoredMomentsAdamW(spec, trainable, on_host=spec.offload)
        case AdamWSpec() if kernel_supports(trainable):
            return FusedAdamW(spec, trainable)
        case AdamWSpec():
            optimizer = _adamw(spec, trainable)
        case AdafactorSpec():
            optimizer = Adafactor(spec, trainable, layout)
        case MuonSpec():
            optimizer = _muon(spec, trainable, layout)
        case _:
            assert_never(spec)
    optimizer.register_step_post_hook(lambda *_: values_changed(trainable))
    return optimizer


def _muon(spec: MuonSpec, parameters: list[LocalParameter], layout: Layout) -> Muon:
    matrices = [parameter for parameter in parameters if parameter.part.is_hidden_matrix]
    other_parameters = [parameter for parameter in parameters if not parameter.part.is_hidden_matrix]
    return Muon(spec, matrices, _adamw(spec, other_parameters), layout)


def _adamw(spec: AdamWSpec | MuonSpec, parameters: list[LocalParameter]) -> torch.optim.AdamW:
    groups = param_groups(spec, group_parameters(spec, parameters))
    optimizer = torch.optim.AdamW(groups, lr=spec.peak_lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)
    for parameter in (parameter.local for parameter in parameters):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def update_parameters(
    optimizer: torch.optim.Optimizer,
    parameters: list[LocalParameter],
    lr: float,
    gradient_factor: Tensor | None,
    found_inf: Tensor | None = None,
) -> None:
    """Apply one optimizer step with learning rate `lr`. Gradients are multiplied by `gradient_factor` (scalar on their
    device; None: 1), possibly in place. If `found_inf` (float32 scalar on the device) is 1, parameters and the
    optimizer's state stay as they are, except for counts of steps on the host."""
    set_learning_rate(optimizer, lr)
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # the name that torch's fused optimizers read
    if isinstance(optimizer, FusedAdamW):
        optimizer.update(gradient_factor)
        return
    if gradient_factor is not None:
        scale_gradients(parameters, gradient_factor)
    optimizer.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of the next update, of groups in proportion."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_factor"]


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the optimizer's count of finished updates."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)


def moments(
    optimizer: torch.optim.Optimizer, parameters: list[LocalParameter]
) -> Iterator[tuple[str, str, Tensor, ParameterShard]]:
    """(parameter name, slot name, local tensor, its shard) of all optimizer state except the step count."""
    for parameter in parameters:
        for slot, tensor in optimizer.state.get(parameter.local, {}).items():
            if slot != "step":
                is_scale = slot.endswith(SCALE)
                part = scale_part(parameter.part, tensor) if is_scale else slot_part(slot, parameter.part)
                yield parameter.name, slot, tensor, part
