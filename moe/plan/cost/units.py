"""A model as the planner sees it: the units that a pipeline stage has whole, with their parameters and dimensions."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from moe.plan.degrees import ShardCounts
from moe.plan.placement import Weight, weights_of
from moe.plan.profile import Profile
from moe.spec import ModelSpec, MoESpec
from moe.spec.adapter import A, B
from moe.spec.block import AttentionDims, Block, FeedForwardDims
from moe.spec.parameter import Parameter, within
from moe.spec.patterns import matches

BACKWARD = 2.0
"""Times the forward pass that a backward pass takes: products for the gradients of both factors."""


Part = Literal["experts", "feed_forward", "others"]
"""Matrices of a unit: experts; the rest of the second half of a layer; attention, or logits."""
_ROUTER = "moe.router"


class Matrix(NamedTuple):
    """A matrix as a rank multiplies it."""

    inputs: int
    outputs: int
    is_split: bool
    """Whether tensor ranks have parts of it, and multiply all tokens of their group; or all of it, and their own."""
    is_trained: bool
    is_adapter: bool
    gives_hidden: bool
    """Whether what it gives is hidden states of a feed-forward layer."""
    again: bool
    """Whether it is an adapter's first half of which nothing is kept."""
    is_first: bool
    """Whether it is the first of those that are multiplied by the same rows, for which these are made narrow."""


class Products(NamedTuple):
    """Matrix products of a pass, where one is what a forward pass takes without adapters."""

    forward: float
    backward: float
    again: float
    """Forward products that the backward pass recomputes: those with the first halves of adapters, whose outputs are
    not kept."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Smallest part of a model that a pipeline stage has whole. Alike units are one object."""

    kind: str
    """Kind in words: `embeddings`, `encoder layer with experts`, `head`."""
    weights: tuple[Weight, ...]
    sides: int = 1
    """Runs of positions that the batch's positions are shared among: each passes through one of two stacks in an
    encoder-decoder."""
    attentions: tuple[AttentionDims, ...] = ()
    feed_forward: FeedForwardDims | None = None
    moe: MoESpec | None = None
    vocabulary: int | None = None
    """Logits of each position, where it is the head."""
    tied_weights: tuple[Weight, ...] = ()
    """Weights of another unit. If that unit is on another stage, this one has a copy."""
    has_backward: bool = True
    """Whether gradients go through it: where neither it nor anything before it is trained, none do."""

    @property
    def is_layer(self) -> bool:
        return bool(self.attentions)

    @cached_property
    def apart(self) -> "Unit":
        """The unit on a stage that has nothing of the units that its weights are tied to."""
        return (
            replace(self, weights=(*self.weights, *self.tied_weights), tied_weights=())
            if self.tied_weights
            else self
        )

    @cached_property
    def adapted_widths(self) -> int:
        """Numbers that adapters outside experts keep of each position: what their first halves gave."""
        narrow = (weight for weight in self.weights if weight.name.endswith(A) and not weight.of_experts)
        return sum(weight.shape[0] for weight in narrow)

    @cached_property
    def quantized_weights(self) -> tuple[Weight, ...]:
        """Weights that are codes of a matrix, which is decoded where it is multiplied."""
        return tuple(weight for weight in self.weights if weight.num_coded)

    def matrices(self, tensor: int, part: Part) -> tuple[tuple[Matrix, int], ...]:
        """Matrices of one part of the unit on each of `tensor` ranks, and how many there are alike; but for the
        router's."""
        shards, counts, seen_inputs = ShardCounts(tensor=tensor), Counter[Matrix](), set()
        for weight in (*self.weights, *self.tied_weights):
            if _part_of(weight) != part or len(weight.shape) < 2 or weight.name.endswith(_ROUTER):
                continue
            *_, inner = weight.unsharded_shape(shards)
            if not (numbers := weight.product_numel(shards)):
                continue
            is_adapter = weight.name.endswith((A, B))
            counts[
                Matrix(
                    inputs=inner, outputs=numbers // inner, is_trained=weight.is_trained, is_adapter=is_adapter,
                    is_split=is_adapter or tensor == 1 or any(axis == "tensor" for axis, _ in weight.axis_dims),
                    gives_hidden=part == "feed_forward" and "w_out" not in weight.name,
                    again=weight.name.endswith(A) and "w_out" in weight.name,
                    is_first=(is_adapter, inner) not in seen_inputs,
                )
            ] += 1  # fmt: skip
            seen_inputs.add((is_adapter, inner))
        return tuple(counts.items())

    @lru_cache(1024)  # noqa: B019
    def products(self, part: Part, shards: ShardCounts = ShardCounts()) -> Products:
        """Products of a rank with the matrices of one part, but for the router's. A frozen matrix has none for a
        gradient of its own; an adapter has all of its own, and ranks that split the matrix split only a half of it."""
        own = adapters = trainable = again = 0
        for weight in (*self.weights, *self.tied_weights):
            if _part_of(weight) != part or len(weight.shape) < 2 or weight.name.endswith(_ROUTER):
                continue
            elements = weight.product_numel(shards)
            if weight.name.endswith((A, B)):
                adapters += elements
                if weight.name.endswith(A):
                    again += elements  # what goes through it is not kept
            else:
                own += elements
            trainable += elements if weight.is_trained else 0
        if not own:
            return Products(1.0, BACKWARD, 0.0)
        forward = 1 + adapters / own
        return Products(forward, forward + trainable / own, again / own)

    def decoded_bytes(self, shards: ShardCounts, width: int) -> int:
        """Bytes of the largest matrix on a rank among those that are dequantized to an element of `width` bytes. A
        matrix whose elements have that width already is multiplied as it is."""
        sizes = (
            weight.dequantized_numel(shards)
            for weight in self.quantized_weights
            if weight.item_bytes != width
        )
        return width * max(sizes, default=0)

    @property
    def trains_router(self) -> bool:
        return any(weight.is_trained and weight.name.endswith(_ROUTER) for weight in self.weights)

    def trains(self, part: str) -> bool:
        """Whether anything that is called so has a gradient."""
        return any(weight.is_trained and part in weight.name for weight in self.weights)


