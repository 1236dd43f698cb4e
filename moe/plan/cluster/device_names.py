"""Device types by the names that drivers, torch and Ray report."""

import re

from moe.plan.cluster.facts import DeviceFacts

_GPU_NAMES = {
    "A100": "a100-80", "V100": "v100", "H100": "h100", "H200": "h200", "B200": "b200", "GB200": "gb200",
    "B300": "b300", "GB300": "gb300", "H20": "h20", "H800": "h800", "L40S": "l40s", "A10G": "a10g",
    "4090": "rtx-4090", "5090": "rtx-5090", "MI300X": "mi300x", "MI355X": "mi355x",
}  # fmt: skip
"""Device types by a part of the reported name: `H100`, `A100-40G`, `NVIDIA H100 80GB HBM3`,
`AMD-Instinct-MI300X-OAM`."""
_ASSUMED = "a100-80"
"""Type whose rates are assumed for unknown GPUs; plans name it."""
_ASSUMED_FACTS = {"bfloat16_flops_per_s": 312e12, "memory_bytes_per_s": 2.039e12, "link_bytes_per_s": 300e9,
                  "across_nodes_bytes_per_s": 25e9}  # fmt: skip


_OTHER_CARDS = {"LAPTOP", "MOBILE", "D", "DD"}
"""Name parts of slower GeForce cards: for laptops, and for China."""
_BETWEEN_A100S = 60 * 1024**3
"""Bytes of memory between those of the two A100s, which Ray reports under one name."""


def find_device(name: str, memory_bytes: int | None = None) -> str | None:
    """Key in `DEVICES` of a GPU with this name; None if unknown.

    Ray 2.60 names data-centre GPUs by model (`H100` for all variants) and GeForce cards in full (`GeForce-RTX-4090`);
    earlier releases have an ambiguous `G` for the latter (Ray's accelerators/nvidia_gpu.py).
    """
    parts = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if parts & {"4090", "5090"} and parts & _OTHER_CARDS:
        return None
    if "A100" in parts and (parts & {"40G", "40GB"} or (memory_bytes or _BETWEEN_A100S) < _BETWEEN_A100S):
        return "a100-40"
    return next((device for part, device in _GPU_NAMES.items() if part in parts), None)


def unknown_gpu(name: str, memory_bytes: int) -> DeviceFacts:
    """Facts assumed for a GPU with an unknown name."""
    return DeviceFacts(
        name=f"unknown GPU {name}".strip()[:64], assumed_as=_ASSUMED, memory_bytes=memory_bytes, **_ASSUMED_FACTS
    )
