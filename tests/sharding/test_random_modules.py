"""Random modules under random assignments on random meshes compute what one device computes."""

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from moe.sharding.capture.capture import CapturedGraph, capture
from moe.sharding.propagation.assignment import Assignment
from tests.sharding.partitioned import MESHES, on_one_device, program_of, random_assignment, run_program, unlike_parts
from tests.sharding.random_modules import STEPS, Recipe
from tests.sharding.thread_mesh import ThreadMesh, on_threads

aten = torch.ops.aten

RECIPES = st.builds(
    Recipe,
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 2**16)), min_size=1, max_size=7).map(tuple),
)  # fmt: skip


_ON_ABSOLUTE_VALUES = {
    aten.sub.Tensor: aten.add.Tensor,
    aten.neg.default: aten.abs.default,
    aten.cos.default: torch.ones_like,
    aten.view.default: aten.reshape.default,
}


class Magnitudes(fx.Interpreter):
    """The same program on absolute values: the scale of rounding errors."""

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        return torch.utils._pytree.tree_map(_absolute, made) if n.op != "output" else made

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(_ON_ABSOLUTE_VALUES.get(target, target), args, kwargs)


def _absolute(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value


def magnitudes(captured: CapturedGraph, module: torch.nn.Module, sample: tuple[Tensor, ...]) -> list[float]:
    """The largest value of each output, then of each gradient, of the program on absolute values."""
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    values = []
    for node in captured.graph.graph.find_nodes(op="placeholder"):
        leaf = captured.leaves[node]
        match leaf.kind:
            case "input":
                values.append(sample[int(leaf.name.split(".")[1])])
            case "tangent":
                values.append(torch.ones(leaf.shape, dtype=leaf.dtype))
            case _:
                values.append(named[leaf.name].detach())
    made = Magnitudes(captured.graph).run(*values, enable_io_processing=False)
    return [max(1.0, float(each.max())) if isinstance(each, Tensor) else 1.0 for each in made]


def wrong_results(
    captured: CapturedGraph, module: torch.nn.Module, sample: tuple[Tensor, ...], assignment: Assignment
) -> list[str]:
    """What differs from one device by more than 1e-10 of the program on absolute values."""
    expected, program = on_one_device(module, sample), program_of(captured, assignment)
    sizes = magnitudes(captured, module, sample)
    of_outputs, of_gradients = sizes[: len(expected.outputs)], sizes[-len(program.gradients) :]
    of_gradient = dict(zip(captured.gradients, of_gradients, strict=True))

    def close(name: str, part: Tensor, whole: Tensor) -> bool:
        return not part.numel() or bool((part - whole).abs().max() <= 1e-10 * of_gradient[name])

    def one(mesh: ThreadMesh) -> list[str]:
        outputs, gradients, _ = run_program(program, module, sample, mesh)
        wrong = [
            f"output {number}: {output} for {whole}"
            for number, (output, whole, size) in enumerate(zip(outputs, expected.outputs, of_outputs, strict=True))
            if output.shape != whole.shape or not (output - whole).abs().max() <= 1e-10 * size
        ]
        return wrong + unlike_parts(program, gradients, expected.gradients, mesh, close)

    return [each for wrong in on_threads(assignment.degrees, one) for each in wrong]


def check(recipe: Recipe, degrees: tuple[int, ...], seed: int) -> None:
    module, sample = recipe.module(), recipe.sample()
    captured = capture(module, sample)
    draw = random.Random(seed)
    prefer = draw.choice([None, lambda option: option.factor is not None, lambda option: option.exchange is not None])
    assignment = random_assignment(captured, degrees, draw, prefer)
    wrong = wrong_results(captured, module, sample, assignment)
    assert not wrong, wrong[:2]


EXAMPLES = {"recipe": RECIPES, "degrees": st.sampled_from(MESHES), "seed": st.integers(0, 2**16)}
SETTINGS = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@pytest.mark.slow
@given(**EXAMPLES)
@settings(max_examples=100, **SETTINGS)
def test_random_modules(recipe: Recipe, degrees: tuple[int, ...], seed: int) -> None:
    check(recipe, degrees, seed)


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_thousands_of_random_modules() -> None:
    settings(max_examples=2000, **SETTINGS)(given(**EXAMPLES)(check))()
