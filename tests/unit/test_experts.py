"""Experts of every kind, by every backend, against one expert after another: outputs, every gradient, the corners."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
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
ACTIVATIONS = {**activations.ACTIVATIONS, "swiglu_clamped": build_activation("swiglu_clamped", (1.5, 1.0))}
"""With a limit that much lies beyond, and some at."""
GATED = [name for name, each in ACTIVATIONS.items() if each.gated]


def kind_of(activation: str, bias: bool) -> dict[str, tuple[int, ...]]:
    """Shapes by name, of four experts."""
    shapes = {"w_in": (4, M, H), "w_out": (4, H, M)}
    if bias:
        shapes |= {"b_in": (4, H), "b_out": (4, M)}
    if activation in GATED:
        shapes["w_gate"] = (4, M, H)
        if bias:
            shapes["b_gate"] = (4, H)
    return shapes


def tensors(shapes: dict[str, tuple[int, ...]], num_rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {  # such that what stands before an activation is exact in bfloat16 too: ReLU's kink is where it is
        name: (torch.randint(-4, 5, shape, generator=generator) / 4).to(dtype)
        for name, shape in {"x": (num_rows, M), "scale": (num_rows,), **shapes}.items()
    }


def run(given: dict[str, torch.Tensor], dtype: torch.dtype, gradient: torch.Tensor, compute) -> dict:
    """The output and the gradient of everything given, in float64."""
    leaves = {name: tensor.detach().clone().to(dtype).requires_grad_() for name, tensor in given.items()}
    weights = {name: leaf for name, leaf in leaves.items() if name not in ("x", "scale")}
    y = compute(leaves["x"], leaves["scale"], ExpertWeights(**weights))
    assert y.dtype == dtype
    y.backward(gradient.to(dtype))
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"{name}: an expert without tokens has a gradient of zeros"
    return {"y": y.detach().double(), **{name: leaf.grad.double() for name, leaf in leaves.items()}}


def assert_close(ours: dict, theirs: dict, tolerance: float, backend: str) -> None:
    for name, expected in theirs.items():
        size = 1 + (expected.abs().max() if expected.numel() else 0)
        torch.testing.assert_close(ours[name] / size, expected / size, rtol=0, atol=tolerance, msg=f"{backend}: {name}")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("counts", LOADS.values(), ids=LOADS)
def test_every_backend_equals_the_reference(counts: list[int], activation: str, bias: bool, dtype: torch.dtype) -> None:
    given = tensors(kind_of(activation, bias), sum(counts), dtype)
    gradient = torch.randn(sum(counts), M, generator=torch.Generator().manual_seed(1)).to(dtype)
    theirs = run(
        given, torch.float64, gradient,
        lambda x, s, w: feed_forward_reference(x, s, w, counts, ACTIVATIONS[activation]),
    )  # fmt: skip
    taking = [name for name, products in BACKENDS.items() if products.supports(dtype, "cpu", (M, H))]
    lacking = {"widened"} if multiplies(dtype, torch.device("cpu")) else set()
    assert set(BACKENDS) - set(taking) == (lacking if dtype == torch.float32 else {"grouped_mm", *lacking})
    for name in {*taking, "widened"}:  # right on any CPU, though only some are the faster for it
        work = LocalComputation(counts, ACTIVATIONS[activation], BACKENDS[name])
        ours = run(given, dtype, gradient, partial(feed_forward, computation=work))
        assert_close(ours, theirs, TOLERANCES[dtype], name)
        again = run(given, dtype, gradient, partial(feed_forward, computation=replace(work, recompute=True)))
        assert all(torch.equal(again[tensor], ours[tensor]) for tensor in ours), "multiplied once more, the same"


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("backend", ["segments", "batched"])
def test_gradients_against_finite_differences(backend: str, activation: str) -> None:
    given = tensors(kind_of(activation, True), 5, torch.float64)
    names = [name for name in given if name not in ("x", "scale")]

    def of(*values: torch.Tensor) -> torch.Tensor:
        weights = ExpertWeights(**dict(zip(names, values[2:], strict=True)))
        return feed_forward(
            *values[:2], weights, LocalComputation([2, 0, 3, 0], ACTIVATIONS[activation], BACKENDS[backend])
        )

    shifted = (tensor + torch.rand_like(tensor) / 8 for tensor in given.values())  # away from ReLU's kink
    assert torch.autograd.gradcheck(of, tuple(tensor.requires_grad_() for tensor in shifted))


def test_clamped_swiglu_is_that_of_gpt_oss() -> None:
    """Their own function of their own layout, at the limits too."""
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=M, intermediate_size=H, num_local_experts=2)
    theirs = GptOssExperts(config)
    assert (theirs.alpha, theirs.limit) == (1.702, 7.0)
    ours = activations.ACTIVATIONS["swiglu_clamped"]
    for scale in (1.0, 8.0):
        up, gate = (torch.randn(64, H, dtype=torch.float64) * scale for _ in range(2))
        up[0, :3], gate[0, :3] = torch.tensor([7.0, -7.0, 8.0]), torch.tensor([7.0, -7.0, 8.0])
        packed = torch.stack((gate, up), -1).flatten(-2).requires_grad_()
        expected = theirs._apply_gate(packed)
        d_hidden = torch.randn_like(expected)
        expected.backward(d_hidden)
        d_gate, d_up = packed.grad[:, ::2], packed.grad[:, 1::2]
        hidden, activated = ours.recompute(up, gate)
        torch.testing.assert_close(hidden, expected.detach())
        torch.testing.assert_close(ours.forward(up, gate), expected.detach())
        torch.testing.assert_close(ours.plain(up, gate), expected.detach())
        found = ours.backward(d_hidden.clone(), up, gate, activated)
        torch.testing.assert_close(found, (d_up, d_gate))


@pytest.mark.parametrize("backend", BACKENDS)
def test_input_and_gradient_need_not_be_contiguous(backend: str) -> None:
    counts = [3, 3, 3, 3]
    given = tensors(kind_of("swiglu", False), 12, torch.float32)
    scale, weights = given["scale"], ExpertWeights(given["w_in"], given["w_out"], given["w_gate"])
    strided = torch.randn(12, 2 * M)[:, ::2].requires_grad_()
    y = feed_forward(strided, scale, weights, LocalComputation(counts, ACTIVATIONS["swiglu"], BACKENDS[backend]))
    torch.testing.assert_close(y, feed_forward_reference(strided, scale, weights, counts, ACTIVATIONS["swiglu"]))
    y.sum().backward()  # its gradient has stride 0
    other = strided.detach().clone().requires_grad_()
    feed_forward_reference(other, scale, weights, counts, ACTIVATIONS["swiglu"]).sum().backward()
    torch.testing.assert_close(strided.grad, other.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_may_run_twice(backend: str) -> None:
    """Hidden states are made again from what was kept, which stays as it is."""
    given = tensors(kind_of("relu", False), 12, torch.float32)
    x = given["x"].requires_grad_()
    weights = ExpertWeights(given["w_in"], given["w_out"])
    y = feed_forward(x, given["scale"], weights, LocalComputation([3, 4, 0, 5], ACTIVATIONS["relu"], BACKENDS[backend]))
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second)


def test_grouped_mm_takes_rows_that_begin_at_multiples_of_16_bytes() -> None:
    grouped = BACKENDS["grouped_mm"]
    assert grouped.supports(torch.float32, "cpu", (4, 8))
    assert not grouped.supports(torch.float32, "cpu", (6, 8))
    assert grouped.supports(torch.bfloat16, "cuda", (8, 8))
    assert not grouped.supports(torch.bfloat16, "cuda", (4, 8))
    assert not grouped.supports(torch.float32, "cuda", (8, 8))


class Products(TorchDispatchMode):
    """Notes the sizes of every matrix product: rows, inner dimension, columns."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, int, int]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm):
            a, b = given[-2:]
            self.sizes.add((*a.shape, b.shape[1]))
        return function(*given, **(named or {}))


