"""Predictions compared with published runs: fits, rankings, and the growth of the paper's own family."""

from math import exp
from statistics import fmean

import pytest

from benchmarks.published import PAPER, Choice, Pair, PaperRow, choices, pairs
from benchmarks.published_cut_down import MEASURED, CutDown
from benchmarks.published_rows import ROWS, Row
from benchmarks.software_profiles import Run
from moe.plan.cost.state import state_of
from moe.plan.executable import not_yet
from moe.plan.search.shape import TIES
from moe.plan.search.spread import NEAR
from moe.plan.software import SOFTWARE, SoftwareName


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} {row.settings}")
def test_a_published_run_is_predicted_to_fit_and_to_take_as_long(row: Row) -> None:
    """Within a factor of 1.5, except two runs with small experts in many virtual stages. The next release replaced
    these by a layout without stages, 1.7 times as fast."""
    run = Run.from_row(row)
    assert exp(abs(run.error(SOFTWARE[row.software]))) < (2 if row.degrees[3] >= 12 and row.device == "h100" else 1.5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sorted({row.software for row in ROWS}))
def test_software_predicts_the_runs_that_it_was_fitted_on(name: SoftwareName) -> None:
    """With the constants of plans: the mean of |ln(predicted / published)|."""
    errors = [abs(Run.from_row(row).error(SOFTWARE[name])) for row in ROWS if row.software == name]
    assert fmean(errors) <= SOFTWARE[name].error


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row.name)
def test_memory_and_time_of_smaller_models_are_predicted_as_they_were_measured(row: CutDown) -> None:
    """Dense and sparse models over tensor ranks, expert ranks and stages."""
    assert row.predicted_gib == pytest.approx(row.measured_gib, rel=0.03)
    for times, ms in row.measured_ms.items():
        assert row.predicted_ms(times) == pytest.approx(ms, rel=0.15)


@pytest.mark.parametrize("pair", pairs(ROWS), ids=lambda pair: pair.name)
def test_runs_of_one_model_are_predicted_in_their_order(pair: Pair) -> None:
    """Except the run that is predicted a third too slow: DeepSeek-V3 over 8 stages of B200, whose exchanges hide behind
    arithmetic."""
    too_slow = pair.faster.name == "deepseek-v3-mtp, 256 b200, 1·32·8·2"
    assert (pair.predicted_ratio > 1) is not too_slow


@pytest.mark.slow
@pytest.mark.parametrize("choice", choices(ROWS), ids=lambda choice: choice.rows[0].name)
def test_what_is_chosen_is_faster_than_what_was_published_but_not_twice_as_fast(choice: Choice) -> None:
    """Except Qwen3-30B on 8 B200 with micro-batches of one sequence, limited by the host's launches: the next release,
    with CUDA graphs and micro-batches of 4, is 2.8 times as fast."""
    held_up = choice.rows[0].name == "qwen3-30b-a3b, 8 b200, 1·8·1·1" and choice.rows[0].micro_batch == 1
    assert 1 / TIES <= 1 + choice.gain < (2.8 if held_up else 2)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} {row.settings}")
def test_a_published_layout_with_one_field_left_free_is_no_slower(row: Row) -> None:
    """Each field in turn; the layout itself is within the 2% that a choice under both ends may cost."""
    assert 1 / TIES <= 1 + Choice([row], row.known_parallel).gain <= NEAR
    for left_free in row.known_parallel:
        fields = {name: value for name, value in row.known_parallel.items() if name != left_free}
        assert (1 + Choice([row], fields).gain) * TIES >= 1, left_free


BY_SIZE = {(row.num_experts, row.num_layers): row for row in PAPER}
PAIRS = [
    *[((experts, 12), (experts, 36)) for experts in (128, 512, 2048)],
    *[((experts, layers), (4 * experts, layers)) for experts in (128, 512) for layers in (12, 36)],
]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_steps_of_the_papers_family_grow_as_its_table_says(first: tuple[int, int], second: tuple[int, int]) -> None:
    """From 128 to 512 to 2,048 experts and from 12 to 36 layers, with one efficiency fitted on 512 experts and 36
    layers."""
    rows = BY_SIZE[first], BY_SIZE[second]
    before_s, after_s = (row.search.time.step_s(row.candidate) for row in rows)
    assert after_s / before_s == pytest.approx(rows[0].steps_per_s / rows[1].steps_per_s, rel=0.25)


def test_memory_a_core_does_not_grow_with_the_papers_experts() -> None:
    of_state = []
    for experts in (128, 512, 2048):
        row = PaperRow(experts, 36, experts * 2048, 1.0)
        state = state_of(row.search.spec.model, row.candidate.degrees, row.search.spec.train.optimizer)
        router = row.search.spec.model.model_dim * experts * len(row.search.spec.model.moe_layers)
        of_state.append(state.stored.total - router)  # a column for each expert
        assert not not_yet(row.search.spec, row.candidate, "ours")
    assert len(set(of_state)) == 1
