"""Repeated blocks of a module: captured once, and copied into the graph for each call.

While the module is captured, each sibling in a list of modules that differs from the others only in the values of its
parameters is one operator, and its gradients are one more. Afterwards these operators are replaced by copies of the
graph of the first sibling.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from moe.sharding import torch_private
from moe.sharding.arguments import register_data_classes
from moe.sharding.capture.siblings import map_layer_numbers, sign_of_value
from moe.sharding.lines import REGION, beginning


@dataclass(frozen=True, eq=False)
class CapturedBlock:
    """Graph of a block, for a call with tensors of given shapes."""

    graph: fx.Graph
    tensors: dict[fx.Node, int]
    """Placeholders, each with its number among the arguments, parameters and buffers, in this order."""
    tangents: dict[fx.Node, int]
    """Placeholders, each with the number of its output."""
    outputs: list[fx.Node]
    """Results of the block, then new values of buffers."""
    gradients: dict[int, fx.Node]
    """Gradients, by the number of the argument, parameter or buffer."""
    backward: frozenset[fx.Node]
    fake_outputs: list[Tensor]
    """Fake tensors of the same shapes as `outputs`."""
    written_buffers: list[int]
    """Numbers of the buffers that have new values."""
    constants: dict[fx.Node, Tensor]
    """Constants of the graph."""


@dataclass
class Call:
    """Signature of a call of blocks of one kind."""

    module: nn.Module
    tree: pytree.TreeSpec
    arguments: list[Any]
    """Fake tensors and other values."""
    result: Any = None
    """Fake result, nested as the block returns it."""
    block: CapturedBlock | None = None


@dataclass
class Calls:
    """Calls of repeated blocks, found while a module runs."""

    kinds: list[list[nn.Module]]
    """Lists of identical blocks."""
    by_key: dict[Hashable, Call] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    """Numbers of keys, in the order in which the keys are found."""
    paths: dict[int, str] = field(default_factory=dict)
    """Paths of modules by their ids."""
    modules: list[nn.Module] = field(default_factory=list)
    """The module of each call."""
    mutating: set[Hashable] = field(default_factory=set)
    """Keys of calls that change an argument in place. Such modules are captured as part of the graph, not as
    operators."""

    def number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


_BLOCKS: ContextVar[dict[int, CapturedBlock]] = ContextVar("blocks")


@torch.library.custom_op("shardyard::block", mutates_args=())
def _block(tensors: list[Tensor], number: int, instance: int) -> list[Tensor]:
    raise AssertionError("a block cannot be called")


@_block.register_fake
def _(tensors: list[Tensor], number: int, instance: int) -> list[Tensor]:
    return [torch.empty_like(output) for output in _BLOCKS.get()[number].fake_outputs]


@torch.library.custom_op("shardyard::block_backward", mutates_args=())
def _block_backward(tensors: list[Tensor], tangents: list[Tensor], number: int, instance: int) -> list[Tensor]:
    raise AssertionError("a block cannot be called")


@_block_backward.register_fake
def _(tensors: list[Tensor], tangents: list[Tensor], number: int, instance: int) -> list[Tensor]:
    return [torch.empty_like(tensors[index]) for index in _BLOCKS.get()[number].gradients]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.number, ctx.instance = inputs
    ctx.save_for_backward(*tensors)
    ctx.fake_outputs = output


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[list[Tensor | None], None, None]:
    tensors = list(ctx.saved_tensors)
    block = _BLOCKS.get()[ctx.number]
    output_numbers = list(block.tangents.values())
    tangents = [
        torch.zeros_like(block.fake_outputs[index]) if (gradient := gradients[index]) is None else gradient
        for index in output_numbers
    ]
    block_gradients = torch.ops.shardyard.block_backward(tensors, tangents, ctx.number, ctx.instance)
    by_number = dict(zip(block.gradients, block_gradients, strict=True))
    return [by_number.get(index) for index in range(len(tensors))], None, None


_block.register_autograd(_backward, setup_context=_keep)
FORWARD, BACKWARD = torch.ops.shardyard.block.default, torch.ops.shardyard.block_backward.default


@contextmanager
def _replaced_forwards(kinds: list[list[nn.Module]], run: Callable[[nn.Module, Any, int], Any]) -> Iterator[None]:
    """Context in which `run(module, (arguments, keyword arguments), number of the kind)` replaces the forward of each
    module of `kinds`."""
    patched_modules: list[nn.Module] = []

    def replacement(module: nn.Module, kind: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: run(module, (args, kwargs), kind)

    try:
        for kind, alike in enumerate(kinds):
            for module in alike:
                patched_modules.append(module)
                module.forward = replacement(module, kind)
        yield
    finally:
        for module in patched_modules:
            vars(module).pop("forward", None)


def _key(kind: int, leaves: list[Any], tree: pytree.TreeSpec) -> Hashable | None:
    signs: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            signs.append((tuple(leaf.shape), leaf.dtype, leaf.requires_grad, leaf.stride()))
        elif (sign := sign_of_value(leaf)) is None:
            return None
        else:
            signs.append(sign)
    return kind, tuple(signs), str(tree), torch.is_grad_enabled()


def _empty_like(value: Any) -> Any:
    """A tensor with the same shape, strides, dtype and `requires_grad`; other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return tensor.requires_grad_(value.requires_grad)


