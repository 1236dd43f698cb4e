"""From a spec to its kind of model: the one place that knows which kinds there are. Loads no torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_never

from moe.spec import JobSpec, LanguageModelSpec, ModelSpec, Problem, SpecError, TranslationModelSpec
from moe.tasks.task import Generator, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from moe.parallel import Layout


def build_task(spec: JobSpec) -> Task[Any, Any]:
    """The task of a job. Raises SpecError for a model that can be planned only."""
    match spec.model:
        case TranslationModelSpec():
            from moe.tasks.translation.task import TranslationTask

            return TranslationTask(spec)
        case LanguageModelSpec():
            raise SpecError(
                Problem("model.kind", spec.model.kind, "can be planned, but not be trained here yet",
                        "use a translation model, or `shardyard plan`")
            )  # fmt: skip
        case _:
            assert_never(spec.model)


def build_model(
    spec: ModelSpec, layout: "Layout | None" = None, *, seed: int = 0, dtype: "torch.dtype | None" = None
) -> "nn.Module":
    """The model with its initial weights, computing in `dtype` (float32): this rank's part under `layout`, all of it
    without.

    Weights are keyed by (seed, parameter name, element), so every layout starts from the same model. Raises SpecError
    where the layout's degrees do not divide what they are to divide, and for a language model, which is none yet.
    """
    match spec:
        case TranslationModelSpec():
            from moe.tasks.translation.build import build_model as build

            return build(spec, layout, seed=seed, dtype=dtype)
        case LanguageModelSpec():
            raise SpecError(
                Problem("kind", spec.kind, "can be planned, but not be built yet", "use a translation model")
            )
        case _:
            assert_never(spec)


def build_generator(
    spec: ModelSpec, model: "nn.Module", max_tokens: int, read: Callable[[str], bytes]
) -> Generator:
    """Generator for a model of this spec, which was trained on texts of at most `max_tokens` tokens.

    `read` gives the tokenizers' files by name. Raises ValueError or FileNotFoundError for what cannot be read.
    """
    match spec:
        case TranslationModelSpec():
            from moe.tasks.translation.translator import Translator

            return Translator.of(model, max_tokens, read)
        case LanguageModelSpec():
            raise SpecError(
                Problem("kind", spec.kind, "can be planned, but not be built yet", "use a translation model")
            )
        case _:
            assert_never(spec)
