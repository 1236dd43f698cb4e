"""Contenders of the layer benchmarks: our layer, other libraries' layers and the limit; and whether they agree."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import peers
from moe import MoELayer, MoESpec
from moe.dispatch import measure_with_kernels
from moe.experts import FUSED, measure
from moe.parallel import Layout, discard_gradients, keep_buffers, local_parameters, values_changed


@dataclass(frozen=True)
class Shape:
    activation: str
    tokens: int
    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    skewed: bool = False
    """Whether some experts are chosen more often: one feature of all tokens favors the first experts."""

    def __str__(self) -> str:
        kind = "two-matrix" if self.activation == "relu" else "gated"
        sizes = f"T {self.tokens} M {self.model_dim} H {self.hidden_dim} E {self.num_experts} K {self.top_k}"
        return f"{kind} {sizes}{', skewed' * self.skewed}"

    @property
    def flops(self) -> float:
        """Operations of the experts' products, forward and backward."""
        matrices = 2 if self.activation == "relu" else 3
        return 3 * 2 * self.tokens * self.top_k * matrices * self.model_dim * self.hidden_dim

    @property
    def dropless(self) -> dict[str, Any]:
        return {"router": "softmax_topk", "top_k": self.top_k, "renormalize_gates": self.top_k > 1}

    def spec(self, **fields: Any) -> MoESpec:
        return MoESpec(
            num_experts=self.num_experts, model_dim=self.model_dim, hidden_dim=self.hidden_dim,
            activation=self.activation, group_tokens=self.tokens, **fields,
        )  # fmt: skip


SHAPES = (
    Shape("relu", 2048, 512, 1024, 8, 2),
    Shape("swiglu", 2048, 512, 1024, 8, 2),
    Shape("swiglu", 2048, 512, 128, 64, 8),
    Shape("swiglu", 4096, 256, 512, 16, 1),
)
HELD_OUT = (
    Shape("relu", 1536, 640, 1536, 12, 2),
    Shape("swiglu", 1536, 640, 1536, 12, 2),
    Shape("swiglu", 1024, 768, 384, 60, 4),
    Shape("swiglu", 1024, 768, 384, 60, 4, skewed=True),
    Shape("swiglu", 3072, 384, 192, 128, 8),
    Shape("swiglu", 3072, 384, 192, 128, 8, skewed=True),
)
"""Shapes that others chose after the layer had been optimized for the shapes above."""
_MOST_EAGER = 16
"""Most experts for which transformers' loop is measured: with 60 it takes 17 times the limit, with 128 16 times."""
_SKEW = 0.5
"""Slope of the experts' logits against the logarithm of their number, negated."""
ON_GPU = {
    "Mixtral-8x7B": Shape("swiglu", 16_384, 4096, 14_336, 8, 2),
    "Qwen3-30B-A3B": Shape("swiglu", 16_384, 2048, 768, 128, 8),
    # 32 of 256 experts, and 8 experts per token: on average one row per token arrives.
    "DeepSeek-V3, a rank's 32 experts": Shape("swiglu", 16_384, 7168, 2048, 32, 1),
}
OURS, OURS_WITH_CAPACITY = "shardyard", "shardyard, top-2 with capacity"
TORCHTITAN = "torchtitan (bfloat16)"
LIKE_DEEPSPEED = {"router": "gshard_top2", "second_expert": "all", "normalize_gates": "after_drop"}
"""DeepSpeed's top-2 rules: the best second expert, capacity 2·S/E, weights normalized after drops."""


class Loads(NamedTuple):
    """Outcome of the expert choices of some tokens."""

    kept: float
    """Share of the choices that is computed."""
    busiest_over_mean: float
    """Rows of the busiest expert over the mean."""


@dataclass
class Contender:
    """A layer to be timed."""

    name: str
    run: Callable[[Tensor], Tensor]
    parameters: list[Tensor]
    like: str | None = None
    """Contender whose outputs and gradients it must reproduce."""
    tolerance: float = 1e-4
    """Largest allowed difference from them, relative to the largest value."""
    loads: Callable[[Tensor], Loads] = lambda x: Loads(1.0, 1.0)
    begin_step: Callable[[], None] = lambda: None
    """What its training does before the first micro-batch of a step, apart from discarding gradients."""


def shardyard_layer(
    name: str,
    spec: MoESpec,
    x: Tensor,
    weights: torch.dtype = torch.float32,
    *,
    is_skewed: bool = False,
    by_rows: bool = False,
) -> tuple[Contender, MoELayer]:
    """Our layer as it is trained, with experts of dtype `weights`; the router is always float32. `by_rows`: without the
    fused kernels."""
    layout = Layout.single(x.device)
    layer = MoELayer(spec, layer=1).to(x.device)
    layer.experts.to(weights)
    if is_skewed:
        with torch.no_grad():
            layer.router[0] = -_SKEW * torch.arange(1, spec.num_experts + 1, device=x.device).log()
    parameters = local_parameters(layer)
    keep_buffers(parameters, layout)
    layer.experts.costs = (measure if by_rows else measure_with_kernels)(layer.experts.w_in.detach().to(x.dtype))

    def begin_step() -> None:
        values_changed(parameters)  # as after an optimizer step: weights are cast once per step
        discard_gradients(parameters)

    @torch.no_grad()
    def loads(x: Tensor) -> Loads:
        routing = layer(x)[1]
        num_accepted = routing.load.sum()
        return Loads(
            float(num_accepted / routing.num_choices), float(routing.load.max() * spec.num_experts / num_accepted)
        )

    run: Callable[[Tensor], Tensor] = lambda x: layer(x)[0]  # noqa: E731
    return Contender(name, run, list(layer.parameters()), loads=loads, begin_step=begin_step), layer