def _versions(leaves: list[Any]) -> list[int]:
    """Version counters of the tensors among the leaves."""
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]


def _fresh(value: Any) -> Any:
    """A new tensor like a block's result, which the caller may change in place; other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    tensor = torch.empty_like(value, requires_grad=value.requires_grad)
    return tensor.clone() if value.requires_grad else tensor


@contextmanager
def observe_calls(calls: Calls) -> Iterator[None]:
    """Context that records how repeated blocks are called. For each key only the first call is run; later calls return
    copies of its result."""

    def run(module: nn.Module, inputs: Any, kind: int) -> Any:
        leaves, tree = pytree.tree_flatten(inputs)
        key = _key(kind, leaves, tree)
        if key is None or key in calls.mutating:
            return type(module).forward(module, *inputs[0], **inputs[1])
        if key not in calls.by_key:
            arguments, versions = [_empty_like(leaf) for leaf in leaves], _versions(leaves)
            output = type(module).forward(module, *inputs[0], **inputs[1])
            if _versions(leaves) != versions:
                calls.mutating.add(key)
                return output
            register_data_classes(output)
            calls.by_key[key] = Call(module, tree, arguments, output)
            calls.number(key)
        return pytree.tree_map(_fresh, calls.by_key[key].result)

    with _replaced_forwards(calls.kinds, run):
        yield


@contextmanager
def as_operators(calls: Calls) -> Iterator[None]:
    """Context in which repeated blocks are operators."""

    def run(module: nn.Module, inputs: Any, kind: int) -> Any:
        leaves, tree = pytree.tree_flatten(inputs)
        key = _key(kind, leaves, tree)
        call = calls.by_key.get(key) if key is not None else None
        if call is None or call.block is None:
            return type(module).forward(module, *inputs[0], **inputs[1])
        calls.modules.append(module)
        buffers = list(module.buffers())
        tensors = [
            *(leaf for leaf in leaves if isinstance(leaf, Tensor)),
            *module.parameters(),
            *(buffer.clone() for buffer in buffers),
        ]
        block_outputs = torch.ops.shardyard.block(tensors, calls.number(key), len(calls.modules))
        output_leaves, form = pytree.tree_flatten(call.result)
        iterator = iter(block_outputs)
        outputs = [next(iterator) if isinstance(leaf, Tensor) else leaf for leaf in output_leaves]
        for index, new_value in zip(call.block.written_buffers, iterator, strict=True):
            buffers[index].copy_(new_value.detach())
        return pytree.tree_unflatten(outputs, form)

    token = _BLOCKS.set({calls.number(key): call.block for key, call in calls.by_key.items() if call.block is not None})
    try:
        with _replaced_forwards(calls.kinds, run):
            yield
    finally:
        _BLOCKS.reset(token)


class BlockModule(nn.Module):
    """Call of a block as a module that takes and returns only tensors. It runs in the context of `make_context`."""

    def __init__(self, call: Call, make_context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.block, self.call, self.make_context = call.module, call, make_context

    @beginning
    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        iterator = iter(tensors)
        leaves = [next(iterator) if isinstance(argument, Tensor) else argument for argument in self.call.arguments]
        args, kwargs = pytree.tree_unflatten(leaves, self.call.tree)
        inputs = (*leaves, *self.parameters(), *self.buffers())
        with self.make_context():
            output = type(self.block).forward(self.block, *args, **kwargs)
            flat = copy_aliases(pytree.tree_leaves(output), inputs)  # before reassigned buffers are written
        return tuple(flat)


def copy_aliases(flat: Sequence[Any], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the tensors among the results, with copies of views and of inputs: torch would otherwise recreate these
    results from their base or from the input, and omit their gradients."""
    input_ids = {id(value) for value in inputs}
    tensors = (value for value in flat if isinstance(value, Tensor))
    return tuple(tensor.clone() if tensor._is_view() or id(tensor) in input_ids else tensor for tensor in tensors)


