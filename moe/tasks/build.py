"""Select a task by model spec: the only module that knows all tasks. Loads no torch."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, assert_never

from moe.spec import JobSpec, LanguageModelSpec, ModelSpec, ModuleModelSpec, TranslationModelSpec
from moe.tasks.task import Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from moe.parallel import Layout


def task_class(spec: ModelSpec) -> type[Task[Any, Any]]:
    """Task class of a kind of model."""
    match spec:
        case TranslationModelSpec():
            from moe.tasks.translation.task import TranslationTask

            return TranslationTask
        case ModuleModelSpec():
            from moe.tasks.module.task import ModuleTask

            return ModuleTask
        case LanguageModelSpec():
            from moe.tasks.language.task import LanguageTask

            return LanguageTask
        case _:
            assert_never(spec)


def build_task(spec: JobSpec, allowed_code: Collection[str] = ()) -> Task[Any, Any]:
    """Task of a job, which may call the functions `allowed_code` of user modules.

    Raises SpecError for a job that can only be planned.
    """
    if isinstance(spec.model, ModuleModelSpec):
        from moe.tasks.module.task import ModuleTask

        return ModuleTask(spec, allowed_code)
    return task_class(spec.model)(spec)


def build_model(
    spec: ModelSpec, layout: "Layout | None" = None, *, seed: int = 0, dtype: "torch.dtype | None" = None
) -> "nn.Module":
    """Build the model (this rank's part under `layout`) with initial weights, computing in `dtype` (default float32).

    Weights are drawn by (seed, parameter name, element): every layout starts from the same model. Raises SpecError if
    the layout's degrees do not divide the model's dimensions.
    """
    return task_class(spec).model_of(spec, layout, seed=seed, dtype=dtype)
