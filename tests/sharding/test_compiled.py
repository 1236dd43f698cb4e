"""Programs under torch.compile."""

import pytest
import torch

from moe import sharding
from moe.sharding.applied.dtensors import local
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import apply_on_one_device, cores
from tests.sharding.test_gshard import small


def compile_on_ranks(backend: str) -> list[str]:
    """Differences from the program without torch.compile."""
    module, batch = small(True)
    applied = sharding.apply(module, sharding.plan(module, batch, cores(2), mesh={"a": 2}))
    results = []
    for number in range(3):
        applied.zero_grad()
        loss = applied(*batch)
        loss.backward()
        gradients = {name: local(parameter.grad) for name, parameter in applied.named_parameters()}
        results.append({"loss": loss.detach(), **gradients})
        if number == 0:
            applied.compile(backend=backend)
    results.append({"loss": applied.eval()(*batch)})
    torch.compiler.reset()
    sharding.close(applied)
    return [f"{name} of call {number}" for number, tensors in enumerate(results) for name, tensor in tensors.items()
            if not torch.allclose(tensor, results[0][name], atol=1e-12)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.grid)])
def test_a_compiled_program_computes_the_same(ranks: Pools, backend: str):
    assert ranks[2].run(compile_on_ranks, backend) == [[], []]


@pytest.mark.slow
def test_steps_over_micro_batches_cannot_be_compiled():
    module, batch = small(True)
    applied = apply_on_one_device(module, *batch, micro_batches=2)
    for training in (True, False):
        with pytest.raises(RuntimeError, match="micro_batches=1"):
            applied.train(training).compile()
