"""Experts of every kind and backend against one expert after another: outputs, every gradient, corner cases."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe.experts import (
    BACKENDS,
    ExpertWeights,
    LocalComputation,
    build_activation,
    feed_forward,
    feed_forward_reference,
)
from moe.experts import activation as activations
from moe.experts.experts import Cost
from moe.experts.measurement import Shape
from moe.layers import MoELayer
from moe.parallel.accelerator import multiplies
from moe.spec import MoESpec

LOADS = {
    "even": [3, 3, 3, 3],
    "an expert without tokens": [5, 0, 6, 1],
    "all to one": [0, 0, 12, 0],
    "one token": [0, 1, 0, 0],
    "no tokens": [0, 0, 0, 0],
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}
M, H = 8, 16
NARROW = set() if multiplies(torch.bfloat16, torch.device("cpu")) else {"widened"}
"""Backends that bfloat16 has beside the others on this CPU."""
ONEDNN = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether this CPU's products in bfloat16 are oneDNN's: AVX2 alone does not do."""
ACTIVATIONS = {**activations.ACTIVATIONS, "swiglu_clamped": build_activation("swiglu_clamped", (1.5, 1.0))}
"""With a limit that many values exceed, and some equal."""
GATED = [name for name, activation in ACTIVATIONS.items() if activation.is_gated]


def computation(counts: list[int], activation: str, backend: str) -> LocalComputation:
    return LocalComputation(counts, ACTIVATIONS[activation], BACKENDS[backend])