def limit(shape: Shape, like_x: Tensor) -> Contender:
    """Only the products of all choices: every expert has the same number of rows, already sorted."""
    experts, rows = shape.num_experts, shape.tokens * shape.top_k // shape.num_experts
    options: dict[str, Any] = {"dtype": like_x.dtype, "device": like_x.device, "requires_grad": True}
    x = torch.randn(experts, rows, shape.model_dim, **options)
    sizes = [(shape.model_dim, shape.hidden_dim)] * (1 if shape.activation == "relu" else 2)
    input_weights = [torch.randn(experts, *size, **options) for size in sizes]
    output_weights = torch.randn(experts, shape.hidden_dim, shape.model_dim, **options)

    def run(_: Tensor) -> Tensor:
        up = torch.bmm(x, input_weights[0])
        hidden_rows = up.relu() if len(input_weights) == 1 else functional.silu(torch.bmm(x, input_weights[1])) * up
        return torch.bmm(hidden_rows, output_weights)

    return Contender("limit", run, [x, *input_weights, output_weights])


def contenders(shape: Shape, x: Tensor, **fields: Any) -> tuple[list[Contender], MoELayer, list[str]]:
    """(contenders, our layer, contenders that are not installed) for tokens like `x`; `fields` of our layers' spec."""
    specs = {OURS: shape.spec(**shape.dropless, **fields)}
    if shape.activation == "relu":
        specs[OURS_WITH_CAPACITY] = shape.spec(**LIKE_DEEPSPEED, **fields)
    contenders, layers, absent = [], {}, []
    for name, spec in specs.items():
        contender, layers[name] = shardyard_layer(name, spec, x, is_skewed=shape.skewed)
        contenders.append(contender)
        if x.dtype != torch.float32:
            # As in the other layers, whose users cast float32 weights outside the layer, once per step.
            contenders.append(shardyard_layer(f"{name}, narrow weights", spec, x, x.dtype, is_skewed=shape.skewed)[0])
        if FUSED in layers[name].experts.costs:
            contenders.append(shardyard_layer(f"{name}, by rows", spec, x, is_skewed=shape.skewed, by_rows=True)[0])
    layer = layers[OURS]
    if shape.activation == "relu":
        with_capacity = layers[OURS_WITH_CAPACITY]
        candidates = {"deepspeed top-2": (lambda: peers.deepspeed_top2(with_capacity), OURS_WITH_CAPACITY)}
    else:
        # With one expert per token Mixtral's weight is always 1: the same work, but other outputs.
        reference = OURS if shape.top_k > 1 else None
        candidates = {
            "transformers grouped_mm": (lambda: peers.transformers_mixtral(layer, "grouped_mm"), reference),
            TORCHTITAN: (lambda: peers.torchtitan_moe(layer), OURS),
        }
        if shape.num_experts <= _MOST_EAGER:
            eager = (lambda: peers.transformers_mixtral(layer, "eager"), reference)
            candidates["transformers eager"] = eager
    for name, (make, reference_name) in candidates.items():
        try:
            run, block = make()
        except ImportError as error:
            absent.append(f"{name}: {error}")
            continue
        block.to(x.device, x.dtype)
        tolerance = 0.05 if name == TORCHTITAN else 1e-4
        contenders.append(
            Contender(name, run, list(block.parameters()), reference_name, tolerance, contenders[-1].loads)
        )
    return [*contenders, limit(shape, x)], layer, absent


def tokens(shape: Shape, dtype: torch.dtype, device: torch.device, draw: int = 0) -> Tensor:
    """Tokens `[T, M]`, different for each `draw`."""
    torch.manual_seed(1 + draw)
    x = torch.randn(shape.tokens, shape.model_dim, dtype=dtype, device=device)
    if shape.skewed:
        x[:, 0] = 1.0
    return x.requires_grad_()


def check(shape: Shape, device: torch.device) -> dict[str, float]:
    """Difference of outputs and token gradients from the reference's by name, in float32, relative to the largest.
    Raises ValueError if a difference is too large.

    Auxiliary losses are left out: other libraries add theirs elsewhere. bfloat16 is not compared: other libraries then
    choose experts by bfloat16 logits, which we never do.
    """
    x = tokens(shape, torch.float32, device)
    return differences(contenders(shape, x, aux_coefficient=0.0)[0], x)


def differences(parts: list[Contender], x: Tensor) -> dict[str, float]:
    """Differences as in `check`, of these contenders."""
    outputs = {
        part.name: (y.detach(), *torch.autograd.grad(y, x, gradient_of(y)))
        for part in parts
        if part.name != "limit"
        for y in [part.run(x)]
    }
    how_far = {
        part.name: max(
            float((tensor.float() - reference.float()).abs().max() / reference.float().abs().max())
            for tensor, reference in zip(outputs[part.name], outputs[part.like], strict=True)
        )
        for part in parts
        if part.like is not None
    }
    for part in parts:
        if not how_far.get(part.name, 0.0) <= part.tolerance:
            raise ValueError(f"{part.name} differs from {part.like} by {how_far[part.name]:.1e}")
    return how_far


def gradient_of(y: Tensor) -> Tensor:
    """Gradient of an output; the same for all outputs of one shape."""
    numbers = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    return numbers.to(y.device, y.dtype)


def gradients_for(parts: list[Contender], x: Tensor) -> dict[str, Tensor]:
    """Gradients of the outputs by name; one tensor for all outputs of one shape."""
    gradient_by_shape: dict[torch.Size, Tensor] = {}
    with torch.no_grad():
        outputs = {part.name: part.run(x) for part in parts}
    return {name: gradient_by_shape.setdefault(y.shape, gradient_of(y)) for name, y in outputs.items()}
