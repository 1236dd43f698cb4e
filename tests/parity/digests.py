"""SHA-256 digests of what a trajectory records: equal where every bit is equal, whatever its parameters are called.

That is a claim about two commits on one machine: another processor, torch or number of threads rounds otherwise.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

LOSSES = ("loss", "nll", "aux_loss", "z_loss", "grad_norm")
OF_THE_LAYOUT = ("all_to_all_bytes", "all_to_all_s", "waiting_s")
"""What a record says of the layout itself: times differ from run to run."""


def digest_of_tensors(tensors: Iterable[Tensor]) -> str:
    """The digest of the bytes of some tensors, in whatever order: names and the order of parameters may change."""
    return _digest("".join(sorted(_digest(_bytes(each)) for each in tensors)).encode())


def digests_of(records: list[dict[str, Any]]) -> dict[str, str]:
    """By kind, the digest of what all steps of a trajectory recorded of it."""
    found = {
        "losses": [[record[name] for name in LOSSES] for record in records],
        "layers": [[_without_layout(layer) for layer in record["layers"]] for record in records],
        "routing": [digest_of_tensors(record["routing"].values()) for record in records],
    }
    for kind in ("gradients", "parameters", "moments"):
        found[kind] = [record["digests"][kind] for record in records if kind in record["digests"]]
    return {kind: _digest(json.dumps(each, sort_keys=True).encode()) for kind, each in found.items()}


def _without_layout(layer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in layer.items() if name not in OF_THE_LAYOUT}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
