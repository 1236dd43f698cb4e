"""A layer by the fused kernels on the rehearsal device: what the host launches, and what it waits for.

Kernels run in Triton's interpreter, on the wrapped tensors.
"""

from collections import Counter
from typing import Any

import torch

from moe.layers import MoELayer
from moe.parallel import Layout
from moe.spec import MoESpec
from tests.rehearsal.device import WAITS, RehearsalTensor, register

PassCounts = dict[str, dict[str, int]]
"""Of each pass, launches by kernel or waits by kind."""


def launches_and_waits(spec: MoESpec) -> tuple[PassCounts, PassCounts]:
    """(launches of our kernels, waits) in the forward and backward pass of one layer."""
    from triton.runtime.interpreter import GridExecutor

    from tests.kernels.enabled import kernels_everywhere

    launch, launches = GridExecutor.__call__, Counter[str]()

    def launch_on_wrapped(executor: Any, *arguments: Any, **keywords: Any) -> None:
        launches[executor.fn.__name__] += 1
        launch(executor, *(_unwrap(value) for value in arguments), **keywords)

    device = register()
    layer = MoELayer(spec, layer=1).to(device)
    layer.set_layout(Layout.single(device))
    x = torch.randn(2 * spec.group_tokens, spec.model_dim, device=device, requires_grad=True)
    waits, launched = {}, {}
    GridExecutor.__call__ = launch_on_wrapped  # type: ignore[method-assign]
    try:
        with kernels_everywhere():
            with WAITS.count() as forward_waits:
                y, _ = layer(x)
            waits["forward"], launched["forward"] = _by_kind(forward_waits), dict(launches)
            launches.clear()
            with WAITS.count() as backward_waits:
                y.square().sum().backward()
            waits["backward"], launched["backward"] = _by_kind(backward_waits), dict(launches)
    finally:
        GridExecutor.__call__ = launch  # type: ignore[method-assign]
    return launched, waits


def _unwrap(value: Any) -> Any:
    return value.inner if isinstance(value, RehearsalTensor) else value


def _by_kind(counts: Counter[tuple[str, str]]) -> dict[str, int]:
    return {f"{kind}, {place}": number for (kind, place), number in sorted(counts.items())}
