"""Parameters cut up over data ranks, and gathered where they are used (FSDP2; arXiv 2304.11277).

Cut up over some of the data ranks and replicated over the rest, it is HSDP. Experts have their own axes for it. What
collectives these are, and which layer's, stands in the errors of those that fail.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from moe.parallel.accelerator import accelerator
from moe.parallel.collective import all_gather_single, collective, reduce_scatter_single
from moe.parallel.mesh import Layout
from moe.parallel.parameters import further_cut, part_of
from moe.plan.placement import fsdp_dim


def cut_up(module: nn.Module, layout: Layout, label: str, *, keep_gathered: bool = False) -> None:
    """Cut up the parameters that lie in `module` and are whole yet, as far as the layout has the axes for it: those of
    experts within it by themselves, the rest together.

    A module's `entry_points`, where it has some, are what is called of it in place of `forward`. `label` is what errors
    call it; `keep_gathered` leaves its own parameters gathered after the forward pass.
    """
    if layout.group("expert_fsdp") is not None:
        for each in [each for each in module.modules() if _has_experts(each)]:
            _cut_up(each, layout, ("expert_replica", "expert_fsdp"), f"experts of {label}", set())
    if layout.group("fsdp") is not None:
        in_experts = {parameter for parameter in module.parameters() if part_of(parameter).of_experts}
        _cut_up(module, layout, ("data_replica", "fsdp"), label, in_experts, keep_gathered=keep_gathered)


def _has_experts(module: nn.Module) -> bool:
    """Whether parameters of experts that are not cut up yet lie in the module itself."""
    parts = map(part_of, module.parameters(recurse=False))
    return any(part.of_experts and "expert_fsdp" not in part.axes for part in parts)


def _cut_up(
    module: nn.Module,
    layout: Layout,
    axes: tuple[str, str],
    label: str,
    ignored: set[nn.Parameter],
    *,
    keep_gathered: bool = False,
) -> None:
    """`axes` are that of the replicas, and that along which parameters are cut up."""
    axis, replicas, over = axes[1], layout.group(axes[0]), layout.group(axes[1])
    degree = layout.degree(axis)
    assert over is not None
    whole = {
        name: p for name, p in module.named_parameters() if p not in ignored and axis not in part_of(p).axes
    }
    cuts = {name: further_cut(part_of(p), axis, fsdp_dim(p.shape, degree)) for name, p in whole.items()}
    del whole
    fully_shard(
        module,
        mesh=DeviceMesh.from_group(over, layout.device.type),
        reshard_after_forward=not keep_gathered,
        shard_placement_fn=lambda parameter: Shard(fsdp_dim(parameter.shape, degree)),
        ignored_params=ignored,
    )
    assert isinstance(module, FSDPModule)
    # Losses divide by global counts: gradients are summed, never averaged.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_custom_all_gather(_AllGather(label))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(_ReduceScatter(label))  # type: ignore[arg-type]
    if replicas is not None:
        module.set_all_reduce_hook(lambda gradients: _sum_over_replicas(gradients, replicas, label))
    for method in getattr(module, "entry_points", ()):
        register_fsdp_forward_method(module, method)
    for name, part in cuts.items():
        module.get_parameter(name).part = part  # type: ignore[attr-defined]


class _Named:
    """A collective in the form in which FSDP2 takes one."""

    def __init__(self, label: str) -> None:
        self._label = label

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class _AllGather(_Named):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with collective(f"all-gather of parameters, {self._label}"):
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Named):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with collective(f"reduce-scatter of gradients, {self._label}"):
            return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _sum_over_replicas(gradients: Tensor, replicas: dist.ProcessGroup, label: str) -> None:
    """HSDP's last step, between the reduce-scatter and the use of what it gave."""
    accelerator(gradients.device).keep_for_stream(gradients)
    with collective(f"all-reduce of gradients over replicas, {label}"):
        dist.all_reduce(gradients, group=replicas)
