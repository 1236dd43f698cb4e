"""MoE layers of a model: this rank's, and facts about all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from moe.dispatch.deepep import DeepEP
from moe.layers.moe import MoELayer
from moe.parallel import Layout, json_collectives
from moe.routing import Routing


@dataclass(frozen=True)
class LayerFacts:
    """Facts about a layer that totals need on every rank."""

    layer: int
    num_experts: int
    aux_coefficient: float
    z_coefficient: float

    @classmethod
    def from_layer(cls, layer: MoELayer) -> "LayerFacts":
        coefficient, _ = layer.spec.routing.auxiliary_loss
        return cls(layer.layer, layer.spec.num_experts, coefficient, layer.spec.z_coefficient)


class MoELayers:
    """MoE layers found in a model; a rank may have some of them or none."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        """Collective over the ranks of the layout. Raises ValueError if two layers have the same number."""
        self.local_layers: dict[int, MoELayer] = {}
        """This rank's layers by number, in model order."""
        for module in model.modules():
            if isinstance(module, MoELayer) and self.local_layers.setdefault(module.layer, module) is not module:
                raise ValueError(f"two MoE layers have the number {module.layer}; number them differently")
        own_facts = [vars(LayerFacts.from_layer(layer)) for layer in self.local_layers.values()]
        # A process group may be up around a layout of one process.
        facts_by_rank = [own_facts] if layout.world_group is None else json_collectives.all_gather_json(own_facts)
        facts_by_number = {facts["layer"]: LayerFacts(**facts) for rank_facts in facts_by_rank for facts in rank_facts}
        self.facts = tuple(facts_by_number[number] for number in sorted(facts_by_number))
        """Facts about the layers of all ranks, by number."""

    def choose_dispatchers(self, layout: Layout, dtype: torch.dtype, dispatch: str | None) -> None:
        """Have the layers dispatch by DeepEP where it applies. `dispatch`: `parallel.dispatch`; `dtype`: that of their
        rows. Collective. Raises SpecError if DeepEP is required and not installed."""
        deepep = DeepEP(layout, dtype, dispatch)
        for number, layer in self.local_layers.items():
            spec = layer.spec
            layer.dispatch = deepep.dispatcher(
                layer.dispatch, spec.expert_dim, spec.experts_per_token, f"MoE layer {number}"
            )

    @property
    def max_experts(self) -> int:
        """Experts of the largest layer; 0 without layers."""
        return max((facts.num_experts for facts in self.facts), default=0)

    @contextmanager
    def routings(self) -> Iterator[list[tuple[int, Routing]]]:
        """Collect (layer number, detached routing) of forward passes that track gradients."""
        routings: list[tuple[int, Routing]] = []

        def note(layer: MoELayer, _inputs: object, output: tuple[object, Routing]) -> None:
            if torch.is_grad_enabled():
                routings.append((layer.layer, output[1].detach()))

        hooks = [layer.register_forward_hook(note) for layer in self.local_layers.values()]
        try:
            yield routings
        finally:
            for hook in hooks:
                hook.remove()
