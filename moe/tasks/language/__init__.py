"""Language modeling: decoder-only model and task. Names load lazily; the package loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe.tasks.language.build import build_model
    from moe.tasks.language.generation import generate
    from moe.tasks.language.model import LanguageModel
    from moe.tasks.language.task import LanguageTask

_WHERE = {"LanguageModel": "model", "LanguageTask": "task", "build_model": "build", "generate": "generation"}

__all__ = ["LanguageModel", "LanguageTask", "build_model", "generate"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'moe.tasks.language' has no attribute {name!r}")
    value = getattr(import_module(f"moe.tasks.language.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
