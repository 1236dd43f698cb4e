"""Expert loads by label in passes over held-out rows: which sources, roles or languages go to which experts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moe.layers.moe import MoELayer
from moe.parallel import Layout, json_collectives
from moe.records import LabelKind, LabelLayerRecord, LabelLoads
from moe.routing import Choices, Routing

MAX_LABELS = 64
MAX_COUNTS = 1 << 18
"""Most counts of a record, of all labels and experts: the largest have about a megabyte."""


class LabelLoadCounter:
    """Counts the experts' accepted choices by label. With one label, or without MoE layers, it counts nothing."""

    def __init__(self, model: nn.Module, layout: Layout, kind: LabelKind, labels: Sequence[str]) -> None:
        """`labels`, most important first: those beyond `MAX_LABELS`, or `MAX_COUNTS` counts, are not counted.
        Collective."""
        self._layout, self._kind = layout, kind
        self._local_layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        sizes = [(layer.layer, layer.spec.num_experts) for layer in self._local_layers]
        self._num_experts = {
            layer: num_experts
            for rank_sizes in json_collectives.all_gather_json(sizes)
            for layer, num_experts in rank_sizes
        }
        """Experts of the MoE layers of all ranks, by layer."""
        total_experts = sum(self._num_experts.values())
        self._labels = labels[: min(MAX_LABELS, MAX_COUNTS // max(1, total_experts))] if total_experts else ()
        self._loads = {
            layer: torch.zeros(len(self._labels), num_experts, dtype=torch.int64, device=layout.device)
            for layer, num_experts in sizes
        }
        """`[labels, E]` of this rank's layers."""

    @contextmanager
    def counting(self, label: Tensor) -> Iterator[None]:
        """Count the first pass of each layer within the context, with labels of these indices, int64: of each row `[B]`
        or each token `[B, L]`; -1 for none."""
        uncounted_layers = set(self._loads) if len(self._labels) > 1 else set[int]()
        label = torch.where(label < len(self._labels), label, -1).flatten().to(self._layout.device)

        def count(layer: MoELayer, _inputs: object, output: tuple[object, Routing]) -> None:
            # Later passes are those of a reference model that shares the layer.
            if layer.layer in uncounted_layers:
                uncounted_layers.remove(layer.layer)
                self._loads[layer.layer] += load_by_label(output[1].choices, label, len(self._labels))

        hooks = [layer.register_forward_hook(count) for layer in self._local_layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def sum_over_ranks(self) -> LabelLoads | None:
        """Loads of the labels with choices, over all ranks; None of fewer than two labels. Collective."""
        if len(self._labels) < 2:
            return None
        numbers = list[int]()
        for layer, num_experts in sorted(self._num_experts.items()):
            # Tensor and context ranks route the same tokens.
            is_counted_here = layer in self._loads and self._layout.is_first_with_rows
            numbers += (
                self._loads[layer].flatten().tolist() if is_counted_here else [0] * num_experts * len(self._labels)
            )
        sums = iter(json_collectives.all_reduce_sum(*numbers))
        loads = {
            layer: [tuple(int(next(sums)) for _ in range(num_experts)) for _ in self._labels]
            for layer, num_experts in sorted(self._num_experts.items())
        }
        present = [index for index in range(len(self._labels)) if any(any(load[index]) for load in loads.values())]
        if len(present) < 2:
            return None
        return LabelLoads(
            self._kind,
            tuple(self._labels[index] for index in present),
            tuple(LabelLayerRecord(layer, tuple(load[index] for index in present)) for layer, load in loads.items()),
        )


def load_by_label(choices: Choices, label_N: Tensor, num_labels: int) -> Tensor:
    """int64 `[num_labels, E]`: accepted choices of each expert, by the labels of N equal runs of the tokens."""
    token, expert, is_kept = choices.pairs
    num_experts = choices.load.numel()
    load = expert.new_zeros(num_labels * num_experts)
    if not choices.num_tokens:
        return load.view(num_labels, num_experts)
    label = label_N[token * len(label_N) // choices.num_tokens]
    place = label.clamp(min=0) * num_experts + expert
    return load.index_add_(0, place, (is_kept & (label >= 0)).to(load.dtype)).view(num_labels, num_experts)
