"""Layers and steps by the fused kernels on the rehearsal device: what the host launches, and what it waits for.

Kernels run in Triton's interpreter, on the wrapped tensors.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from moe.layers import MoELayer
from moe.parallel import Layout, apply, discard_gradients, keep_buffers, local_parameters
from moe.plan.degrees import ShardCounts
from moe.plan.placement import build_placements
from moe.routing import TokenContext
from moe.spec import LanguageModelSpec, MoESpec, TrainSpec
from moe.train.signals import Signals
from moe.train.step import step
from tests.parity.trajectory import Degrees, Shape, batch_of, state_of
from tests.rehearsal.device import DEVICE_TIME, LAUNCHES, WAITS, RehearsalTensor, register
from tests.rehearsal.recording import Recording

PassCounts = dict[str, dict[str, int]]
"""Of each pass, launches by kernel or operation, or waits by kind."""


def launches_and_waits(spec: MoESpec, has_padding: bool) -> tuple[PassCounts, ...]:
    """(launches of our kernels, of torch's, waits) in the forward and backward pass of one layer, as it trains:
    bfloat16 tokens, float32 weights of which an earlier pass made the narrow copies."""
    device = register()
    layout = Layout.build(Degrees().plan(num_groups=2), device)
    with torch.device("meta"):
        layer = MoELayer(spec, layer=1)
    apply(layer, build_placements(spec.parameters(), ShardCounts.from_degrees(layout.degrees)), layout)
    keep_buffers(local_parameters(layer), layout)
    x = torch.randn(2 * spec.group_tokens, spec.model_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    d_y, tokens = torch.randn_like(x), None
    if has_padding:
        ids = torch.arange(x.shape[0], device=device).view(2, -1)
        tokens = TokenContext(ids, ids % 7 == 0)
    with kernels_on_wrapped() as launches:
        layer(x, tokens)[0].backward(d_y)
        x.grad = None
        discard_gradients(local_parameters(layer))
        with counting(launches) as forward:
            y, _ = layer(x, tokens)
        with counting(launches) as backward:
            y.backward(d_y)
    layout.close()
    return tuple({"forward": forward[kind], "backward": backward[kind]} for kind in (0, 1, 2))


def launches_and_waits_of_step(model: LanguageModelSpec, train: TrainSpec) -> list[dict[str, int]]:
    """The same in a training step of a language model, in which no buffer is new."""
    device, degrees, shape = register(), Degrees(), Shape(groups=1)
    plan = degrees.plan(shape.groups)
    layout = Layout.build(plan, device)
    with kernels_on_wrapped() as launches:
        state = state_of(model, train, layout)
        for number in (1, 2):
            batch = batch_of(layout, plan, shape, model, number)
            with counting(launches) as counts:
                step(state, batch, Signals())
    layout.close()
    return counts


def host_seconds_of_steps(model: LanguageModelSpec, train: TrainSpec, shape: Shape, num_steps: int) -> list[float]:
    """Processor seconds of the host in each training step: Python, autograd and dispatch, without the launches
    themselves. One micro-batch per token group."""
    device, degrees = register(), Degrees(micro_batch_groups=1)
    plan = degrees.plan(shape.groups)
    layout = Layout.build(plan, device)
    seconds = []
    with kernels_on_wrapped() if model.moe is not None else nullcontext():
        state = state_of(model, train, layout)
        for number in range(num_steps):
            batch = batch_of(layout, plan, shape, model, number)
            began, device_began = time.process_time(), DEVICE_TIME.seconds
            step(state, batch, Signals())
            seconds.append(time.process_time() - began - (DEVICE_TIME.seconds - device_began))
    layout.close()
    return seconds


@contextmanager
def kernels_on_wrapped() -> Iterator[Counter[str]]:
    """Within the context, layers use the kernels, on the wrapped tensors. Yields the launches by kernel."""
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    from moe.kernels import adamw
    from tests.kernels.enabled import kernels_everywhere

    launch, interpret, launches = GridExecutor.__call__, InterpretedFunction.run, Counter[str]()
    addresses_of = adamw.addresses_of

    def launch_on_wrapped(executor: Any, *arguments: Any, **keywords: Any) -> None:
        launches[executor.fn.__name__] += 1
        run = partial(launch, executor, *map(_unwrap, arguments), **keywords)
        if Recording.current is None:
            run()
        else:
            Recording.current.launch(executor.fn.__name__, run)

    def run_measured(*arguments: Any, **keywords: Any) -> None:
        with DEVICE_TIME.measure():
            interpret(*arguments, **keywords)

    GridExecutor.__call__ = launch_on_wrapped  # type: ignore[method-assign]
    InterpretedFunction.run = run_measured  # type: ignore[method-assign]
    adamw.addresses_of = lambda tensors: addresses_of(map(_unwrap, tensors))
    try:
        with kernels_everywhere():
            yield launches
    finally:
        GridExecutor.__call__ = launch  # type: ignore[method-assign]
        InterpretedFunction.run = interpret  # type: ignore[method-assign]
        adamw.addresses_of = addresses_of


@contextmanager
def counting(launches: Counter[str]) -> Iterator[list[dict[str, int]]]:
    """Launches of our kernels, launches of torch's and waits within the context, once it is left."""
    launches.clear()
    counts: list[dict[str, int]] = []
    with WAITS.count() as waits, LAUNCHES.count() as torch_launches:
        yield counts
    by_operation = Counter(operation for operation, _ in torch_launches.elements())
    counts += [dict(launches), dict(by_operation), _by_kind(waits)]


def _unwrap(value: Any) -> Any:
    return value.inner if isinstance(value, RehearsalTensor) else value


def _by_kind(counts: Counter[tuple[str, str]]) -> dict[str, int]:
    return {f"{kind}, {place}": number for (kind, place), number in sorted(counts.items())}
