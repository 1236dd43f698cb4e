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
from moe.dispatch.exchange import AllToAll
from moe.dispatch.hierarchical import HierarchicalDispatcher
from moe.parallel import Layout


def build_dispatcher(layout: Layout, label: str) -> Dispatcher:
    """Build the dispatcher for a layout: local, all-to-all or, if the plan spreads experts over nodes, hierarchical.
    `label` names the layer in errors of collectives."""
    across = layout.group("rail")
    group = layout.group("expert", "expert_tensor") if across is None else layout.group("node")
    within: DirectDispatcher = LocalDispatcher()
    if group is not None:
        within = AllToAllDispatcher(
            AllToAll(group, layout.device, label),
            parts_per_expert=layout.degree("expert_tensor"),
            num_chunks=layout.num_chunks,
            max_rows=layout.max_rows,
        )
    if across is None:
        return within
    return HierarchicalDispatcher(AllToAll(across, layout.device, f"{label}, across nodes"), within)


__all__ = [
    "AllToAllDispatcher", "Combiner", "DispatchedRows", "Dispatcher", "EinsumDispatcher", "HierarchicalDispatcher",
    "LocalDispatcher", "build_dispatcher", "combine_weights",
]  # fmt: skip
