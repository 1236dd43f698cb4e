"""One MoE layer, forward and backward: ours, other libraries', and the limit, turn and turn about in one process.

The limit is the same floating-point operations as dense batched products, with no routing. Where the mathematics is
the same, outputs are compared first. Held memory is what a layer keeps for its backward pass, beside its weights and
its input. Shares of routing, permutation, experts and combining are of our own layer, each run by itself.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import peers, results
from moe import MoELayer, MoESpec, TokenContext
from moe.dispatch.permute import pad, rows_to_tokens, tokens_to_rows
from moe.experts import measure

ROUNDS = 15


@dataclass(frozen=True)
class Shape:
    activation: str
    tokens: int
    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        kind = "two-matrix" if self.activation == "relu" else "gated"
        return f"{kind} T {self.tokens} M {self.model_dim} H {self.hidden_dim} E {self.num_experts} K {self.top_k}"

    def spec(self, **fields: Any) -> MoESpec:
        dropless = {"router": "softmax_topk", "top_k": self.top_k, "renormalize_gates": self.top_k > 1}
        return MoESpec(
            num_experts=self.num_experts, model_dim=self.model_dim, hidden_dim=self.hidden_dim,
            activation=self.activation, group_tokens=self.tokens, **(fields or dropless),
        )  # fmt: skip


SHAPES = (
    Shape("relu", 2048, 512, 1024, 8, 2),
    Shape("swiglu", 2048, 512, 1024, 8, 2),
    Shape("swiglu", 2048, 512, 128, 64, 8),
    Shape("swiglu", 4096, 256, 512, 16, 1),
)
LIKE_DEEPSPEED = {"router": "gshard_top2", "second_expert": "all", "normalize_gates": "after_drop"}
"""DeepSpeed's top-2 rules: the best second expert, capacity 2·S/E, weights normalised after drops."""


@dataclass
class Contender:
    """A layer that takes part."""

    name: str
    run: Callable[[Tensor], Tensor]
    parameters: list[Tensor]
    like: str | None = None
    """Whose outputs it must have."""


def ours(name: str, spec: MoESpec, dtype: torch.dtype) -> tuple[Contender, MoELayer]:
    torch.manual_seed(0)
    layer = MoELayer(spec, layer=1)
    layer.experts.costs = measure(layer.experts.w_in.detach().to(dtype))
    return Contender(name, lambda x: layer(x)[0], list(layer.parameters())), layer


def limit(shape: Shape, dtype: torch.dtype) -> Contender:
    """The products alone: every expert has the same number of rows, and they are there already."""
    experts, rows = shape.num_experts, shape.tokens * shape.top_k // shape.num_experts
    torch.manual_seed(0)
    x = torch.randn(experts, rows, shape.model_dim, dtype=dtype, requires_grad=True)
    sizes = [(shape.model_dim, shape.hidden_dim)] * (1 if shape.activation == "relu" else 2)
    into = [torch.randn(experts, *size, dtype=dtype, requires_grad=True) for size in sizes]
    out = torch.randn(experts, shape.hidden_dim, shape.model_dim, dtype=dtype, requires_grad=True)

    def run(_: Tensor) -> Tensor:
        up = torch.bmm(x, into[0])
        hidden = up.relu() if len(into) == 1 else functional.silu(torch.bmm(x, into[1])) * up
        return torch.bmm(hidden, out)

    return Contender("limit", run, [x, *into, out])


def contenders(shape: Shape, dtype: torch.dtype) -> tuple[list[Contender], MoELayer, list[str]]:
    """(who takes part, our layer, who is not installed)."""
    first, layer = ours("shardyard", shape.spec(), dtype)
    found, absent = [first], []
    if shape.activation == "relu":
        second, like_theirs = ours("shardyard, top-2 with capacity", shape.spec(**LIKE_DEEPSPEED), dtype)
        found.append(second)
        candidates = {"deepspeed top-2": (lambda: peers.deepspeed_top2(like_theirs), second.name)}
    else:
        # With one expert a token Mixtral's weight is always 1: the same work, other outputs.
        same = first.name if shape.top_k > 1 else None
        candidates = {
            "transformers grouped_mm": (lambda: peers.transformers_mixtral(layer, "grouped_mm"), same),
            "transformers eager": (lambda: peers.transformers_mixtral(layer, "eager"), same),
            "torchtitan (bfloat16)": (lambda: peers.torchtitan_moe(layer), first.name),
        }
    for name, (make, like) in candidates.items():
        try:
            run, block = make()
        except ImportError as error:
            absent.append(f"{name}: {error}")
            continue
        block.to(dtype)
        found.append(Contender(name, run, list(block.parameters()), like))
    return [*found, limit(shape, dtype)], layer, absent


