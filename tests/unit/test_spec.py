"""Specs: the meaning of a small one, and the problems of an invalid one."""

import pickle
from typing import Any
from unittest.mock import ANY

import pytest

from moe.spec import JobSpec, MoESpec, Problem, SpecError, model_spec
from tests.refusals import Summary, expect_problem, expect_problems


def job(**changes: Any) -> dict[str, Any]:
    """A small job with changes: a dict is merged into its part, `...` removes the part."""
    spec: dict[str, Any] = {
        "name": "small",
        "model": {"preset": "gshard-tiny"},
        "data": {"corpus": "catalogs"},
        "train": {"num_steps": 10, "batch_tokens": 1024},
    }
    for part, change in changes.items():
        if change is ...:
            del spec[part]
        elif isinstance(change, dict) and isinstance(spec.get(part), dict):
            spec[part] = {key: value for key, value in {**spec[part], **change}.items() if value is not ...}
        else:
            spec[part] = change
    return spec


def moe(**fields: Any) -> dict[str, Any]:
    return {"model": {"moe": fields}}


def adamw(**fields: Any) -> dict[str, Any]:
    return {"train": {"optimizer": {"name": "adamw", **fields}}}


WRONG: dict[str, tuple[dict[str, Any], Summary]] = {
    name: (job(**changes), (code, path, value))
    for name, changes, code, path, value in [
        ("unknown key", {"foo": 1}, "unknown_key", "foo", 1),
        ("unknown key below", moe(experts=4), "unknown_key", "model.moe.experts", 4),
        ("unknown key of an optimizer", {"train": {"optimizer": {"name": "adafactor", "beta1": 0.9}}},
         "unknown_key", "train.optimizer.beta1", 0.9),
        ("another corpus's key", {"data": {"paths": ["a"]}}, "unknown_key", "data.paths", ["a"]),
        ("number as text", {"train": {"batch_tokens": "1024"}}, "wrong_type", "train.batch_tokens", "1024"),
        ("truth for a number", {"resources": {"num_workers": True}}, "wrong_type", "resources.num_workers", True),
        ("no steps", {"train": {"num_steps": 0}}, "out_of_range", "train.num_steps", 0),
        ("negative tokens", {"train": {"batch_tokens": -8}}, "out_of_range", "train.batch_tokens", -8),
        ("not a number", adamw(peak_lr=float("nan")), "not_finite", "train.optimizer.peak_lr", ANY),
        ("no model", {"model": ...}, "missing", "model", None),
        ("no corpus", {"data": {"corpus": ...}}, "missing", "data.corpus", None),
        ("no such corpus", {"data": {"corpus": "web"}}, "not_a_choice", "data.corpus", "web"),
        ("no such preset", {"model": {"preset": "gshard-huge"}}, "not_a_choice", "model.preset", "gshard-huge"),
        ("one choice, renormalised", moe(router="sigmoid_topk", top_k=1, renormalize_gates=True),
         "out_of_range", "model.moe.renormalize_gates", True),
        ("one choice, softmax over it", moe(router="softmax_topk", top_k=1, softmax="after_topk"),
         "out_of_range", "model.moe.softmax", "after_topk"),
        ("more choices than experts", moe(router="softmax_topk", top_k=9), "out_of_range", "model.moe.top_k", 9),
        ("a field of other routers", moe(router="switch_top1", top_k=1), "unknown_key", "model.moe.top_k", 1),
        ("a field of a router that is not named", moe(bias_update_rate=0.1),
         "unknown_key", "model.moe.bias_update_rate", 0.1),
        ("no bias that is to follow the loads", moe(router="sigmoid_topk", selection_bias=False),
         "conflict", "model.moe.selection_bias", False),
        ("a number of another activation", moe(activation="swiglu", activation_limit=5.0),
         "not_applicable", "model.moe.activation_limit", 5.0),
        ("two choices of one expert", moe(router="sparsemixer", num_experts=1),
         "out_of_range", "model.moe.num_experts", 1),
        ("no such router", moe(router="hash"), "not_a_choice", "model.moe.router", "hash"),
        ("a router that is no name", moe(router=["switch_top1"]), "not_a_choice", "model.moe.router", ["switch_top1"]),
        ("groups of experts that are uneven", moe(router="sigmoid_topk", num_expert_groups=3),
         "not_divisible", "model.moe.num_expert_groups", 3),
        ("more groups than there are", moe(router="sigmoid_topk", num_expert_groups=2, expert_groups_per_token=3),
         "out_of_range", "model.moe.expert_groups_per_token", 3),
        ("groups of experts that are uneven under softmax", moe(router="softmax_topk", num_expert_groups=3),
         "not_divisible", "model.moe.num_expert_groups", 3),
        ("more choices than stand", moe(router="sigmoid_topk", num_expert_groups=4, top_k=3),
         "out_of_range", "model.moe.top_k", 3),
        ("expert choice without capacity", moe(router="expert_choice", capacity_factor=None),
         "wrong_type", "model.moe.capacity_factor", None),
        ("expert choice in a causal model", moe(router="expert_choice"),
         "unsupported", "model.moe.router", "expert_choice"),
        ("norms of branches in a translation model", moe(branch_norms=True, shared_hidden_dim=8),
         "unsupported", "model", None),
        ("experts and degree", {"model": {"moe": {"num_experts": 63}}, "parallel": {"expert": 8}},
         "not_divisible", "model.moe.num_experts", 63),
        ("degrees and workers", {"parallel": {"expert": 2, "data": 2}, "resources": {"num_workers": 2}},
         "mismatch", "parallel", "expert 2 x data 2"),
        ("expert degree of a dense model", {"model": {"preset": "gshard-tiny-dense"}, "parallel": {"expert": 2}},
         "out_of_range", "parallel.expert", 2),
        ("group and batch", {"train": {"batch_tokens": 1000}}, "not_divisible", "model.moe.group_tokens", 512),
        ("group and longest pair", moe(group_tokens=128), "out_of_range", "model.moe.group_tokens", 128),
        ("warm-up", {"train": {"schedule": {"warmup_steps": 11}}}, "out_of_range", "train", None),
        ("cycles of less than two steps",
         {"train": {"schedule": {"decay": "cosine_with_restarts", "num_cycles": 5, "warmup_steps": 1}}},
         "out_of_range", "train.schedule.num_cycles", 5),
        ("length of completions without prompts", {"train": {"evaluation": {"prompt_max_tokens": 9}}},
         "not_applicable", "train.evaluation.prompt_max_tokens", 9),
        ("best checkpoint without evaluations", {"checkpoint": {"keep_best": {}}},
         "requires", "checkpoint.keep_best", "held_out"),
        ("stopping after evaluations that are never due", {"train": {"evaluation": {"stop_after": 2}}},
         "requires", "train.evaluation.stop_after", 2),
        ("best checkpoint by no held-out set",
         {"checkpoint": {"keep_best": {"metric": "held_out.dev"}}, "train": {"evaluation": {"every_steps": 1}}},
         "not_found", "checkpoint.keep_best.metric", "held_out.dev"),
        ("best checkpoint by another metric", {"checkpoint": {"keep_best": {"metric": "loss"}}},
         "invalid_value", "checkpoint.keep_best.metric", "loss"),
        ("vocabularies", {"model": {"source_vocab_size": 5000}}, "mismatch", "model", None),
        ("workers twice", {"resources": {"num_workers": 1, "min_workers": 1, "max_workers": 2}},
         "conflict", "resources", None),
        ("range the wrong way", {"resources": {"min_workers": 4, "max_workers": 2}}, "out_of_range", "resources", None),
        ("turns and whole blocks", {"parallel": {"overlap": True, "recompute": "full"}}, "conflict", "parallel", None),
        ("turns and chunks", {"parallel": {"overlap": True, "num_chunks": 2}}, "conflict", "parallel", None),
        ("turns of nothing", {"parallel": {"overlap": True, "expert": 1, "expert_tensor": 1}},
         "not_applicable", "parallel", None),
        ("turns in a V", {"parallel": {"overlap": True, "schedule": "zb_v"}}, "conflict", "parallel", None),
        ("turns in a plain pipeline", {"parallel": {"overlap": True, "pipeline": 2, "virtual_stages": 1}},
         "conflict", "parallel", None),
        ("virtual stages of none", {"parallel": {"virtual_stages": 4, "pipeline": 1}},
         "not_applicable", "parallel", None),
        ("a schedule of nothing", {"parallel": {"schedule": "gpipe", "pipeline": 1}},
         "not_applicable", "parallel", None),
        ("stages of nothing", {"parallel": {"stages": [1, 1], "pipeline": 1}}, "not_applicable", "parallel", None),
        ("an unknown schedule", {"parallel": {"schedule": "dual"}}, "not_a_choice", "parallel.schedule", "dual"),
        ("an interleaved schedule with nothing to interleave",
         {"parallel": {"schedule": "interleaved", "virtual_stages": 1}}, "conflict", "parallel", None),
        ("virtual stages under 1F1B", {"parallel": {"schedule": "1f1b", "virtual_stages": 2}},
         "conflict", "parallel", None),
        ("virtual stages that make no V", {"parallel": {"schedule": "zb_v", "virtual_stages": 4}},
         "conflict", "parallel", None),
        ("a stage cut for fewer ranks", {"parallel": {"pipeline": 3, "stages": [1, 1]}},
         "not_divisible", "parallel", None),
        ("a stage cut without virtual stages", {"parallel": {"pipeline": 2, "virtual_stages": 2, "stages": [1, 1]}},
         "mismatch", "parallel", None),
        ("a stage cut without the stages of a V", {"parallel": {"schedule": "zb_v", "stages": [1, 1, 1]}},
         "not_divisible", "parallel", None),
        ("an empty stage", {"parallel": {"pipeline": 2, "stages": [2, 0]}}, "out_of_range", "parallel.stages[1]", 0),
        ("a single stage", {"parallel": {"stages": [2]}}, "empty", "parallel.stages", [2]),
        ("stages in no form", {"parallel": {"stages": "1+"}}, "invalid_syntax", "parallel.stages", "1+"),
        ("an exchange between no ranks", {"parallel": {"context_exchange": "ring", "context": 1}},
         "not_applicable", "parallel", None),
        ("sharding of nothing", {"parallel": {"sharding": "optimizer", "fsdp": 1, "expert_fsdp": 1}},
         "not_applicable", "parallel", None),
        ("name with a path", {"name": "../x"}, "invalid_value", "name", "../x"),
        ("truth for a fraction", {"train": {"label_smoothing": False}}, "wrong_type", "train.label_smoothing", False),
        ("a bound above another one", {"data": {"corpus": "catalogs", "max_length_ratio": 0.5}},
         "out_of_range", "data.max_length_ratio", 0.5),
        ("text for a rate", adamw(peak_lr="0.5"), "wrong_type", "train.optimizer.peak_lr", "0.5"),
        ("text for a truth", {"model": {"share_vocabulary": "no"}}, "wrong_type", "model.share_vocabulary", "no"),
        ("a path that no file can have", {"data": {"corpus": "jsonl", "paths": ["/x/\ud800"]}},
         "invalid_encoding", "data.paths[0]", "/x/\ud800"),
        ("a language that is none", {"data": {"corpus": "catalogs", "languages": ["d e"]}},
         "invalid_value", "data.languages[0]", "d e"),
        ("an exponent beyond sense", {"data": {"corpus": "catalogs", "sampling_exponent": 300}},
         "out_of_range", "data.sampling_exponent", 300),
        ("truth for a number of GPUs", {"resources": {"gpus_per_worker": True}},
         "wrong_type", "resources.gpus_per_worker", True),
        ("a rate beyond sense", adamw(peak_lr=1e300), "out_of_range", "train.optimizer.peak_lr", 1e300),
        ("an optimizer's name alone", {"train": {"optimizer": "adamw"}}, "wrong_type", "train.optimizer", "adamw"),
        ("a preset's name alone", {"model": "gshard-tiny"}, "wrong_type", "model", "gshard-tiny"),
        ("a number for a preset", {"model": {"preset": 5}}, "not_a_choice", "model.preset", 5),
        ("another word than auto", {"parallel": "manual"}, "wrong_type", "parallel", "manual"),
        ("a list for a part", {"train": [1]}, "wrong_type", "train", [1]),
    ]
}  # fmt: skip
"""By name: a wrong spec and its problem."""


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_spec_is_refused(case: str) -> None:
    spec, problem = WRONG[case]
    with expect_problem(*problem):
        JobSpec.parse(spec)


