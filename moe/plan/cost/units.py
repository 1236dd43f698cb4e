"""A model as the planner sees it: the units that a pipeline stage has whole, with their parameters and dimensions."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from moe.plan.degrees import Shards
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
    """Forward products that the backward pass makes once more, of halves of adapters that nothing is kept of."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Smallest part of a model that a pipeline stage has whole. Alike units are one object."""

    kind: str
    """In words: `embeddings`, `encoder layer with experts`, `head`."""
    weights: tuple[Weight, ...]
    sides: int = 1
    """Runs of positions that the batch's positions are shared among: each passes through one of two stacks in an
    encoder-decoder."""
    attentions: tuple[AttentionDims, ...] = ()
    feed_forward: FeedForwardDims | None = None
    moe: MoESpec | None = None
    vocabulary: int | None = None
    """Logits of each position, where it is the head."""
    tied: tuple[Weight, ...] = ()
    """Of another unit: where that is on another stage, it has a copy of its own."""
    has_backward: bool = True
    """Whether gradients go through it: where neither it nor anything before it is trained, none do."""

    @property
    def is_layer(self) -> bool:
        return bool(self.attentions)

    @cached_property
    def apart(self) -> "Unit":
        """The unit on a stage that has nothing of the units that its weights are tied to."""
        return replace(self, weights=(*self.weights, *self.tied), tied=()) if self.tied else self

    @cached_property
    def adapted_widths(self) -> int:
        """Numbers that adapters outside experts keep of each position: what their first halves gave."""
        narrow = (each for each in self.weights if each.name.endswith(A) and not each.of_experts)
        return sum(each.shape[0] for each in narrow)

    @cached_property
    def coded(self) -> tuple[Weight, ...]:
        """Weights that are codes of a matrix, which is decoded where it is multiplied."""
        return tuple(each for each in self.weights if each.num_coded)

    def matrices(self, tensor: int, part: Part) -> tuple[tuple[Matrix, int], ...]:
        """Matrices of one part of the unit on each of `tensor` ranks, and how many there are alike; but for the
        router's."""
        shards, found, met = Shards(tensor=tensor), Counter[Matrix](), set()
        for each in (*self.weights, *self.tied):
            if _part_of(each) != part or len(each.shape) < 2 or each.name.endswith(_ROUTER):
                continue
            *_, inner = each.used(shards)
            if not (numbers := each.multiplied(shards)):
                continue
            is_adapter = each.name.endswith((A, B))
            found[
                Matrix(
                    inputs=inner, outputs=numbers // inner, is_trained=each.trained, is_adapter=is_adapter,
                    is_split=is_adapter or tensor == 1 or any(axis == "tensor" for axis, _ in each.divided),
                    gives_hidden=part == "feed_forward" and "w_out" not in each.name,
                    again=each.name.endswith(A) and "w_out" in each.name,
                    is_first=(is_adapter, inner) not in met,
                )
            ] += 1  # fmt: skip
            met.add((is_adapter, inner))
        return tuple(found.items())

    @lru_cache(1024)  # noqa: B019
    def products(self, part: Part, shards: Shards = Shards()) -> Products:
        """Products of a rank with the matrices of one part, but for the router's. A frozen matrix has none for a
        gradient of its own; an adapter has all of its own, and ranks that split the matrix split only a half of it."""
        own = adapters = trained = again = 0
        for each in (*self.weights, *self.tied):
            if _part_of(each) != part or len(each.shape) < 2 or each.name.endswith(_ROUTER):
                continue
            here = each.multiplied(shards)
            if each.name.endswith((A, B)):
                adapters += here
                if each.name.endswith(A):
                    again += here  # what goes through it is not kept
            else:
                own += here
            trained += here if each.trained else 0
        if not own:
            return Products(1.0, BACKWARD, 0.0)
        forward = 1 + adapters / own
        return Products(forward, forward + trained / own, again / own)

    def decoded_bytes(self, shards: Shards, width: int) -> int:
        """Of its largest matrix on a rank, of those that are decoded for an arithmetic of so many bytes a number; one
        that is kept as wide as that is multiplied as it is."""
        decoded = (each.decoded(shards) for each in self.coded if each.item_bytes != width)
        return width * max(decoded, default=0)

    @property
    def trains_router(self) -> bool:
        return any(each.trained and each.name.endswith(_ROUTER) for each in self.weights)

    def trains(self, part: str) -> bool:
        """Whether anything that is called so has a gradient."""
        return any(each.trained and part in each.name for each in self.weights)


@lru_cache(64)
def units(model: ModelSpec, profile: Profile, freeze: tuple[str, ...] = ()) -> tuple[Unit, ...]:
    """All units of a model, in the order in which it uses them: embeddings, layers, head. Parameters whose names match
    a pattern of `freeze` are not trained; layers that differ in these, or in whether any before them is, are not
    alike."""
    made: dict[tuple[Block, frozenset[str], frozenset[str], bool], Unit] = {}
    found, has_backward = [], False
    for path, block in model.blocks():
        frozen, tied = _frozen(path, block.parameters, freeze), _frozen("", block.tied, freeze)
        weights = weights_of(block.parameters, profile.axes, frozen)
        has_backward = has_backward or any(each.trained for each in weights)
        if (key := (block, frozen, tied, has_backward)) not in made:
            made[key] = Unit(
                block.kind,
                weights,
                model.sides,
                block.attentions,
                block.feed_forward,
                block.moe,
                block.vocabulary,
                weights_of(block.tied, profile.axes, tied),
                has_backward,
            )
        found.append(made[key])
    return tuple(found)


def _part_of(weight: Weight) -> Part:
    if weight.of_experts:
        return "experts"
    return "feed_forward" if weight.name.startswith("feed_forward.") else "others"


def _frozen(path: str, parameters: tuple[Parameter, ...], freeze: tuple[str, ...]) -> frozenset[str]:
    """Names in their block of the parameters that a pattern matches."""
    if not freeze:
        return frozenset()
    whole = zip(parameters, within(path, parameters), strict=True)
    return frozenset(
        one.name for one, each in whole if any(matches(pattern, each.name) for pattern in freeze)
    )
