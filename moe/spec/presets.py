"""Presets by their names, as models."""

from moe.spec.expansion import dimensions, names
from moe.spec.model import ModelSpec, model_spec

__all__ = ["load", "names"]


def load(name: str) -> ModelSpec:
    """The model of a preset, every dimension filled in. Raises SpecError for a name that is none."""
    dimensions(name)  # a name that is none is told as such
    return model_spec({"preset": name})
