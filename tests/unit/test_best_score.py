"""The best evaluation of a run: what is better, what is carried over to a resumed run, when training ends early."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from moe.spec import JobSpec
from moe.train.best_score import BestScore

LOSSES = st.lists(st.none() | st.floats(-5, 5) | st.just(math.nan) | st.just(math.inf), max_size=12)


def job(metric: str = "held_out", mode: str = "min", **evaluation: object) -> JobSpec:
    return JobSpec.parse({
        "model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"},
        "train": {"num_steps": 100, "evaluation": {"every_steps": 5, **evaluation}},
        "checkpoint": {"keep_best": {"metric": metric, "mode": mode}},
    })  # fmt: skip


def scores_of(spec: JobSpec, losses: list[float | None]) -> list[BestScore]:
    scores = [BestScore.of_job(spec)]
    for step, loss in enumerate(losses, 1):
        scores.append(scores[-1].after(step, {"unseen": 0.0, "seen": loss}))
    return scores[1:]


@given(losses=LOSSES, mode=st.sampled_from(["min", "max"]))
def test_the_best_step_is_the_first_with_the_best_finite_loss(losses: list[float | None], mode: str) -> None:
    for step, score in enumerate(scores_of(job("held_out.seen", mode), losses), 1):
        finite = [(n, loss) for n, loss in enumerate(losses[:step], 1) if loss is not None and math.isfinite(loss)]
        if not finite:
            assert (score.step, score.value, score.num_evaluations_since) == (None, None, step)
            continue
        best = (min if mode == "min" else max)(loss for _, loss in finite)
        first = next(n for n, loss in finite if loss == best)
        assert (score.step, score.value, score.num_evaluations_since) == (first, best, step - first)


@given(losses=LOSSES, cut=st.integers(0, 12))
def test_a_score_that_was_stored_continues_as_if_it_had_not_been(losses: list[float | None], cut: int) -> None:
    spec, score = job("held_out.seen"), BestScore.of_job(job("held_out.seen"))
    for step, loss in enumerate(losses, 1):
        if step == cut:
            score = BestScore.of_job(spec, json.loads(json.dumps(score.to_plain())))
        score = score.after(step, {"seen": loss})
    assert score == ([BestScore.of_job(spec), *scores_of(spec, losses)])[-1]


def test_the_mean_is_over_the_sets_that_have_a_loss() -> None:
    score = BestScore.of_job(job()).after(5, {"unseen": 1.0, "seen": 2.0})
    assert (score.step, score.value) == (5, 1.5)
    assert score.after(10, {"unseen": 1.4, "seen": None}).value == 1.4
    assert score.after(10, {"unseen": None, "seen": None}).num_evaluations_since == 1


def test_a_score_of_another_metric_is_not_continued() -> None:
    plain = BestScore.of_job(job()).after(5, {"seen": 1.0}).to_plain()
    assert BestScore.of_job(job(), plain).step == 5
    average = JobSpec.parse(
        {**job().model_dump(mode="json"), "train": {
            "num_steps": 100, "ema_decay": 0.9, "evaluation": {"every_steps": 5, "use_ema": True}}}
    )  # fmt: skip
    for other in (job("held_out.seen"), job(mode="max"), average):
        assert BestScore.of_job(other, plain) == BestScore.of_job(other)


def test_a_score_is_stale_after_as_many_evaluations_without_a_better_one() -> None:
    scores = scores_of(job("held_out.seen"), [2.0, 2.5, 2.0, 1.0, 1.5])
    assert [score.is_stale(2) for score in scores] == [False, False, True, False, False]
    assert not any(score.is_stale(None) for score in scores)
