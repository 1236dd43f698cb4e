"""One MoE layer, forward and backward: ours, other libraries', and the limit, in turns in one process.

Each round has new tokens, the same for all contenders, so that loads differ from pass to pass as they do in training.

The limit is the same floating-point operations as dense batched products, without routing. Outputs and gradients of
contenders that compute the same function are compared first, and a difference is an error. A layer with capacity drops
some choices: its rate counts the rows it kept. Held memory is what a layer keeps for its backward pass, without its
weights and input; copies of float32 weights in the dtype of the pass are listed separately, since other layers store
their weights in that dtype. Peak memory is the most that tensors take at a time, including gradients, without weights
and input. Shares of our layer are measured part by part: routing, permutation, experts, combining, keyed randomness,
and the cast of its weights to bfloat16, once per step of any number of micro-batches.

On a CPU the process keeps freed memory, as our workers do, which benefits all contenders; `--fresh-memory` leaves the
allocator at its defaults.

On an NVIDIA GPU, published models' layers are timed in bfloat16 and compared with the card's own matrix rate.
"""

import argparse
import os
import statistics
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import results
from benchmarks.contenders import (
    HELD_OUT,
    ON_GPU,
    SHAPES,
    Contender,
    Loads,
    Shape,
    check,
    contenders,
    gradients_for,
    tokens,
)  # fmt: skip
from moe import MoELayer, TokenContext
from moe.dispatch.dispatcher import pad_assignments, rows_to_tokens, tokens_to_rows
from moe.parallel import local_parameters, narrow, values_changed
from moe.random import dropout, fold
from moe.train.environment import KEEP_FREED_MEMORY

ROUNDS = 15
MAX_CHECKED = 4096
"""Most tokens for comparing outputs and gradients."""


def once(part: Contender, x: Tensor, gradient: Tensor) -> float:
    """Seconds of one forward and backward pass, with the output's gradient."""
    wait_for(x)
    began = time.perf_counter()
    part.run(x).backward(gradient)
    wait_for(x)
    seconds = time.perf_counter() - began
    x.grad = None
    part.begin_step()
    for parameter in part.parameters:
        parameter.grad = None
    return seconds


def wait_for(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)


class Live(TorchDispatchMode):
    """Counts the bytes of live tensors that were created in its block."""

    def __init__(self, known_tensors: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known_tensors}
        self._sizes: dict[int, int] = {}
        self.current = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return outputs

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if storage.data_ptr() in self._known or key in self._sizes or not storage.nbytes():
            return
        self._sizes[key] = storage.nbytes()
        self.current += storage.nbytes()
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.current -= self._sizes.pop(key, 0)


def peak_bytes(part: Contender, x: Tensor, gradient: Tensor) -> int:
    """Peak of tensor memory, forward and backward, with gradients but without parameters and input."""
    if x.device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        once(part, x, gradient)
        return torch.cuda.max_memory_allocated() - before
    with Live([x, gradient, *part.parameters]) as live:
        once(part, x, gradient)
    return live.peak


