"""Promise 1 on random layouts of random models: refused before anything starts, or the same as one process."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.parity.combinations import assert_ranks_same
from tests.parity.gloo_ranks import Pools
from tests.parity.random_layouts import NUM_STEPS, Case, cases, run_or_refuse
from tests.parity.trajectory import Degrees, run


def is_refused(ranks: Pools, case: Case) -> bool:
    """Whether the layout is refused, by all ranks alike. Fails if it is run and differs from one process."""
    num_ranks = case.degrees.num_workers
    answers = ranks[num_ranks].run(run_or_refuse, case) if num_ranks > 1 else [run_or_refuse(case)]
    if isinstance(answers[0], set):
        assert answers[0]
        assert all(answer == answers[0] for answer in answers)
        return True
    expected = run(case.model, case.train, Degrees(), case.shape, NUM_STEPS)
    assert_ranks_same(answers, expected, 1e-10)
    return False


def num_refused(ranks: Pools, num_cases: int) -> int:
    """Check so many random cases."""
    number = 0

    # Examples are not shrunk: each attempt that fails costs new processes.
    @settings(
        max_examples=num_cases, deadline=None, phases=[Phase.explicit, Phase.generate], print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases())
    def check(case: Case) -> None:
        nonlocal number
        number += is_refused(ranks, case)

    check()
    return number


@pytest.mark.parametrize("num_cases", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_layouts_are_refused_or_train_alike(ranks: Pools, num_cases: int) -> None:
    num_refused(ranks, num_cases)


@pytest.mark.grid
def test_most_of_many_layouts_are_not_refused(ranks: Pools) -> None:
    """Otherwise the law would say little."""
    assert num_refused(ranks, 300) < 150