def test_all_problems_are_reported_at_once() -> None:
    problems = [WRONG[case][1] for case in ("unknown key", "no steps", "no such corpus")]
    with expect_problems(problems):
        JobSpec.parse(job(foo=1, train={"num_steps": 0}, data={"corpus": "web"}))


def test_errors_cross_process_boundaries() -> None:
    error = SpecError(
        [Problem("conflict", "a.b", 1, "is wrong", "mend it"), Problem("missing", "c", None, "is required")]
    )
    copy = pickle.loads(pickle.dumps(error))
    assert copy.problems == error.problems
    assert str(copy) == str(error) == "a.b (=1) is wrong; mend it\nc is required"


def test_specs_are_frozen() -> None:
    spec = JobSpec.parse(job())
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"  # type: ignore[misc]


def test_fields_beside_a_preset_override_it() -> None:
    spec = JobSpec.parse(job(model={"dropout": 0.3, "moe": {"num_experts": 16}}))
    assert spec.model.dropout == 0.3
    assert spec.model.moe == model_spec({"preset": "gshard-tiny"}).moe.model_copy(update={"num_experts": 16})


def test_a_part_alone_is_refused_in_the_same_way() -> None:
    with expect_problem("out_of_range", "top_k", 5):
        MoESpec(router="softmax_topk", num_experts=4, top_k=5, model_dim=2, hidden_dim=2)
    with expect_problem("not_a_choice", "preset", "nope"):
        model_spec({"preset": "nope"})


