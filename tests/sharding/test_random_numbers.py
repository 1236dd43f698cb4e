"""Random numbers are a function of seed, step, operator and position: any layout draws those that one device draws."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from moe.sharding.capture.capture import capture
from moe.sharding.exchange.exchange import part_of, strip_padding
from moe.sharding.exchange.mesh import Draws, OneDevice
from moe.sharding.operands import is_operator
from moe.sharding.placement import WHOLE
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules.distributions import DISTRIBUTIONS, values
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


class Distributions(nn.Module):
    """Noise of every distribution, from functions and methods."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 7, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        like = torch.empty_like(x)
        noise = torch.randn(5, 7, dtype=D) + torch.randn_like(x) + torch.empty(7, dtype=D).normal_(1, 2)
        noise = noise + torch.normal(x, x.abs()) + torch.normal(0.5, x.abs()) + torch.normal(x, 2.0)
        noise = noise + torch.normal(0.0, 1.0, (5, 7), dtype=D) + like.exponential_(2.0).log()
        noise = noise + torch.empty_like(x).log_normal_(0.1, 0.2) + torch.empty_like(x).geometric_(0.3)
        noise = noise + torch.empty_like(x).cauchy_(1, 2).tanh() + torch.randint(9, (5, 7)) + torch.randint(-3, 3, (7,))
        noise = noise + torch.randint_like(x, 4) + torch.randint_like(x, -2, 9)
        return self.w * noise + F.gumbel_softmax(self.w, hard=True)


def on_one(module: nn.Module, sample: tuple[Tensor, ...], draws: Draws) -> Any:
    captured = capture(module, sample)
    whole = {node.name: (rule_of(node).axis_options()[0],) for node in captured.graph.graph.nodes if is_operator(node)}
    leaves = {node.name: (WHOLE,) for node in captured.leaves}
    program = programmed(captured, Assignment((1,), leaves, whole))
    return run_program(program, module, sample, OneDevice(draws=draws))  # type: ignore[arg-type]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Dropped, Drawn, Distributions])
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
                mine = strip_padding(parts[name], whole.shape, placements, mesh)
                true = strip_padding(part_of(whole, placements, mesh), whole.shape, placements, mesh)
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


class Samples(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(torch.empty_like(x))


@pytest.mark.parametrize(
    ("draw", "distribution"),
    [
        (torch.randn_like, stats.norm()),
        (lambda x: x.normal_(1, 2), stats.norm(1, 2)),
        (lambda x: x.log_normal_(0.5, 0.4), stats.lognorm(0.4, scale=math.exp(0.5))),
        (lambda x: x.exponential_(3), stats.expon(scale=1 / 3)),
        (lambda x: x.cauchy_(-1, 2), stats.cauchy(-1, 2)),
        (lambda x: x.geometric_(0.3), stats.geom(0.3)),
        (lambda x: torch.randint_like(x, 5), stats.randint(0, 5)),
        (lambda x: torch.randint_like(x, -4, 9), stats.randint(-4, 9)),
    ],
    ids=["randn", "normal", "log-normal", "exponential", "Cauchy", "geometric", "below", "between"],
)
def test_distributions_are_those_of_torch(draw: Callable[[Tensor], Tensor], distribution: Any) -> None:
    """By the Kolmogorov-Smirnov statistic of continuous ones, and the greatest error of a frequency of others."""
    (numbers,) = on_one(Samples(draw), (torch.zeros(300, 100, dtype=D),), Draws())[0]
    assert numbers.isfinite().all()
    if hasattr(distribution, "pmf"):
        numbers, counts = numbers.unique(return_counts=True)
        assert float((counts / 30_000 - torch.tensor(distribution.pmf(numbers.numpy()))).abs().max()) < 0.01
    else:
        assert stats.kstest(numbers.flatten().numpy(), distribution.cdf).statistic < 0.01


@pytest.mark.parametrize("draw", [0.0, 2.0**-53, 1 - 2.0**-53])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_least_and_the_greatest_draw_give_finite_numbers(name: str, draw: float) -> None:
    parameters: list[Any] = {"integer": [2, 5], "geometric": [0.5]}.get(name, [])
    dtypes = (torch.float16, torch.float32, D) if name == "exponential" else (D,)
    for dtype in dtypes:
        number = values(name, torch.tensor(draw, dtype=D), parameters, dtype)
        assert number.isfinite()
        assert name != "exponential" or number.log().isfinite()
        assert name != "integer" or 2 <= number < 5


def test_dropout_of_a_module_that_is_evaluated_drops_nothing() -> None:
    module, sample = Dropped().eval(), (torch.randn(5, 6, dtype=D),)
    assert torch.allclose(on_one(module, sample, Draws())[0][0], module(*sample))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.randn(3, dtype=torch.complex64).real,
        lambda x: torch.randperm(5),
        lambda x: torch.multinomial(x, 1),
    ],
)
def test_others_are_refused_in_words(function: Any) -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    captured = capture(Other(), (torch.ones(2, 4),))
    node = next(node for node in captured.graph.graph.nodes if is_operator(node))
    with pytest.raises(SpecError, match=r"test_random_numbers.py:\d+.*would depend on the layout; make them of"):
        rule_of(node)
