"""AdamW as one kernel launch per step and parameter group on a GPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe.kernels.support import has_kernels
from moe.parallel import LocalParameter, buffers_of
from moe.spec import AdamWSpec
from moe.train.optimizer.parameter_groups import group_parameters, param_groups

if TYPE_CHECKING:
    from moe.kernels.adamw import BlockTable


def kernel_supports(parameters: Sequence[LocalParameter]) -> bool:
    """Whether the kernel supports all parameters: contiguous float32, on a GPU where it passed its check."""
    return bool(parameters) and all(
        parameter.local.dtype == torch.float32
        and parameter.local.is_contiguous()
        and has_kernels(parameter.local, "optimizer")
        for parameter in parameters
    )


class FusedAdamW(torch.optim.Optimizer):
    """AdamW that also clips gradients and writes narrow copies, in one pass.

    Moves 30 bytes per parameter (28 without a narrow copy); torch's fused AdamW with separate passes for clipping and
    copies moves 42. State keys are those of torch's AdamW.
    """

    found_inf: Tensor | None = None
    """float32 scalar on the device: 1 if updates must change nothing but the host's count of steps."""

    def __init__(self, spec: AdamWSpec, parameters: Sequence[LocalParameter]) -> None:
        """`parameters`: those that the kernel supports."""
        from moe.kernels.adamw import BlockTable

        self._spec, self._groups = spec, group_parameters(spec, parameters)
        super().__init__(param_groups(spec, self._groups), {"lr": spec.peak_lr})
        self._blocks = [BlockTable(group["params"]) for group in self.param_groups]
        for parameter in parameters:
            self.state[parameter.local] = {
                "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                "exp_avg": torch.zeros_like(parameter.local),
                "exp_avg_sq": torch.zeros_like(parameter.local),
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters in place from their gradients."""
        assert closure is None, "not supported"
        self.update(None)

    @torch.no_grad()
    def update(self, gradient_factor: Tensor | None) -> None:
        """`step` from the gradients times `gradient_factor`, a scalar on their device (None: 1)."""
        for parameters, group, blocks in zip(self._groups, self.param_groups, self._blocks, strict=True):
            self._update_group(parameters, group, blocks, gradient_factor)

    def _update_group(
        self, parameters: list[LocalParameter], group: dict[str, Any], blocks: "BlockTable",
        gradient_factor: Tensor | None,
    ) -> None:  # fmt: skip
        from moe.kernels.adamw import AdamWFactors, AdamWTensors, launch_adamw

        weights, spec = [parameter.local for parameter in parameters], self._spec
        states = [self.state[weight] for weight in weights]
        torch._foreach_add_([state["step"] for state in states], 1)
        factors = AdamWFactors.of_step(
            int(states[0]["step"]), lr=group["lr"], beta1=spec.beta1, beta2=spec.beta2, eps=spec.eps,
            weight_decay=group["weight_decay"],
        )  # fmt: skip
        copies = [_copy_to_refresh(parameter) for parameter in parameters]
        tensors = AdamWTensors(
            weights=weights,
            gradients=[_gradient(weight) for weight in weights],
            moments1=[state["exp_avg"] for state in states],
            moments2=[state["exp_avg_sq"] for state in states],
            narrow_copies=[copy if copy is not None and copy.dtype == torch.bfloat16 else None for copy in copies],
        )
        launch_adamw(tensors, blocks, factors, gradient_factor, self.found_inf)
        for weight, copy in zip(weights, copies, strict=True):
            if copy is not None and copy.dtype != torch.bfloat16:
                copy.copy_(weight)


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None, "reduce_gradients gives every parameter a gradient"
    return weight.grad.contiguous()


def _copy_to_refresh(parameter: LocalParameter) -> Tensor | None:
    buffers = buffers_of(parameter.parameter)
    return None if buffers is None else buffers.begin_refresh(parameter.parameter)
