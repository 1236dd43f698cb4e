"""Language modeling: decoder-only model and task. Names load lazily; the package loads no torch."""

from typing import TYPE_CHECKING

from moe.lazy import lazy_names

if TYPE_CHECKING:
    from moe.tasks.language.generation import generate
    from moe.tasks.language.model import LanguageModel, build_model
    from moe.tasks.language.task import LanguageTask

_WHERE = {"LanguageModel": ".model", "LanguageTask": ".task", "build_model": ".model", "generate": ".generation"}

__all__ = ["LanguageModel", "LanguageTask", "build_model", "generate"]

__getattr__, __dir__ = lazy_names(__name__, _WHERE)
