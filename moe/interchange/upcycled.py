"""Tensors of a mixture that is made of a dense folder: the part of their tensors that each one begins with. No
torch."""

import re
from collections.abc import Sequence

from moe.interchange.family import LAYER, Family
from moe.interchange.pieces import ParameterPiece, piece
from moe.spec import LanguageModelSpec

_OF_EXPERTS = re.compile(r"layers\.(\d+)\.feed_forward\.moe\.(experts|shared)\.(w_in|w_gate|w_out)")
_OF_NONE = re.compile(r"layers\.\d+\.feed_forward\.moe\.(router|router_bias|shared\.gate)")


def begins_anew(spec: LanguageModelSpec, name: str) -> bool:
    """Whether one of our tensors is part of a mixture only, so that no dense model has anything of it."""
    return spec.upcycle is not None and _OF_NONE.fullmatch(name) is not None


def piece_of(spec: LanguageModelSpec, family: Family, name: str, shape: Sequence[int]) -> ParameterPiece | None:
    """Part of a dense layer's matrix, in the hub's layout of its family, that is one of experts or shared experts; None
    for what a dense model has, too.

    Shared experts have the first hidden units, and the experts of each virtual group, which stand side by side, the
    others in order.
    """
    if spec.upcycle is None or spec.moe is None or (match := _OF_EXPERTS.fullmatch(name)) is None:
        return None
    layer, part, matrix = match.groups()
    upcycle, width = spec.upcycle, spec.moe.hidden_dim
    whole = upcycle.granularity * width
    if part == "shared":
        copies, hidden_axes, factor = "", f"h@0/{whole}", upcycle.shared_factor(spec.moe)
    else:
        copies, hidden_axes = "(n g) ", f"(g h)@{upcycle.shared_slices * width}/{whole}"
        factor = upcycle.experts_factor(spec.moe)
    if matrix == "w_out":
        our_pattern, their_pattern = f"{copies}h m", f"m {hidden_axes}"
    else:
        our_pattern, their_pattern, factor = f"{copies}m h", f"{hidden_axes} m", 1.0
    (row,), *_ = family.rows(f"{LAYER}feed_forward.dense.{matrix}.weight")
    return piece(shape, our_pattern, row.name_in(int(layer)), their_pattern, {"g": upcycle.routed_slices}, factor)
