"""A module that knows nothing of layouts is the same under all of them, its placements given."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.layers import MoELayer, TokenContext
from moe.parallel import Layout, apply, local_parameters, reduce_gradients
from moe.plan.placement import Placement
from moe.routing import BatchCounts
from moe.spec import MoESpec
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees, Whole

WORDS, GROUPS, GROUP_TOKENS = 11, 4, 6
SPEC = MoESpec(num_experts=4, model_dim=8, hidden_dim=12, group_tokens=GROUP_TOKENS, capacity_factor=1.0)


class Guesser(nn.Module):
    """The word after each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.moe = MoELayer(SPEC)
        self.head = nn.Linear(8, WORDS)

    def forward(self, words: Tensor, tokens: TokenContext) -> Tensor:
        return self.head(self.moe(self.embedding(words), tokens)[0])


SPLITS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "moe.experts.w_in": (("expert", 0), ("expert_tensor", 2), ("expert_fsdp", 0)),
    "moe.experts.w_out": (("expert", 0), ("expert_tensor", 1), ("expert_fsdp", 0)),
}
LAYOUTS = (
    Degrees(expert=2),
    Degrees(expert=4),
    Degrees(expert=2, fsdp=2),
    Degrees(data=2, fsdp=2, expert_fsdp=2),
    Degrees(expert=2, tensor=2),
    Degrees(data=2, tensor=2),
    Degrees(expert=2, data=2, tensor=2, expert_fsdp=2),
    Degrees(expert=2, expert_tensor=2, tensor=2, fsdp=2),
)


def gradients(degrees: Degrees) -> tuple[float, dict[str, Tensor]]:
    """(the loss of the whole batch, every gradient in full)."""
    layout = Layout.build(degrees.plan(GROUPS))
    torch.manual_seed(4)
    model = Guesser().double()
    placements = [
        Placement(parameter=name, shape=each.shape, splits=SPLITS.get(name, (("fsdp", 0),)))
        for name, each in model.named_parameters()
    ]
    apply(model, placements, layout, {"moe": "layer 0", "": "the model"})
    here = layout.groups_here(GROUPS)
    words = torch.randint(WORDS, (GROUPS, GROUP_TOKENS + 1))[here.start : here.stop]
    ids = torch.arange(GROUPS * GROUP_TOKENS).view(GROUPS, -1)[here.start : here.stop]
    counts = BatchCounts(GROUPS, GROUPS, GROUPS * GROUP_TOKENS)
    logits = model(words[:, :-1], TokenContext(ids, step=2, seed=3, batch=counts))
    loss = functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten(), reduction="sum")
    (loss / (GROUPS * GROUP_TOKENS)).backward()
    parameters = local_parameters(model)
    reduce_gradients(parameters, layout)
    found = Whole(parameters, layout).gradients()
    layout.close()
    return loss.item(), found


@pytest.fixture(scope="module")
def alone() -> tuple[float, dict[str, Tensor]]:
    return gradients(Degrees())


@pytest.mark.sample(4)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_any_module_is_the_same_under_every_layout(
    ranks: Pools, degrees: Degrees, alone: tuple[float, dict[str, Tensor]]
) -> None:
    each = ranks[degrees.workers].run(gradients, degrees)
    loss, expected = alone
    data_ranks = degrees.workers // degrees.tensor
    assert sum(of_rank for of_rank, _ in each) == pytest.approx(loss * degrees.workers / data_ranks, rel=1e-10)
    for _, found in each:
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)
