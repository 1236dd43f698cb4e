"""A pipeline rank keeps the activations that its schedule says, and frees them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moe.parallel import Layout
from moe.plan.schedule import Action, activations_bound, peak_activations, schedule, splits_backward
from moe.train.signals import Signals
from moe.train.step import step
from tests.parity.combinations import train_of
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Model, Shape, batch_of, state_of

SHAPE = Shape(groups=6)


class SavedBytes:
    """Bytes of the tensors that graphs have saved and not freed yet, without parameters."""

    def __init__(self) -> None:
        self.live = 0

    def save(self, tensor: Tensor) -> "_Saved":
        return _Saved(tensor, self)


class _Saved:
    def __init__(self, tensor: Tensor, total: SavedBytes) -> None:
        self.tensor, self._total = tensor.detach(), total  # else an output that its own node saves is never freed
        self._num_bytes = 0 if isinstance(tensor, torch.nn.Parameter) else tensor.nbytes
        total.live += self._num_bytes

    def __del__(self) -> None:
        self._total.live -= self._num_bytes


def saved_after_actions(model: Model, degrees: Degrees) -> tuple[int, list[tuple[Action, int]]]:
    """This rank's place in the pipeline, and the saved bytes after each action of a step."""
    plan = degrees.plan(SHAPE.groups)
    layout = Layout.build(plan)
    state, saved, after = state_of(model, train_of(), layout), SavedBytes(), list[tuple[Action, int]]()

    def noted(run: Any) -> Any:
        def run_and_note(action: Action, *arguments: Any) -> Any:
            result = run(action, *arguments)
            after.append((action, saved.live))
            return result

        return run_and_note

    executor: Any = state.passes.executor  # type: ignore[attr-defined]
    executor.forward, executor.backward = noted(executor.forward), noted(executor.backward)
    with saved_tensors_hooks(saved.save, lambda holder: holder.tensor):
        step(state, batch_of(layout, plan, SHAPE, model, 1), Signals())
    layout.close()
    return layout.index("pipeline"), after


@pytest.mark.parametrize(
    "degrees",
    [Degrees(pipeline=2, schedule="gpipe"), Degrees(pipeline=2), Degrees(pipeline=2, virtual_stages=2),
     Degrees(pipeline=2, schedule="zero_bubble"), Degrees(pipeline=2, virtual_stages=2, schedule="zb_v")],
    ids=str,
)  # fmt: skip
def test_activations_are_kept_as_the_schedule_says(ranks: Pools, degrees: Degrees) -> None:
    degrees = Degrees(**{**vars(degrees), "micro_batch_groups": 1})
    model = language_model(next(iter(ATTENTIONS))).model_copy(update={"num_layers": 4})
    name = degrees.pipeline_schedule
    orders = schedule(name, degrees.pipeline, degrees.virtual_stages, SHAPE.groups)
    for rank, after in ranks[2].run(saved_after_actions, model, degrees):
        assert [action for action, _ in after] == [*orders[rank]]
        saved_of_stage, before = dict[int, int](), 0
        for action, saved in after:
            if action.kind == "forward":
                saved_of_stage[action.stage] = max(saved - before, saved_of_stage.get(action.stage, 0))
            before = saved
        assert before == 0, "all is freed"
        assert len(saved_of_stage) == degrees.virtual_stages
        most = max(saved for _, saved in after)
        expected = peak_activations(orders[rank], saved_of_stage)
        if splits_backward(name):  # a pass of inputs frees what gradients of weights do not need
            assert 0 < most <= expected
        else:
            assert 0.9 * expected <= most <= expected
        bound = activations_bound(name, rank, degrees.pipeline, degrees.virtual_stages, SHAPE.groups)
        assert most <= bound * max(saved_of_stage.values())
