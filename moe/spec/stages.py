"""Numbers of layers of a pipeline's stages."""

import re
from itertools import groupby
from typing import Any

from moe.spec.errors import RuleError

_TERM = re.compile(r"(?:(\d{1,6})x)?(\d{1,6})")
_MAX_STAGES = 100_000


def parse_stages(value: Any) -> Any:
    """Return the list that the text of a layout stands for: `3+2x4+3` is [3, 4, 4, 3]. Other values stay."""
    if not isinstance(value, str):
        return value
    terms = [_TERM.fullmatch(term.strip()) for term in value.split("+")]
    counts = [(int(term[1] or 1), int(term[2])) for term in terms if term is not None]
    if len(counts) < len(terms) or sum(times for times, _ in counts) > _MAX_STAGES:
        raise RuleError("invalid_syntax", "must list the layers of each stage", "write it as 3+4+4+3 or 3+2x4+3")
    return [num_layers for times, num_layers in counts for _ in range(times)]


def format_stages(stages: tuple[int, ...]) -> str:
    """Text of the stages in a layout, such as `3+2x4+3`."""
    runs = [(len(list(equal)), num_layers) for num_layers, equal in groupby(stages)]
    return "+".join(f"{times}x{num_layers}" if times > 1 else f"{num_layers}" for times, num_layers in runs)


def even_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as possible with the embeddings and the head counted as a layer each, and at least
    one; the longer stages first."""
    if num_stages == 1:
        return (num_layers,)
    shortest, longer = divmod(num_layers + 2, num_stages)
    if shortest == 1:  # the last stage is one of the longer: the head alone is no stage
        lengths = [2] * (longer - 1) + [1] * (num_stages - longer) + [2]
    else:
        lengths = [shortest + (stage < longer) for stage in range(num_stages)]
    lengths[0] -= 1
    lengths[-1] -= 1
    return tuple(lengths)