def random_loads(num_loads: int) -> list[list[int]]:
    """Rows of four experts, some without any, some with a few, some with hundreds."""
    generator = torch.Generator().manual_seed(0)

    def some(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    return [[some(2) * some((8, 40, 280, 800)[some(4)]) for _ in range(4)] for _ in range(num_loads)]


ONEDNN = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether this CPU's products in bfloat16 are oneDNN's: AVX2 alone does not do."""


@pytest.mark.skipif(not ONEDNN, reason="no oneDNN kernels for bfloat16 on this CPU")
def test_bfloat16_rows_are_multiplied_in_few_numbers_on_a_cpu() -> None:
    """oneDNN makes a kernel for each number of rows, which costs more than to multiply a few more of them."""
    loads = random_loads(60)
    given = tensors(kind_of("swiglu", False), 0, torch.bfloat16)
    weights = ExpertWeights(*(given[name].requires_grad_() for name in ("w_in", "w_out", "w_gate")))
    with Products() as products:
        for counts in loads:
            x = torch.randn(sum(counts), M, dtype=torch.bfloat16, requires_grad=True)
            work = LocalComputation(counts, ACTIVATIONS["swiglu"], BACKENDS["segments"])
            feed_forward(x, torch.ones(sum(counts)), weights, work).sum().backward()
    numbers = {next(iter({*size} - {M, H}), H) for size in products.sizes}
    assert numbers <= {*range(16, 256, 16), *range(256, 512, 32), *range(512, 1025, 64)}
    assert len({count for counts in loads for count in counts}) > 2 * len(numbers)


@pytest.mark.parametrize("adds", [False, True], ids=["", "to what is there"])
def test_bfloat16_products_of_any_loads_are_those_of_each_expert(adds: bool) -> None:
    """The rows that a product takes along are multiplied by their own expert's matrix in the end."""
    segments, generator = BACKENDS["segments"], torch.Generator().manual_seed(1)

    def whole(*shape: int) -> torch.Tensor:
        """Such that sums are exact in bfloat16 up to 256 of them."""
        return torch.randint(-1, 2, shape, generator=generator).bfloat16()

    for counts in [*random_loads(40), [1], [17], [48], [513], [1100], [530, 1], [1, 530], [16, 16], [0, 33, 0]]:
        x, d_y, w = whole(sum(counts), M), whole(sum(counts), H), whole(len(counts), M, H)
        per_expert = [*zip(x.split(counts), d_y.split(counts), w, strict=True)]
        assert torch.equal(segments.forward(x, w, counts), torch.cat([xs @ ws for xs, _, ws in per_expert]))

        onto = whole(sum(counts), M) if adds else None
        expected = torch.cat([ds @ ws.T for _, ds, ws in per_expert]) + (0 if onto is None else onto)
        assert torch.equal(segments.input_gradient(d_y, w, counts, onto), expected)

        into = torch.randint(-9, 9, w.shape, generator=generator).float()
        expected = torch.stack([xs.float().T @ ds.float() for xs, ds, _ in per_expert]) + adds * into
        found = segments.weight_gradient(x, d_y, counts, into, adds=adds)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0.5)