def block_of(
    call: Call, module: fx.GraphModule, dependents: Callable[[fx.Graph, set[fx.Node]], frozenset[fx.Node]]
) -> CapturedBlock:
    """The captured block of a joint graph of its `BlockModule`. `dependents` returns the nodes that depend on given
    ones."""
    graph = module.graph
    names = [f"block.{name}" for name, _ in call.module.named_parameters()]
    buffers = [f"block.{name}" for name, _ in call.module.named_buffers()]
    num_arguments = sum(isinstance(argument, Tensor) for argument in call.arguments)
    indices = {name: num_arguments + index for index, name in enumerate([*names, *buffers])}

    def number(descriptor: Any) -> int:
        match descriptor:
            case torch_private.PlainAOTInput(idx=idx):
                return idx
            case torch_private.ParamAOTInput(target=name) | torch_private.BufferAOTInput(target=name):
                return indices[name]
        raise AssertionError(f"unexpected input of a block: {descriptor}")

    tensors: dict[fx.Node, int] = {}
    tangents: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        match node.meta["desc"]:
            case torch_private.TangentAOTInput(output=torch_private.PlainAOTOutput(idx=idx)):
                tangents[node] = idx
            case descriptor:
                tensors[node] = number(descriptor)
    outputs: list[fx.Node] = []
    updates: dict[int, fx.Node] = {}
    gradients: dict[int, fx.Node] = {}
    (results,) = graph.output_node().args
    for node, descriptor in zip(results, graph.output_node().meta["desc"], strict=True):  # type: ignore[arg-type]
        match descriptor:
            case torch_private.PlainAOTOutput():
                outputs.append(node)
            case torch_private.InputMutationAOTOutput(mutated_input=torch_private.BufferAOTInput(target=name)):
                updates[buffers.index(name)] = node
            case torch_private.GradAOTOutput(grad_of=grad_input) if node is not None:
                gradients[number(grad_input)] = node
            case torch_private.InputMutationAOTOutput():
                raise ValueError("a block modifies an argument in place")
    fake_outputs = [node.meta["val"] for node in (*outputs, *updates.values())]
    constants = {node: getattr(module, str(node.target)) for node in graph.nodes if node.op == "get_attr"}
    all_outputs = [*outputs, *updates.values()]
    return CapturedBlock(
        graph,
        tensors,
        tangents,
        all_outputs,
        gradients,
        dependents(graph, set(tangents)),
        fake_outputs,
        list(updates),
        constants,
    )


def inline_blocks(module: fx.GraphModule, calls: Calls) -> None:
    """Replace the operators of blocks with copies of the blocks' graphs."""
    graph = module.graph
    by_number = {calls.number(key): call for key, call in calls.by_key.items()}
    constants: dict[fx.Node, fx.Node] = {}
    node_maps: dict[Any, dict[fx.Node, Any]] = {}
    operators = [node for node in graph.nodes if node.op == "call_function" and node.target in (FORWARD, BACKWARD)]
    for node in operators:
        tensors: Any = node.args[0]
        number: Any = node.args[-2]
        call = by_number[number]
        block = call.block
        assert block is not None
        if node.target is FORWARD:
            node_map = node_maps[node.args[-1]] = {
                placeholder: tensors[index] for placeholder, index in block.tensors.items()
            }
            for constant, value in block.constants.items():
                if constant not in constants:
                    constants[constant] = _constant(module, f"block_{number}_{constant.target}", value)
                node_map[constant] = constants[constant]
            results = [*block.outputs]
        else:
            tangents: Any = node.args[1]
            node_map = node_maps[node.args[-1]]
            node_map.update(zip(block.tangents, tangents, strict=True))
            results = [*block.gradients.values()]
        instance: Any = node.args[-1]
        block_module = calls.modules[instance - 1]
        path, layers = calls.paths.get(id(block_module), ""), map_layer_numbers(call.module, block_module)
        for copy in _copies(node, block, node_map):
            if (inner_path := copy.meta.get("block")) is not None:
                copy.meta["block"] = ".".join(filter(None, (path, inner_path)))
            if (region := copy.meta.get(REGION)) is not None:
                copy.meta[REGION] = f"{instance}.{region}"
            copy.meta[REGION] = node.meta.get(REGION) or copy.meta.get(REGION)
            _renumber(copy, layers)
        for user in list(node.users):
            assert user.target is getitem
            index: Any = user.args[1]
            user.replace_all_uses_with(node_map[results[index]])
            graph.erase_node(user)
    for node in reversed(operators):
        graph.erase_node(node)


def _constant(module: fx.GraphModule, name: str, value: Tensor) -> fx.Node:
    setattr(module, name, value)
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        node = module.graph.get_attr(name)
    node.meta["val"] = value
    return node


def _copies(operator: fx.Node, block: CapturedBlock, node_map: dict[fx.Node, Any]) -> Iterator[fx.Node]:
    """Copy the nodes of a block's forward pass or backward pass to before the block's operator."""
    with operator.graph.inserting_before(operator):
        for node in block.graph.nodes:
            is_backward = node in block.backward
            if node.op == "call_function" and is_backward == (operator.target is BACKWARD):
                node_map[node] = copy = operator.graph.node_copy(node, lambda operand: node_map[operand])
                copy.meta["line"] = node.meta.get("line") or operator.meta.get("line")
                yield copy


def _renumber(node: fx.Node, layers: Mapping[int, int]) -> None:
    """Change the number of the layer that is a key of the random numbers of this package's operators."""
    if layers and getattr(node.target, "namespace", "") == "shardyard":
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        node.args = tuple(
            layers.get(value, value) if name == "layer" and isinstance(value, int) else value
            for name, value in zip(names, node.args, strict=False)
        )
