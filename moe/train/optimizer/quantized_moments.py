"""AdamW with 8-bit moments, quantized in blocks that do not depend on the layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe.parallel import Layout, LocalParameter, ParameterShard, collective, extent
from moe.spec import AdamWSpec, spec_error
from moe.spec.optimizer import moment_block_elements
from moe.train.optimizer.dynamic_quantization import MIN_SCALE, dequantize, quantize
from moe.train.optimizer.found_inf import select
from moe.train.optimizer.parameter_groups import group_parameters, param_groups

SCALE = "_scale"
"""Ending of the slots of scales."""
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Slots, with whether their values have signs."""
_ELEMENTS_AT_ONCE = {"cpu": 1 << 18}
"""Elements updated at once, by device."""


@dataclass(frozen=True)
class _Blocks:
    """Blocks along the last dimension of a rank's part of a parameter."""

    num_elements: int
    """Number of elements of a block."""
    num_before: int
    """Elements of the first block on the ranks before this one; 0 unless the shards cut blocks."""
    first: int
    """Number of the first block among those that this rank has scales of."""
    num_scales: int
    """Blocks that this rank has scales of: its own, or all of a row if the shards cut blocks."""
    groups: tuple[dist.ProcessGroup, ...]
    """Process groups of the ranks that hold the rest of a row, if the shards cut blocks."""

    @classmethod
    def of_part(cls, part: ParameterShard, layout: Layout) -> "_Blocks | None":
        """Blocks of a parameter's moments; None if they are not quantized."""
        if part.offsets is not None:
            raise spec_error("not_applicable", "train.optimizer.moments", "8bit", "does not apply to a user's module",
                             "use float32 or bfloat16")  # fmt: skip
        num_elements = moment_block_elements(part.shape, of_experts=part.of_experts)
        if num_elements is None:
            return None
        last = len(part.shape) - 1
        shard_size = part.shape[-1]
        axes = [axis for axis, dim in part.splits if dim == last]
        for axis in axes:
            shard_size = -(-shard_size // layout.degree(axis))
        first, end = extent(part, layout)[last]
        if shard_size % num_elements == 0:
            return cls(num_elements, 0, 0, (end - first) // num_elements, ())
        groups = tuple(group for axis in axes if (group := layout.group(axis)) is not None)
        return cls(num_elements, first % num_elements, first // num_elements, part.shape[-1] // num_elements, groups)

    def scales(self, values: Tensor, device: torch.device) -> Tensor:
        """float32 `[..., num_scales]`: largest magnitude of each block, over all ranks that hold a part of it."""
        largest = self._in_blocks(values.abs()).amax(-1).float()
        if not self.groups:
            return largest.clamp_(min=MIN_SCALE)
        scales = largest.new_zeros(*values.shape[:-1], self.num_scales, device=device)
        scales[..., self.first : self.first + largest.shape[-1]] = largest
        with collective("all-reduce of the scales of 8-bit moments"):
            for group in self.groups:
                dist.all_reduce(scales, dist.ReduceOp.MAX, group=group)
        return scales.to(values.device).clamp_(min=MIN_SCALE)

    def by_element(self, scales: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        """`[..., n]`: scale of each of this rank's elements of a row."""
        num_blocks = -(-(self.num_before + num_elements) // self.num_elements)
        own = scales[..., self.first : self.first + num_blocks].to(dtype)
        by_element = own[..., None].expand(*own.shape, self.num_elements).flatten(-2)
        return by_element[..., self.num_before : self.num_before + num_elements]

    def _in_blocks(self, values: Tensor) -> Tensor:
        """`[..., blocks, elements]`, with zeros for elements of other ranks."""
        num_after = -(self.num_before + values.shape[-1]) % self.num_elements
        padded = functional.pad(values, (self.num_before, num_after))
        return padded.unflatten(-1, (padded.shape[-1] // self.num_elements, self.num_elements))


class QuantizedMomentsAdamW(torch.optim.Optimizer):
    """AdamW whose moments are stored as 8-bit codes, some rows of a parameter at a time: moments are dequantized,
    updated in the weights' dtype, used, and quantized for the next step, as in torchao.

    Blocks are parts of rows of the full parameter (`moment_block_elements`); one that several ranks hold parts of has
    one scale, by an all-reduce over them. Moments of vectors and of small parameters are float32. With moments on the
    host, so is the update. Slots are `exp_avg` and `exp_avg_sq`, and the scales of both.
    """

    found_inf: Tensor | None = None
    """float32 scalar on the weights' device: 1 if `step` must change nothing."""

    def __init__(self, spec: AdamWSpec, parameters: Sequence[LocalParameter], layout: Layout, *, on_host: bool) -> None:
        self._spec, self._device = spec, layout.device
        super().__init__(param_groups(spec, group_parameters(spec, parameters)), {"lr": spec.peak_lr})
        self._blocks: dict[Tensor, _Blocks | None] = {}
        self._row_elements: dict[Tensor, int] = {}
        """Elements of a row of the full parameter."""
        for parameter in parameters:
            weight, shape = parameter.local, parameter.part.shape
            device = torch.device("cpu") if on_host else weight.device
            self._blocks[weight] = blocks = _Blocks.of_part(parameter.part, layout)
            self._row_elements[weight] = max(1, shape[-1]) if shape else 1
            self.state[weight] = {"step": torch.zeros((), dtype=torch.float32, device=device)}
            for name, signed in _MOMENTS.items():
                if blocks is None:
                    self.state[weight][name] = torch.zeros(weight.shape, device=device)
                    continue
                zero = int(quantize(torch.zeros(1), signed=signed))
                self.state[weight][name] = torch.full(weight.shape, zero, dtype=torch.uint8, device=device)
                scales_shape = (*weight.shape[:-1], blocks.num_scales)
                self.state[weight][name + SCALE] = torch.full(scales_shape, MIN_SCALE, device=device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters in place from their gradients. Collective."""
        assert closure is None, "not supported"
        for group in self.param_groups:
            for weight in group["params"]:
                assert weight.grad is not None, "reduce_gradients gives every parameter a gradient"
                state = self.state[weight]
                state["step"] += 1 if self.found_inf is None else 1 - self.found_inf.to(state["step"].device)
                slots = {name: _rows(tensor) for name, tensor in state.items() if name != "step"}
                weight_rows, gradient_rows = _rows(weight), _rows(weight.grad.contiguous())
                # As many rows on all ranks with parts of them.
                at_once = max(1, _ELEMENTS_AT_ONCE.get(weight.device.type, 1 << 24) // self._row_elements[weight])
                for first in range(0, len(weight_rows), at_once):
                    part = slice(first, first + at_once)
                    self._update(
                        group, state["step"], self._blocks[weight], weight_rows[part], gradient_rows[part],
                        {name: rows[part] for name, rows in slots.items()},
                    )  # fmt: skip

    def _update(
        self,
        group: dict[str, Any],
        step: Tensor,
        blocks: _Blocks | None,
        weight: Tensor,
        gradient: Tensor,
        slots: dict[str, Tensor],
    ) -> None:
        """Update some rows for the step number `step`. Operations are those of torchao, in their order."""
        spec, dtype, device = self._spec, weight.dtype, step.device
        new_weight, gradient = weight.to(device), gradient.to(device, dtype)
        step, lr = step.to(dtype), torch.full((), group["lr"], dtype=dtype, device=device)
        new_weight = new_weight - lr * group["weight_decay"] * new_weight
        moment1 = self._load("exp_avg", slots, blocks, dtype).lerp(gradient, 1 - spec.beta1)
        moment2 = self._load("exp_avg_sq", slots, blocks, dtype).lerp(gradient.square(), 1 - spec.beta2)
        self._store("exp_avg", moment1, slots, blocks)
        self._store("exp_avg_sq", moment2, slots, blocks)
        denominator = moment2.sqrt() / (1 - spec.beta2**step).sqrt() + spec.eps
        new_weight = new_weight - lr * (moment1 / (1 - spec.beta1**step)) / denominator
        weight.copy_(select(self.found_inf, weight, new_weight.to(weight.device)))

    def _load(self, name: str, slots: dict[str, Tensor], blocks: _Blocks | None, dtype: torch.dtype) -> Tensor:
        """Values of a moment in `dtype`."""
        if blocks is None:
            return slots[name].to(dtype)
        values = dequantize(slots[name], dtype, signed=_MOMENTS[name])
        return values * blocks.by_element(slots[name + SCALE], values.shape[-1], dtype)

    def _store(self, name: str, values: Tensor, slots: dict[str, Tensor], blocks: _Blocks | None) -> None:
        found_inf, moment = self.found_inf, slots[name]
        if found_inf is not None:
            found_inf = found_inf.to(moment.device)
        if blocks is None:
            moment.copy_(select(found_inf, moment, values))
            return
        scales, stored_scales = blocks.scales(values, self._device), slots[name + SCALE]
        scaled_values = values / blocks.by_element(scales, values.shape[-1], values.dtype)
        stored_scales.copy_(select(found_inf, stored_scales, scales))
        moment.copy_(select(found_inf, moment, quantize(scaled_values, signed=_MOMENTS[name])))


def scale_part(part: ParameterShard, scales: Tensor) -> ParameterShard:
    """Shard of a moment's scales `[..., num_scales]`, from that of its parameter."""
    num_elements = moment_block_elements(part.shape, of_experts=part.of_experts)
    assert num_elements is not None
    last, num_blocks = len(part.shape) - 1, part.shape[-1] // num_elements
    splits = part.splits
    if scales.shape[-1] == num_blocks:  # of whole rows
        splits = tuple(split for split in splits if split[1] != last)
    return replace(part, shape=torch.Size((*part.shape[:-1], num_blocks)), splits=splits)


def _rows(tensor: Tensor) -> Tensor:
    """`[rows, n]`: a view along the last dimension."""
    return tensor.view(tensor.shape[:-1].numel(), tensor.shape[-1]) if tensor.dim() else tensor.view(1, 1)
