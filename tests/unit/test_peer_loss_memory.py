"""Memory that PyTorch allocates for its cross-entropy, compared with what the profile `torchtitan` counts."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.profiler import ProfilerActivity, profile

from moe.plan.profile import TORCHTITAN

TOKENS, VOCABULARY = 512, 2048


@pytest.fixture
def _process_group() -> Iterator[None]:
    """A process group of one rank, on which `loss_parallel` allocates as much for its shard as on several."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def peak_bytes(run: Callable[[], None]) -> int:
    """Peak of the bytes allocated while a function runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    num_bytes = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        num_bytes += event.nbytes()
        peak = max(peak, num_bytes)
    return peak


def logits() -> torch.Tensor:
    return torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0)).bfloat16()


def loss_of(hidden_states: torch.Tensor) -> Callable[[], None]:
    """Function that computes the loss and its gradients and frees the logits in between, as torchtitan does."""
    targets = torch.arange(TOKENS) % VOCABULARY

    def run() -> None:
        logits = hidden_states * 1.0
        loss = F.cross_entropy(logits.float(), targets)
        del logits
        loss.backward()

    return run


def test_a_loss_of_all_logits_takes_three_tensors_in_float32() -> None:
    peak = peak_bytes(loss_of(logits().requires_grad_()))
    assert peak / (TOKENS * VOCABULARY) == pytest.approx(TORCHTITAN.loss_bytes[0], rel=0.02)


@pytest.mark.usefixtures("_process_group")
def test_a_loss_over_tensor_ranks_takes_one_more() -> None:
    mesh = init_device_mesh("cpu", (1,))
    run = loss_of(DTensor.from_local(logits(), mesh, [Shard(1)]).requires_grad_())
    with loss_parallel():
        peak = peak_bytes(run)
    assert peak / (TOKENS * VOCABULARY) == pytest.approx(TORCHTITAN.loss_bytes[1], rel=0.02)
