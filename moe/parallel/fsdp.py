"""Parameters sharded over data-parallel ranks, and gathered for use (FSDP2; arXiv 2304.11277).

Sharded over some of these ranks and replicated over the others, it is HSDP. Experts have their own FSDP axes. Errors of
collectives name the collective and the layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from moe.parallel.accelerator import accelerator
from moe.parallel.collective import all_gather_single, collective, reduce_scatter_single
from moe.parallel.mesh import Layout
from moe.parallel.parameters import shard_of, split_further
from moe.spec import spec_error


def shard_block(
    module: nn.Module, splits: Mapping[str, tuple[str, int]], layout: Layout, label: str, *, keep_gathered: bool = False
) -> None:
    """Shard the parameters of `module` by `splits`, (FSDP axis, dimension) by path: experts' parameters separately, the
    others together. They must have been through `place`; parameters not in `splits` are unchanged.

    `entry_points` of a module are methods called instead of `forward`. `label` names it in errors; `keep_gathered`
    leaves its own parameters gathered after the forward pass. Raises SpecError for a dimension, other than the first,
    that the degree does not divide.
    """
    by_axis: dict[str, dict[int, int]] = {"fsdp": {}, "expert_fsdp": {}}
    for path, (axis, dim) in splits.items():
        _check_even(module.get_parameter(path), dim, axis, layout, path)
        by_axis[axis][id(module.get_parameter(path))] = dim
    if layout.group("expert_fsdp") is not None:
        for submodule in list(module.modules()):
            if any(id(parameter) in by_axis["expert_fsdp"] for parameter in submodule.parameters(recurse=False)):
                axes = ("expert_replica", "expert_fsdp")
                _shard(submodule, by_axis["expert_fsdp"], layout, axes, f"experts of {label}")
    has_split_parameters = any("fsdp" in shard_of(parameter).axes for parameter in module.parameters())
    if layout.group("fsdp") is not None and (by_axis["fsdp"] or has_split_parameters):
        axes = ("data_replica", "fsdp")
        _shard(module, by_axis["fsdp"], layout, axes, label, keep_gathered=keep_gathered)


def _check_even(parameter: nn.Parameter, dim: int, axis: str, layout: Layout, path: str) -> None:
    size, degree = parameter.shape[dim], layout.degree(axis)
    if dim and size % degree:
        raise spec_error("not_divisible", f"{path}.shape[{dim}]", size,
                         f"must be divisible by the {axis} degree (={degree})",
                         "split the first dimension, which need not divide evenly")  # fmt: skip


def _shard(
    module: nn.Module,
    dims: Mapping[int, int],
    layout: Layout,
    axes: tuple[str, str],
    label: str,
    *,
    keep_gathered: bool = False,
) -> None:
    """`axes` are (replica axis, sharding axis). `dims` are dimensions by the parameters' ids, not the parameters, which
    are freed as soon as they are sharded."""
    axis, replica_group, sharding_group = axes[1], layout.group(axes[0]), layout.group(axes[1])
    assert sharding_group is not None
    trainable = (parameter for parameter in module.parameters() if id(parameter) in dims and parameter.requires_grad)
    if len(dtypes := {str(parameter.dtype) for parameter in trainable}) > 1:
        raise spec_error("dtype_mismatch", label, sorted(dtypes),
                         "must have one dtype, since FSDP gathers it in one tensor",
                         "convert its parameters, or keep some of them whole")  # fmt: skip
    splits = {
        name: split_further(shard_of(parameter), axis, dims[id(parameter)])
        for name, parameter in module.named_parameters() if id(parameter) in dims
    }  # fmt: skip
    fully_shard(
        module,
        mesh=DeviceMesh.from_group(sharding_group, layout.device.type),
        reshard_after_forward=not keep_gathered,
        shard_placement_fn=lambda parameter: Shard(dims[id(parameter)]),
        ignored_params={parameter for parameter in module.parameters() if id(parameter) not in dims},
    )
    assert isinstance(module, FSDPModule)
    # losses are divided by global counts, so gradients are summed and not averaged
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_custom_all_gather(_AllGather(label))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(_ReduceScatter(label))  # type: ignore[arg-type]
    if replica_group is not None:
        module.set_all_reduce_hook(lambda gradients: _sum_over_replicas(gradients, replica_group, label))
    for method in getattr(module, "entry_points", ()):
        register_fsdp_forward_method(module, method)
    for name, part in splits.items():
        parameter = module.get_parameter(name)
        assert isinstance(parameter, DTensor), f"{name} of {label} is not gathered by FSDP"
        parameter.part = part  # type: ignore[attr-defined]


def reduce_late_gradients(model: nn.Module) -> None:
    """Reduce-scatter the gradients of gathered parameters that were computed after their backward pass, when FSDP had
    reduced the others. Collective over the ranks that shard them."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and (state := fully_shard.state(module))._is_root:  # type: ignore[attr-defined]
            state._root_post_backward_final_callback()  # as torch's pipelines do (`_PipelineStage.perform_reduce_grad`)


class _LabeledCollective:
    """Collective with a label, in the form that FSDP2 takes."""

    def __init__(self, label: str) -> None:
        self._label = label

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class _AllGather(_LabeledCollective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with collective(f"all-gather of parameters, {self._label}"):
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_LabeledCollective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        with collective(f"reduce-scatter of gradients, {self._label}"):
            return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _sum_over_replicas(gradients: Tensor, replicas: dist.ProcessGroup, label: str) -> None:
    """HSDP's all-reduce, between the reduce-scatter and the use of its result."""
    accelerator(gradients.device).keep_for_stream(gradients)
    with collective(f"all-reduce of gradients over replicas, {label}"):
        dist.all_reduce(gradients, group=replicas)
