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
        result = super().run_node(n)
        return torch.utils._pytree.tree_map(_absolute, result) if n.op != "output" else result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(_ON_ABSOLUTE_VALUES.get(target, target), args, kwargs)


def _absolute(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value


def magnitudes(captured_graph: CapturedGraph, module: torch.nn.Module, sample: tuple[Tensor, ...]) -> list[float]:
    """The largest value of each output, then of each gradient, of the program on absolute values."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    values = []
    for node in captured_graph.graph.graph.find_nodes(op="placeholder"):
        leaf = captured_graph.leaves[node]
        match leaf.kind:
            case "input":
                values.append(sample[int(leaf.name.split(".")[1])])
            case "tangent":
                values.append(torch.ones(leaf.shape, dtype=leaf.dtype))
            case _:
                values.append(tensors[leaf.name].detach())
    results = Magnitudes(captured_graph.graph).run(*values, enable_io_processing=False)
    return [max(1.0, float(result.max())) if isinstance(result, Tensor) else 1.0 for result in results]


def wrong_results(
    captured_graph: CapturedGraph, module: torch.nn.Module, sample: tuple[Tensor, ...], assignment: Assignment
) -> list[str]:
    """Differences from one device by more than 1e-10 of the program on absolute values."""
    expected, program = on_one_device(module, sample), program_of(captured_graph, assignment)
    sizes = magnitudes(captured_graph, module, sample)
    output_sizes, gradient_sizes = sizes[: len(expected.outputs)], sizes[-len(program.gradients) :]
    size_of_gradient = dict(zip(captured_graph.gradients, gradient_sizes, strict=True))

    def close(name: str, part: Tensor, reference: Tensor) -> bool:
        return not part.numel() or bool((part - reference).abs().max() <= 1e-10 * size_of_gradient[name])

    def run_rank(mesh: ThreadMesh) -> list[str]:
        outputs, gradients, _ = run_program(program, module, sample, mesh)
        wrong = [
            f"output {number}: {output} for {reference_output}"
            for number, (output, reference_output, size) in enumerate(
                zip(outputs, expected.outputs, output_sizes, strict=True)
            )
            if output.shape != reference_output.shape or not (output - reference_output).abs().max() <= 1e-10 * size
        ]
        return wrong + unlike_parts(program, gradients, expected.gradients, mesh, close)

    return [message for wrong in on_threads(assignment.degrees, run_rank) for message in wrong]


def check(recipe: Recipe, degrees: tuple[int, ...], seed: int) -> None:
    module, sample = recipe.module(), recipe.sample()
    captured_graph = capture(module, sample)
    draw = random.Random(seed)
    prefer = draw.choice([None, lambda option: option.factor is not None, lambda option: option.exchange is not None])
    assignment = random_assignment(captured_graph, degrees, draw, prefer)
    wrong = wrong_results(captured_graph, module, sample, assignment)
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
