"""A layer by the fused kernels on the rehearsal device: what the host launches, and what it waits for.

Kernels run in Triton's interpreter, on the wrapped tensors.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe.layers import MoELayer
from moe.parallel import Layout, apply, discard_gradients, keep_buffers, local_parameters
from moe.plan.degrees import ShardCounts
from moe.plan.placement import build_placements
from moe.routing import TokenContext
from moe.spec import MoESpec
from tests.parity.trajectory import Degrees
from tests.rehearsal.device import LAUNCHES, WAITS, RehearsalTensor, register

PassCounts = dict[str, dict[str, int]]
"""Of each pass, launches by kernel or operation, or waits by kind."""


def launches_and_waits(spec: MoESpec, has_padding: bool) -> tuple[PassCounts, PassCounts, PassCounts]:
    """(launches of our kernels, of torch's, waits) in the forward and backward pass of one layer, as it trains:
    bfloat16 tokens, float32 weights of which an earlier pass made the narrow copies."""
    from triton.runtime.interpreter import GridExecutor

    from tests.kernels.enabled import kernels_everywhere

    launch, launches = GridExecutor.__call__, Counter[str]()

    def launch_on_wrapped(executor: Any, *arguments: Any, **keywords: Any) -> None:
        launches[executor.fn.__name__] += 1
        launch(executor, *(_unwrap(value) for value in arguments), **keywords)

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
    waits: PassCounts = {}
    launched: PassCounts = {}
    torch_launches: PassCounts = {}

    @contextmanager
    def counting(name: str) -> Iterator[None]:
        launches.clear()
        with WAITS.count() as wait_counts, LAUNCHES.count() as torch_counts:
            yield
        launched[name], waits[name] = dict(launches), _by_kind(wait_counts)
        torch_launches[name] = dict(Counter(operation for operation, _ in torch_counts.elements()))

    GridExecutor.__call__ = launch_on_wrapped  # type: ignore[method-assign]
    try:
        with kernels_everywhere():
            layer(x, tokens)[0].backward(d_y)
            x.grad = None
            discard_gradients(local_parameters(layer))
            with counting("forward"):
                y, _ = layer(x, tokens)
            with counting("backward"):
                y.backward(d_y)
    finally:
        GridExecutor.__call__ = launch  # type: ignore[method-assign]
        layout.close()
    return launched, torch_launches, waits


def _unwrap(value: Any) -> Any:
    return value.inner if isinstance(value, RehearsalTensor) else value


def _by_kind(counts: Counter[tuple[str, str]]) -> dict[str, int]:
    return {f"{kind}, {place}": number for (kind, place), number in sorted(counts.items())}
