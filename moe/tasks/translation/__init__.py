"""Translation: encoder-decoder model and task. Names load lazily; the package loads no torch."""

from typing import TYPE_CHECKING

from moe.lazy import lazy_names

if TYPE_CHECKING:
    from moe.tasks.translation.decoding import translate
    from moe.tasks.translation.model import TranslationModel, build_model
    from moe.tasks.translation.task import TranslationTask

_WHERE = {"TranslationModel": ".model", "TranslationTask": ".task", "build_model": ".model", "translate": ".decoding"}

__all__ = ["TranslationModel", "TranslationTask", "build_model", "translate"]

__getattr__, __dir__ = lazy_names(__name__, _WHERE)