def held_bytes(part: Contender, x: Tensor) -> tuple[int, int]:
    """Bytes that the forward pass saves for the backward pass: (activations, copies of weights)."""
    known_pointers = {tensor.untyped_storage().data_ptr() for tensor in (x, *part.parameters)}
    weights = {(parameter.shape, parameter.dtype) for parameter in part.parameters}
    of_weights = {shape for shape, _ in weights}
    activations: dict[int, int] = {}
    copies: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known_pointers:
            is_copy = tensor.shape in of_weights and (tensor.shape, tensor.dtype) not in weights
            kind = copies if is_copy else activations
            kind[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = part.run(x)
    num_bytes = sum(activations.values()), sum(copies.values())
    del y
    return num_bytes


def shares(layer: MoELayer, x: Tensor) -> dict[str, float]:
    """Median milliseconds of each part of our layer, forward and backward, measured separately."""
    tokens, key = TokenContext(), fold(0, 1)
    x_TM, ids = x.detach().requires_grad_(), torch.arange(x.shape[0], device=x.device)
    logits = layer._logits(x_TM, ids, tokens)[None].detach().requires_grad_()
    routing = layer.route(logits, tokens, 1, layer.state)
    counts = routing.load.tolist()
    computation = layer.experts.local_computation(counts)
    with torch.no_grad():
        assignments = pad_assignments(routing.assignments, counts, computation.counts)
        rows = tokens_to_rows(x, assignments)
    weight = assignments.weight.detach().requires_grad_()
    flat, rows = x.detach().requires_grad_(), rows.requires_grad_()

    def route() -> Tensor:
        routing = layer.route(layer._logits(x_TM, ids, tokens)[None], tokens, 1, layer.state)
        return routing.assignments.weight.sum() + routing.aux_loss

    parts = {
        "routing": route,
        "permutation": lambda: tokens_to_rows(flat, assignments),
        "experts": lambda: layer.experts(rows, weight, computation),
        "combine": lambda: rows_to_tokens(rows, assignments),
        "keyed randomness (dropout)": lambda: dropout(flat, 0.1, key, ids),
    }
    part_figures = {}
    for name, part in parts.items():
        times = []
        for _ in range(ROUNDS):
            wait_for(x)
            began = time.perf_counter()
            y = part()
            y.backward(torch.ones_like(y))
            wait_for(x)
            times.append(time.perf_counter() - began)
            for leaf in (x_TM, flat, rows, weight, *layer.parameters()):
                leaf.grad = None
        part_figures[name] = 1e3 * statistics.median(times[2:])
    if x.dtype != torch.float32:
        part_figures["narrowing, once a step"] = 1e3 * statistics.median(_narrowing(layer, x) for _ in range(ROUNDS))
    return part_figures


def _narrowing(layer: MoELayer, x: Tensor) -> float:
    """Seconds to cast the experts' weights."""
    values_changed(local_parameters(layer))
    wait_for(x)
    began = time.perf_counter()
    for parameter in layer.experts.parameters():
        narrow(parameter, x.dtype)
    wait_for(x)
    return time.perf_counter() - began


def compare(shape: Shape, dtype: torch.dtype, device: torch.device, num_rounds: int = ROUNDS) -> dict[str, Any]:
    difference = check(replace(shape, tokens=min(shape.tokens, MAX_CHECKED)), device)
    x = tokens(shape, dtype, device)
    parts, layer, absent = contenders(shape, x)
    gradients = gradients_for(parts, x)
    for part in parts:
        once(part, x, gradients[part.name])

    def rounds() -> Iterator[Tensor]:
        return (tokens(shape, dtype, device, draw=turn + 1) for turn in range(num_rounds))

    times = round_times(parts, rounds(), gradients)
    loads = {part.name: mean_loads(part, rounds()) for part in parts}
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    kept_sizes = {part.name: held_bytes(part, x) for part in parts}
    figures = {
        part.name: {
            "median_ms": 1e3 * medians[part.name],
            "quartiles_ms": [1e3 * cut for cut in statistics.quantiles(times[part.name], n=4)[::2]],
            **loads[part.name]._asdict(),
            "tflops_per_s": loads[part.name].kept * shape.flops / medians[part.name] / 1e12,
            "held_mib": kept_sizes[part.name][0] / 1024**2,
            "held_copies_mib": kept_sizes[part.name][1] / 1024**2,
            "peak_mib": peak_bytes(part, x, gradients[part.name]) / 1024**2,
            "difference": difference.get(part.name),
        }
        for part in parts
    }
    return {"shape": asdict(shape), "dtype": str(dtype).removeprefix("torch."), "layers": figures,
            "parts_ms": shares(layer, x), "not_installed": absent}  # fmt: skip


def round_times(
    parts: list[Contender], rounds: Iterable[Tensor], gradients: dict[str, Tensor]
) -> dict[str, list[float]]:
    """Seconds of each round by name; all take the round's tokens, and the first one changes each round."""
    times: dict[str, list[float]] = {part.name: [] for part in parts}
    for turn, x in enumerate(rounds):
        for part in parts[turn % len(parts) :] + parts[: turn % len(parts)]:
            times[part.name].append(once(part, x, gradients[part.name]))
    return times


def mean_loads(part: Contender, rounds: Iterable[Tensor]) -> Loads:
    """Mean loads over the rounds."""
    return Loads(*map(statistics.mean, zip(*map(part.loads, rounds), strict=True)))


def show(case: dict[str, Any], title: str = "") -> None:
    layers = case["layers"]
    fastest = layers["limit"]["median_ms"]
    busiest = layers["shardyard"]["busiest_over_mean"]
    print(f"\n{title}{Shape(**case['shape'])}, {case['dtype']}; the busiest expert has {busiest:.2f} times the mean")
    for name, figures in layers.items():
        low, high = figures["quartiles_ms"]
        median, difference = figures["median_ms"], figures["difference"]
        line = f"  {name:<46}{median:8.1f} ms  ({low:.1f} to {high:.1f})  {median / fastest:5.2f}x the limit"
        line += f"  {figures['held_mib']:7.1f} MiB held, {figures['peak_mib']:7.1f} at the peak"
        line += f" ({figures['held_copies_mib']:.0f} in copies)" if figures["held_copies_mib"] else ""
        line += f"  {figures['tflops_per_s']:.3g} TFLOP/s"
        line += f" of the {figures['kept']:.1%} kept" if figures["kept"] < 1 else ""
        print(line if difference is None else f"{line}  differs by {difference:.1e}")
    total = layers["shardyard"]["median_ms"]
    parts = ", ".join(f"{name} {ms:.1f} ms ({ms / total:.0%})" for name, ms in case["parts_ms"].items())
    print(f"  of ours: {parts}")
    for line in case["not_installed"]:
        print(f"  not installed: {line}")


def matrix_rate(device: torch.device) -> float:
    """Operations per second of one large bfloat16 product on this card."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = []
    for _ in range(ROUNDS):
        wait_for(a)
        began = time.perf_counter()
        a @ b
        wait_for(a)
        seconds.append(time.perf_counter() - began)
    return 2 * 8192**3 / statistics.median(seconds[2:])


def on_gpu() -> None:
    device = torch.device("cuda")
    rate, comparisons = matrix_rate(device), []
    print(f"{torch.cuda.get_device_name()}: {rate / 1e12:.0f} TFLOP/s in bfloat16")
    for name, shape in ON_GPU.items():
        comparisons.append(compare(shape, torch.bfloat16, device) | {"model": name})
        show(comparisons[-1], f"{name}: ")
        share = comparisons[-1]["layers"]["shardyard"]["tflops_per_s"] * 1e12 / rate
        print(f"  ours at {share:.0%} of the card's rate")
    print(f"\nwritten to {results.write('layer_gpu', {'matrix_rate': rate, 'rounds': ROUNDS, 'cases': comparisons})}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--gpu", action="store_true", help="measure on a GPU or not at all")
    parser.add_argument("--held-out", action="store_true", help="only the shapes that others chose")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--fresh-memory", action="store_true", help="leave the allocator at its defaults")
    args = parser.parse_args()
    threads = args.threads
    if torch.cuda.is_available():
        return on_gpu()
    if args.gpu:
        print("no NVIDIA GPU here: nothing to measure")
        return None
    if not args.fresh_memory and not os.environ.keys() >= KEEP_FREED_MEMORY.keys():
        command = [sys.executable, "-m", "benchmarks.layer", *sys.argv[1:]]
        os.execve(sys.executable, command, KEEP_FREED_MEMORY | os.environ)
    torch.set_num_threads(threads)
    comparisons = []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in HELD_OUT if args.held_out else (*SHAPES, *HELD_OUT):
            comparisons.append(compare(shape, dtype, torch.device("cpu"), args.rounds))
            show(comparisons[-1])
    figures = {"threads": threads, "rounds": args.rounds, "fresh_memory": args.fresh_memory, "cases": comparisons}
    name = f"layer{'_held_out' * args.held_out}{'_fresh_memory' * args.fresh_memory}"
    print(f"\nwritten to {results.write(name, figures)}")
    return None


if __name__ == "__main__":
    main()
