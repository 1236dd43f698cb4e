"""Fields of a layer that belong to its router: defaults and dumps."""

import copy
import pickle

import pytest

from moe.plan import Cluster
from moe.plan.plan_file import made_for
from moe.spec import JobSpec, MoESpec
from moe.spec.routers import ROUTERS, router_fields
from moe.train.checkpoint.spec_changes import state_changes, trajectory_changes
from tests.refusals import expect_problem
from tests.unit.test_spec import job


def test_another_router_leaves_the_presets_fields_of_its_own_behind() -> None:
    moe = JobSpec.parse(job(model={"moe": {"router": "softmax_topk"}})).model.moe
    assert (moe.routing.capacity_factor, moe.routing.aux_coefficient, moe.group_tokens) == (None, 0.01, 512)
    gshard = JobSpec.parse(job(model={"moe": {"router": "gshard_top2"}})).model.moe
    assert gshard.routing.capacity_factor == 4.0


@pytest.mark.parametrize("router", ROUTERS)
def test_what_a_router_writes_it_reads_again(router: str) -> None:
    spec = MoESpec(router=router, num_experts=8, model_dim=2, hidden_dim=2)
    dump = spec.model_dump(mode="json")
    assert not MoESpec.model_fields.keys() & router_fields(), "a field belongs to a layer or to its router"
    assert dump.keys() & router_fields() == ROUTERS[router].model_fields.keys()
    assert MoESpec.model_validate(dump) == spec
    assert MoESpec.model_validate_json(spec.model_dump_json()) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize("router", ["softmax_topk", "sigmoid_topk"])
def test_the_weight_of_one_choice_is_not_renormalized_unless_it_was_trained_so(router: str) -> None:
    """A new model's router would never be trained. Jobs accepted earlier, and jobs that start from one, keep the
    field."""
    fields = job(model={"moe": {"router": router, "top_k": 1}})
    assert JobSpec.parse(fields).model.moe.routing.renormalizes is False
    assert JobSpec.parse(job(model={"moe": {"router": router}})).model.moe.routing.renormalizes is True
    for before, after in ((1, 2), (2, 1)):  # another `top_k`, edited in a dump
        dump = JobSpec.parse(job(model={"moe": {"router": router, "top_k": before}})).model_dump(mode="json")
        assert dump["model"]["moe"]["renormalize_gates"] is None
        dump["model"]["moe"]["top_k"] = after
        assert JobSpec.parse(dump).model.moe.routing.renormalizes is (after > 1)
    fields["model"]["moe"]["renormalize_gates"] = True  # a new spec is refused: see test_spec.py
    spec = JobSpec.model_validate(fields)
    assert spec.model.moe.routing.renormalizes is True
    assert JobSpec.parse(spec.model_dump(mode="json"), accepted=True) == spec
    assert JobSpec.parse({**fields, "start_from": {"job": "another"}}).model == spec.model


@pytest.mark.parametrize("router", ["softmax_topk", "sigmoid_topk"])
def test_what_is_left_out_and_the_same_said_in_words_are_one(router: str) -> None:
    """For checkpoints and plans stored by an older release, which dumped the default."""
    new = JobSpec.parse(job(model={"moe": {"router": router}}))
    dump = new.model_dump(mode="json")
    dump["model"]["moe"]["renormalize_gates"] = True
    old, cluster = (JobSpec.parse(dump), Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=1))
    assert trajectory_changes(old, new) == state_changes(new, old) == []
    assert made_for(old, cluster) == made_for(new, cluster)
    dump["model"]["moe"]["renormalize_gates"] = False
    (problem,) = trajectory_changes(JobSpec.parse(dump), new)
    assert (problem.path, problem.value) == ("model.moe.renormalize_gates", True)


@pytest.mark.parametrize(
    ("router", "bias"), [("softmax_topk", False), ("sigmoid_topk", True)], ids=["softmax", "sigmoid"]
)
def test_a_bias_that_is_there_anyway_is_the_same_said_in_words(router: str, bias: bool) -> None:
    """The default of a new field changes nothing: plans stored before the field existed stay valid."""
    cluster = Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=1)
    specs = [
        JobSpec.parse(job(model={"moe": {"router": router, "num_experts": 8, **fields}}))
        for fields in (
            {}, {"selection_bias": bias}, {"logit_bias": False, "activation_alpha": 1.702},
            {"bias_update_rate": 0.0, "selection_bias": True}, {"logit_bias": True},
        )
    ]  # fmt: skip
    base, *equivalents, with_frozen_bias, with_logit_bias = specs
    for spec in equivalents:
        assert made_for(spec, cluster) == made_for(base, cluster)
        assert state_changes(base, spec) == []
    for spec in (with_frozen_bias, with_logit_bias):
        assert made_for(spec, cluster) != made_for(base, cluster)
        assert state_changes(base, spec)
    assert base.model.moe.routing.has_selection_bias is bias
    assert with_frozen_bias.model.moe.routing.has_selection_bias
    assert with_frozen_bias.model.moe.routing.bias_rate == 0


def test_a_published_model_of_one_choice_begins_with_its_weights() -> None:
    """Its router was trained with more choices; from scratch it would never be trained."""
    moe = {"top_k": 1, "softmax": "after_topk"}
    data, train = {"corpus": "synthetic"}, {"num_steps": 1, "batch_tokens": 8192}
    fields = {"model": {"preset": "mixtral-8x7b", "moe": moe}, "data": data, "train": train}
    with expect_problem("out_of_range", "model.moe.softmax", "after_topk"):
        JobSpec.parse(fields)
    with_weights = {**fields, "model": {**fields["model"], "from": "/models/mixtral"}}
    assert JobSpec.parse(with_weights).model.moe.routing.softmax == "after_topk"


def test_fields_of_the_router_are_attributes_of_the_layer() -> None:
    spec = MoESpec(num_experts=4, model_dim=8, hidden_dim=8, router="softmax_topk", top_k=3)
    assert (spec.router, spec.top_k, spec.capacity_factor) == ("softmax_topk", 3, None)
    with pytest.raises(AttributeError, match="second_expert"):
        spec.second_expert  # noqa: B018
    assert copy.deepcopy(spec) == spec
