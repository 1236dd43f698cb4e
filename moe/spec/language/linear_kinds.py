"""Kinds of linear attention."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from moe.spec.language.gated_delta_net import GatedDeltaNetSpec
from moe.spec.language.mamba2 import Mamba2Spec
from moe.spec.language.short_convolution import ShortConvolutionSpec


def _with_kind(fields: Any) -> Any:
    """Fields with the only kind that there once was, if they name none."""
    return {"kind": "gated_delta_net", **fields} if isinstance(fields, dict) else fields


LinearAttention = Annotated[
    Annotated[GatedDeltaNetSpec | Mamba2Spec | ShortConvolutionSpec, Field(discriminator="kind")],
    BeforeValidator(_with_kind),
]
