"""Constants of all devices as the planner reads them: `moe/plan/cluster/measured.py`, from the record of the fits."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from moe.plan.cluster.kernels import (
    CollectiveCost,
    ExchangeCost,
    FusedAttention,
    GroupedExperts,
    Kernels,
    MatrixProducts,
)

Constants = Mapping[str, Any]
"""Constants of a device, as JSON has them: `products` and `experts` by dtype, `attention` by width, `ring`,
`all_to_all` and `exchange`."""

_HEAD = '''"""Constants of kernels on real GPUs. Generated: `python -m benchmarks.device_constants` fits them on what
was measured, and writes this file; docs/planner.md has their errors.

float32 (TF32 on tensor cores) and float64 were not measured: they have bfloat16's share of their own peak, and the
bytes of their numbers. Between nodes only H100 and H200 were measured: `hop_s` and `forward_bytes_per_s` of others are
H100's, `line_bytes_per_s` is H100's at the ratio of the adapters. Nobody measured DeepEP on A100.
"""

from moe.plan.cluster.kernels import (
    CollectiveCost,
    ExchangeCost,
    FusedAttention,
    GroupedExperts,
    Kernels,
    MatrixProducts,
)

MEASURED: dict[str, Kernels] = {
'''
_WIDTH = 110


def constants_of(kernel: Any) -> dict[str, float]:
    """Fields of one of the planner's types that are not as by default, in four digits."""
    found = {}
    for each in fields(kernel):
        value = getattr(kernel, each.name)
        if each.default is MISSING or value != each.default:
            found[each.name] = value if isinstance(value, int) else float(f"{value:.4g}")
    return found


def kernels_of(device: Constants) -> Kernels:
    """One device's constants as the planner's own types."""
    exchange = device["exchange"]
    return Kernels(
        products={dtype: MatrixProducts(**given) for dtype, given in device["products"].items()},
        experts={dtype: GroupedExperts(**given) for dtype, given in device["experts"].items()},
        attention={int(widths): FusedAttention(**given) for widths, given in device["attention"].items()},
        ring=CollectiveCost(**device["ring"]),
        all_to_all=CollectiveCost(**device["all_to_all"]),
        exchange=None if exchange is None else ExchangeCost(**exchange),
    )


def source(constants: Mapping[str, Constants]) -> str:
    """The text of the module."""
    lines = []
    for name, device in constants.items():
        lines.append(f'    "{name}": Kernels(')
        for field, kind, key in (
            ("products", "MatrixProducts", '"{}"'),
            ("experts", "GroupedExperts", '"{}"'),
            ("attention", "FusedAttention", "{}"),
        ):
            lines.append(f"        {field}={{")
            for of, given in device[field].items():
                lines += _call(f"            {key.format(of)}: {kind}", given)
            lines.append("        },")
        for field, kind in (
            ("ring", "CollectiveCost"),
            ("all_to_all", "CollectiveCost"),
            ("exchange", "ExchangeCost"),
        ):
            if device[field] is not None:
                lines += _call(f"        {field}={kind}", device[field])
        lines.append("    ),")
    return _HEAD + "\n".join([*lines, "}  # fmt: skip"]) + "\n"


def _call(begin: str, given: Mapping[str, float]) -> list[str]:
    """A call over as few lines as its arguments need."""
    indent = " " * (len(begin) - len(begin.lstrip()))
    words = [f"{name}={number(value)}" for name, value in given.items()]
    line = f"{begin}({', '.join(words)}),"
    if len(line) <= _WIDTH:
        return [line]
    lines, current = [f"{begin}("], ""
    for word in words:
        if current and len(indent) + 4 + len(current) + len(word) + 2 > _WIDTH:
            lines.append(f"{indent}    {current}")
            current = ""
        current += f" {word}," if current else f"{word},"
    return [*lines, f"{indent}    {current}", f"{indent}),"]


def number(value: float) -> str:
    """A number as Python's source has it: four digits at most, an exponent of three."""
    if isinstance(value, int):
        return str(value)
    if 0.01 <= abs(value) < 10_000 or not value:
        return f"{value:.4g}" if value != int(value) else str(float(value))
    digits, _, exponent = f"{value:.3e}".partition("e")
    digits = digits.rstrip("0").rstrip(".")
    return f"{digits}e{int(exponent)}"
