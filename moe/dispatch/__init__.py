"""Tokens to experts to tokens: reference (einsum), local, all-to-all."""

from moe.dispatch.all_to_all import AllToAllDispatcher
from moe.dispatch.dispatcher import Dispatcher
from moe.dispatch.einsum import EinsumDispatcher, combine_weights
from moe.dispatch.local import LocalDispatcher
from moe.parallel import AllToAll, Layout


def build_dispatcher(layout: Layout, label: str) -> Dispatcher:
    """The dispatcher for a layout: local where this rank holds every expert, all-to-all where not. `label` names the
    layer where a collective fails."""
    if layout.expert_group is None:
        return LocalDispatcher()
    return AllToAllDispatcher(AllToAll(layout.expert_group, layout.device, label))


__all__ = [
    "AllToAllDispatcher",
    "Dispatcher",
    "EinsumDispatcher",
    "LocalDispatcher",
    "build_dispatcher",
    "combine_weights",
]
