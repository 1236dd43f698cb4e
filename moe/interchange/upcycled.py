"""Parts of a dense folder's tensors that initialize an upcycled mixture. No torch."""

import re
from collections.abc import Sequence

from moe.interchange.family import LAYER, Family
from moe.interchange.pieces import ParameterPiece, piece
from moe.spec import LanguageModelSpec

_EXPERT_MATRIX = re.compile(r"layers\.(\d+)\.feed_forward\.moe\.(experts|shared)\.(w_in|w_gate|w_out)")
_NEW_TENSOR = re.compile(r"layers\.\d+\.feed_forward\.moe\.(router|router_bias|shared\.gate)")


def is_new_in_mixture(spec: LanguageModelSpec, name: str) -> bool:
    """Whether one of our tensors exists only in the mixture, without a counterpart in the dense model."""
    return spec.upcycle is not None and _NEW_TENSOR.fullmatch(name) is not None


def piece_of(spec: LanguageModelSpec, family: Family, name: str, shape: Sequence[int]) -> ParameterPiece | None:
    """Piece of a dense layer's matrix, in its family's hub layout, that initializes a matrix of experts or shared
    experts; None for tensors that the dense model has too.

    Shared experts get the first hidden units; the consecutive experts of each virtual group get the others in order.
    """
    if spec.upcycle is None or spec.moe is None or (match := _EXPERT_MATRIX.fullmatch(name)) is None:
        return None
    layer, part, matrix = match.groups()
    upcycle, width = spec.upcycle, spec.moe.hidden_dim
    ffn_dim = upcycle.granularity * width
    if part == "shared":
        copies, hidden_axes, factor = "", f"h@0/{ffn_dim}", upcycle.shared_factor(spec.moe)
    else:
        copies, hidden_axes = "(n g) ", f"(g h)@{upcycle.shared_slices * width}/{ffn_dim}"
        factor = upcycle.experts_factor(spec.moe)
    if matrix == "w_out":
        parameter_pattern, tensor_pattern = f"{copies}h m", f"m {hidden_axes}"
    else:
        parameter_pattern, tensor_pattern, factor = f"{copies}m h", f"{hidden_axes} m", 1.0
    (row,), *_ = family.rows(f"{LAYER}feed_forward.dense.{matrix}.weight")
    return piece(
        shape, parameter_pattern, row.name_in(int(layer)), tensor_pattern, {"g": upcycle.routed_slices}, factor
    )
