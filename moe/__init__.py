"""Mixture-of-experts models in PyTorch: specs, plans, layers, expert parallelism, training.

Shape suffixes of names and comments:

    B rows (sentences)   L source length   N target length   V vocabulary
    G token groups       S tokens per group T tokens         M model dimension
    E experts            C capacity        K experts per token H expert hidden dimension

Names are imported lazily (PEP 562), so that `moe.spec` and `moe.plan` load without torch.
"""

from moe.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _WHERE)
