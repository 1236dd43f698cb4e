"""Units of a model over pipeline stages, and micro-batches in flight on each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.plan.cost.stages import PipelineChoices, Stage, in_flight, stages
from moe.plan.cost.units import units
from moe.plan.profile import OURS, PEER
from moe.spec import LanguageModelSpec, ModelSpec, model_spec


@given(st.integers(1, 64), st.integers(1, 8))
def test_stages_have_all_units_and_are_even(pipeline: int, virtual_stages: int) -> None:
    model = units(model_spec({"preset": "deepseek-v3"}), PEER)
    if pipeline * virtual_stages > len(model):  # more only for a peer: stages of the embeddings or the head alone
        return
    different = stages(model, PipelineChoices(pipeline, virtual_stages))
    sizes = [sum(count for _, count in stage.units) for stage in different]
    assert max(sizes) - min(sizes) <= virtual_stages
    assert different[0].index == 0
    if len(different) == pipeline:
        assert sum(sizes) == len(model)


TIED = LanguageModelSpec.model_validate(
    {"kind": "language", "model_dim": 256, "num_layers": 4, "ffn_dim": 512, "vocab_size": 1000, "tie_embeddings": True,
     "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}}
)  # fmt: skip


UNTIED = model_spec({"preset": "gshard-tiny", "share_vocabulary": False})
"""An encoder-decoder whose first stage embeds the target by the table of the head."""


@pytest.mark.parametrize(
    "model", [TIED, model_spec({"preset": "gshard-tiny"}), UNTIED], ids=["language", "translation", "two vocabularies"]
)
def test_the_last_stage_has_its_own_copy_of_a_tied_table_on_another_rank(model: ModelSpec) -> None:
    def numel(stage: Stage) -> int:
        return sum(weight.numel * count for unit, count in stage.units for weight in unit.weights)

    (table,) = next(unit.tied_weights for unit in units(model, OURS) if unit.tied_weights)
    (single,) = stages(units(model, OURS), PipelineChoices())
    first, last = stages(units(model, OURS), PipelineChoices(2))
    assert numel(single) == model.num_parameters()
    assert numel(first) + numel(last) == model.num_parameters() + table.numel
    of_a_v = stages(units(model, OURS), PipelineChoices(2, 2, "zb_v"))  # the first rank has the last stage, too
    assert sum(map(numel, of_a_v)) == model.num_parameters()


def slow_in_flight(stage: int, pipeline: int, num_micro_batches: int) -> int:
    """Micro-batches in flight under the 1F1B schedule, counted step by step."""
    warm_up = min(pipeline - stage - 1, num_micro_batches)
    order = ["forward"] * warm_up
    for _ in range(num_micro_batches - warm_up):
        order += ["forward", "backward"]
    order += ["backward"] * warm_up
    in_flight = peak = 0
    for direction in order:
        in_flight += 1 if direction == "forward" else -1
        peak = max(peak, in_flight)
    return peak


@given(st.integers(1, 16), st.integers(1, 40), st.data())
def test_micro_batches_in_flight(pipeline: int, num_micro_batches: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, pipeline - 1))
    assert in_flight(stage, PipelineChoices(pipeline), num_micro_batches) == slow_in_flight(
        stage, pipeline, num_micro_batches
    )
