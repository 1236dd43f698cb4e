"""Translation: encoder-decoder model and task. Names load lazily; the package loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe.tasks.translation.build import build_model
    from moe.tasks.translation.context import BatchContext
    from moe.tasks.translation.greedy import greedy_decode
    from moe.tasks.translation.model import DecodingState, TranslationModel
    from moe.tasks.translation.task import TranslationTask

_WHERE = {
    "BatchContext": "context",
    "DecodingState": "model",
    "TranslationModel": "model",
    "TranslationTask": "task",
    "build_model": "build",
    "greedy_decode": "greedy",
}

__all__ = [
    "BatchContext", "DecodingState", "TranslationModel", "TranslationTask", "build_model", "greedy_decode",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'moe.tasks.translation' has no attribute {name!r}")
    value = getattr(import_module(f"moe.tasks.translation.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
