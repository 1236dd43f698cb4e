"""Mixture-of-experts models in PyTorch: specs, plans, layers, expert parallelism, training.

Shape suffixes of names and comments:

    B rows (sentences)   L source length   N target length   V vocabulary
    G token groups       S tokens per group T tokens         M model dimension
    E experts            C capacity        K experts per token H expert hidden dimension

Names are imported lazily (PEP 562), so that `moe.spec` and `moe.plan` load without torch.
"""

from importlib import import_module
from typing import Any

_WHERE = {
    "JobSpec": "moe.spec",
    "ModelSpec": "moe.spec",
    "MoESpec": "moe.spec",
    "SpecError": "moe.spec",
    "MoELayer": "moe.layers.moe",
    "TokenContext": "moe.routing",
    "build_model": "moe.tasks.build",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'moe' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
