"""Translation: encoder-decoder model and task. Names load lazily; the package loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe.tasks.translation.build import build_model
    from moe.tasks.translation.decoding import translate
    from moe.tasks.translation.model import TranslationModel
    from moe.tasks.translation.task import TranslationTask

_WHERE = {"TranslationModel": "model", "TranslationTask": "task", "build_model": "build", "translate": "decoding"}

__all__ = ["TranslationModel", "TranslationTask", "build_model", "translate"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'moe.tasks.translation' has no attribute {name!r}")
    value = getattr(import_module(f"moe.tasks.translation.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
