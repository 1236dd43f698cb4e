"""Fills in a job's `model: {from: FOLDER}` from the folder's `config.json`. No torch."""

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

_REQUIRED = {"kind", "model_dim", "num_layers", "attention", "vocab_size"}
"""Fields of every model that has been filled in."""
_CORPORA_WITH_DATE = ("chat", "preference", "unpaired_preference")
"""Corpora whose templates may use a date."""


def expand(fields: Mapping[str, Any], roots: Sequence[str] | None) -> dict[str, Any]:
    """Fill in a job (plain data, before parsing): its model by `expand_model`, a top-level adapter, and today's date
    for chat templates that use it."""
    if not isinstance(model := fields.get("model"), Mapping):
        return dict(fields)
    model, data = expand_model(model, roots, is_trained=True), fields.get("data")
    job = {**fields, "model": model, **_expanded_adapter(fields, model, roots, "adapter", "model")}
    if isinstance(data, Mapping) and data.get("corpus") in _CORPORA_WITH_DATE and data.get("date") is None:
        job["data"] = {**data, "date": datetime.now(UTC).date().isoformat()}
    return job


def names_folder(job: Any) -> bool:
    """Whether a job, before parsing, has a model to fill in from a folder."""
    model = job.get("model") if isinstance(job, Mapping) else None
    return isinstance(model, Mapping) and isinstance(model.get("from"), str)


def expand_request(request: Any, roots: Sequence[str] | None) -> Any:
    """Like `expand`, for a posted job or a plan request `{spec: ..., cluster: ...}` of any form."""
    if not isinstance(request, Mapping):
        return request
    if isinstance(request.get("spec"), Mapping):
        return {**request, "spec": expand(request["spec"], roots)}
    return expand(request, roots)


def expand_model(
    fields: Mapping[str, Any], roots: Sequence[str] | None, place: str = "model", *, is_trained: bool = False
) -> dict[str, Any]:
    """Fill in a model (plain data), to be trained or only read. Dimensions come from the folder in `from`, or are those
    of the mixture with `upcycle`; fields next to `from` override them, in `moe` and `attention` one by one. An adapter
    that names a folder is filled in from it. Raises SpecError."""
    model = _expand(fields, roots, place, is_trained)
    return {**model, **_expanded_adapter(model, model, roots, f"{place}.adapter", place)}


def _expanded_adapter(
    fields: Mapping[str, Any], model: Mapping[str, Any], roots: Sequence[str] | None, place: str, model_place: str
) -> dict[str, Any]:
    """The `adapter` of `fields`, filled in for `model`, whose path is `model_place`; `place` is the adapter's path in
    errors. Empty if the adapter names no folder. Problems with the model itself are reported when it is parsed."""
    adapter = fields.get("adapter")
    if not isinstance(adapter, Mapping) or not isinstance(adapter.get("from"), str):
        return {}
    folder = AdapterFolder(adapter["from"], roots, f"{place}.from")
    try:
        spec = LanguageModelSpec(**{key: value for key, value in model.items() if key != "adapter"})
    except (SpecError, TypeError):
        spec = None
    if spec is None or spec.from_folder is None:
        return {"adapter": folder.fill_in(adapter, place)}
    family = family_in(HubFolder(spec.from_folder, roots, f"{model_place}.from"))
    return {"adapter": folder.fill_in(adapter, place, (spec, family))}


def _expand(model: Mapping[str, Any], roots: Sequence[str] | None, place: str, is_trained: bool) -> dict[str, Any]:
    """Fill in a model from its folder.

    Returns a model that names no folder, or is filled in already, unchanged. Reads only `config.json`, under the
    `roots` (as in `moe.data.locations`; None allows any path). Raises SpecError, also if the model was filled in from
    another `config.json`.
    """
    if not isinstance(model.get("from"), str) or (model.keys() >= _REQUIRED and model.get("from_config") is None):
        return dict(model)
    if model.get("preset") is not None:
        raise spec_error("conflict", f"{place}.preset", model["preset"], "conflicts with `from`, which determines it",
                         "omit one of them")  # fmt: skip
    model = {**model, "from": folder_of(model["from"])}
    folder = HubFolder(model["from"], roots, f"{place}.from")
    config, digest = folder.config()
    if model.keys() >= _REQUIRED:
        if model["from_config"] != digest:
            raise spec_error("changed",
                f"{place}.from", model["from"],
                f"has changed: the other fields of {place} came from a different {CONFIG}",
                f"write only {place}: {{from: FOLDER}} and the fields to change",
            )  # fmt: skip
        return dict(model)
    file = folder.path(CONFIG)
    description = describe_config(config, file, folder.quantization_file())
    # Problems with the job's own fields are reported when it is parsed.
    try:
        LanguageModelSpec(**description.model_fields)
    except SpecError as error:
        problems = [
            replace(problem, path=f"{file}:{', '.join(keys)}", remedy="correct config.json")
            for problem in error.problems
            if (keys := _keys_of(description.keys, problem.path)) and not _sets(model, problem.path)
        ]
        if problems:
            raise SpecError(problems) from None
    if is_trained and description.requests_router_loss and not _sets(model, "moe.aux_coefficient"):
        key = description.family.key_path(config, "output_router_logits")
        raise spec_error("unsupported",
            f"{file}:{key}", True, "uses a loss over all layers together, which is not supported",
            f"set the balancing loss, {place}: {{from: FOLDER, moe: {{aux_coefficient: 0.01}}}}, or 0 for none",
        )  # fmt: skip
    provenance = {"ignored_keys": description.ignored_keys, "from_config": digest}
    if model.get("upcycle") is not None:
        return {**mixture(description, model, place), **provenance}
    return {**expansion.merge_overrides(description.model_fields, model), **provenance}


def _keys_of(keys: Mapping[str, tuple[str, ...]], path: str) -> tuple[str, ...]:
    """Config keys that a field, or the field that contains it, is read from."""
    while path and path not in keys:
        path = path.rpartition("[" if path.endswith("]") else ".")[0]
    return keys.get(path, ())


def _sets(model: Mapping[str, Any], path: str) -> bool:
    """Whether the model in a job sets this field."""
    value: Any = model
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True
