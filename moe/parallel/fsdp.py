"""Parameters cut up over data ranks, and gathered where they are used (FSDP2; arXiv 2304.11277).

Cut up over some of the data ranks and replicated over the rest, it is HSDP. Experts have their own axes for it.
"""

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from moe.parallel.layout import Layout, ranks_along
from moe.parallel.parameters import Part, further_cut


def cut_up(
    model: nn.Module,
    layout: Layout,
    *,
    units: Iterable[nn.Module],
    experts: Iterable[nn.Module],
    methods: dict[type[nn.Module], tuple[str, ...]],
) -> None:
    """Cut up the model's parameters over the axes `fsdp` and `expert_fsdp`, as far as the layout has them.

    Parameters of `experts`, and of each of `units` beside experts, are gathered and let go together; what is left is
    the model's own. `methods` names, by class, what is called in place of `forward`.
    """
    parts = {name: part for name, p in model.named_parameters() if (part := getattr(p, "part", None))}
    in_experts = {p for each in experts for p in each.parameters()}
    if (mesh := _mesh(layout, "expert_replica", "expert_fsdp")) is not None:
        for each in experts:
            _fully_shard(each, mesh, expert_dim(next(each.parameters()).shape[0], layout), set(), True)
    if (mesh := _mesh(layout, "data_replica", "fsdp")) is not None:
        for each in units:
            _fully_shard(each, mesh, 0, in_experts, True)
        _fully_shard(model, mesh, 0, in_experts, False)  # its embeddings are wanted again for the loss
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for kind, names in methods.items():
                if isinstance(module, kind):
                    for name in names:
                        register_fsdp_forward_method(module, name)
    for name, parameter in model.named_parameters():
        part = parts.get(name, Part(parameter.shape))
        axis = "expert_fsdp" if part.of_experts else "fsdp"
        if layout.degree(axis) > 1:
            dim = expert_dim(part.shape[0] // layout.degree("expert"), layout) if part.of_experts else 0
            part = further_cut(part, axis, dim)
        parameter.part = part  # type: ignore[attr-defined]


def expert_dim(experts_here: int, layout: Layout) -> int:
    """The dimension that experts' parameters are cut up along: by whole experts, where that comes out even."""
    return 0 if experts_here % layout.degree("expert_fsdp") == 0 else 1


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


def _fully_shard(
    module: nn.Module, mesh: DeviceMesh, dim: int, ignored: set[nn.Parameter], let_go: bool
) -> None:
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=let_go,
        shard_placement_fn=lambda _parameter: Shard(dim),
        ignored_params=ignored,
    )
    assert isinstance(module, FSDPModule)
    # Losses divide by global counts: gradients are summed, never averaged.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
