"""Random numbers are a function of seed, step, operator and position, in any layout."""

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
from moe.sharding.exchange.mesh import Draws, OneDevice
from moe.sharding.placement import WHOLE
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules.distributions import DISTRIBUTIONS, values
from moe.sharding.rules.registry import rule_of
from tests.refusals import expect_problem
from tests.sharding.modules import Function
from tests.sharding.partitioned import MESHES, operators, program_of, random_assignment, run_program, unlike_parts
from tests.sharding.refused import lines_of
from tests.sharding.thread_mesh import ThreadMesh, on_threads

D = torch.float64


class DropoutModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(6, 7, dtype=D)), nn.Parameter(torch.randn(7, 5, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        hidden_states = F.dropout(torch.tanh(x @ self.w), 0.4, self.training)
        return F.dropout(hidden_states, 0.2, self.training) @ self.v


def uniform(w: Tensor, x: Tensor) -> Tensor:
    noise = torch.rand(5, 7, dtype=D) + torch.rand_like(w) * torch.empty(7, dtype=D).uniform_(-2, 3)
    coins = torch.empty_like(x).bernoulli_(0.3) + torch.bernoulli(torch.sigmoid(x))
    return w * (noise + coins) + F.dropout1d(w[None], 0.5)[0]


def sum_of_distributions(w: Tensor, x: Tensor) -> Tensor:
    """Noise of every distribution, from functions and methods."""
    noise = torch.randn(5, 7, dtype=D) + torch.randn_like(x) + torch.empty(7, dtype=D).normal_(1, 2)
    noise = noise + torch.normal(x, x.abs()) + torch.normal(0.5, x.abs()) + torch.normal(x, 2.0)
    noise = noise + torch.normal(0.0, 1.0, (5, 7), dtype=D) + torch.empty_like(x).exponential_(2.0).log()
    noise = noise + torch.empty_like(x).log_normal_(0.1, 0.2) + torch.empty_like(x).geometric_(0.3)
    noise = noise + torch.empty_like(x).cauchy_(1, 2).tanh() + torch.randint(9, (5, 7)) + torch.randint(-3, 3, (7,))
    noise = noise + torch.randint_like(x, 4) + torch.randint_like(x, -2, 9)
    return w * noise + F.gumbel_softmax(w, hard=True)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "dropout": DropoutModule,
    "uniform": lambda: Function(uniform, torch.randn(5, 7, dtype=D)),
    "distributions": lambda: Function(sum_of_distributions, torch.randn(5, 7, dtype=D)),
}


def run_on_one_device(module: nn.Module, sample: tuple[Tensor, ...], draws: Draws) -> Any:
    captured_graph = capture(module, sample)
    options = {node.name: (rule_of(node).axis_options()[0],) for node in operators(captured_graph)}
    leaves = {node.name: (WHOLE,) for node in captured_graph.leaves}
    program = program_of(captured_graph, Assignment((1,), leaves, options))
    return run_program(program, module, sample, OneDevice(draws=draws))  # type: ignore[arg-type]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODULES)
def test_any_layout_draws_the_same(name: str) -> None:
    torch.manual_seed(0)
    module, sample = MODULES[name](), (torch.randn(5, 6 if name == "dropout" else 7, dtype=D),)
    captured_graph, draws = capture(module, sample), Draws(seed=3, step=8)
    (output,), gradients, _ = run_on_one_device(module, sample, draws)
    for case in range(20):
        draw = random.Random(case)
        degrees = draw.choice(MESHES)
        program = program_of(captured_graph, random_assignment(captured_graph, degrees, draw))

        def run_rank(mesh: ThreadMesh, program: Any = program) -> list[str]:
            mesh.draws.seed, mesh.draws.step = draws.seed, draws.step
            (actual,), parts, _ = run_program(program, module, sample, mesh)
            assert torch.allclose(actual, output, rtol=1e-10, atol=1e-10)
            return unlike_parts(program, parts, gradients, mesh, lambda _, a, b: torch.allclose(a, b, 1e-10, 1e-10))

        assert not any(on_threads(degrees, run_rank))


@pytest.mark.slow
def test_only_seed_and_step_change_the_numbers() -> None:
    module, sample = MODULES["uniform"](), (torch.zeros(5, 7, dtype=D),)
    (first,), _, _ = run_on_one_device(module, sample, Draws())
    assert torch.equal(run_on_one_device(module, sample, Draws())[0][0], first)
    for draws in (Draws(seed=1), Draws(step=1)):
        assert not torch.isclose(run_on_one_device(module, sample, draws)[0][0], first).any()


def test_uniform_numbers_are_distributed_as_in_torch() -> None:
    def draw_numbers(x: Tensor) -> tuple[Tensor, ...]:
        dropout = F.dropout(torch.ones(300, 100), 0.25)
        return torch.rand(300, 100), torch.rand(300, 100, dtype=torch.bfloat16), dropout, x.bernoulli(0.9)

    numbers, coarse, dropout, coins = run_on_one_device(Function(draw_numbers), (torch.zeros(300, 100),), Draws())[0]
    for sample in (numbers, coarse.float()):
        assert 0 <= sample.min() < 0.01
        assert 0.99 < sample.max() < 1
        assert sample.mean() == pytest.approx(0.5, abs=0.01)
        assert sample.var() == pytest.approx(1 / 12, abs=0.003)
    assert dropout.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert dropout.mean() == pytest.approx(1, abs=0.02)
    assert coins.mean() == pytest.approx(0.9, abs=0.01)
    rows = torch.corrcoef(torch.stack([numbers.flatten(), coarse.float().flatten(), dropout.flatten()]))
    assert (rows - torch.eye(3)).abs().max() < 0.03, "each operator has its own stream"


@pytest.mark.sample(2)
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
def test_other_numbers_are_distributed_as_in_torch(draw: Callable[[Tensor], Tensor], distribution: Any) -> None:
    """By the Kolmogorov-Smirnov statistic, or the largest error of a frequency for whole numbers."""
    (numbers,) = run_on_one_device(
        Function(lambda x: draw(torch.empty_like(x))), (torch.zeros(300, 100, dtype=D),), Draws()
    )[0]
    assert numbers.isfinite().all()
    if hasattr(distribution, "pmf"):
        numbers, counts = numbers.unique(return_counts=True)
        assert float((counts / 30_000 - torch.tensor(distribution.pmf(numbers.numpy()))).abs().max()) < 0.01
    else:
        assert stats.kstest(numbers.flatten().numpy(), distribution.cdf).statistic < 0.01


@pytest.mark.parametrize("draw", [0.0, 2.0**-53, 1 - 2.0**-53])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_smallest_and_largest_draws_give_finite_numbers(name: str, draw: float) -> None:
    parameters: list[Any] = {"integer": [2, 5], "geometric": [0.5]}.get(name, [])
    dtypes = (torch.float16, torch.float32, D) if name == "exponential" else (D,)
    for dtype in dtypes:
        number = values(name, torch.tensor(draw, dtype=D), parameters, dtype)
        assert number.isfinite()
        assert name != "exponential" or number.log().isfinite()
        assert name != "integer" or 2 <= number < 5


def test_dropout_has_no_effect_in_evaluation() -> None:
    module, sample = DropoutModule().eval(), (torch.randn(5, 6, dtype=D),)
    assert torch.allclose(run_on_one_device(module, sample, Draws())[0][0], module(*sample))


@pytest.mark.sample(1)
@pytest.mark.parametrize("function", [
    lambda x: torch.randn(3, dtype=torch.complex64).real,  # complex
    lambda x: torch.randperm(5),  # permutation
    lambda x: torch.multinomial(x, 1),  # multinomial
], ids=["complex", "permutation", "multinomial"])  # fmt: skip
def test_other_distributions_are_refused(function: Any, request: pytest.FixtureRequest) -> None:
    node = operators(capture(Function(function), (torch.ones(2, 4),)))[0]
    with expect_problem("unsupported", lines_of(__file__)(request.node.callspec.id)):
        rule_of(node)
