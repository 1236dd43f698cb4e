"""Command line options of text generation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moe.spec.errors import SpecError

if TYPE_CHECKING:
    from moe.spec.generation import GenerationSpec

_OPTIONS = {"num_beams": "--beams"}
"""Options with another name than their field."""


def generation_spec(**options: Any) -> "GenerationSpec":
    """Spec of the given options. Raises SpecError with option names for fields."""
    from moe.spec.generation import GenerationSpec

    with option_names():
        return GenerationSpec(**{name: value for name, value in options.items() if value is not None})


@contextmanager
def option_names() -> Iterator[None]:
    """Replace the fields of `GenerationSpec` in SpecErrors by option names."""
    from moe.spec.generation import GenerationSpec

    try:
        yield
    except SpecError as error:
        raise SpecError(
            replace(problem, path=_option(problem.path))
            if problem.path.partition(".")[0].partition("[")[0] in GenerationSpec.model_fields
            else problem
            for problem in error.problems
        ) from None


def _option(path: str) -> str:
    field, dot, rest = path.partition(".")
    return _OPTIONS.get(field, f"--{field.replace('_', '-')}") + dot + rest
