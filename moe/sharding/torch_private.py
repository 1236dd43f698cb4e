"""All private parts of torch that this package uses. `tests/unit/test_torch_private.py` lists them, and fails with a
release of torch that changes one of them."""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch._dynamo import OptimizedModule
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    BufferAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.utils import KNOWN_TYPES
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._higher_order_ops.effects import with_effects
from torch._library.opaque_object import is_opaque_type
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.amp import GradScaler
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, _traversal_utils
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._ops.single_dim_strategy import _expand_single_dim_strategy_to_mesh
from torch.distributed.tensor.placement_types import Placement
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

__all__ = [
    "BackwardTokenAOTInput", "BackwardTokenAOTOutput", "BufferAOTInput", "DataDependentOutputException",
    "DynamicOutputShapeException", "FakeTensorMode", "ForwardTokenAOTInput", "ForwardTokenAOTOutput", "GradAOTOutput",
    "InputMutationAOTOutput", "ParamAOTInput", "PlainAOTInput", "PlainAOTOutput", "OpOverload", "TangentAOTInput",
    "UnsupportedOperatorException", "after_unscaling", "before_wrapping", "can_be_argument", "checkpointing",
    "compiling", "cond_as", "decompositions", "dtensor_like", "has_hooks", "is_compiled", "is_traced", "joint_graph",
    "marking_nodes", "marks_of", "refuse_composable", "refuses_composable", "strategies", "two_ranks", "with_effects",
    "without_mkldnn",
]  # fmt: skip


def joint_graph(
    stack: ExitStack, module: nn.Module, arguments: tuple[Any, ...], decompose: dict[Any, Callable[..., Any]]
) -> torch.fx.GraphModule:
    """The forward pass and the backward pass as one functional graph. `meta["desc"]` describes placeholders and
    results. Without parameters to train, it is the forward pass only."""
    return aot_export_joint_with_descriptors(stack, module, arguments, decompositions=decompose).graph_module


def can_be_argument(value: Any) -> bool:
    """Whether a joint graph may be traced with a value as an argument."""
    return isinstance(value, tuple(KNOWN_TYPES)) or is_opaque_type(type(value))


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """Context in which recurrent layers are traced as products and sigmoids, not as one operator of mkldnn.
    `torch.backends.mkldnn.flags` would also set other flags, and warns of it."""
    original = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(original)


@contextmanager
def compiling() -> Iterator[None]:
    """Context in which `torch.compiler.is_compiling()` is true: code with a separate path for tracing, which reads no
    values of tensors, takes that path."""
    original = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = original


@contextmanager
def cond_as(substitute: Callable[..., Any]) -> Iterator[None]:
    """Context in which another function replaces `torch.cond`, also where it was imported by name."""
    module = sys.modules["torch._higher_order_ops.cond"]
    original = module.cond_op
    module.cond_op = substitute  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.cond_op = original  # type: ignore[attr-defined]


