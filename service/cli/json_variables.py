"""Environment variables that hold lists and mappings of settings, as JSON."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from pydantic import BaseModel

    from moe.spec import Problem

_PREFIX = "SHARDYARD"


def json_problems(settings: "type[BaseModel]", environment: Mapping[str, str] = os.environ) -> "Iterator[Problem]":
    """Problems of the variables of these settings that are no JSON. Only values of Kubernetes settings are shown, since
    others may be secret."""
    from pydantic import BaseModel

    texts = {name.upper(): text for name, text in environment.items()}
    for field, info in settings.model_fields.items():
        yield from _problems(field, f"{_PREFIX}_{field.upper()}", info.annotation, texts, is_secret=field != "kuberay")
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            for part, part_info in info.annotation.model_fields.items():
                variable = f"{_PREFIX}_{field.upper()}_{part.upper()}"
                yield from _problems(f"{field}.{part}", variable, part_info.annotation, texts, is_secret=False)


def _problems(
    path: str, variable: str, annotation: Any, texts: Mapping[str, str], *, is_secret: bool
) -> "Iterator[Problem]":
    from moe.spec import Problem

    shape, text = _shape(annotation), texts.get(variable)
    if shape is None or text is None or _is_json(text):
        return
    yield Problem(
        "invalid_syntax", path, None if is_secret else text, f"must be a JSON {shape}",
        f"write it as {variable}='{_example(annotation, shape, '' if is_secret else text)}'",
    )  # fmt: skip


def _shape(annotation: Any) -> Literal["list", "object"] | None:
    """Shape of the JSON that a setting of this type takes; None for a plain value."""
    from pydantic import BaseModel

    origin = get_origin(annotation)
    if origin in (list, tuple):
        return "list"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "object"
    return None


def _example(annotation: Any, shape: Literal["list", "object"], text: str) -> str:
    """JSON like that which is meant: a word or several become a list of them."""
    if shape == "object":
        return '{"NAME": "VALUE"}'
    if _shape(get_args(annotation)[0]) == "object":
        return '[{"NAME": "VALUE"}]'
    words = [word.strip() for word in text.split(",")]
    is_plain = all(word and not set(word) & set("[]{}\"'") for word in words)
    return json.dumps(words if is_plain else ["/data"] if not text else ["NAME"])


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
