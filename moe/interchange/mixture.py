"""Spec and config of the mixture that a dense folder's model is upcycled to. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

from pydantic import ValidationError

from moe.interchange.config import ConfigDescription, build_config, differences, meaning, new_config
from moe.interchange.families import BY_TYPE
from moe.spec import LanguageModelSpec, Problem, SpecError, UpcycleSpec, expansion, spec_error
from moe.spec.problems import problems_of
from moe.spec.upcycle import MixtureFamily

FORMS: tuple[MixtureFamily, ...] = get_args(MixtureFamily)
"""Families of mixtures in order of preference. By default, the first that can represent the mixture is used."""
_ALWAYS_SHARED = ("qwen2_moe", "glm4_moe")
"""Families whose models always have shared experts."""
_MIXTURE_ONLY = {"upcycle", "moe", "adapter", "from", "from_config", "ignored_keys", "preset"}
"""Keys of a model that do not describe its dense model."""
_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "initializer_range")
"""Keys of a dense config that the mixture's config keeps."""


def mixture(description: ConfigDescription, job_model: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a mixture as plain data: the fields of `job_model`, including `from` and `upcycle`, over those of the
    upcycled model of `description`. `place` is the model's path in errors. Raises SpecError.

    Problems with other fields of `job_model` are reported when the model is parsed.
    """
    model, place = place, f"{place}.upcycle"
    name = description.family.model_types[0]
    if "moe" in description.model_fields:
        rule = f"requires a dense model, but this folder has a {name}, which already has experts"
        raise spec_error("conflict", place, None, rule, "omit upcycle, or name another folder by from")
    if description.family.wrapper is not None:
        rule = f"requires a language model alone, but this folder has a {name}, whose other parts no mixture has"
        raise spec_error("unsupported", place, None, rule, "name a folder of a language model by from")
    upcycle = _upcycle(job_model["upcycle"], place)
    dense = {key: value for key, value in description.model_fields.items() if key != "ffn_dim"}
    ffn_dim = description.model_fields["ffn_dim"]
    if problems := list(upcycle.problems_of_dense(ffn_dim, dense["num_layers"])):
        raise SpecError([replace(problem, path=f"{place}.{problem.path}") for problem in problems])
    if changes := list(_function_changes(description, job_model, model)):
        raise SpecError(changes)
    if upcycle.every > 1:
        dense |= {"ffn_dim": ffn_dim, "moe_every": upcycle.every}
    reasons = []
    for form in FORMS if upcycle.form is None else (upcycle.form,):
        if form in _ALWAYS_SHARED and not upcycle.shared_slices:
            rule = "always has shared experts, but shared_slices is 0"
            reasons.append(Problem("conflict", f"{place}.form", form, rule, "raise shared_slices, or use another form"))
            continue
        layer = {**upcycle.layer_of(ffn_dim, dense.get("ffn_activation", "swiglu")), **_fixed_fields(form, upcycle)}
        upcycle_fields = {**upcycle.model_dump(mode="json"), "form": form}
        fields = {**expansion.merge_overrides({**dense, "moe": layer}, job_model), "upcycle": upcycle_fields}
        try:
            spec = LanguageModelSpec(**fields)
        except SpecError:
            return fields
        difference_texts = list(differences(spec, new_config(spec, BY_TYPE[form], "float32")))
        if not difference_texts:
            return fields
        reasons.append(
            Problem(
                "unsupported",
                f"{place}.form",
                form,
                f"cannot express an upcycled {name}: {'; '.join(difference_texts)}",
                "change what it cannot express, or use another form",
            )
        )
    raise SpecError(reasons)


def _function_changes(description: ConfigDescription, model_fields: Mapping[str, Any], model: str) -> Iterator[Problem]:
    """Yield problems for fields next to `upcycle` that change the function of the folder's dense model. Other problems
    with these fields are reported when the model is parsed."""
    dense_fields = {key: value for key, value in model_fields.items() if key not in _MIXTURE_ONLY}
    try:
        folder_spec, job_spec = (
            LanguageModelSpec(**spec_fields)
            for spec_fields in (
                description.model_fields,
                expansion.merge_overrides(description.model_fields, dense_fields),
            )
        )
    except SpecError:
        return
    folder_meaning = meaning(folder_spec)
    for path, value in meaning(job_spec).items():
        if value != folder_meaning.get(path):
            rule = f"changes the function of the folder's model, where it is {folder_meaning.get(path)!r}"
            yield Problem("mismatch", f"{model}.{path}", value, rule, "omit it, or omit upcycle")


def _upcycle(fields: Any, place: str) -> UpcycleSpec:
    try:
        return UpcycleSpec.model_validate(fields)
    except ValidationError as error:
        problems = problems_of(error)
    raise SpecError([
        replace(problem, path=place if problem.path == "the spec" else f"{place}.{problem.path}")
        for problem in problems
    ])  # fmt: skip


def _fixed_fields(form: MixtureFamily, upcycle: UpcycleSpec) -> dict[str, Any]:
    """Fields of an MoE layer that are fixed in a family, with its scaling factor, if any."""
    if form == "glm4_moe":
        scaling = float(upcycle.routed_slices)
        return {"router": "sigmoid_topk", "renormalize_gates": True, "routed_scaling_factor": scaling}
    router = {"router": "softmax_topk", "renormalize_gates": True}
    return {**router, "shared_gate": True} if form == "qwen2_moe" and upcycle.shared_slices else router


def config_of(spec: LanguageModelSpec, dense: Mapping[str, Any]) -> dict[str, Any]:
    """Config of the mixture that the model of a `dense` config is upcycled to. Raises SpecError."""
    assert spec.upcycle is not None
    form = spec.upcycle.form
    config = build_config(spec, None, "float32") if form is None else new_config(spec, BY_TYPE[form], "float32")
    return {**config, **{key: dense[key] for key in _CARRIED if key in dense}}