@lru_cache(64)
def units(model: ModelSpec, profile: Profile, freeze: tuple[str, ...] = ()) -> tuple[Unit, ...]:
    """All units of a model, in the order in which it uses them: embeddings, layers, head. Parameters whose names match
    a pattern of `freeze` are not trained; layers that differ in these, or in whether any before them is, are not
    alike."""
    unique_units: dict[tuple[Block, frozenset[str], frozenset[str], bool], Unit] = {}
    all_units, has_backward = [], False
    for path, block in model.blocks():
        frozen_names, frozen_tied_names = (
            _frozen_names(path, block.parameters, freeze),
            _frozen_names("", block.tied, freeze),
        )
        weights = weights_of(block.parameters, profile.axes, frozen_names)
        has_backward = has_backward or any(weight.is_trained for weight in weights)
        if (key := (block, frozen_names, frozen_tied_names, has_backward)) not in unique_units:
            unique_units[key] = Unit(
                block.kind,
                weights,
                model.sides,
                block.attentions,
                block.feed_forward,
                block.moe,
                block.vocabulary,
                weights_of(block.tied, profile.axes, frozen_tied_names),
                has_backward,
            )
        all_units.append(unique_units[key])
    return tuple(all_units)


def _part_of(weight: Weight) -> Part:
    if weight.of_experts:
        return "experts"
    return "feed_forward" if weight.name.startswith("feed_forward.") else "others"


def _frozen_names(path: str, parameters: tuple[Parameter, ...], freeze: tuple[str, ...]) -> frozenset[str]:
    """Names in their block of the parameters that a pattern matches."""
    if not freeze:
        return frozenset()
    whole = zip(parameters, within(path, parameters), strict=True)
    return frozenset(
        parameter.name
        for parameter, with_path in whole
        if any(matches(pattern, with_path.name) for pattern in freeze)
    )
