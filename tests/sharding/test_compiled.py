"""Programs under torch.compile."""

import pytest
import torch

from moe import sharding
from moe.sharding.applied.dtensors import local
from tests.parity.gloo_ranks import Pools
from tests.sharding.on_ranks import cores
from tests.sharding.test_gshard import small


def compiled(backend: str) -> list[str]:
    """What differs from the program that runs as it is written."""
    module, batch = small(True)
    plan = sharding.plan(module, batch, cores(2), mesh={"a": 2})
    applied = sharding.apply(module, plan)
    expected = applied(*batch)
    expected.backward()
    gradients = {name: local(each.grad) for name, each in applied.named_parameters()}
    for each in applied.parameters():
        each.grad = None
    applied.compile(backend=backend)
    wrong = []
    for _ in range(2):
        found = applied(*batch)
        found.backward()
        if not torch.allclose(found, expected, atol=1e-12):
            wrong.append(f"{found} for {expected}")
        for name, each in applied.named_parameters():
            if not torch.allclose(local(each.grad), gradients[name], atol=1e-12):
                wrong.append(name)
            each.grad = None
    applied.eval()
    if not torch.allclose(applied(*batch), expected, atol=1e-12):
        wrong.append("evaluation")
    torch.compiler.reset()
    sharding.close(applied)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.grid)])
def test_a_compiled_program_computes_the_same(ranks: Pools, backend: str):
    assert ranks[2].run(compiled, backend) == [[], []]


@pytest.mark.slow
def test_a_step_over_micro_batches_is_not_compiled():
    module, batch = small(True)
    plan = sharding.plan(module, batch, cores(1), mesh={"a": 1}, micro_batches=2)
    applied = sharding.apply(module, plan)
    for training in (True, False):
        with pytest.raises(RuntimeError, match=r"over micro-batches cannot be compiled.*micro_batches=1"):
            applied.train(training).compile()
