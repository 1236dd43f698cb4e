"""Annotations: the same tensor, with the placement of a hint."""

import torch
from torch import fx

from moe.sharding.hints.annotate import PLACED
from moe.sharding.operands import shape_of
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Rule


def annotation_rule(node: fx.Node) -> Rule:
    shape = shape_of(node)
    dims = tuple((f"d{dim}",) for dim in range(len(shape)))
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    return Rule((dims,), (dims,), sizes, linear=(frozenset({0}),), any_size=True, work="none", lower=_first_part)


def _first_part(local: LocalCall) -> torch.fx.Node:
    return local.parts[0]


RULES = {PLACED: annotation_rule}