def tensors(activation: str, bias: bool, num_rows: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs and weights of four experts: inputs of activations are exact in bfloat16, and away from kinks."""
    inner = ("in", "gate") if activation in GATED else ("in",)
    shapes = {"x": (num_rows, M), "scale": (num_rows,), "w_in": (4, M, H), "w_out": (4, H, M)}
    shapes |= {f"w_{name}": (4, M, H) for name in inner}
    if bias:
        shapes |= {"b_in": (4, H), "b_out": (4, M)} | {f"b_{name}": (4, H) for name in inner}
    generator = torch.Generator().manual_seed(0)
    return {name: (torch.randint(-4, 5, shape, generator=generator) / 4).to(dtype) for name, shape in shapes.items()}


def run(
    inputs: dict[str, Tensor], dtype: torch.dtype, d_y: Tensor, compute: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """The output and the gradient of every input, in float64."""
    leaves = {name: tensor.detach().clone().to(dtype).requires_grad_() for name, tensor in inputs.items()}
    weights = {name: leaf for name, leaf in leaves.items() if name not in ("x", "scale")}
    y = compute(leaves["x"], leaves["scale"], ExpertWeights(**weights))
    assert y.dtype == dtype
    y.backward(d_y.to(dtype))
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"{name}: an expert without tokens has a gradient of zeros"
    return {"y": y.detach().double(), **{name: leaf.grad.double() for name, leaf in leaves.items()}}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS)
def test_every_backend_equals_the_reference(counts: list[int], activation: str, bias: bool, dtype: torch.dtype) -> None:
    inputs = tensors(activation, bias, sum(counts), dtype)
    d_y = torch.randn(sum(counts), M, generator=torch.Generator().manual_seed(1)).to(dtype)
    reference = partial(feed_forward_reference, counts=counts, activation=ACTIVATIONS[activation])
    expected = run(inputs, torch.float64, d_y, reference)
    supporting = {name for name, products in BACKENDS.items() if products.supports(dtype, "cpu", (M, H))}
    lacking = {"widened"} if multiplies(dtype, torch.device("cpu")) else set()
    assert set(BACKENDS) - supporting == (lacking if dtype == torch.float32 else {"grouped_mm", *lacking})
    for backend in {*supporting, "widened"}:  # correct on any CPU, though faster only on some
        work = computation(counts, activation, backend)
        actual = run(inputs, dtype, d_y, partial(feed_forward, computation=work))
        for name, tensor in expected.items():
            size = 1 + (tensor.abs().max() if tensor.numel() else 0)
            error, tolerance = (actual[name] - tensor).abs() / size, TOLERANCES[dtype]
            assert (error <= tolerance).all(), (backend, name)
        repeat = run(inputs, dtype, d_y, partial(feed_forward, computation=replace(work, recompute=True)))
        assert all(torch.equal(repeat[name], actual[name]) for name in actual), "recomputation changes nothing"


def test_clamped_swiglu_is_that_of_gpt_oss() -> None:
    """Compared with its own function on its memory layout, also at the limits."""
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    torch.manual_seed(0)
    reference = GptOssExperts(GptOssConfig(hidden_size=M, intermediate_size=H, num_local_experts=2))
    assert (reference.alpha, reference.limit) == (1.702, 7.0)
    activation = activations.ACTIVATIONS["swiglu_clamped"]
    for scale in (1.0, 8.0):
        up, gate = (torch.randn(64, H, dtype=torch.float64) * scale for _ in range(2))
        up[0, :3] = gate[0, :3] = torch.tensor([7.0, -7.0, 8.0])
        gate_and_up = torch.stack((gate, up), -1).flatten(-2).requires_grad_()
        expected = reference._apply_gate(gate_and_up)
        d_hidden = torch.randn_like(expected)
        expected.backward(d_hidden)
        hidden_states, activated_gate = activation.recompute(up, gate)
        for output in (hidden_states, activation.forward(up, gate), activation.differentiable_forward(up, gate)):
            torch.testing.assert_close(output, expected.detach())
        gradients = activation.backward(d_hidden.clone(), up, gate, activated_gate)
        torch.testing.assert_close(gradients, (gate_and_up.grad[:, 1::2], gate_and_up.grad[:, ::2]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_may_be_strided_and_backward_may_run_twice(backend: str) -> None:
    counts, inputs = [3, 4, 0, 5], tensors("swiglu", False, 12, torch.float32)
    scale, weights = inputs["scale"], ExpertWeights(inputs["w_in"], inputs["w_out"], inputs["w_gate"])
    x = torch.randn(12, 2 * M)[:, ::2].requires_grad_()
    y = feed_forward(x, scale, weights, computation(counts, "swiglu", backend))
    expected = feed_forward_reference(x, scale, weights, counts, ACTIVATIONS["swiglu"])
    torch.testing.assert_close(y, expected)
    # The gradient of a sum has stride 0.
    first, second, of_expected = (
        torch.autograd.grad(output.sum(), x, retain_graph=True)[0] for output in (y, y, expected)
    )
    assert torch.equal(first, second)
    torch.testing.assert_close(first, of_expected)


@pytest.mark.parametrize(
    ("dtype", "device", "shape", "is_supported"),
    [
        (torch.float32, "cpu", (4, 8), True), (torch.float32, "cpu", (6, 8), False),
        (torch.bfloat16, "cuda", (8, 8), True), (torch.bfloat16, "cuda", (4, 8), False),
        (torch.float32, "cuda", (8, 8), False),
    ],
)  # fmt: skip
def test_grouped_mm_needs_rows_of_multiples_of_16_bytes(
    dtype: torch.dtype, device: str, shape: tuple[int, int], is_supported: bool
) -> None:
    assert BACKENDS["grouped_mm"].supports(dtype, device, shape) == is_supported


class Products(TorchDispatchMode):
    """Records the sizes of all matrix products (rows, inner dimension, columns), and the largest number of rows
    copied."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, int, int]] = set()
        self.max_copied_rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm):
            a, b = args[-2:]
            self.sizes.add((*a.shape, b.shape[1]))
        if function.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.clone):
            self.max_copied_rows = max(self.max_copied_rows, result.shape[0])
        return result


