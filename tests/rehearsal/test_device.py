"""The rehearsal device refuses what CUDA refuses, and sees every wait."""

import pytest
import torch

from moe.parallel.accelerator import accelerator
from tests.parity.gloo_ranks import Pools
from tests.rehearsal.device import WAITS, RehearsalTensor, TwoDevices, register


def refused() -> list[str]:
    device = register()
    here, there = torch.ones(3, device=device), torch.ones(3)
    attempts = {
        "a sum": lambda: here + there,
        "a product": lambda: here.outer(there),
        "a concatenation": lambda: torch.cat((here, there)),
        "what was made on the default device": lambda: here * torch.arange(3),
        "written into": lambda: torch.add(here, 1, out=there),
        "onto the other": lambda: there.add_(here),
        "a meta tensor": lambda: here + torch.ones(3, device="meta"),
    }
    found = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except TwoDevices:
            found.append(name)
    return [name for name in attempts if name not in found]


def taken() -> list[bool]:
    device = register()
    here = torch.arange(3.0, device=device, requires_grad=True)
    index, scalar = torch.tensor([2, 0]), torch.tensor(2.0)
    given = (here * scalar, here[index], here.to("cpu").to(device), torch.zeros(3, device=device).copy_(here.detach()))
    (given[0].sum() + given[1].sum()).backward()
    assert here.grad.tolist() == [3, 2, 3]
    return [isinstance(each, RehearsalTensor) and each.device == device for each in (*given, here.grad)]


def waits() -> dict[str, int]:
    """By kind, of operations that each wait once, and of some that wait for nothing."""
    device = register()
    x, here = torch.tensor([0, 2, 0, 1], device=device), torch.tensor([1, 0])
    with WAITS.counted() as found:
        x.sum().item(), bool(x.any()), x.tolist(), x.nonzero(), x[x > 0], x.cpu(), x.bincount(), x.unique()
        x.repeat_interleave(x), x[here], here.to(device)
        x.repeat_interleave(x, output_size=3), x.cumsum(0), x[x], x + 1, torch.where(x > 0, x, 1)
        accelerator(device).take(here), torch.zeros(2, device=device)
    return {kind: number for (kind, _), number in found.items()}


@pytest.mark.slow
def test_operands_of_two_devices_are_refused_and_scalars_indices_and_copies_taken(ranks: Pools) -> None:
    assert ranks[1].run(refused) == [[]]
    assert ranks[1].run(taken) == [[True] * 5]


def test_each_wait_is_counted_once(ranks: Pools) -> None:
    (found,) = ranks[1].run(waits)
    assert found.pop("item") + found.pop("bool", 0) == 2
    assert found == dict.fromkeys(
        ("tolist", "nonzero", "index by a mask", "copy to the host", "copy from the host", "index of the host",
         "bincount", "unique", "repeat_interleave"), 1,
    )  # fmt: skip
