"""The learning rate of each step: values by hand, and laws."""

import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from moe.spec import TrainSpec
from moe.spec.train import ScheduleSpec
from moe.train.optimizer.schedule import learning_rate
from tests.refusals import expect_problem


def spec(decay, warmup=4, num_steps=12, final=0.0, peak=2.0, **fields):
    return TrainSpec(
        num_steps=num_steps,
        batch_tokens=1,
        optimizer={"name": "adamw", "peak_lr": peak},
        schedule={"decay": decay, "warmup_steps": warmup, "final_fraction": final, **fields},
    )


@pytest.mark.parametrize(
    ("decay", "final", "expected"),
    [
        ("constant", 0.0, {0: 0.5, 1: 1.0, 2: 1.5, 3: 2.0, 4: 2.0, 11: 2.0}),
        ("linear", 0.0, {0: 0.5, 3: 2.0, 4: 2.0, 8: 1.0, 11: 0.25}),
        ("linear", 0.5, {3: 2.0, 8: 1.5, 11: 1.125}),
        ("cosine", 0.0, {3: 2.0, 4: 2.0, 8: 1.0, 11: 1 + math.cos(math.pi * 7 / 8)}),
        ("inverse_sqrt", 0.0, {0: 0.5, 3: 2.0, 4: 2 * math.sqrt(4 / 5), 11: 2 * math.sqrt(4 / 12)}),
    ],
)
def test_table(decay, final, expected):
    rates = {step: learning_rate(spec(decay, final=final), step) for step in expected}
    assert rates == pytest.approx(expected)


SCHEDULERS = {
    "linear": ({}, lambda optimizer, n: transformers.get_linear_schedule_with_warmup(optimizer, 4, n)),
    "cosine": ({}, lambda optimizer, n: transformers.get_cosine_schedule_with_warmup(optimizer, 4, n)),
    "inverse_sqrt": ({}, lambda optimizer, _: transformers.get_inverse_sqrt_schedule(optimizer, 4, timescale=4)),
    "cosine_with_restarts": (
        {"num_cycles": 3},
        lambda optimizer, n: transformers.get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 4, n, 3),
    ),
    **{
        f"warmup_stable_decay {shape}": (
            {"decay_steps": 7, "decay_shape": shape, "final": 0.2},
            lambda optimizer, n, shape=shape: transformers.get_wsd_schedule(
                optimizer, 4, 7, num_training_steps=n, decay_type=shape, min_lr_ratio=0.2
            ),
        )
        for shape in ("linear", "cosine", "1-sqrt")
    },
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_equals_the_schedulers_of_transformers(name):
    """Their warm-up starts at 0, or at the final rate if there is one, and ours one step later; inverse_sqrt differs by
    that step throughout."""
    fields, build = SCHEDULERS[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler, rates = build(optimizer, 23), []
    for _ in range(23):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    train = spec(name.split()[0], num_steps=23, **fields)
    expected = rates[1:] if name == "inverse_sqrt" else rates[1:5] + rates[4:]
    first = 3 if "final" in fields else 0
    rates = [learning_rate(train, step) for step in range(first, len(expected))]
    assert rates == pytest.approx(expected[first:])


@pytest.mark.parametrize(
    ("fields", "path", "value"),
    [
        ({"decay": "cosine", "num_cycles": 2}, "num_cycles", 2),
        ({"decay": "linear", "decay_steps": 3}, "decay_steps", 3),
        ({"decay": "cosine_with_restarts", "decay_shape": "cosine"}, "decay_shape", "cosine"),
    ],
)
def test_fields_of_another_decay_are_refused(fields, path, value):
    with expect_problem("not_applicable", path, value):
        ScheduleSpec(**fields)


def test_decay_must_fit_after_the_warm_up():
    spec("warmup_stable_decay", warmup=4, num_steps=12, decay_steps=8)
    with expect_problem("out_of_range", "schedule.decay_steps", 9):
        spec("warmup_stable_decay", warmup=4, num_steps=12, decay_steps=9)


def test_warm_up_takes_a_twelfth_when_it_is_left_out():
    left_out = TrainSpec(num_steps=1000, batch_tokens=1)
    assert learning_rate(left_out, 79) == left_out.optimizer.peak_lr
    assert learning_rate(left_out, 39) == pytest.approx(left_out.optimizer.peak_lr / 2)


@given(
    st.sampled_from(["inverse_sqrt", "cosine", "linear", "constant", "warmup_stable_decay"]),
    st.integers(1, 50),
    st.integers(0, 50),
    st.floats(0, 1),
)
def test_rises_to_the_peak_then_never_rises_and_never_ends_training_early(decay, num_steps, warmup, final):
    train = spec(decay, warmup=min(warmup, num_steps), num_steps=num_steps, final=final)
    rates = [learning_rate(train, step) for step in range(num_steps)]
    top = max(0, train.warmup_steps - 1)
    assert rates[top] == pytest.approx(2.0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert all(next_rate <= rate + 1e-12 for rate, next_rate in zip(rates[top:], rates[top + 1 :], strict=False))
    assert min(rates) > 0
