"""The parts of torch that are not public, all that this package uses. `tests/unit/test_torch_private.py` names each, so
that a release of torch that changes one fails there, in words."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.optim.optimizer import _foreach_supported_types

__all__ = [
    "BufferAOTInput",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "UnsupportedOperatorException",
    "allow_foreach",
    "decompositions",
    "is_traced",
    "joint_graph",
    "marking_nodes",
    "marks_of",
]


def joint_graph(
    stack: ExitStack,
    module: nn.Module,
    arguments: tuple[Any, ...],
    decompose: dict[Any, Callable[..., Any]],
) -> torch.fx.GraphModule:
    """The forward pass and the backward pass as one functional graph, whose placeholders and results say in
    `meta["desc"]` what they are. Without parameters to train, the forward pass alone."""
    return aot_export_joint_with_descriptors(stack, module, arguments, decompositions=decompose).graph_module


def decompositions(operators: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """Torch's own ways to write these operators with simpler ones."""
    return dict(get_decompositions(list(operators)))


@contextmanager
def marking_nodes() -> Iterator[Callable[[dict[str, str] | None], None]]:
    """Gives a function that says what is marked on the nodes recorded from then on."""

    def mark(marks: dict[str, str] | None) -> None:
        if marks is None:
            torch.fx.traceback.current_meta.pop("custom", None)
        else:
            torch.fx.traceback.current_meta["custom"] = marks

    with torch.fx.traceback.preserve_node_meta():
        try:
            yield mark
        finally:
            mark(None)


def marks_of(node: torch.fx.Node) -> dict[str, str]:
    return node.meta.get("custom") or {}


def is_traced(value: Any) -> bool:
    """Whether a value is a tensor of a tracing that has nothing behind it."""
    return isinstance(value, Tensor) and (
        torch._is_functional_tensor(value)
        or isinstance(value, torch._subclasses.FakeTensor)
        or get_proxy_mode() is not None
    )


def allow_foreach(kind: type[nn.Parameter]) -> None:
    """Have torch's optimizers choose their grouped form for parameters of this type, as for torch's own."""
    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)
