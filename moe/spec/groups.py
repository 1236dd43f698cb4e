"""Default token group size of language models."""

from collections.abc import Mapping
from typing import Any

from moe.spec import expansion
from moe.spec.data import SyntheticSpec
from moe.spec.errors import SpecError
from moe.spec.model import kind_of
from moe.spec.moe import MoESpec
from moe.spec.sequences import SequencesFields
from moe.spec.train import TrainSpec


def with_group(job: Any) -> Any:
    """Return a job's plain data, with `model.moe.group_tokens` filled in if unset.

    Sets one sequence (`max_tokens`) if the model is `from` a folder, or if the preset's or default value is not a
    multiple of `max_tokens` or does not divide `batch_tokens`. Returns `job` itself if nothing changes.
    """
    model = job.get("model") if isinstance(job, Mapping) else None
    if not isinstance(model, Mapping) or kind_of(model) != "language":
        return job
    try:
        moe_fields, expanded_moe = model.get("moe") or {}, expansion.expand_preset(dict(model)).get("moe")
    except SpecError:
        return job  # unknown preset: its own validator refuses it
    if not isinstance(moe_fields, Mapping) or not isinstance(expanded_moe, Mapping) or "group_tokens" in moe_fields:
        return job
    corpus = _part(job, "data").get("corpus")
    max_tokens = _number(job, "data", "max_tokens", SyntheticSpec if corpus == "synthetic" else SequencesFields)
    batch_tokens = _number(job, "train", "batch_tokens", TrainSpec)
    if max_tokens is None or batch_tokens is None:
        return job  # invalid value: its own validator refuses it
    default = expanded_moe.get("group_tokens", MoESpec.model_fields["group_tokens"].default)
    if model.get("from") is None and not default % max_tokens and not batch_tokens % default:
        return job
    return {**job, "model": {**model, "moe": {**moe_fields, "group_tokens": max_tokens}}}


def _part(job: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = job.get(name)
    return part if isinstance(part, Mapping) else {}


def _number(job: Mapping[str, Any], part: str, name: str, spec: Any) -> int | None:
    """A positive integer field, or its default; else None."""
    value = _part(job, part).get(name, spec.model_fields[name].default)
    return value if type(value) is int and value > 0 else None
