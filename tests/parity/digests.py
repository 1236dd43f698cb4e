"""SHA-256 digests of a trajectory's records: equal if every bit is equal, independent of names of parameters.

This holds for two commits on one machine: another processor, torch version or number of threads rounds differently.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

LOSSES = ("loss", "nll", "aux_loss", "z_loss", "grad_norm")
OF_THE_LAYOUT = ("all_to_all_bytes", "all_to_all_s", "waiting_s")
"""Fields of a record that depend on the layout itself; times differ from run to run."""


def digest_of_tensors(tensors: Iterable[Tensor]) -> str:
    """The digest of the bytes of some tensors in any order: names and the order of parameters may change."""
    return _digest("".join(sorted(_digest(_bytes(tensor)) for tensor in tensors)).encode())


def digests_of(records: list[dict[str, Any]]) -> dict[str, str]:
    """Digests of the records of all steps of a trajectory, by kind."""
    contents = {
        "losses": [[record[name] for name in LOSSES] for record in records],
        "layers": [[_without_layout(layer) for layer in record["layers"]] for record in records],
        "routing": [digest_of_tensors(record["routing"].values()) for record in records],
    }
    for kind in ("gradients", "parameters", "moments"):
        contents[kind] = [record["digests"][kind] for record in records if kind in record["digests"]]
    return {kind: _digest(json.dumps(content, sort_keys=True).encode()) for kind, content in contents.items()}


def _without_layout(layer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in layer.items() if name not in OF_THE_LAYOUT}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
