"""A step that fails leaves nothing behind for the next one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe.parallel import Layout
from moe.plan.schedule import Action
from moe.spec import LanguageModelSpec
from moe.train.passes import ScheduledPasses
from moe.train.signals import Signals
from moe.train.step import step
from moe.train.train_state import TrainState
from tests.parity.combinations import train_of
from tests.parity.trajectory import Degrees, Shape, batch_of, state_of

MODEL = LanguageModelSpec(
    kind="language", model_dim=16, num_layers=2, ffn_dim=16, vocab_size=300,
    attention={"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 4},
)  # fmt: skip
DEGREES, SHAPE = Degrees(micro_batch_groups=1), Shape(groups=3, source=4, target=4)


def gradients_of_step(state: TrainState, layout: Layout) -> list[Tensor]:
    step(state, batch_of(layout, DEGREES.plan(SHAPE.groups), SHAPE, MODEL, 1), Signals())
    return [parameter.local.grad.clone() for parameter in state.parameters if parameter.local.grad is not None]


@pytest.mark.parametrize("kind", ["forward", "backward_input", "backward_weight"])
def test_gradients_after_a_failed_step_are_those_of_a_new_state(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = replace(Layout.single(), schedule="zero_bubble")
    state = state_of(MODEL, train_of(), layout)
    assert isinstance(state.passes, ScheduledPasses)
    executor = state.passes.executor
    name = "forward" if kind == "forward" else "backward"
    run = getattr(executor, name)

    def fail_at_the_second(action: Action, *arguments: object) -> object:
        if (action.kind, action.micro_batch) == (kind, 1):
            raise torch.OutOfMemoryError("of this test")
        return run(action, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(executor, name, fail_at_the_second)
        with pytest.raises(torch.OutOfMemoryError):
            gradients_of_step(state, layout)
    assert not executor._passes
    assert not executor._deferred
    expected = gradients_of_step(state_of(MODEL, train_of(), layout), layout)
    for gradient, reference in zip(gradients_of_step(state, layout), expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=0)