@contextmanager
def checkpointing(region: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Context in which `torch.utils.checkpoint.checkpoint` calls its function once, within a `region`, which marks the
    nodes to recompute. A second call by torch would draw other random numbers."""

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            with region():
                return function(*args)

    def plain(*_: Any, **__: Any) -> Iterator[None]:
        with region():
            yield

    original = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator
    checkpoint.CheckpointFunction = Plain  # type: ignore[assignment, misc]
    checkpoint._checkpoint_without_reentrant_generator = plain
    try:
        yield
    finally:
        checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator = original  # type: ignore[misc]


def has_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has hooks on its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def is_compiled(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def decompositions(operators: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """Torch's decompositions of these operators."""
    return dict(get_decompositions(list(operators)))


@contextmanager
def marking_nodes() -> Iterator[Callable[[dict[str, str] | None], None]]:
    """Context that returns a function which sets the marks of the nodes that are recorded from then on."""

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
    """Whether a value is a tensor without data, as in tracing."""
    return isinstance(value, Tensor) and (
        torch._is_functional_tensor(value)
        or isinstance(value, torch._subclasses.FakeTensor)
        or get_proxy_mode() is not None
    )


def before_wrapping(check: Callable[[nn.Module, str], None]) -> None:
    """Have `check` see, and refuse by raising, each module that DistributedDataParallel, FullyShardedDataParallel or
    DataParallel is about to wrap, with the wrapper's name."""
    for wrapper in (DistributedDataParallel, FullyShardedDataParallel, DataParallel):
        wrapper.__init__ = _checking(wrapper.__init__, wrapper.__name__, check)  # type: ignore[method-assign]


def _checking(init: Any, name: str, check: Callable[[nn.Module, str], None]) -> Any:
    @functools.wraps(init)
    def checked_init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        check(module, name)
        init(self, module, *args, **kwargs)

    return checked_init


class _Refusing(dict[Any, Any]):
    """State and registry of a module for torch's composable functions. It raises when one of these functions looks up
    itself or another one."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __contains__(self, function: Any) -> bool:
        # `torch.distributed.checkpoint` searches any module for FSDP1's state, and asks each submodule for "replicate"
        if sys._getframe(1).f_globals.get("__name__") == _traversal_utils.__name__:
            return False
        # in submodules of its module, each of these two functions looks up the other one by name
        name = _LOOKED_UP_BY.get(function, function)
        self._refuse(name if isinstance(name, str) else name.__name__)
        return False


_LOOKED_UP_BY = {"replicate": "fully_shard", "fully_shard": "replicate"}


def refuse_composable(module: nn.Module, refuse: Callable[[str], None]) -> None:
    """Have `refuse` raise where a composable function of torch's (`fully_shard`, `replicate`) is applied to a module,
    or `fully_shard` to a module that contains it. `refuse` is given the function's name."""
    vars(module)[STATE_KEY] = vars(module)[REGISTRY_KEY] = _Refusing(refuse)


def refuses_composable(module: nn.Module) -> bool:
    """Whether `refuse_composable` was called with the module."""
    return isinstance(vars(module).get(STATE_KEY), _Refusing)


def after_unscaling(hook: Callable[[torch.optim.Optimizer, dict[torch.device, Tensor]], None]) -> None:
    """Have each `GradScaler` call `hook` after it has unscaled an optimizer's gradients. The hook may change the
    tensors it gets: by device, 1 if a gradient is not finite, else 0."""
    unscale: Any = GradScaler._unscale_grads_

    def unscale_and_report(scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        by_device = unscale(scaler, optimizer, *args, **kwargs)
        hook(optimizer, by_device)
        return by_device

    GradScaler._unscale_grads_ = unscale_and_report  # type: ignore[assignment, method-assign]


def dtensor_like(template: DTensor, shard: Tensor) -> DTensor:
    """DTensor of this shard with another DTensor's spec. `DTensor.from_local` also checks and copies, which takes
    milliseconds a step for hundreds of gradients."""
    return DTensor(shard, template._spec, requires_grad=False)


def two_ranks() -> DeviceMesh:
    """A mesh with one axis of two ranks, without process groups."""
    return DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)


def strategies(
    operator: Any,
    arguments: tuple[Sequence[Any], dict[str, Any]],
    result: Any,
    placements: Sequence[Placement],
    mesh: DeviceMesh,
) -> list[tuple[tuple[Placement, ...], tuple[Placement | None, ...]]]:
    """(placements of tensor operands, placements of results) with which DTensor would run an operator whose operands
    have the given placements, on a mesh of one axis; empty if it has no strategy, or one that changes other arguments.
    Of `arguments` and `result`, only shapes and dtypes are used."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    if operator in propagator.op_to_shape_and_stride_idx or operator in propagator.op_to_scalar_shape_adjuster:
        return []
    remaining = list(placements)

    def to_spec(value: Any) -> Any:
        if isinstance(value, Tensor):
            meta = TensorMeta(value.shape, value.stride(), value.dtype)
            return DTensorSpec(mesh, (remaining.pop(0),), tensor_meta=meta)
        return type(value)(map(to_spec, value)) if isinstance(value, list | tuple) else value

    args, kwargs = arguments
    info = propagator.op_to_schema_info.get(operator) or propagator.op_to_schema_info_for_single_dim_strategy.get(
        operator
    )
    schema = propagator._wrap_with_op_strategy(
        OpSchema(
            operator,
            tuple(map(to_spec, args)),
            {key: to_spec(value) for key, value in kwargs.items()},
            schema_info=info,
        )
    )
    if (single := propagator.op_single_dim_strategy_funcs.get(operator)) is not None:
        metas = pytree.tree_map_only(
            Tensor, lambda tensor: TensorMeta(tensor.shape, tensor.stride(), tensor.dtype), result
        )
        strategy_of_mesh = _expand_single_dim_strategy_to_mesh(mesh, schema, single, metas)
        op_strategy = strategy_of_mesh(operator, schema.args_meta, schema.kwargs_meta)
    elif (strategy_of := propagator.op_strategy_funcs.get(operator)) is not None:
        op_strategy = strategy_of(schema)
    else:
        return []
    return [_placements_of(strategy, len(placements)) for strategy in op_strategy.strategies]


def _placements_of(strategy: Any, num_operands: int) -> tuple[tuple[Placement, ...], tuple[Placement | None, ...]]:
    result_specs = strategy.output_specs
    results = result_specs if isinstance(result_specs, tuple | list) else (result_specs,)
    operands = strategy.input_specs if strategy.input_specs is not None else (result_specs,) * num_operands
    return (
        tuple(spec.placements[0] for spec in operands),
        tuple(None if spec is None else spec.placements[0] for spec in results),
    )
