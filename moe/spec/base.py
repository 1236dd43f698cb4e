"""Base classes and field types of specs."""

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from moe.spec.attribute_docs import attribute_docstrings
from moe.spec.errors import RuleError, SpecError
from moe.spec.problems import problems_of


class Frozen(BaseModel):
    """Immutable model that forbids unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """JSON Schema with the docstrings of the fields as their descriptions."""
        json_schema = handler(schema)
        properties = handler.resolve_ref_schema(json_schema).get("properties", {})
        for name, docstring in attribute_docstrings(cls).items():
            if (field := cls.model_fields.get(name)) is not None and field.description is None:
                alias = field.validation_alias
                names = alias.choices if isinstance(alias, AliasChoices) else [alias]
                for key in {name, *names} & properties.keys():
                    properties[key].setdefault("description", docstring)
        return json_schema


class Spec(Frozen):
    """Immutable part of a user's input. Raises SpecError with every problem."""

    if not TYPE_CHECKING:  # a type checker sees the fields

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise SpecError(problems_of(error)) from None

        __init__.__pydantic_base_init__ = True  # so that errors in nested parts have full paths


LARGEST_EXACT = 2**53 - 1
"""Largest integer that JSON readers and databases represent exactly."""


def _exact(number: int) -> int:
    if number > LARGEST_EXACT:
        raise RuleError("out_of_range", f"must be at most {LARGEST_EXACT}", "lower it")
    return number


def _encodable(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RuleError("invalid_encoding", "must be valid UTF-8", "remove its lone surrogates")
    return text


Text = Annotated[str, AfterValidator(_encodable)]
"""Text without lone surrogates, which JSON escapes allow and UTF-8 does not."""

LANGUAGE_CODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_@.-]{0,30}[A-Za-z0-9])?")
LANGUAGE_CODE_REMEDY = "use 1 to 32 letters, digits, '_', '-', '.' and '@', as in pt_BR"


def _language(code: str) -> str:
    if not LANGUAGE_CODE.fullmatch(code):
        raise RuleError("invalid_value", "must be a language code", LANGUAGE_CODE_REMEDY)
    return code


LanguageCode = Annotated[str, AfterValidator(_language)]
"""`de`, `pt_BR`, `zh-Hans`, `sr@latin`."""

Count = Annotated[int, Field(strict=True, gt=0), AfterValidator(_exact)]
"""Positive integer; `true` and `"3"` are refused."""

CountOrZero = Annotated[int, Field(strict=True, ge=0), AfterValidator(_exact)]
Positive = Annotated[float, Field(strict=True, gt=0)]
AboveOne = Annotated[float, Field(strict=True, gt=1)]
"""Separate type, since pydantic ignores one of two `gt` bounds, `Positive`'s and a field's."""
NonNegative = Annotated[float, Field(strict=True, ge=0)]
Rate = Annotated[float, Field(strict=True, ge=1, le=1e21)]
"""Bytes or FLOPs per second."""
Latency = Annotated[float, Field(strict=True, ge=0, le=1000)]
"""Seconds."""
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1)]


MAX_PLACES = 1000
"""Maximum files, patterns or languages of a corpus; each is looked up when a job is posted."""
Place = Annotated[Text, Field(max_length=4096)]
Column = Annotated[Text, Field(max_length=256)]