def random_loads(num_loads: int) -> list[list[int]]:
    """Rows of four experts: none, a few, or hundreds."""
    generator = torch.Generator().manual_seed(0)

    def random_number(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    return [
        [random_number(2) * random_number((8, 40, 280, 800)[random_number(4)]) for _ in range(4)]
        for _ in range(num_loads)
    ]


@pytest.mark.skipif(not ONEDNN, reason="no oneDNN kernels for bfloat16 on this CPU")
def test_bfloat16_products_have_few_numbers_of_rows_on_a_cpu() -> None:
    """oneDNN builds a kernel for each number of rows, which costs more than a few additional rows."""
    loads, inputs = random_loads(60), tensors("swiglu", False, 0, torch.bfloat16)
    weights = ExpertWeights(*(inputs[name].requires_grad_() for name in ("w_in", "w_out", "w_gate")))
    with Products() as products:
        for counts in loads:
            x = torch.randn(sum(counts), M, dtype=torch.bfloat16, requires_grad=True)
            work = computation(counts, "swiglu", "segments")
            feed_forward(x, torch.ones(sum(counts)), weights, work).sum().backward()
    numbers = {next(iter({*size} - {M, H}), H) for size in products.sizes}
    assert numbers <= {*range(16, 256, 16), *range(256, 512, 32), *range(512, 1025, 64)}
    assert len({count for counts in loads for count in counts}) > 2 * len(numbers)


@pytest.mark.parametrize("adds", [False, True], ids=["", "to existing values"])
def test_bfloat16_products_of_any_loads_are_those_of_each_expert(adds: bool) -> None:
    """Rows added to a product still count towards their own expert in the end."""
    segments, generator = BACKENDS["segments"], torch.Generator().manual_seed(1)

    def integers(*shape: int) -> Tensor:
        """Values whose sums are exact in bfloat16, up to 256 of them."""
        return torch.randint(-1, 2, shape, generator=generator).bfloat16()

    for counts in [*random_loads(40), [1], [17], [48], [513], [1100], [530, 1], [1, 530], [16, 16], [0, 33, 0]]:
        x, d_y, w = integers(sum(counts), M), integers(sum(counts), H), integers(len(counts), M, H)
        per_expert = [*zip(x.split(counts), d_y.split(counts), w, strict=True)]
        assert torch.equal(segments.forward(x, w, counts), torch.cat([xs @ ws for xs, _, ws in per_expert]))

        onto = integers(sum(counts), M) if adds else None
        expected = torch.cat([ds @ ws.T for _, ds, ws in per_expert]) + (0 if onto is None else onto)
        assert torch.equal(segments.input_gradient(d_y, w, counts, onto), expected)

        previous = torch.randint(-9, 9, w.shape, generator=generator).float()
        expected = torch.stack([xs.float().T @ ds.float() for xs, ds, _ in per_expert]) + adds * previous
        gradient = segments.weight_gradient(x, d_y, counts, previous, adds=adds)
        torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=0.5)


@pytest.mark.parametrize("counts", [[100_001], [70_000, 3000], [1697], [20_000, 12, 9000]], ids=str)
def test_few_rows_are_copied_however_many_an_expert_has(counts: list[int]) -> None:
    segments = BACKENDS["segments"]
    x, w = torch.ones(sum(counts), 2).bfloat16(), torch.ones(len(counts), 2, 2).bfloat16()
    with Products() as products:
        y = segments.forward(x, w, counts)
        onto = segments.input_gradient(x, w, counts, torch.ones_like(x))
        segments.weight_gradient(x, y, counts)
    assert bool((y == 2).all())
    assert bool((onto == 3).all())
    assert products.max_copied_rows <= 512
    assert products.max_copied_rows > 0 or not ONEDNN


def test_rows_of_other_experts_change_no_expert_s_weights() -> None:
    counts, segments = [3, 20, 0, 40], BACKENDS["segments"]
    x, d_y = torch.ones(63, M).bfloat16(), torch.ones(63, H).bfloat16()
    x[3:23], d_y[3:23] = float("inf"), float("nan")
    d_w = segments.weight_gradient(x, d_y, counts)
    assert torch.equal(d_w[[0, 2, 3]], torch.tensor([3.0, 0, 40])[:, None, None].expand(3, M, H).bfloat16())
    assert d_w[1].isnan().all()
    y = segments.forward(x, torch.ones(4, M, H).bfloat16(), counts)
    assert torch.equal(y.isfinite().all(1), x.isfinite().all(1))


def test_without_onednn_no_other_rows_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no kernels to save, so additional rows would only cost time."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    w_in = torch.ones(2, M, H, dtype=torch.bfloat16)
    assert Shape.from_weight(w_in).row_multiple == 1
    with Products() as products:
        BACKENDS["segments"].forward(torch.ones(20, M).bfloat16(), w_in, [3, 17])
    assert products.sizes == {(3, M, H), (17, M, H)}


def test_batched_products_pad_many_rows_to_a_multiple_of_eight_and_change_no_layer() -> None:
    pad_counts = BACKENDS["batched"].pad_counts
    assert pad_counts([3, 0, 5]) == [5, 5, 5], "few rows are not worth it"
    assert pad_counts([533, 512, 1]) == [536, 536, 536]
    assert pad_counts([536, 0]) == [536, 536]
    assert pad_counts([]) == []
    torch.manual_seed(1)
    layer = MoELayer(MoESpec(num_experts=2, model_dim=M, hidden_dim=H, group_tokens=301, router="switch_top1"))
    x = torch.randn(301, M, requires_grad=True)
    counts = layer(x)[1].load.tolist()
    assert max(counts) >= 128
    assert max(counts) % 8
    results = []
    for backend in BACKENDS:
        layer.experts.costs = {backend: Cost(0.0, 1.0)}
        assert (layer.experts.local_computation(counts).counts != counts) == (backend == "batched")
        y = layer(x)[0]
        results.append((y.detach(), *torch.autograd.grad(y.sum(), (x, *layer.parameters()))))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
