"""Dispatch of tokens to experts: einsum (reference), local, all-to-all, hierarchical."""

from moe.dispatch.dispatcher import (
    AllToAllDispatcher,
    Combiner,
    DirectDispatcher,
    DispatchedRows,
    Dispatcher,
    LocalDispatcher,
)
from moe.dispatch.einsum import EinsumDispatcher, combine_weights
from moe.dispatch.hierarchical import HierarchicalDispatcher
from moe.dispatch.measurement import measure_with_kernels
from moe.dispatch.row_exchange import AllToAll
from moe.parallel import Layout


def build_dispatcher(layout: Layout, label: str) -> Dispatcher:
    """Build the dispatcher for a layout: local, all-to-all or, if the plan spreads experts over nodes, hierarchical.
    `label` names the layer in errors of collectives."""
    rail_group = layout.group("rail")
    group = layout.group("expert", "expert_tensor") if rail_group is None else layout.group("node")
    dispatcher: DirectDispatcher = LocalDispatcher()
    if group is not None:
        dispatcher = AllToAllDispatcher(
            AllToAll(group, layout.device, label),
            parts_per_expert=layout.degree("expert_tensor"),
            num_chunks=layout.num_chunks,
            max_rows=layout.max_rows,
        )
    if rail_group is None:
        return dispatcher
    return HierarchicalDispatcher(AllToAll(rail_group, layout.device, f"{label}, across nodes"), dispatcher)


__all__ = [
    "AllToAllDispatcher", "Combiner", "DispatchedRows", "Dispatcher", "EinsumDispatcher", "HierarchicalDispatcher",
    "LocalDispatcher", "build_dispatcher", "combine_weights",
    "measure_with_kernels",
]  # fmt: skip
