"""Specs: what a small one means, and what a wrong one is told, word for word."""

import pickle
from typing import Any

import pytest

from moe.spec import JobSpec, MoESpec, Problem, SpecError, model_spec, presets


def job(**changes: Any) -> dict[str, Any]:
    """A small job with some parts replaced; a dict merges into the part, `...` takes it away."""
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


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (job(foo=1), "foo (=1) is not a key that a spec has; remove it, or look up its spelling"),
    "unknown key below": (
        job(model={"moe": {"experts": 4}}),
        "model.moe.experts (=4) is not a key that a spec has; remove it, or look up its spelling",
    ),
    "unknown key of an optimizer": (
        job(train={"optimizer": {"name": "adafactor", "beta1": 0.9}}),
        "train.optimizer.beta1 (=0.9) is not a key that a spec has; remove it, or look up its spelling",
    ),
    "another corpus's key": (
        job(data={"paths": ["a"]}),
        "data.paths (=['a']) is not a key that a spec has; remove it, or look up its spelling",
    ),
    "number as text": (
        job(train={"batch_tokens": "1024"}),
        "train.batch_tokens (='1024') must be a valid integer; write a whole number, without quotes",
    ),
    "truth for a number": (
        job(resources={"num_workers": True}),
        "resources.num_workers (=True) must be a valid integer; write a whole number, without quotes",
    ),
    "no steps": (job(train={"num_steps": 0}), "train.num_steps (=0) must be greater than 0; raise it"),
    "negative tokens": (
        job(train={"batch_tokens": -8}),
        "train.batch_tokens (=-8) must be greater than 0; raise it",
    ),
    "not a number": (
        job(train={"optimizer": {"name": "adamw", "peak_lr": float("nan")}}),
        "train.optimizer.peak_lr (=nan) must be a finite number; write a finite number",
    ),
    "no model": (job(model=...), "model is required; add it"),
    "no corpus": (job(data={"corpus": ...}), "data.corpus is required; add it"),
    "no such corpus": (
        job(data={"corpus": "web"}),
        "data.corpus (='web') must be one of 'catalogs', 'jsonl', 'text', 'synthetic', 'packages', 'documents', "
        "'chat', 'preference', 'module'; use one of them",
    ),
    "no such preset": (
        job(model={"preset": "gshard-huge"}),
        "model.preset (='gshard-huge') is not a preset; use one of " + ", ".join(presets.names()),
    ),
    "one choice, renormalised": (
        job(model={"moe": {"router": "sigmoid_topk", "top_k": 1, "renormalize_gates": True}}),
        "model.moe.renormalize_gates (=True) makes the weight of a token's one choice (top_k is 1) the same whatever "
        "its score, so that the router is never trained; use false, or a top_k of 2 or more",
    ),
    "one choice, softmax over it": (
        job(model={"moe": {"router": "softmax_topk", "top_k": 1, "softmax": "after_topk"}}),
        "model.moe.softmax (='after_topk') makes the weight of a token's one choice (top_k is 1) the same whatever its "
        "score, so that the router is never trained; use before_topk, or a top_k of 2 or more",
    ),
    "more choices than experts": (
        job(model={"moe": {"router": "softmax_topk", "top_k": 9}}),
        "model.moe.top_k (=9) must be at most num_experts (=8); lower it",
    ),
    "a field of other routers": (
        job(model={"moe": {"router": "switch_top1", "top_k": 1}}),
        "model.moe.top_k (=1) is no field of the router switch_top1; "
        "leave it out, or use softmax_topk or sigmoid_topk or sinkhorn_topk",
    ),
    "a field of a router that is not named": (
        job(model={"moe": {"bias_update_rate": 0.1}}),
        "model.moe.bias_update_rate (=0.1) is no field of the router gshard_top2; "
        "leave it out, or use softmax_topk or sigmoid_topk",
    ),
    "no bias that is to follow the loads": (
        job(model={"moe": {"router": "sigmoid_topk", "selection_bias": False}}),
        "model.moe.selection_bias (=False) must not be false where a bias follows the loads (bias_update_rate=0.001); "
        "leave it out, or use a bias_update_rate of 0",
    ),
    "a number of another activation": (
        job(model={"moe": {"activation": "swiglu", "activation_limit": 5.0}}),
        "model.moe.activation_limit (=5.0) is nothing that swiglu has; "
        "leave it out, or use the activation swiglu_clamped",
    ),
    "no such router": (
        job(model={"moe": {"router": "hash"}}),
        "model.moe.router (='hash') must be 'gshard_top2', 'switch_top1', 'softmax_topk', 'sigmoid_topk', "
        "'sinkhorn_topk' or 'expert_choice'; use one of them",
    ),
    "a router that is no name": (
        job(model={"moe": {"router": ["switch_top1"]}}),
        "model.moe.router (=['switch_top1']) must be 'gshard_top2', 'switch_top1', 'softmax_topk', 'sigmoid_topk', "
        "'sinkhorn_topk' or 'expert_choice'; use one of them",
    ),
    "groups of experts that are uneven": (
        job(model={"moe": {"router": "sigmoid_topk", "num_expert_groups": 3}}),
        "model.moe.num_expert_groups (=3) must divide num_experts (=8); use a divisor of it",
    ),
    "more groups of experts than there are": (
        job(model={"moe": {"router": "sigmoid_topk", "num_expert_groups": 2, "expert_groups_per_token": 3}}),
        "model.moe.expert_groups_per_token (=3) must be at most num_expert_groups (=2); lower it",
    ),
    "groups of experts that are uneven under softmax": (
        job(model={"moe": {"router": "softmax_topk", "num_expert_groups": 3}}),
        "model.moe.num_expert_groups (=3) must divide num_experts (=8); use a divisor of it",
    ),
    "more choices than stand": (
        job(model={"moe": {"router": "sigmoid_topk", "num_expert_groups": 4, "top_k": 3}}),
        "model.moe.top_k (=3) must be at most the 2 experts of expert_groups_per_token (=1) groups; "
        "lower it, or raise expert_groups_per_token",
    ),
    "expert choice without capacity": (
        job(model={"moe": {"router": "expert_choice", "capacity_factor": None}}),
        "model.moe.capacity_factor must be a number where experts choose; "
        "give the experts that serve a token on average",
    ),
    "expert choice in a causal model": (
        job(model={"moe": {"router": "expert_choice"}}),
        "model.moe.router (='expert_choice') lets later tokens decide which experts an earlier one gets, and this "
        "model's decoder is causal; use another router, or say moe.later_tokens_choose_too: accepted",
    ),
    "experts and degree": (
        job(model={"moe": {"num_experts": 63}}, parallel={"expert": 8}),
        "model.moe.num_experts (=63) must be divisible by parallel.expert (=8); "
        "use 64 experts or an expert degree of 1, 3, 7, 9, 21 or 63",
    ),
    "degrees and workers": (
        job(parallel={"expert": 2, "data": 2}, resources={"num_workers": 2}),
        "parallel (='expert 2 x data 2') must multiply to the number of workers (=2), not 4; "
        "use resources.num_workers 4, or leave one degree out",
    ),
    "expert degree of a dense model": (
        job(model={"preset": "gshard-tiny-dense"}, parallel={"expert": 2}),
        "parallel.expert (=2) must be 1 for a model without experts; leave it out, or give the model a moe part",
    ),
    "group and batch": (
        job(train={"batch_tokens": 1000}),
        "model.moe.group_tokens (=512) must divide train.batch_tokens (=1000); use batch_tokens 512 or 1024",
    ),
    "group and longest pair": (
        job(model={"moe": {"group_tokens": 128}}),
        "model.moe.group_tokens (=128) must hold one pair of the longest kind, 2 x data.max_tokens (=192); "
        "use 192 or more, or a data.max_tokens of 64 or less",
    ),
    "warm-up": (
        job(train={"schedule": {"warmup_steps": 11}}),
        "train warms up for 11 steps but runs only num_steps (=10); "
        "lower schedule.warmup_steps or leave it out",
    ),
    "vocabularies": (
        job(model={"source_vocab_size": 5000}),
        "model shares one vocabulary, so source_vocab_size (=5000) must equal target_vocab_size (=4096); "
        "make them equal or set share_vocabulary: false",
    ),
    "workers twice": (
        job(resources={"num_workers": 1, "min_workers": 1, "max_workers": 2}),
        "resources names num_workers and a range; leave min_workers and max_workers out, or num_workers",
    ),
    "range the wrong way": (
        job(resources={"min_workers": 4, "max_workers": 2}),
        "resources has min_workers (=4) above max_workers (=2); swap them",
    ),
    "turns and whole blocks": (
        job(parallel={"overlap": True, "recompute": "full"}),
        "parallel has overlap (=True) with recompute (='full'), which computes whole blocks again at once; "
        "use recompute selective, or leave overlap out",
    ),
    "turns and chunks": (
        job(parallel={"overlap": True, "num_chunks": 2}),
        "parallel has overlap (=True) with num_chunks (=2), and exchanges hide behind one thing only; "
        "leave one of them out",
    ),
    "turns of nothing": (
        job(parallel={"overlap": True, "expert": 1, "expert_tensor": 1}),
        "parallel has overlap (=True) where expert and expert_tensor are 1 and no rows travel; leave overlap out",
    ),
    "turns in a plain pipeline": (
        job(parallel={"overlap": True, "pipeline": 2, "virtual_stages": 1}),
        "parallel has overlap (=True) with virtual_stages (=1) in a pipeline (=2), whose micro-batches take turns "
        "between virtual stages; use 2 or more, or leave overlap out",
    ),
    "virtual stages of none": (
        job(parallel={"virtual_stages": 4, "pipeline": 1}),
        "parallel has virtual_stages (=4) with pipeline (=1), which has no stages; "
        "raise pipeline, or leave virtual_stages out",
    ),
    "sharding of nothing": (
        job(parallel={"sharding": "optimizer", "fsdp": 1, "expert_fsdp": 1}),
        "parallel has sharding (='optimizer') where fsdp and expert_fsdp are 1 and nothing is cut up; "
        "raise one of them, or leave sharding out",
    ),
    "name with a path": (
        job(name="../x"),
        "name (='../x') is wrong: String must match pattern '^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$'; "
        "use letters, digits, '.', '_' and '-' only",
    ),
    "truth for a fraction": (
        job(train={"label_smoothing": False}),
        "train.label_smoothing (=False) must be a valid number; write a number",
    ),
    "a bound above another one": (
        job(data={"corpus": "catalogs", "max_length_ratio": 0.5}),
        "data.max_length_ratio (=0.5) must be greater than 1; raise it",
    ),
    "text for a rate": (
        job(train={"optimizer": {"name": "adamw", "peak_lr": "0.5"}}),
        "train.optimizer.peak_lr (='0.5') must be a valid number; write a number",
    ),
    "text for a truth": (
        job(model={"share_vocabulary": "no"}),
        "model.share_vocabulary (='no') must be a valid boolean; write true or false",
    ),
    "a path that no file can have": (
        job(data={"corpus": "jsonl", "paths": ["/x/\ud800"]}),
        "data.paths[0] (='/x/\\ud800') must be text that UTF-8 can hold; remove the lone surrogates in it",
    ),
    "a language that is none": (
        job(data={"corpus": "catalogs", "languages": ["d e"]}),
        "data.languages[0] (='d e') must be a language code; "
        "use 1 to 32 letters, digits, '_', '-', '.' and '@', as in pt_BR",
    ),
    "an exponent beyond sense": (
        job(data={"corpus": "catalogs", "sampling_exponent": 300}),
        "data.sampling_exponent (=300) must be less than or equal to 5; lower it",
    ),
    "truth for a number of GPUs": (
        job(resources={"gpus_per_worker": True}),
        "resources.gpus_per_worker (=True) must be auto, 0 or 1; write it as a whole number",
    ),
    "a rate beyond sense": (
        job(train={"optimizer": {"name": "adamw", "peak_lr": 1e300}}),
        "train.optimizer.peak_lr (=1e+300) must be less than or equal to 100; lower it",
    ),
    "an optimizer's name alone": (
        job(train={"optimizer": "adamw"}),
        "train.optimizer (='adamw') must be a mapping of fields; write its fields below it",
    ),
    "a preset's name alone": (
        job(model="gshard-tiny"),
        "model (='gshard-tiny') must be a mapping of fields; write its fields below it",
    ),
    "a number for a preset": (
        job(model={"preset": 5}),
        "model.preset (=5) is not a preset; use one of " + ", ".join(presets.names()),
    ),
    "another word than auto": (
        job(parallel="manual"),
        "parallel (='manual') must be a mapping of fields or the word auto; write its fields below it",
    ),
    "a list for a part": (
        job(train=[1]),
        "train (=[1]) must be a mapping of fields; write its fields below it",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_spec_is_told_place_value_rule_and_remedy(case: str) -> None:
    given, expected = WRONG[case]
    with pytest.raises(SpecError) as caught:
        JobSpec.parse(given)
    assert [str(problem) for problem in caught.value.problems] == [expected]


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse(job(foo=1, train={"num_steps": -1}, data={"corpus": "web"}))
    assert {problem.path for problem in caught.value.problems} == {"foo", "train.num_steps", "data.corpus"}


@pytest.mark.parametrize("given", [None, 3, "text", [1], {}])
def test_what_is_no_spec_at_all_is_refused(given: Any) -> None:
    with pytest.raises(SpecError):
        JobSpec.parse(given)


def test_errors_cross_process_boundaries() -> None:
    error = SpecError(
        [Problem("conflict", "a.b", 1, "is wrong", "mend it"), Problem("missing", "c", None, "is required")]
    )
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems
    assert str(again) == str(error) == "a.b (=1) is wrong; mend it\nc is required"


def test_specs_are_frozen() -> None:
    spec = JobSpec.parse(job())
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"  # type: ignore[misc]


def test_what_stands_beside_a_preset_overrides_it() -> None:
    spec = JobSpec.parse(job(model={"dropout": 0.3, "moe": {"num_experts": 16}}))
    assert spec.model.dropout == 0.3
    assert spec.model.moe == model_spec({"preset": "gshard-tiny"}).moe.model_copy(update={"num_experts": 16})


def test_a_part_alone_is_told_the_same_way() -> None:
    with pytest.raises(SpecError) as caught:
        MoESpec(router="softmax_topk", num_experts=4, top_k=5, model_dim=2, hidden_dim=2)
    assert caught.value.problems == (
        Problem("out_of_range", "top_k", 5, "must be at most num_experts (=4)", "lower it"),
    )


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
    active = (
        model.num_parameters()
        - model.num_expert_parameters()
        - routers
        + len(model.moe_layers) * 4 * 1024 * 8192
    )
    assert twin.num_parameters() == active, "a twin has the weights that one token meets"


def test_layers_with_experts_are_every_other_one_of_both_stacks() -> None:
    assert model_spec({"preset": "gshard-tiny"}).moe_layers == (1, 3)
    assert model_spec({"preset": "gshard-128e-12l"}).moe_layers == (1, 3, 5, 7, 9, 11)
    assert MoESpec(num_experts=1, model_dim=2, hidden_dim=2).experts_per_token == 1


def test_a_small_spec_is_small() -> None:
    spec = JobSpec.parse(
        {"model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"}, "train": {"num_steps": 5}}
    )
    assert (spec.name, spec.train.batch_tokens, spec.resources.num_workers) == ("job", 4096, 1)


def test_a_preset_that_is_none_is_a_spec_error_also_for_the_library() -> None:
    with pytest.raises(SpecError, match=r"^preset \(='nope'\) is not a preset"):
        model_spec({"preset": "nope"})