def check(parts: list[Contender], x: Tensor) -> dict[str, float]:
    """By name, how far outputs are from those they must equal, relative to the largest."""
    with torch.no_grad():
        outputs = {part.name: part.run(x).float() for part in parts if part.name != "limit"}
    return {
        part.name: float(
            (outputs[part.name] - outputs[part.like]).abs().max() / outputs[part.like].abs().max()
        )
        for part in parts
        if part.like is not None
    }


def once(part: Contender, x: Tensor, gradient: Tensor | None) -> float:
    """Seconds of one forward and backward pass."""
    began = time.perf_counter()
    y = part.run(x)
    y.backward(torch.ones_like(y) if gradient is None or y.shape != gradient.shape else gradient)
    seconds = time.perf_counter() - began
    x.grad = None
    for parameter in part.parameters:
        parameter.grad = None
    return seconds


def held_bytes(part: Contender, x: Tensor) -> int:
    """What the forward pass keeps for the backward one, beside parameters and input."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *part.parameters)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = part.run(x)
    total = sum(kept.values())
    del y
    return total


def shares(layer: MoELayer, x: Tensor) -> dict[str, float]:
    """Milliseconds of the parts of our layer, forward and backward, each by itself; the median."""
    tokens = TokenContext()
    x_TM, ids = x.detach().requires_grad_(), torch.arange(x.shape[0])
    logits = layer._logits(x_TM, ids, tokens)[None].detach().requires_grad_()
    routing = layer.route(logits, tokens, 1, layer.state)
    counts = routing.load.tolist()
    padded = layer.experts.padded(counts)
    with torch.no_grad():
        assignments = pad(routing.assignments, counts, padded)
        rows = tokens_to_rows(x, assignments)
    weight = assignments.weight.detach().requires_grad_()
    flat, rows = x.detach().requires_grad_(), rows.requires_grad_()

    def route() -> Tensor:
        made = layer.route(layer._logits(x_TM, ids, tokens)[None], tokens, 1, layer.state)
        return made.assignments.weight.sum() + made.aux_loss

    parts = {
        "routing": route,
        "permutation": lambda: tokens_to_rows(flat, assignments),
        "experts": lambda: layer.experts(rows, weight, padded),
        "combine": lambda: rows_to_tokens(rows, assignments),
    }
    found = {}
    for name, part in parts.items():
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            y = part()
            y.backward(torch.ones_like(y))
            times.append(time.perf_counter() - began)
            for leaf in (x_TM, flat, rows, weight, *layer.parameters()):
                leaf.grad = None
        found[name] = 1e3 * statistics.median(times[2:])
    return found


def compare(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    parts, layer, absent = contenders(shape, dtype)
    torch.manual_seed(1)
    x = torch.randn(shape.tokens, shape.model_dim, dtype=dtype, requires_grad=True)
    gradient = torch.randn(shape.tokens, shape.model_dim, dtype=dtype)
    # In bfloat16 others choose experts by bfloat16 logits, which we never do: the mathematics is not the same.
    difference = check(parts, x) if dtype == torch.float32 else {}
    for part in parts:
        once(part, x, gradient)
    times: dict[str, list[float]] = {part.name: [] for part in parts}
    for turn in range(ROUNDS):
        for part in parts[turn % len(parts) :] + parts[: turn % len(parts)]:
            times[part.name].append(once(part, x, gradient))
    figures = {
        part.name: {
            "median_ms": 1e3 * statistics.median(times[part.name]),
            "quartiles_ms": [1e3 * cut for cut in statistics.quantiles(times[part.name], n=4)[::2]],
            "held_mib": held_bytes(part, x) / 1024**2,
            "difference": difference.get(part.name),
        }
        for part in parts
    }
    return {"shape": asdict(shape), "dtype": str(dtype).removeprefix("torch."), "layers": figures,
            "parts_ms": shares(layer, x), "not_installed": absent}  # fmt: skip


def show(found: dict[str, Any]) -> None:
    layers = found["layers"]
    fastest = layers["limit"]["median_ms"]
    print(f"\n{Shape(**found['shape'])}, {found['dtype']}")
    for name, figures in layers.items():
        low, high = figures["quartiles_ms"]
        median, difference = figures["median_ms"], figures["difference"]
        line = f"  {name:<32}{median:8.1f} ms  ({low:.1f} to {high:.1f})  {median / fastest:5.2f}x the limit"
        line += f"  {figures['held_mib']:7.1f} MiB held"
        print(line if difference is None else f"{line}  outputs differ by {difference:.1e}")
    total = layers["shardyard"]["median_ms"]
    parts = ", ".join(f"{name} {ms:.1f} ms ({ms / total:.0%})" for name, ms in found["parts_ms"].items())
    print(f"  of ours: {parts}")
    for line in found["not_installed"]:
        print(f"  not installed: {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            found.append(compare(shape, dtype))
            show(found[-1])
    print(f"\nwritten to {results.write('layer', {'threads': threads, 'rounds': ROUNDS, 'cases': found})}")


if __name__ == "__main__":
    main()
