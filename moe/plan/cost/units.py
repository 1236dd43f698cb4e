"""Units of a model: the layers, embeddings and head that pipeline stages consist of."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from moe.plan.degrees import ShardCounts
from moe.plan.placement import Weight, weights_of
from moe.plan.profile import Profile
from moe.spec import ModelSpec, MoESpec
from moe.spec.adapter_names import MAGNITUDES, A, B, is_adapter
from moe.spec.block import AttentionDims, Block, FeedForwardDims
from moe.spec.parameter import Parameter, with_prefix
from moe.spec.patterns import matches

BACKWARD = 2.0
"""Cost of a backward pass in forward passes: gradients of both factors."""


Part = Literal["experts", "feed_forward", "others"]
"""A unit's matrices: experts; the rest of the feed-forward half; others (attention, or logits)."""
_ROUTER = "moe.router"


class Matrix(NamedTuple):
    """A weight matrix as one rank multiplies it."""

    inputs: int
    outputs: int
    is_split: bool
    """Whether tensor ranks multiply shards of it by all tokens of their group, or all of it by their own."""
    is_trained: bool
    is_adapter: bool
    gives_hidden: bool
    """Whether it outputs hidden states of a feed-forward layer."""
    is_recomputed: bool
    """Whether it is an adapter's first half with recomputed output."""
    is_first: bool
    """Whether it is the first of those with the same input, which is cast for it."""


class Products(NamedTuple):
    """Matrix products of a pass, in forward passes without adapters."""

    forward: float
    backward: float
    recomputed: float
    """Recomputed forward products of adapters' first halves."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Smallest part of a model that a pipeline stage has whole. Identical units are one object."""

    kind: str
    """Description: `embeddings`, `encoder layer with experts`, `head`."""
    weights: tuple[Weight, ...]
    sides: int = 1
    """Stacks that share the batch's positions: 2 in an encoder-decoder."""
    attentions: tuple[AttentionDims, ...] = ()
    feed_forward: FeedForwardDims | None = None
    moe: MoESpec | None = None
    vocabulary: int | None = None
    caps_logits: bool = False
    extra_norms: int = 0
    """Norms of a layer in addition to the two before, or after, its attention and feed-forward layers."""
    tied_weights: tuple[Weight, ...] = ()
    """Weights of another unit; on another stage, this unit has a copy."""
    has_backward: bool = True
    """Whether gradients pass through it: it or a unit before it is trained."""

    @property
    def is_layer(self) -> bool:
        return bool(self.attentions) or self.feed_forward is not None or self.moe is not None

    @cached_property
    def untied(self) -> "Unit":
        """The unit with its own copies of tied weights."""
        return (
            replace(self, weights=(*self.weights, *self.tied_weights), tied_weights=()) if self.tied_weights else self
        )

    @cached_property
    def without_backward(self) -> "Unit":
        """The unit with forward passes alone."""
        return replace(self, has_backward=False)

    @cached_property
    def frozen(self) -> "Unit":
        """The unit without gradients of its weights, but with those of its input."""
        weights, tied_weights = (
            tuple(replace(weight, is_trained=False) for weight in part) for part in (self.weights, self.tied_weights)
        )
        return replace(self, weights=weights, tied_weights=tied_weights)

    def adapted_widths(self, tensor: int) -> int:
        """Elements per position that adapters outside experts save on each of `tensor` ranks: outputs of first halves,
        and those that DoRA's magnitudes scale."""
        shards = ShardCounts(tensor=tensor)
        narrow = (weight for weight in self.weights if weight.name.endswith((A, MAGNITUDES)) and not weight.of_experts)
        return sum(weight.unsharded_shape(shards)[0] for weight in narrow)

    @property
    def logit_copies(self) -> int:
        """Tensors of a chunk's logits at once: three if gradients overwrite them, one more if they are capped, and more
        if an adapter makes them."""
        names = [weight.name for weight in (*self.weights, *self.tied_weights)]
        return (
            3
            + self.caps_logits
            + 2 * any(map(is_adapter, names))
            + 2 * any(name.endswith(MAGNITUDES) for name in names)
        )

    @cached_property
    def quantized_weights(self) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.weights if weight.num_coded)

    def matrices(self, tensor: int, part: Part) -> tuple[tuple[Matrix, int], ...]:
        """(matrix, count) pairs of one part on each of `tensor` ranks, without the router."""
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
                    is_recomputed=weight.name.endswith(A) and "w_out" in weight.name,
                    is_first=(is_adapter, inner) not in seen_inputs,
                )
            ] += 1  # fmt: skip
            seen_inputs.add((is_adapter, inner))
        return tuple(counts.items())

    @lru_cache(1024)  # noqa: B019
    def products(self, part: Part, shards: ShardCounts = ShardCounts()) -> Products:
        """Products of a rank with one part, without the router. A frozen matrix has no weight gradient; ranks that
        split a matrix split only one half of its adapter."""
        base = adapters = trainable = recomputed = 0
        for weight in (*self.weights, *self.tied_weights):
            if _part_of(weight) != part or len(weight.shape) < 2 or weight.name.endswith(_ROUTER):
                continue
            elements = weight.product_numel(shards)
            if weight.name.endswith((A, B)):
                adapters += elements
                if weight.name.endswith(A):
                    recomputed += elements  # its output is not saved
            else:
                base += elements
            trainable += elements if weight.is_trained else 0
        if not base:
            return Products(1.0, BACKWARD, 0.0)
        forward = 1 + adapters / base
        return Products(forward, forward + trainable / base, recomputed / base)

    def decoded_bytes(self, shards: ShardCounts, width: int) -> int:
        """Bytes of the rank's largest matrix that is dequantized to `width` bytes per element."""
        sizes = (weight.dequantized_numel(shards) for weight in self.quantized_weights if weight.item_bytes != width)
        return width * max(sizes, default=0)

    @property
    def trains_router(self) -> bool:
        return any(weight.is_trained and weight.name.endswith(_ROUTER) for weight in self.weights)

    def trains(self, part: str) -> bool:
        """Whether a weight with `part` in its name is trained."""
        return any(weight.is_trained and part in weight.name for weight in self.weights)


@lru_cache(64)
def units(model: ModelSpec, profile: Profile, freeze: tuple[str, ...] = ()) -> tuple[Unit, ...]:
    """Units of a model in execution order.

    `freeze` patterns name untrained parameters. Layers differ if other parameters are frozen, or if only one follows
    a trained parameter.
    """
    unique_units: dict[tuple[Block, frozenset[str], frozenset[str], bool], Unit] = {}
    all_units, has_backward = [], False
    for path, block in model.blocks():
        frozen_names, frozen_tied_names = (
            _frozen_names(path, block.parameters, freeze),
            _frozen_names("", block.tied_parameters, freeze),
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
                block.caps_logits,
                block.extra_norms,
                weights_of(block.tied_parameters, profile.axes, frozen_tied_names),
                has_backward,
            )
        all_units.append(unique_units[key])
    return tuple(all_units)


def _part_of(weight: Weight) -> Part:
    if weight.of_experts:
        return "experts"
    return "feed_forward" if weight.name.startswith("feed_forward.") else "others"


def _frozen_names(path: str, parameters: tuple[Parameter, ...], freeze: tuple[str, ...]) -> frozenset[str]:
    if not freeze:
        return frozenset()
    full_parameters = zip(parameters, with_prefix(path, parameters), strict=True)
    return frozenset(
        parameter.name
        for parameter, with_path in full_parameters
        if any(matches(pattern, with_path.name) for pattern in freeze)
    )
