"""Fused attention: batch and heads may be split, and queries if each of them attends to all keys."""

import math
from typing import Any

import torch
from torch import fx

from moe.sharding.operands import is_tensor, results, shape_of
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Dims, Rule
from moe.spec import spec_error

aten = torch.ops.aten

_LETTERS = {
    "query": "bhsd", "key": "bktd", "value": "bkte", "out": "bhse", "grad_out": "bhse", "grad_out_": "bhse",
    "logsumexp": "bhs1", "attn_mask": "bhst", "attn_bias": "bhst",
}  # fmt: skip
"""Dimensions of operands by their names: batch, heads of queries and keys, queries, keys, and the two vector sizes."""

_FORWARD = ("out", "logsumexp")
_BACKWARD = ("query", "key", "value", "attn_bias")

_BY_ROWS = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
"""Operators whose sums over keys have one value for each query, without added padding."""


def attention(node: fx.Node) -> Rule:
    """Rule of fused attention. Raises SpecError for dropout."""
    arguments = _by_name(node)
    if (dropout := arguments.get("dropout_p", 0.0)) != 0:
        rule = "is the dropout of fused attention, whose random numbers would depend on the layout"
        remedy = "use dropout_p=0, or write attention with torch.nn.functional.dropout, which is keyed by position"
        raise spec_error("unsupported", node.meta.get("line") or node.name, dropout, rule, remedy)
    query, key = shape_of(arguments["query"]), shape_of(arguments["key"])
    by_rows = node.target in _BY_ROWS and not arguments.get("is_causal", False)
    # each head of keys serves one head of queries, or a group of heads
    sizes = {"b": query[0], "k": key[1], "g": query[1] // key[1], "s": query[2] if by_rows else 1}
    factors = {letter: size for letter, size in sizes.items() if size > 1}
    letter_factors: dict[str, tuple[str, ...]] = {letter: (letter,) if letter in factors else () for letter in "bks"}
    letter_factors["h"] = tuple(letter for letter in "kg" if letter in factors)
    full_sizes = {"b": query[0], "h": query[1], "k": key[1], "s": query[2]}

    def dims(name: str | None, shape: tuple[int, ...]) -> Dims:
        letters = _LETTERS.get(name or "", "")
        # a mask is broadcast from its last dimension on; sums over keys may lack the dimension of size 1
        letters = letters[len(letters) - len(shape) :] if name in ("attn_mask", "attn_bias") else letters
        return tuple(
            letter_factors.get(letter, ()) if size == full_sizes.get(letter) else ()
            for letter, size in zip(letters.ljust(len(shape)), shape, strict=False)
        )

    is_backward = "logsumexp" in arguments
    result_names = _BACKWARD if is_backward else _FORWARD
    outputs = results(node)
    is_relevant = [
        output is not None
        and index < len(result_names)
        and (result_names[index] != "attn_bias" or is_tensor(arguments["attn_bias"]))
        for index, output in enumerate(outputs)
    ]
    points = math.prod(factors.values())
    total = math.prod(query[:3]) * key[2] * query[3] * (10.0 if is_backward else 4.0)
    return Rule(
        operands=tuple(dims(name, shape_of(value)) for name, value in arguments.items() if is_tensor(value)),
        results=tuple(
            dims(result_names[index], tuple(output.shape)) if is_relevant[index] else ()
            for index, output in enumerate(outputs)
        ),
        sizes=factors,
        combine=dict.fromkeys(factors, "sum") if is_backward else {},
        replicated_results=frozenset(index for index, relevant in enumerate(is_relevant) if not relevant),
        work="attention",
        flops=total / points,
        lower=LocalCall.in_rows if node.target in _BY_ROWS else LocalCall.contiguous,
    )


def _by_name(node: fx.Node) -> dict[str, Any]:
    """Arguments by name, in order."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


RULES = dict.fromkeys(
    (
        *_BY_ROWS,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        aten._scaled_dot_product_fused_attention_overrideable_backward.default,
    ),
    attention,
)
