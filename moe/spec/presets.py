"""Presets as model specs."""

from moe.spec.expansion import dimensions, names
from moe.spec.model import ModelSpec, model_spec

__all__ = ["load", "names"]


def load(name: str) -> ModelSpec:
    """Model of a preset. Raises SpecError for an unknown name."""
    dimensions(name)  # reports an unknown name as such
    return model_spec({"preset": name})
