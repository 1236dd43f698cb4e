"""Parameters cut up over data ranks, and gathered where they are used (FSDP2; arXiv 2304.11277).

Cut up over some of the data ranks and replicated over the rest, it is HSDP. Experts have their own axes for it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from moe.parallel.layout import Layout, ranks_along
from moe.parallel.parameters import further_cut, part_of


def cut_up(
    module: nn.Module,
    layout: Layout,
    *,
    experts: Iterable[nn.Module] = (),
    methods: Sequence[str] = (),
    keep_gathered: bool = False,
) -> None:
    """Cut up the parameters that lie in `module` and are whole yet, as far as the layout has the axes for it: those of
    `experts` within it by themselves, the rest together.

    Called as soon as a module is built, so that a model never lies on a rank as a whole. `methods` names what is called
    of the module in place of `forward`; `keep_gathered` leaves its own parameters gathered after the forward pass.
    """
    if (mesh := _mesh(layout, "expert_replica", "expert_fsdp")) is not None:
        for each in experts:
            _cut_up(each, mesh, layout, "expert_fsdp", ("travelling",), set(), True)
    if (mesh := _mesh(layout, "data_replica", "fsdp")) is not None:
        in_experts = {parameter for parameter in module.parameters() if part_of(parameter).of_experts}
        _cut_up(module, mesh, layout, "fsdp", methods, in_experts, not keep_gathered)


def cut_dim(shape: torch.Size, degree: int) -> int:
    """The dimension that a parameter is cut up along: the first of the two outermost that comes out even, else the
    first."""
    return 1 if shape[0] % degree and len(shape) > 1 and shape[1] % degree == 0 else 0


def _cut_up(
    module: nn.Module,
    mesh: DeviceMesh,
    layout: Layout,
    axis: str,
    methods: Sequence[str],
    ignored: set[nn.Parameter],
    let_go: bool,
) -> None:
    degree = layout.degree(axis)
    whole = {
        name: p for name, p in module.named_parameters() if p not in ignored and axis not in part_of(p).axes
    }
    cuts = {name: further_cut(part_of(p), axis, cut_dim(p.shape, degree)) for name, p in whole.items()}
    del whole
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=let_go,
        shard_placement_fn=lambda parameter: Shard(cut_dim(parameter.shape, degree)),
        ignored_params=ignored,
    )
    assert isinstance(module, FSDPModule)
    # Losses divide by global counts: gradients are summed, never averaged.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    for method in methods:
        register_fsdp_forward_method(module, method)
    for name, part in cuts.items():
        module.get_parameter(name).part = part  # type: ignore[attr-defined]


def _mesh(layout: Layout, replicas: str, shards: str) -> DeviceMesh | None:
    over, replicated = layout.group(shards), layout.group(replicas)
    if over is None:
        return None
    if replicated is None:
        return DeviceMesh.from_group(over, layout.device.type)
    mine = next(ranks for ranks in ranks_along((replicas, shards), layout.degrees) if layout.rank in ranks)
    rows = [mine[start : start + over.size()] for start in range(0, len(mine), over.size())]
    return DeviceMesh.from_group(
        [replicated, over], layout.device.type, mesh=rows, mesh_dim_names=(replicas, shards)
    )
