"""A module's loss and other numbers, in every form that it may return."""

from typing import Any

import pytest
import torch

from moe.tasks.module.outputs import MAX_NUMBERS, loss_and_numbers
from tests.refusals import expect_problem

LOSS = torch.tensor(2.0)
OTHERS = {"accuracy": torch.tensor([0.5]), "logits": torch.ones(3), "note": "text", "count": torch.tensor(3)}


@pytest.mark.parametrize("output", [LOSS, {"loss": LOSS, **OTHERS}, (LOSS, OTHERS), [LOSS, OTHERS]])
def test_the_loss_is_found_and_scalars_beside_it(output: Any) -> None:
    loss, numbers = loss_and_numbers(output, "m:build")
    assert float(loss) == 2.0
    expected = {} if output is LOSS else {"accuracy": 0.5, "count": 3.0}
    assert {name: float(number) for name, number in numbers.items()} == expected


@pytest.mark.parametrize(
    "output",
    [
        None,
        {"accuracy": LOSS},
        (LOSS, LOSS),
        {"loss": torch.ones(2)},
        {"loss": LOSS, **{str(number): LOSS for number in range(MAX_NUMBERS + 1)}},
        {"loss": LOSS, "n" * 65: LOSS},
    ],
)
def test_what_is_no_loss_is_refused_with_the_remedy(output: Any) -> None:
    with expect_problem("unsupported", "model.build", "m:build") as error:
        loss_and_numbers(output, "m:build")
    assert [problem.path for problem in error.value.problems] == ["model.build"]
