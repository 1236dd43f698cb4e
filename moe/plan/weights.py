"""Every parameter of a model: its shape, how a layout cuts it up, and what the fullest rank then holds of it.

The model's modules say the same when they make their parameters; a test compares the two for every layout.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from moe.plan.degrees import Degrees
from moe.spec import ModelSpec, MoESpec


@dataclass(frozen=True)
class Weight:
    """One parameter."""

    name: str
    """Within its block."""
    shape: tuple[int, ...]
    cuts: tuple[tuple[str, int], ...] = ()
    """(mesh axis, dimension divided by its degree); FSDP cuts once more."""
    of_experts: bool = False
    """Whether the first dimension counts experts."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def used(self, degrees: Degrees) -> tuple[int, ...]:
        """Its shape on a rank when it is used, gathered from FSDP."""
        sizes, axes = list(self.shape), degrees.axes
        for axis, dim in self.cuts:
            sizes[dim] //= axes[axis]
        return tuple(sizes)

    def held(self, degrees: Degrees) -> tuple[int, ...]:
        """Its shape on the fullest rank between uses."""
        sizes, degree = list(self.used(degrees)), degrees.axes["expert_fsdp" if self.of_experts else "fsdp"]
        dim = fsdp_dim(self.used(degrees), degree)
        sizes[dim] = -(-sizes[dim] // degree)
        return tuple(sizes)


def fsdp_dim(shape: tuple[int, ...], degree: int) -> int:
    """The dimension that FSDP cuts up: the first of the two outermost that comes out even, else the first."""
    return 1 if shape[0] % degree and len(shape) > 1 and shape[1] % degree == 0 else 0


@dataclass(frozen=True)
class Block:
    """Some layers that are alike: what FSDP gathers for one of them at a time."""

    count: int
    weights: tuple[Weight, ...]


def blocks(model: ModelSpec) -> list[Block]:
    """All parameters of a model, in the order in which it uses them."""
    width = model.model_dim
    around = [Weight("source_embedding", (model.source_vocab_size, width))]
    if not model.share_vocabulary:
        around.append(Weight("target_embedding", (model.target_vocab_size, width)))
    around += [_norm("encoder_norm", width), _norm("decoder_norm", width)]
    with_experts = set(model.moe_layers)
    stacks = (
        (range(model.num_encoder_layers), {"attention": "norm"}),
        (
            range(model.num_encoder_layers, model.num_layers),
            {"attention": "norm", "cross_attention": "cross_norm"},
        ),
    )
    found = [Block(1, tuple(around))]
    for layers, attentions in stacks:
        widths = Counter(None if layer in with_experts else model.ffn_dim_of(layer) for layer in layers)
        for ffn_dim, count in widths.items():  # None has experts instead
            weights = [
                weight for each, norm in attentions.items() for weight in _attention(model, each, norm)
            ]
            weights.append(_norm("feed_forward.norm", width))
            weights += _feed_forward(model, ffn_dim) if ffn_dim is not None else _experts(model.moe)
            found.append(Block(count, tuple(weights)))
    return found


def _norm(name: str, width: int) -> Weight:
    return Weight(f"{name}.weight", (width,))


def _attention(model: ModelSpec, name: str, norm: str) -> Iterator[Weight]:
    width, inner = model.model_dim, model.num_heads * model.head_dim
    yield _norm(norm, width)
    yield Weight(f"{name}.query.weight", (inner, width), (("tensor", 0),))
    yield Weight(f"{name}.key_value", (2, inner, width), (("tensor", 1),))
    yield Weight(f"{name}.output.weight", (width, inner), (("tensor", 1),))


def _feed_forward(model: ModelSpec, ffn_dim: int) -> Iterator[Weight]:
    yield Weight("feed_forward.dense.w_in.weight", (ffn_dim, model.model_dim), (("tensor", 0),))
    yield Weight("feed_forward.dense.w_out.weight", (model.model_dim, ffn_dim), (("tensor", 1),))


def _experts(moe: MoESpec | None) -> Iterator[Weight]:
    assert moe is not None
    width, hidden, shared = moe.model_dim, moe.hidden_dim, moe.shared_hidden_dim
    gated = moe.num_matrices == 3

    def of_experts(name: str, shape: tuple[int, ...], hidden_at: int) -> Weight:
        cuts = (("expert", 0), ("expert_tensor", hidden_at))
        return Weight(f"feed_forward.moe.experts.{name}", (moe.num_experts, *shape), cuts, of_experts=True)

    yield Weight("feed_forward.moe.router", (width, moe.num_experts))
    yield of_experts("w_in", (width, hidden), 2)
    if gated:
        yield of_experts("w_gate", (width, hidden), 2)
    yield of_experts("w_out", (hidden, width), 1)
    if moe.expert_bias:
        yield of_experts("b_in", (hidden,), 1)
        if gated:
            yield of_experts("b_gate", (hidden,), 1)
        yield of_experts("b_out", (width,), 1)
    if shared is not None:
        yield Weight("feed_forward.moe.shared.w_in", (width, shared))
        if gated:
            yield Weight("feed_forward.moe.shared.w_gate", (width, shared))
        yield Weight("feed_forward.moe.shared.w_out", (shared, width))
        if moe.shared_gate:
            yield Weight("feed_forward.moe.shared.gate", (width, 1))


def optimizer_elements(shape: tuple[int, ...], of_experts: bool, optimizer: str) -> int:
    """Numbers that the optimizer remembers of a parameter of which a rank holds `shape`, beside its count of updates.

    AdamW: two moments of each weight. Adafactor: a mean for each row and each column of a matrix, one matrix after
    another where they are of experts; each weight of a vector.
    """
    if optimizer == "adamw":
        return 2 * prod(shape)
    own = 1 if of_experts else 0
    if len(shape) - own < 2:
        return prod(shape)
    return prod(shape[:-1]) + prod(shape[:own]) * shape[-1]
