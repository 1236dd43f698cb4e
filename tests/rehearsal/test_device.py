"""The rehearsal device refuses what CUDA refuses, and sees every wait."""

import pytest
import torch

from moe.parallel.accelerator import accelerator
from tests.parity.gloo_ranks import Pools
from tests.rehearsal.device import WAITS, RehearsalTensor, TwoDevices, register


def missed_refusals() -> list[str]:
    device = register()
    on_device, on_host = torch.ones(3, device=device), torch.ones(3)
    attempts = {
        "a sum": lambda: on_device + on_host,
        "a product": lambda: on_device.outer(on_host),
        "a concatenation": lambda: torch.cat((on_device, on_host)),
        "what was made on the default device": lambda: on_device * torch.arange(3),
        "written into": lambda: torch.add(on_device, 1, out=on_host),
        "onto the other": lambda: on_host.add_(on_device),
        "a meta tensor": lambda: on_device + torch.ones(3, device="meta"),
    }
    refusals = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except TwoDevices:
            refusals.append(name)
    return [name for name in attempts if name not in refusals]


def check_accepted_operations() -> list[bool]:
    device = register()
    x = torch.arange(3.0, device=device, requires_grad=True)
    index, scalar = torch.tensor([2, 0]), torch.tensor(2.0)
    results = (x * scalar, x[index], x.to("cpu").to(device), torch.zeros(3, device=device).copy_(x.detach()))
    (results[0].sum() + results[1].sum()).backward()
    assert x.grad.tolist() == [3, 2, 3]
    return [isinstance(tensor, RehearsalTensor) and tensor.device == device for tensor in (*results, x.grad)]


def waits() -> dict[str, int]:
    """Waits by kind, of operations that wait once each, and of some that never wait."""
    device = register()
    x, host_index = torch.tensor([0, 2, 0, 1], device=device), torch.tensor([1, 0])
    with WAITS.count() as counts:
        x.sum().item(), bool(x.any()), x.tolist(), x.nonzero(), x[x > 0], x.cpu(), x.bincount(), x.unique()
        x.repeat_interleave(x), x[host_index], host_index.to(device)
        x.repeat_interleave(x, output_size=3), x.cumsum(0), x[x], x + 1, torch.where(x > 0, x, 1)
        accelerator(device).take(host_index), torch.zeros(2, device=device)
    return {kind: number for (kind, _), number in counts.items()}


@pytest.mark.slow
def test_operands_of_two_devices_are_refused_and_scalars_indices_and_copies_taken(ranks: Pools) -> None:
    assert ranks[1].run(missed_refusals) == [[]]
    assert ranks[1].run(check_accepted_operations) == [[True] * 5]


def test_each_wait_is_counted_once(ranks: Pools) -> None:
    (counts,) = ranks[1].run(waits)
    assert counts.pop("item") + counts.pop("bool", 0) == 2
    assert counts == dict.fromkeys(
        ("tolist", "nonzero", "index by a mask", "copy to the host", "copy from the host", "index of the host",
         "bincount", "unique", "repeat_interleave"), 1,
    )  # fmt: skip
