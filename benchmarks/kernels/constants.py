"""Constants of the planner's kernels as JSON."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any


def constants_of(kernel: Any) -> dict[str, float]:
    """Fields of a kernel that differ from their defaults, rounded to four digits."""
    constants = {}
    for field in fields(kernel):
        value = getattr(kernel, field.name)
        if field.default is MISSING or value != field.default:
            constants[field.name] = value if isinstance(value, int) else float(f"{value:.4g}")
    return constants


def render_json(constants: Mapping[str, Mapping[str, Any]]) -> str:
    """JSON text of all devices' constants, one kernel per line."""
    devices = (f" {json.dumps(name)}: {_render_device(device)}" for name, device in constants.items())
    return "{\n" + ",\n".join(devices) + "\n}\n"


def _render_device(device: Mapping[str, Any]) -> str:
    lines = []
    for name, kernels in device.items():
        if name in ("products", "experts", "attention"):
            rows = (f"   {json.dumps(key)}: {json.dumps(kernel)}" for key, kernel in kernels.items())
            lines.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n  }")
        else:
            lines.append(f"  {json.dumps(name)}: {json.dumps(kernels)}")
    return "{\n" + ",\n".join(lines) + "\n }"
