"""Mixture that a dense folder's model becomes: its spec's fields, and its config in another family. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

from pydantic import ValidationError

from moe.interchange.config import ConfigDescription, anew, build_config, differences, meaning
from moe.interchange.families import BY_TYPE
from moe.spec import LanguageModelSpec, Problem, SpecError, UpcycleSpec, expansion, spec_error
from moe.spec.problems import problems_of
from moe.spec.upcycle import MixtureFamily

FORMS: tuple[MixtureFamily, ...] = get_args(MixtureFamily)
"""Families of mixtures, by preference: if none is asked for, the first that can represent the mixture."""
_ALWAYS_SHARED = ("qwen2_moe", "glm4_moe")
"""Families whose models always have shared experts."""
_NOT_OF_DENSE = {"upcycle", "moe", "adapter", "from", "from_config", "ignored_keys", "preset"}
"""Keys of a model that do not concern the dense one."""
_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "initializer_range")
"""Keys of a dense config that its mixture's config keeps."""


def mixture(description: ConfigDescription, job_model: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A model as plain data: the fields of `job_model`, `from` and `upcycle` among them, and all those that the model
    of the `description` has as a mixture. `place` is the model's in errors. Raises SpecError.

    What is wrong with the fields that are given beside these two is left to who parses the model.
    """
    model, place = place, f"{place}.upcycle"
    if (name := description.family.model_types[0]) not in ("llama", "qwen3"):
        rule = f"requires a llama or qwen3, but this folder has a {name}, which already has experts"
        raise spec_error("conflict", place, None, rule, "omit upcycle, or name another folder by from")
    upcycle = _upcycle(job_model["upcycle"], place)
    dense = {key: value for key, value in description.model_fields.items() if key != "ffn_dim"}
    ffn_dim = description.model_fields["ffn_dim"]
    if problems := list(upcycle.problems_of_dense(ffn_dim, dense["num_layers"])):
        raise SpecError([replace(problem, path=f"{place}.{problem.path}") for problem in problems])
    if changes := list(_of_another_function(description, job_model, model)):
        raise SpecError(changes)
    if upcycle.every > 1:
        dense |= {"ffn_dim": ffn_dim, "moe_every": upcycle.every}
    reasons = []
    for form in FORMS if upcycle.form is None else (upcycle.form,):
        if form in _ALWAYS_SHARED and not upcycle.shared_slices:
            rule = "always has shared experts, but shared_slices is 0"
            reasons.append(Problem("conflict", f"{place}.form", form, rule, "raise shared_slices, or use another form"))
            continue
        layer = {**upcycle.layer_of(ffn_dim), **_of_form(form, upcycle)}
        upcycle_fields = {**upcycle.model_dump(mode="json"), "form": form}
        fields = {**expansion.over({**dense, "moe": layer}, job_model), "upcycle": upcycle_fields}
        try:
            spec = LanguageModelSpec(**fields)
        except SpecError:
            return fields
        unlike = list(differences(spec, anew(spec, BY_TYPE[form], "float32")))
        if not unlike:
            return fields
        reasons.append(
            Problem(
                "unsupported",
                f"{place}.form",
                form,
                f"cannot express an upcycled {name}: {'; '.join(unlike)}",
                "change what it cannot express, or use another form",
            )
        )
    raise SpecError(reasons)


def _of_another_function(
    description: ConfigDescription, model_fields: Mapping[str, Any], model: str
) -> Iterator[Problem]:
    """Fields beside `upcycle` that change what the folder's model computes before it becomes a mixture. Their other
    problems are reported when the model is parsed."""
    beside = {key: value for key, value in model_fields.items() if key not in _NOT_OF_DENSE}
    try:
        was, becomes = (
            LanguageModelSpec(**spec_fields)
            for spec_fields in (description.model_fields, expansion.over(description.model_fields, beside))
        )
    except SpecError:
        return
    before = meaning(was)
    for path, value in meaning(becomes).items():
        if value != before.get(path):
            rule = f"changes the function of the folder's model, where it is {before.get(path)!r}"
            yield Problem("mismatch", f"{model}.{path}", value, rule, "omit it beside upcycle")


def _upcycle(fields: Any, place: str) -> UpcycleSpec:
    try:
        return UpcycleSpec.model_validate(fields)
    except ValidationError as error:
        problems = problems_of(error)
    raise SpecError([
        replace(problem, path=place if problem.path == "the spec" else f"{place}.{problem.path}")
        for problem in problems
    ])  # fmt: skip


def _of_form(form: MixtureFamily, upcycle: UpcycleSpec) -> dict[str, Any]:
    """Fields of a layer of experts that all models of a family have, and the scaling factor of those with one."""
    if form == "glm4_moe":
        scaling = float(upcycle.routed_slices)
        return {"router": "sigmoid_topk", "renormalize_gates": True, "routed_scaling_factor": scaling}
    router = {"router": "softmax_topk", "renormalize_gates": True}
    return {**router, "shared_gate": True} if form == "qwen2_moe" and upcycle.shared_slices else router


def config_of(spec: LanguageModelSpec, dense: Mapping[str, Any]) -> dict[str, Any]:
    """Config of the mixture that the model of a `dense` config becomes. Raises SpecError."""
    assert spec.upcycle is not None
    form = spec.upcycle.form
    config = build_config(spec, None, "float32") if form is None else anew(spec, BY_TYPE[form], "float32")
    return {**config, **{key: dense[key] for key in _CARRIED if key in dense}}
