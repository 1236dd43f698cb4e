"""A job's `model: {from: FOLDER}` with what the folder's `config.json` says filled in. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from moe.interchange.adapter_folder import AdapterFolder
from moe.interchange.catalog import family_in
from moe.interchange.config import describe_config
from moe.interchange.hub_folder import CONFIG, HubFolder, folder_of
from moe.interchange.mixture import mixture
from moe.spec import LanguageModelSpec, SpecError, expansion, spec_error

_WHOLE = {"kind", "model_dim", "num_layers", "attention", "vocab_size"}
"""Fields of a model that has been filled in."""
_DATED = ("chat", "preference")
"""Corpora whose templates may ask for a date."""


def expand(fields: Mapping[str, Any], roots: Sequence[str] | None) -> dict[str, Any]:
    """A job as plain data, before it is parsed, with its model as from `expand_model`, the adapter beside it filled in,
    and today's date for chat templates that ask for it."""
    if not isinstance(model := fields.get("model"), Mapping):
        return dict(fields)
    model, data = expand_model(model, roots, is_trained=True), fields.get("data")
    job = {**fields, "model": model, **_expanded_adapter(fields, model, roots, "adapter", "model")}
    if isinstance(data, Mapping) and data.get("corpus") in _DATED and data.get("date") is None:
        job["data"] = {**data, "date": datetime.now(UTC).date().isoformat()}
    return job


def names_folder(job: Any) -> bool:
    """Whether a job, before it is parsed, has a model that is filled in from a folder."""
    model = job.get("model") if isinstance(job, Mapping) else None
    return isinstance(model, Mapping) and isinstance(model.get("from"), str)


def expand_request(request: Any, roots: Sequence[str] | None) -> Any:
    """The same for whatever was sent as a job, or as a request `{spec: ..., cluster: ...}` for a plan."""
    if not isinstance(request, Mapping):
        return request
    if isinstance(request.get("spec"), Mapping):
        return {**request, "spec": expand(request["spec"], roots)}
    return expand(request, roots)


def expand_model(
    fields: Mapping[str, Any], roots: Sequence[str] | None, place: str = "model", *, is_trained: bool = False
) -> dict[str, Any]:
    """A model as plain data, to be trained or only read. Its dimensions are those of the folder in `from`; fields
    written beside `from` override them, one by one in `moe` and `attention`. With `upcycle`, they are those of the
    mixture. An adapter that names a folder is filled in from it. Raises SpecError."""
    model = _expand(fields, roots, place, is_trained)
    return {**model, **_expanded_adapter(model, model, roots, f"{place}.adapter", place)}


def _expanded_adapter(
    fields: Mapping[str, Any], model: Mapping[str, Any], roots: Sequence[str] | None, place: str, beneath: str
) -> dict[str, Any]:
    """The `adapter` of `fields`, filled in for the model `beneath`, with `place` as its path in errors; nothing if it
    names no folder. Problems of the model itself are reported when it is parsed."""
    adapter = fields.get("adapter")
    if not isinstance(adapter, Mapping) or not isinstance(adapter.get("from"), str):
        return {}
    folder = AdapterFolder(adapter["from"], roots, f"{place}.from")
    try:
        spec = LanguageModelSpec(**{key: value for key, value in model.items() if key != "adapter"})
    except (SpecError, TypeError):
        spec = None
    if spec is None or spec.from_folder is None:
        return {"adapter": folder.filled_in(adapter, place)}
    family = family_in(HubFolder(spec.from_folder, roots, f"{beneath}.from"))
    return {"adapter": folder.filled_in(adapter, place, (spec, family))}


def _expand(model: Mapping[str, Any], roots: Sequence[str] | None, place: str, is_trained: bool) -> dict[str, Any]:
    """A model with what its folder says filled in.

    One that names no folder, or is filled in already, is returned as it is. Only `config.json` is read, under the
    `roots` (as `moe.data.locations` has them; None allows any). Raises SpecError, also for one that was filled in from
    another `config.json`.
    """
    if not isinstance(model.get("from"), str) or (model.keys() >= _WHOLE and model.get("from_config") is None):
        return dict(model)
    if model.get("preset") is not None:
        raise spec_error("conflict", f"{place}.preset", model["preset"], "conflicts with `from`, which determines it",
                         "omit one of them")  # fmt: skip
    model = {**model, "from": folder_of(model["from"])}
    folder = HubFolder(model["from"], roots, f"{place}.from")
    config, digest = folder.config()
    if model.keys() >= _WHOLE:
        if model["from_config"] != digest:
            raise spec_error("changed",
                f"{place}.from", model["from"],
                f"has another {CONFIG} than the one the other fields of {place} came from",
                f"write only {place}: {{from: FOLDER}} and the fields to change",
            )  # fmt: skip
        return dict(model)
    file = folder.path(CONFIG)
    description = describe_config(config, file)
    # What the job itself says is told when it is parsed.
    try:
        LanguageModelSpec(**description.model_fields)
    except SpecError as error:
        problems = [
            replace(problem, path=f"{file}:{', '.join(keys)}", remedy="correct config.json")
            for problem in error.problems
            if (keys := _keys_of(description.keys, problem.path)) and not _says(model, problem.path)
        ]
        if problems:
            raise SpecError(problems) from None
    if is_trained and description.asks_router_loss and not _says(model, "moe.aux_coefficient"):
        raise spec_error("unsupported",
            f"{file}:output_router_logits", True, "uses a loss over all layers together, which is not supported",
            (
f"set the balancing loss, {place}: {{from: FOLDER, moe: {{aux_coefficient: 0.01}}}}, or "
"0 for none"
),
        )  # fmt: skip
    provenance = {"ignored_keys": description.ignored_keys, "from_config": digest}
    if model.get("upcycle") is not None:
        return {**mixture(description, model, place), **provenance}
    return {**expansion.over(description.model_fields, model), **provenance}


def _keys_of(keys: Mapping[str, tuple[str, ...]], path: str) -> tuple[str, ...]:
    """Config keys that a field is read from, or those of the field that contains it."""
    while path and path not in keys:
        path = path.rpartition("[" if path.endswith("]") else ".")[0]
    return keys.get(path, ())


def _says(model: Mapping[str, Any], path: str) -> bool:
    """Whether the model in a job sets this field."""
    value: Any = model
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True
