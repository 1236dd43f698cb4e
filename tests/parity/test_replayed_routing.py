"""Routing recorded on one process and replayed on many, and the other way round."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from moe.parallel import Layout, local_parameters, reduce_gradients
from moe.routing import merge_recordings, record_routing, replay_routing
from tests.parity.combinations import model_of, train_of
from tests.parity.full_tensors import FullTensors
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS, language_model
from tests.parity.trajectory import Degrees, Model, Shape, batch_of, task_of

SOFTMAX = {"router": "softmax_topk", "capacity_factor": 0.9, "aux_scope": "sequence"}
MODELS: dict[str, Model] = {
    "gshard": model_of(),
    "softmax": model_of(**SOFTMAX),
    **{f"language model, {attention}": language_model(attention, **SOFTMAX) for attention in ATTENTIONS},
}
LAYOUTS = [
    Degrees(data=2),
    Degrees(expert=2, micro_batch_groups=1),
    Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2, recompute="full"),
    Degrees(expert=2, tensor=2, recompute="selective"),
    Degrees(expert=2, data=2, context=2, recompute="full"),
]


def run_pass(
    degrees: Degrees, model_name: str, replay: dict[int, Tensor] | None
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """(choices of this rank's tokens, full gradients) of a pass over the batch"""
    plan = degrees.plan(8)
    layout = Layout.build(plan)
    task = task_of(MODELS[model_name], train_of(seed=3))
    model, batch = task.build_model(layout), batch_of(layout, plan, Shape(), MODELS[model_name], 1)
    with record_routing(model) as recording, nullcontext() if replay is None else replay_routing(model, replay):
        for micro_batch in batch.micro_batches:
            (task.loss(model, micro_batch).objective / batch.num_targets).backward()
    parameters = [parameter for parameter in local_parameters(model) if parameter.parameter.requires_grad]
    reduce_gradients(parameters, layout)
    gradients = FullTensors(parameters, layout).gradients()
    layout.close()
    return dict(recording), gradients


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_any_layout_replays_what_one_process_chose(ranks: Pools, degrees: Degrees, model: str) -> None:
    """Replayed choices are ones that no router makes by itself, so that its own cannot pass for them."""
    router_choices, _ = run_pass(Degrees(), model, None)
    forced_choices = {layer: torch.where(rows >= 0, (rows + 1) % 4, -1) for layer, rows in router_choices.items()}
    recorded_choices, gradients = run_pass(Degrees(), model, forced_choices)
    assert all(torch.equal(recorded_choices[layer], forced_choices[layer]) for layer in router_choices)
    answers = ranks[degrees.workers].run(run_pass, degrees, model, forced_choices)
    merged_choices = merge_recordings(*(recording for recording, _ in answers))
    assert all(torch.equal(merged_choices[layer], forced_choices[layer]) for layer in router_choices)
    for _, rank_gradients in answers:
        for name, gradient in gradients.items():
            torch.testing.assert_close(rank_gradients[name], gradient, rtol=1e-10, atol=1e-13, msg=name)
