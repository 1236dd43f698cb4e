"""A model as the planner sees it: the units that a pipeline stage has whole, with their parameters and dimensions."""

from dataclasses import dataclass, replace
from functools import lru_cache

from moe.plan.placement import Weight, weights_of
from moe.plan.profile import Profile
from moe.spec import ModelSpec, MoESpec
from moe.spec.block import AttentionDims, Block, FeedForwardDims


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

    @property
    def is_layer(self) -> bool:
        return bool(self.attentions)


@lru_cache(64)
def apart(unit: Unit) -> Unit:
    """The unit on a stage that has nothing of the units that its weights are tied to."""
    return replace(unit, weights=(*unit.weights, *unit.tied), tied=()) if unit.tied else unit


@lru_cache(64)
def units(model: ModelSpec, profile: Profile) -> tuple[Unit, ...]:
    """All units of a model, in the order in which it uses them: embeddings, layers, head."""
    made: dict[Block, Unit] = {}
    blocks = [block for _, block in model.blocks()]
    for block in blocks:
        if block not in made:
            made[block] = Unit(
                block.kind,
                weights_of(block.parameters, profile.axes),
                model.sides,
                block.attentions,
                block.feed_forward,
                block.moe,
                block.vocabulary,
                weights_of(block.tied, profile.axes),
            )
    return tuple(made[block] for block in blocks)
