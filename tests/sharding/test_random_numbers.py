"""Random numbers are a function of seed, step, operator and position: any layout draws those that one device draws."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe.sharding.capture.capture import capture
from moe.sharding.exchange.draws import Draws
from moe.sharding.exchange.exchange import part_of, unpadded
from moe.sharding.exchange.mesh import OneDevice
from moe.sharding.operands import is_operator
from moe.sharding.placement import WHOLE
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules.registry import rule_of
from moe.spec import SpecError
from tests.sharding.partitioned import MESHES, drawn, programmed, run_program
from tests.sharding.thread_mesh import ThreadMesh, on_threads

D = torch.float64


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(6, 7, dtype=D)), nn.Parameter(torch.randn(7, 5, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(x @ self.w), 0.4, self.training)
        return F.dropout(hidden, 0.2, self.training) @ self.v


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 7, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(5, 7, dtype=D) + torch.rand_like(self.w) * torch.empty(7, dtype=D).uniform_(-2, 3)
        coins = torch.empty_like(x).bernoulli_(0.3) + torch.bernoulli(torch.sigmoid(x))
        whole_rows = F.dropout1d(self.w[None], 0.5)[0]
        return self.w * (noise + coins) + whole_rows


def on_one(module: nn.Module, sample: tuple[Tensor, ...], draws: Draws) -> Any:
    captured = capture(module, sample)
    whole = {
        node.name: (rule_of(node).axis_options()[0],)
        for node in captured.graph.graph.nodes
        if is_operator(node)
    }
    leaves = {node.name: (WHOLE,) for node in captured.leaves}
    program = programmed(captured, Assignment((1,), leaves, whole))
    return run_program(program, module, sample, OneDevice(draws=draws))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Dropped, Drawn])
def test_any_layout_draws_the_same(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, sample = kind(), (torch.randn(5, 6 if kind is Dropped else 7, dtype=D),)
    captured, draws = capture(module, sample), Draws(seed=3, step=8)
    (output,), gradients, _ = on_one(module, sample, draws)
    for case in range(20):
        draw = random.Random(case)
        degrees = draw.choice(MESHES)
        program = programmed(captured, drawn(captured, degrees, draw))

        def one(mesh: ThreadMesh, program: Any = program) -> None:
            mesh.draws.seed, mesh.draws.step = draws.seed, draws.step
            (found,), parts, _ = run_program(program, module, sample, mesh)
            assert torch.allclose(found, output, rtol=1e-10, atol=1e-10)
            for name, whole in gradients.items():
                placements = program.placements[name]
                mine = unpadded(parts[name], whole.shape, placements, mesh)
                true = unpadded(part_of(whole, placements, mesh), whole.shape, placements, mesh)
                assert torch.allclose(mine, true, rtol=1e-10, atol=1e-10)

        on_threads(degrees, one)


def test_seed_and_step_change_what_is_drawn_and_nothing_else_does() -> None:
    module, sample = Drawn(), (torch.zeros(5, 7, dtype=D),)
    (first,), _, _ = on_one(module, sample, Draws())
    assert torch.equal(on_one(module, sample, Draws())[0][0], first)
    for draws in (Draws(seed=1), Draws(step=1)):
        assert not torch.isclose(on_one(module, sample, draws)[0][0], first).any()


class Uniform(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        kept = F.dropout(torch.ones(300, 100), 0.25)
        return torch.rand(300, 100), torch.rand(300, 100, dtype=torch.bfloat16), kept, x.bernoulli(0.9)


def test_what_is_drawn_is_distributed_as_torch_says() -> None:
    numbers, coarse, kept, coins = on_one(Uniform(), (torch.zeros(300, 100),), Draws())[0]
    for each in (numbers, coarse.float()):
        assert 0 <= each.min() < 0.01
        assert 0.99 < each.max() < 1
        assert each.mean() == pytest.approx(0.5, abs=0.01)
        assert each.var() == pytest.approx(1 / 12, abs=0.003)
    assert kept.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert kept.mean() == pytest.approx(1, abs=0.02)
    assert coins.mean() == pytest.approx(0.9, abs=0.01)
    rows = torch.corrcoef(torch.stack([numbers.flatten(), coarse.float().flatten(), kept.flatten()]))
    assert (rows - torch.eye(3)).abs().max() < 0.03, "operators draw from streams of their own"


def test_dropout_of_a_module_that_is_evaluated_drops_nothing() -> None:
    module, sample = Dropped().eval(), (torch.randn(5, 6, dtype=D),)
    assert torch.allclose(on_one(module, sample, Draws())[0][0], module(*sample))


@pytest.mark.parametrize(
    "function", [lambda x: torch.randn(3), lambda x: torch.randperm(5), lambda x: torch.multinomial(x, 1)]
)
def test_others_are_refused_in_words(function: Any) -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    captured = capture(Other(), (torch.ones(2, 4),))
    (node,) = [each for each in captured.graph.graph.nodes if is_operator(each)]
    with pytest.raises(
        SpecError, match=r"test_random_numbers.py:\d+.*would be others on each layout; make them of"
    ):
        rule_of(node)
