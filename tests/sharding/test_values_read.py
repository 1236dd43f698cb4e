"""Operators that read a tensor's values while a module is captured: the user's line, and what reads none."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moe import sharding
from tests.sharding.on_ranks import cores
from tests.sharding.refused import BATCH, ONE_AXIS, Plain, lines_of, refused

line_of = lines_of(__file__)


def takes(module: Plain, h: Tensor) -> Tensor:
    return h[h[:, 0].argmax()] + h  # takes one


def takes_part(module: Plain, h: Tensor) -> Tensor:
    return h.narrow(0, h[:, 0].argmax() % 4, 2).sum(0) + h  # takes a part


def puts(module: Plain, h: Tensor) -> Tensor:
    q = torch.zeros(4, 8)
    q[h[:, 0].argmax() % 4] = h[0]  # puts one
    return h + q.sum(0)


def cuts(module: Plain, h: Tensor) -> Tensor:
    return h[: h[:, 0].argmax()].sum(0) + h  # cuts


def aligned(module: Plain, h: Tensor) -> Tensor:
    scores, label, length = h.log_softmax(1).unsqueeze(1), torch.ones(1, 2).long(), torch.tensor([8])
    return h * functional.ctc_loss(scores, label, length, torch.tensor([2]))  # aligned


READS = {
    "an index": (takes, "takes one", "h.index_select(0, i.view(1))"),
    "a beginning": (takes_part, "takes a part", "h.index_select(0, begin + torch.arange(length))"),
    "an index to write at": (puts, "puts one", "q = q.index_copy(0, i.view(1), h.unsqueeze(0))"),
    "a bound": (cuts, "cuts", "a mask of positions in its place, as torch.arange(len(h)) < n"),
    "ctc_loss": (aligned, "aligned", "return the log-probabilities, and compute the loss of what the applied"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("which", READS)
def test_what_reads_a_value_is_told_what_would_not(which: str) -> None:
    between, mark, remedy = READS[which]
    message = refused(Plain(between))
    assert message.startswith(f"{line_of(mark)} ")
    assert remedy in message


def takes_by_tensors(module: Plain, h: Tensor) -> Tensor:
    at = h[:, 0].argmax()
    taken = h.index_select(0, at.view(1)) + h.index_select(0, at % 4 + torch.arange(2)).sum(0)
    q = torch.zeros(4, 8).index_copy(0, (at % 4).view(1), h[0].unsqueeze(0))
    return h + taken + q.sum(0) + (h * (torch.arange(len(h)) < at).unsqueeze(1)).sum(0)


def test_what_is_advised_in_place_of_reading_is_planned_and_the_same() -> None:
    module = Plain(takes_by_tensors)
    reads = Plain(lambda _, h: h + h[(at := h[:, 0].argmax())] + h[at % 4 :][:2].sum(0) + h[0] + h[:at].sum(0))
    reads.load_state_dict(module.state_dict())
    sharding.plan(module, BATCH, cores(2), mesh=ONE_AXIS)
    applied = sharding.apply(module, sharding.plan(module, BATCH, cores(1)))
    assert torch.allclose(applied(*BATCH), reads(*BATCH))


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).log_softmax(-1).unsqueeze(1)


def test_a_loss_of_what_the_applied_module_returns_is_that_of_one_device() -> None:
    module = Scores()
    applied = sharding.apply(module, sharding.plan(module, BATCH, cores(1)))
    for each in (module, applied):
        functional.ctc_loss(each(*BATCH), torch.tensor([[1, 2]]), torch.tensor([8]), torch.tensor([2])).backward()
    assert torch.allclose(applied.get_parameter("layer.weight").grad, module.layer.weight.grad)


def test_a_batch_norm_that_counts_is_told_to_have_a_momentum() -> None:
    message = refused(nn.BatchNorm1d(6, momentum=None), loss=lambda y: y.square().mean())
    assert message.endswith("set its momentum, as momentum=0.1")