class Copies(TorchDispatchMode):
    """Notes how many rows copies have."""

    def __init__(self) -> None:
        super().__init__()
        self.max_rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        made = function(*given, **(named or {}))
        if function.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.clone):
            self.max_rows = max(self.max_rows, made.shape[0])
        return made


@pytest.mark.parametrize("counts", [[100_001], [70_000, 3000], [1697], [20_000, 12, 9000]], ids=str)
def test_few_rows_are_copied_however_many_an_expert_has(counts: list[int]) -> None:
    segments, x, w = (
        BACKENDS["segments"],
        torch.ones(sum(counts), 2).bfloat16(),
        torch.ones(len(counts), 2, 2).bfloat16(),
    )
    with Copies() as copies:
        y = segments.forward(x, w, counts)
        onto = segments.input_gradient(x, w, counts, torch.ones_like(x))
        segments.weight_gradient(x, y, counts)
    assert bool((y == 2).all())
    assert bool((onto == 3).all())
    assert copies.max_rows <= 512
    assert copies.max_rows > 0 or not ONEDNN


def test_what_other_experts_rows_hold_changes_no_experts_weights() -> None:
    counts, segments = [3, 20, 0, 40], BACKENDS["segments"]
    x, d_y = torch.ones(63, M).bfloat16(), torch.ones(63, H).bfloat16()
    x[3:23], d_y[3:23] = float("inf"), float("nan")
    d_w = segments.weight_gradient(x, d_y, counts)
    assert torch.equal(d_w[[0, 2, 3]], torch.tensor([3.0, 0, 40])[:, None, None].expand(3, M, H).bfloat16())
    assert d_w[1].isnan().all()
    y = segments.forward(x, torch.ones(4, M, H).bfloat16(), counts)
    assert torch.equal(y.isfinite().all(1), x.isfinite().all(1))


def test_without_onednn_no_row_is_taken_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no kernels to spare, only rows to pay for."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    w_in = torch.ones(2, M, H, dtype=torch.bfloat16)
    assert Shape.from_weight(w_in).row_multiple == 1
    with Products() as products:
        BACKENDS["segments"].forward(torch.ones(20, M).bfloat16(), w_in, [3, 17])
    assert products.sizes == {(3, M, H), (17, M, H)}


def test_batched_products_fill_up_many_rows_to_a_multiple_of_eight() -> None:
    padded = BACKENDS["batched"].padded
    assert padded([3, 0, 5]) == [5, 5, 5], "few rows are not worth it"
    assert padded([533, 512, 1]) == [536, 536, 536]
    assert padded([536, 0]) == [536, 536]
    assert padded([]) == []


def test_a_layer_is_the_same_whether_its_experts_fill_up_rows_or_not() -> None:
    spec = MoESpec(num_experts=2, model_dim=M, hidden_dim=H, group_tokens=301, router="switch_top1")
    torch.manual_seed(1)
    layer, x = MoELayer(spec), torch.randn(301, M, requires_grad=True)
    counts = layer(x)[1].load.tolist()
    assert max(counts) >= 128
    assert max(counts) % 8
    found = []
    for backend in BACKENDS:
        layer.experts.costs = {backend: Cost(0.0, 1.0)}
        assert (layer.experts.local_computation(counts).counts != counts) == (backend == "batched")
        y = layer(x)[0]
        found.append((y.detach(), *torch.autograd.grad(y.sum(), (x, *layer.parameters()))))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
