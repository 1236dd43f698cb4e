"""Specs of a user's module: the functions that build it and return its batches."""

import json
import math
from collections.abc import Iterator
from keyword import iskeyword
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from moe.spec.base import LARGEST_EXACT, Spec
from moe.spec.block import Blocks
from moe.spec.errors import RuleError, spec_error
from moe.spec.parameter_counts import ParameterCounts

MAX_CODE_CHARS = 255
MAX_OPTIONS_CHARS = 100_000
CODE_REMEDY = "name one function of an importable module, such as mypackage.model:build"


def is_code(text: str) -> bool:
    """Whether a text is `module:function`: a dotted module, one colon, one name without dots."""
    module, colon, function = text.partition(":")
    names = [*module.split("."), function]
    return bool(colon) and all(_is_name(name) for name in names) and len(text) <= MAX_CODE_CHARS


def _is_name(text: str) -> bool:
    return text.isascii() and text.isidentifier() and not iskeyword(text)


def _code(text: str) -> str:
    if not is_code(text):
        raise RuleError("invalid_value", "must be module:function", CODE_REMEDY)
    return text


Code = Annotated[str, AfterValidator(_code)]
"""Importable function: `mypackage.model:build`."""


def _options(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if not _is_name(name):
            raise RuleError("invalid_value", f"must have argument names as keys, and {name!r} is not one", "rename it")
    return _plain_values(options)


def _plain_values(options: dict[str, Any]) -> dict[str, Any]:
    if any(not _is_plain(value) for value in _values(options)):
        raise RuleError("wrong_type",
                        "must be JSON: text, finite numbers, true, false, null, lists, and mappings with text keys",
                        "use only these")  # fmt: skip
    if len(json.dumps(options)) > MAX_OPTIONS_CHARS:
        raise RuleError("too_large", f"must have at most {MAX_OPTIONS_CHARS:,} characters", "shorten them")
    return options


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, element in value.items():
            yield key if isinstance(key, str) else object()
            yield from _values(element)
    elif isinstance(value, list):
        for element in value:
            yield from _values(element)
    else:
        yield value


def _is_plain(value: Any) -> bool:
    match value:
        case None | bool():
            return True
        case int():
            return abs(value) <= LARGEST_EXACT
        case float():
            return math.isfinite(value)
        case str():
            return not any("\ud800" <= character <= "\udfff" for character in value)
    return False


class ModuleModelSpec(ParameterCounts):
    """A torch module built by the user's function. It returns the batch's loss as a scalar, or a dict with `loss` and
    further scalars, which are recorded at each step.

    The layout is planned from its graph. Only functions that the operator's settings allow may be called.
    """

    kind: Literal["module"]
    build: Code
    """Function that builds the module: `mypackage.model:build`."""
    options: Annotated[dict[str, Any], AfterValidator(_options)] = Field(default={}, max_length=1000)
    """Keyword arguments of the function: plain values."""
    hints: Annotated[dict[str, Any], AfterValidator(_plain_values)] = Field(default={}, max_length=1000)
    """Required placements, by name patterns of parameters and inputs: `{"*.experts.*": {split: 0}}`."""

    if not TYPE_CHECKING:  # type checkers use the declaration of the base class

        @property
        def moe(self) -> None:
            """No MoE layers that the planner knows: a module's layers are unknown."""
            return

    @property
    def sides(self) -> int:
        return 1

    @property
    def heads(self) -> dict[str, int]:
        return {}

    def ffn_dims(self) -> set[int]:
        return set()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return ()

    @property
    def model_dim(self) -> int:
        """Raises SpecError: unknown until the module is built."""
        raise spec_error("unsupported", "model.kind", self.kind,
                         "has no known dimensions: it is planned from its graph",
                         "submit the job, or use `shardyard plan --module`")  # fmt: skip

    def blocks(self) -> Blocks:
        """Raises SpecError."""
        raise spec_error("unsupported", "model.kind", self.kind,
                         "has no table of parameters: it is planned from its graph",
                         "submit the job, or use `shardyard plan --module`")  # fmt: skip


class ModuleDataSpec(Spec):
    """Batches from the user's function: `batch(seed, step)` returns the global batch, as a tuple of the module's
    arguments or a mapping by name. It must return the same batch on every call and machine."""

    corpus: Literal["module"]
    batches: Code
    """That function: `mypackage.model:batch`."""

    @property
    def max_tokens(self) -> int:
        """Raises SpecError: unknown for a user's batches."""
        raise spec_error("unsupported", "data.corpus", self.corpus,
                         "has no known lengths: its batches come from the module's code",
                         "use the module's own code")  # fmt: skip

    @property
    def padded_tokens(self) -> float:
        """Raises SpecError."""
        return float(self.max_tokens)