PAPER = {  # Table 1 and section 4: experts in all, published weights
    "gshard-128e-12l": (768, 12.5e9),
    "gshard-128e-36l": (2304, 37e9),
    "gshard-512e-12l": (3072, 50e9),
    "gshard-512e-36l": (9216, 150e9),
    "gshard-2048e-12l": (12288, 200e9),
    "gshard-2048e-36l": (36864, 600e9),
    "gshard-2048e-60l": (61440, 1e12),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_family(name: str) -> None:
    experts, weights = PAPER[name]
    model = model_spec({"preset": name})
    assert model.num_experts_total() == experts
    assert model.num_parameters() == pytest.approx(weights, rel=0.08)
    assert model.num_expert_parameters() == experts * 2 * 1024 * 8192
    twin = model_spec({"preset": f"{name}-dense"})
    assert twin.moe is None
    assert twin.dense_twin_ffn_dim == 2 * 8192
    routers = len(model.moe_layers) * 1024 * model.moe.num_experts
    active = model.num_parameters() - model.num_expert_parameters() - routers + len(model.moe_layers) * 4 * 1024 * 8192
    assert twin.num_parameters() == active, "a twin has the weights that one token meets"


def test_every_other_layer_of_both_stacks_has_experts() -> None:
    assert model_spec({"preset": "gshard-tiny"}).moe_layers == (1, 3)
    assert model_spec({"preset": "gshard-128e-12l"}).moe_layers == (1, 3, 5, 7, 9, 11)


def test_a_small_spec_is_small() -> None:
    spec = JobSpec.parse(
        {"model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"}, "train": {"num_steps": 5}}
    )
    assert (spec.name, spec.train.batch_tokens, spec.resources.num_workers) == ("job", 4096, 1)
