"""Names of adapters' parameters, and of the matrices that can have them."""

import re

from moe.spec.patterns import matches

A, B = "_lora_a", "_lora_b"
"""Name suffixes of A and B, after the matrix's name."""
MAGNITUDES = "_lora_m"
"""Name suffix of DoRA's magnitudes."""
TOKEN_ROWS = ".token_rows"
"""Name suffix of the trained rows of a table, after the name of its module."""
EMBEDDING, OUTPUT = "embedding.weight", "output.weight"
TABLES = EMBEDDING, OUTPUT
"""Tables of the vocabulary, which have adapters only if a target is exactly their name."""
GATE, UP = "w_gate", "w_in"
"""Gate and up matrices of an expert, which have the same inputs and share A."""
_LAYER_MATRIX = re.compile(
    r"(?P<kind>attention|dense|shared|experts)\.(?!convolution|\w*norm)(\w+\.weight|w_in|w_gate|w_out)$|(\brouter)$"
)
"""Names of matrices in layers that can have adapters, apart from `_MAMBA_OUTPUT`: not convolutions, norms and the gate
of shared experts."""
_MAMBA_OUTPUT = ".out_projection.weight"
"""Mamba-2's last projection, to which PEFT applies no adapter, since fused kernels would ignore it."""


def kind_of(name: str) -> str | None:
    """`attention`, `dense`, `shared`, `experts`, `router` or `table` for a matrix that can have an adapter; else
    None."""
    if name in TABLES:
        return "table"
    match = _LAYER_MATRIX.search(name)
    return None if match is None or name.endswith(_MAMBA_OUTPUT) else match["kind"] or "router"


def is_target(pattern: str, name: str) -> bool:
    """Whether a pattern of `AdapterSpec.targets` matches a matrix; tables match only their name."""
    return pattern == name if name in TABLES else matches(pattern, name)


def is_base_matrix(name: str) -> bool:
    """Whether `AdapterSpec.base` applies to this parameter."""
    match = _LAYER_MATRIX.search(name)
    return match is not None and match["kind"] is not None


def is_adapter(name: str) -> bool:
    """Whether this parameter belongs to an adapter."""
    return name.endswith((A, B, MAGNITUDES, TOKEN_ROWS))


def partner_of(name: str) -> str:
    """Name of the matrix that shares A with a gate or up matrix of experts; other names unchanged."""
    if f"experts.{GATE}" in name:
        return name.replace(GATE, UP)
    return name.replace(UP, GATE) if f"experts.{UP}" in name else name


def a_name(name: str) -> str:
    """Name of the A of an adapted matrix."""
    return (partner_of(name) if GATE in name else name) + A
