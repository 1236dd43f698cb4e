"""Results on a GPU compared with those on a CPU: equal keyed draws, equal routing, close numbers."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe.calibrate.rates import measure
from moe.dispatch import AllToAllDispatcher, EinsumDispatcher, HierarchicalDispatcher, LocalDispatcher
from moe.dispatch.row_exchange import AllToAll
from moe.experts import BACKENDS, ExpertWeights, LocalComputation, feed_forward, feed_forward_reference
from moe.experts.activation import ACTIVATIONS
from moe.layers import MoELayer, TokenContext
from moe.parallel import Layout
from moe.random import bits, fold, keep_mask
from moe.spec import MoESpec, TranslationModelSpec
from moe.spec.generation import GenerationSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.translation import build_model, translate
from moe.train.moe_layers import MoELayers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]


def spec_of() -> TranslationModelSpec:
    moe = MoESpec(num_experts=8, model_dim=64, hidden_dim=128, capacity_factor=1.0, group_tokens=96)
    return TranslationModelSpec(
        model_dim=64, num_heads=4, head_dim=16, ffn_dim=128, num_encoder_layers=2, num_decoder_layers=2,
        source_vocab_size=400, target_vocab_size=400, moe=moe,
    )  # fmt: skip


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(4, 400, (8, 14), generator=generator)
    source[2, 9:] = 0
    return source.to(device), torch.randint(4, 400, (8, 10), generator=generator).to(device)


def test_draws_are_the_same() -> None:
    ids = torch.arange(1000)
    assert torch.equal(bits(fold(1), ids.cuda()).cpu(), bits(fold(1), ids))
    assert torch.equal(keep_mask(fold(1), ids.cuda(), 64, 0.9).cpu(), keep_mask(fold(1), ids, 64, 0.9))


def test_initial_weights_are_the_same() -> None:
    cpu_model, gpu_model = build_model(spec_of()), build_model(spec_of(), Layout.single("cuda"))
    for (name, parameter), gpu_parameter in zip(cpu_model.named_parameters(), gpu_model.parameters(), strict=True):
        assert torch.equal(parameter, gpu_parameter.cpu()), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_equal_the_reference(dtype: torch.dtype, backend: str) -> None:
    products = BACKENDS[backend]
    if not products.supports(dtype, "cuda", (64, 128)):
        assert (backend, dtype) == ("grouped_mm", torch.float32) or backend == "widened"  # CPUs only
        return
    counts = [5, 0, 30, 1]
    generator = torch.Generator().manual_seed(0)
    shapes = [(36, 64), (36,), (4, 64, 128), (4, 128, 64), (4, 64, 128)]
    tensors = [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    y = feed_forward(*inputs[:2], ExpertWeights(*inputs[2:]), LocalComputation(counts, ACTIVATIONS["swiglu"], products))
    expected = feed_forward_reference(*exact[:2], ExpertWeights(*exact[2:]), counts, ACTIVATIONS["swiglu"])
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
    scale = expected.detach().abs().max()
    torch.testing.assert_close(y.double() / scale, expected / scale, **tolerance)
    y.sum().backward()
    expected.sum().backward()
    for actual, reference in zip(inputs, exact, strict=True):
        size = reference.grad.abs().max()
        torch.testing.assert_close(actual.grad.double() / size, reference.grad / size, **tolerance)


def training_step(layout: Layout, dtype: torch.dtype) -> tuple[float, list[torch.Tensor], dict[str, torch.Tensor]]:
    """(loss, chosen experts, gradients by name) of a step, as CPU tensors."""
    model = build_model(spec_of(), layout, dtype=dtype)
    with MoELayers(model, layout).routings() as routings:
        logits = model(*batch(str(layout.device)), BatchContext(step=3, seed=1))
    loss = logits.logsumexp(-1).mean() + sum(routing.aux_loss for _, routing in routings)
    loss.backward()
    gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
    return loss.item(), [routing.expert.cpu() for _, routing in routings], gradients


def test_float64_training_step_is_that_of_a_cpu() -> None:
    loss, experts, gradients = training_step(Layout.single(), torch.float64)
    loss_there, experts_there, gradients_there = training_step(Layout.single("cuda"), torch.float64)
    assert loss_there == pytest.approx(loss, rel=1e-10)
    assert all(torch.equal(a, b) for a, b in zip(experts, experts_there, strict=True))
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_there[name], gradient, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("dtype", "loss_tolerance", "least_cosine"), [(torch.float32, 1e-4, 0.999), (torch.bfloat16, 1e-2, 0.95)]
)
def test_training_step_is_close_to_that_of_a_cpu(
    dtype: torch.dtype, loss_tolerance: float, least_cosine: float
) -> None:
    """As close as rounding allows: near ties of scores may be decided differently."""
    loss, experts, gradients = training_step(Layout.single(), dtype)
    gpu_loss, gpu_experts, gpu_gradients = training_step(Layout.single("cuda"), dtype)
    assert gpu_loss == pytest.approx(loss, rel=loss_tolerance)
    for cpu_expert, gpu_expert in zip(experts, gpu_experts, strict=True):
        assert (cpu_expert == gpu_expert).double().mean() > 0.97
    for name, gradient in gradients.items():
        cosine = torch.cosine_similarity(gradient.double().flatten(), gpu_gradients[name].double().flatten(), dim=0)
        assert cosine > least_cosine, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_gradients_repeat_bit_for_bit(dtype: torch.dtype) -> None:
    gradients = []
    for _ in range(2):
        model = build_model(spec_of(), Layout.single("cuda"), dtype=dtype)
        model(*batch("cuda"), BatchContext(step=3)).float().logsumexp(-1).mean().backward()
        gradients.append([p.grad for name, p in model.named_parameters() if "experts" in name])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_sorted_rows_equal_the_einsums() -> None:
    spec = MoESpec(num_experts=8, model_dim=64, hidden_dim=128, capacity_factor=1.0, group_tokens=96)
    layer = MoELayer(spec, dtype=torch.float64).cuda()
    x = torch.randn(192, 64, dtype=torch.float64, device="cuda")
    y, _ = layer(x, TokenContext())
    layer.dispatch = EinsumDispatcher(96)
    torch.testing.assert_close(layer(x, TokenContext())[0], y)


def test_a_layer_waits_for_its_gpu_once() -> None:
    """As `tests/rehearsal` counts without a GPU: copies to the GPU also wait, except from pinned memory."""
    spec = MoESpec(num_experts=8, model_dim=64, hidden_dim=128, expert_bias=True, activation="swiglu")
    layer, x = MoELayer(spec).cuda(), torch.randn(192, 64, device="cuda", requires_grad=True)
    layer(x)[0].sum().backward()
    with warnings.catch_warnings(record=True) as records:  # the mode also warns about itself
        warnings.simplefilter("always")
        try:
            torch.cuda.set_sync_debug_mode("warn")
            layer(x)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([record for record in records if "synchronizing CUDA operation" in str(record.message)]) == 1


def test_no_rows_at_all() -> None:
    model = build_model(spec_of(), Layout.single("cuda"))
    source, target = batch("cuda")
    logits = model(source[:0], target[:0], BatchContext(rows_per_group=2))
    logits.sum().backward()
    assert logits.shape == (0, 10, 400)


def test_all_to_all_over_nccl(tmp_path: Path) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        spec = MoESpec(num_experts=8, model_dim=64, hidden_dim=128, capacity_factor=1.0, group_tokens=96)
        layer = MoELayer(spec, dtype=torch.float64).cuda()
        results = []
        over = AllToAll(dist.group.WORLD, torch.device("cuda"))
        for dispatcher in (
            LocalDispatcher(),
            AllToAllDispatcher(over),
            AllToAllDispatcher(over, num_chunks=3),
            AllToAllDispatcher(over, max_rows=40),
            HierarchicalDispatcher(over, LocalDispatcher()),
        ):
            layer.dispatch = dispatcher
            layer.zero_grad()
            x = torch.randn(192, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            x = x.cuda().requires_grad_()
            y, _ = layer(x)
            y.square().sum().backward()
            results.append([y, x.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
        assert all(torch.equal(actual, expected) for actual, expected in zip(*results[:2], strict=True))
        for tensors in results[2:]:  # products of fewer rows, sums in another order
            for actual, expected in zip(tensors, results[0], strict=True):
                torch.testing.assert_close(actual, expected)
        traffic = over.take_traffic()
        assert traffic.num_bytes == 0, "of one rank nothing leaves"
        assert traffic.transfer_s > 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_changes_no_gradient(dtype: torch.dtype, recompute: str) -> None:
    gradients = []
    for mode in ("none", recompute):
        layout = replace(Layout.single("cuda"), recompute=mode)  # type: ignore[arg-type]
        model = build_model(spec_of(), layout, dtype=dtype)
        model(*batch("cuda"), BatchContext(step=3)).float().logsumexp(-1).mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if "experts" in name})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_decoding_agrees() -> None:
    cpu_model = build_model(spec_of(), dtype=torch.float64)
    gpu_model = build_model(spec_of(), Layout.single("cuda"), dtype=torch.float64)
    spec = GenerationSpec(max_tokens=8)
    assert translate(cpu_model, batch("cpu")[0], spec) == translate(gpu_model, batch("cuda")[0], spec)


def test_a_gpu_is_measured() -> None:
    """One GPU alone: measuring links takes two."""
    facts = measure("cuda", (0,))
    assert facts.device == "cuda"
    assert facts.flops_per_s["bfloat16"] > facts.flops_per_s["float32"] > 1e12
    assert facts.memory_bytes_per_s is not None
    assert facts.memory_bytes_per_s > 1e11
    assert facts.within_node_bytes_per_s is None
