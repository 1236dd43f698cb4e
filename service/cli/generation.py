"""Command line options of text generation."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe.spec.generation import GenerationSpec

_OPTIONS = {"num_beams": "--beams"}
"""Options with another name than their field."""


def generation_spec(**options: Any) -> "GenerationSpec":
    """Spec of the given options. Raises SpecError with option names for fields."""
    from moe.spec.errors import SpecError
    from moe.spec.generation import GenerationSpec

    try:
        return GenerationSpec(**{name: value for name, value in options.items() if value is not None})
    except SpecError as error:
        raise SpecError(replace(problem, path=_option(problem.path)) for problem in error.problems) from None


def _option(path: str) -> str:
    field, dot, rest = path.partition(".")
    return _OPTIONS.get(field, f"--{field.replace('_', '-')}") + dot + rest
