"""Model spec: by dimensions, preset, or the function that builds it."""

from typing import Annotated, Any

from pydantic import Discriminator, Tag, TypeAdapter, ValidationError

from moe.spec import expansion
from moe.spec.errors import SpecError
from moe.spec.language import LanguageModelSpec
from moe.spec.module import ModuleModelSpec
from moe.spec.problems import problems_of
from moe.spec.translation import TranslationModelSpec


def kind_of(model: Any) -> str:
    """Explicit kind, else the preset's, else translation."""
    if not isinstance(model, dict):
        return str(getattr(model, "kind", "translation"))
    if "kind" in model:
        return str(model["kind"])
    try:
        return str(expansion.dimensions(model["preset"]).get("kind", "translation"))
    except (KeyError, SpecError):  # the model's own validators report it
        return "translation"


ModelSpec = Annotated[
    Annotated[TranslationModelSpec, Tag("translation")]
    | Annotated[LanguageModelSpec, Tag("language")]
    | Annotated[ModuleModelSpec, Tag("module")],
    Discriminator(kind_of),
]
_MODEL: TypeAdapter[TranslationModelSpec | LanguageModelSpec | ModuleModelSpec] = TypeAdapter(ModelSpec)


def model_spec(plain: Any) -> TranslationModelSpec | LanguageModelSpec | ModuleModelSpec:
    """Parse plain data. Raises SpecError with every problem."""
    try:
        return _MODEL.validate_python(plain)
    except ValidationError as error:
        raise SpecError(problems_of(error)) from None
