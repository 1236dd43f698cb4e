"""The learning rate of each step: values by hand, and laws."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.spec import TrainSpec
from moe.train.optimizer.schedule import learning_rate


def spec(decay, warmup=4, num_steps=12, final=0.0, peak=2.0):
    return TrainSpec(
        num_steps=num_steps,
        batch_tokens=1,
        optimizer={"name": "adamw", "peak_lr": peak},
        schedule={"decay": decay, "warmup_steps": warmup, "final_fraction": final},
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


def test_warm_up_takes_a_twelfth_when_it_is_left_out():
    left_out = TrainSpec(num_steps=1000, batch_tokens=1)
    assert learning_rate(left_out, 79) == left_out.optimizer.peak_lr
    assert learning_rate(left_out, 39) == pytest.approx(left_out.optimizer.peak_lr / 2)


@given(
    st.sampled_from(["inverse_sqrt", "cosine", "linear", "constant"]),
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
