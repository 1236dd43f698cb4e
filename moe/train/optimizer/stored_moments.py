"""AdamW with moments stored in bfloat16, in host memory, or both."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from moe.parallel import LocalParameter
from moe.spec import AdamWSpec
from moe.train.optimizer.parameter_groups import group_parameters, param_groups

_ELEMENTS_AT_ONCE = {"cpu": 1 << 20}
"""Elements updated at once, by device: on a CPU, what fits its caches."""


class StoredMomentsAdamW(torch.optim.Optimizer):
    """torch's AdamW, some rows of a parameter at a time: moments are converted to the weights' dtype, updated, and
    rounded to nearest in theirs. With moments on the host, so is the update: gradients and weights are copied there,
    and weights back. State keys are those of torch's AdamW."""

    found_inf: Tensor | None = None
    """float32 scalar on the weights' device: 1 if `step` must change nothing."""

    def __init__(self, spec: AdamWSpec, parameters: list[LocalParameter], *, on_host: bool) -> None:
        self._spec, self._is_on_host, groups = spec, on_host, group_parameters(spec, parameters)
        super().__init__(param_groups(spec, groups), {"lr": spec.peak_lr})
        for weight in (parameter.local for parameter in parameters):
            device = torch.device("cpu") if on_host else weight.device
            dtype = torch.bfloat16 if spec.moments == "bfloat16" else weight.dtype
            self.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(weight, dtype=dtype, device=device, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(weight, dtype=dtype, device=device, requires_grad=False),
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters in place from their gradients."""
        assert closure is None, "not supported"
        found_inf = self.found_inf
        if found_inf is not None and self._is_on_host:
            found_inf = found_inf.cpu()
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                assert weight.grad is not None, "reduce_gradients gives every parameter a gradient"
                for rows in zip(*map(_rows, (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"])), strict=True):
                    self._update(group, state["step"].clone(), found_inf, *rows)
                state["step"] += 1 if found_inf is None else 1 - found_inf

    def _update(
        self, group: dict[str, Any], step: Tensor, found_inf: Tensor | None,
        weight: Tensor, gradient: Tensor, moment1: Tensor, moment2: Tensor,
    ) -> None:  # fmt: skip
        """Update some rows after `step` updates."""
        tensors = (weight, gradient, moment1, moment2)
        new_weight, gradient, *new_moments = (tensor.to(moment1.device, weight.dtype) for tensor in tensors)
        adamw(
            [new_weight], [gradient], [new_moments[0]], [new_moments[1]], [], [step],
            fused=True, amsgrad=False, beta1=self._spec.beta1, beta2=self._spec.beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=self._spec.eps, maximize=False, found_inf=found_inf,
        )  # fmt: skip
        weight.copy_(new_weight)
        moment1.copy_(new_moments[0])
        moment2.copy_(new_moments[1])


def _rows(tensor: Tensor) -> tuple[Tensor, ...]:
    """Rows of a parameter or its state that are updated at once."""
    tensor = torch.atleast_1d(tensor)
    row_elements = max(1, tensor[:1].numel())
    return tensor.split(max(1, _ELEMENTS_AT_ONCE.get(tensor.device.type, 1 << 26) // row_elements))
