"""Numbers of layers of pipeline stages: their text, and the even cut."""

from hypothesis import given
from hypothesis import strategies as st

from moe.plan.candidate import Options
from moe.plan.plan import Plan
from moe.spec import ParallelSpec
from moe.spec.stages import even_stages, format_stages
from tests.unit.test_compare import plan_of

STAGES = st.lists(st.integers(1, 70), min_size=2, max_size=40).map(tuple)


@given(STAGES)
def test_the_text_of_a_layout_stands_for_the_list(stages: tuple[int, ...]) -> None:
    for text in (format_stages(stages), "+".join(map(str, stages))):
        assert ParallelSpec.model_validate({"stages": text}).stages == stages


def test_equal_stages_are_counted() -> None:
    assert format_stages((3, 4, 4, 4, 2)) == "3+3x4+2"


@given(st.integers(1, 100), st.integers(0, 200))
def test_an_even_cut_has_all_layers_and_no_empty_stage(num_stages: int, further_layers: int) -> None:
    stages = even_stages(num_stages + further_layers, num_stages)
    assert (len(stages), sum(stages)) == (num_stages, num_stages + further_layers)
    assert min(stages) >= 1
    with_ends = [stages[0] + 1, *stages[1:-1], stages[-1] + 1] if num_stages > 1 else []
    assert not with_ends or max(with_ends) - min(with_ends) <= 1


@given(STAGES)
def test_plans_keep_stages_and_leave_defaults_unwritten(stages: tuple[int, ...]) -> None:
    plain = plan_of(products_s=1)
    assert not {"schedule", "stages", "context_exchange"} & plain.model_dump(mode="json")["options"].keys()
    assert plain.options.pipeline_schedule == "1f1b"
    assert Options(virtual_stages=2).pipeline_schedule == "interleaved"
    options = Options(schedule="zb_v", stages=stages, context_exchange="ring")
    plan = plain.model_copy(update={"options": options})
    assert Plan.model_validate_json(plan.model_dump_json()).options == options
