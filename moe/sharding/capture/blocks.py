"""Blocks that repeat in a module: captured once, and written into the graph as often as they are called.

Siblings in a list of modules that are the same but for their parameters' values are one operator each while the module
is captured, and one more for their gradients; the graph of the first is then put in the place of each.
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
from moe.sharding.capture.siblings import renumbered, sign_of_value
from moe.sharding.lines import REGION, beginning


@dataclass(frozen=True, eq=False)
class Block:
    """The graph of a block that is called with tensors of given shapes."""

    graph: fx.Graph
    tensors: dict[fx.Node, int]
    """Placeholders, each with its number among the arguments, then parameters and buffers."""
    tangents: dict[fx.Node, int]
    """Placeholders, each with the number of its output."""
    outputs: list[fx.Node]
    """What the block returns, then new values of buffers."""
    gradients: dict[int, fx.Node]
    """By the number of the argument, parameter or buffer."""
    backward: frozenset[fx.Node]
    made: list[Tensor]
    """Fake outputs."""
    written: list[int]
    """Numbers of the buffers that have new values."""
    constants: dict[fx.Node, Tensor]
    """Tensors that the graph has of its own."""


@dataclass
class Call:
    """One way to call blocks of one kind."""

    module: nn.Module
    tree: pytree.TreeSpec
    arguments: list[Any]
    """Fake tensors, and values that are none."""
    returned: Any = None
    """Fake tensors in the block's own form."""
    block: Block | None = None


@dataclass
class Calls:
    """Calls of repeated blocks, found while a module runs."""

    kinds: list[list[nn.Module]]
    """Blocks that are the same."""
    by_key: dict[Hashable, Call] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    """Of keys, in the order in which they are found."""
    paths: dict[int, str] = field(default_factory=dict)
    """Of modules, by their ids."""
    called: list[nn.Module] = field(default_factory=list)
    """The module of each call."""
    mutating: set[Hashable] = field(default_factory=set)
    """Keys of calls that change an argument in place; such modules are captured where they stand, not as operators."""

    def number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


_BLOCKS: ContextVar[dict[int, Block]] = ContextVar("blocks")


@torch.library.custom_op("shardyard::block", mutates_args=())
def _block(tensors: list[Tensor], number: int, instance: int) -> list[Tensor]:
    raise AssertionError("a block is only captured")


@_block.register_fake
def _(tensors: list[Tensor], number: int, instance: int) -> list[Tensor]:
    return [torch.empty_like(each) for each in _BLOCKS.get()[number].made]


@torch.library.custom_op("shardyard::block_backward", mutates_args=())
def _block_backward(
    tensors: list[Tensor], tangents: list[Tensor], number: int, instance: int
) -> list[Tensor]:
    raise AssertionError("a block is only captured")


@_block_backward.register_fake
def _(tensors: list[Tensor], tangents: list[Tensor], number: int, instance: int) -> list[Tensor]:
    return [torch.empty_like(tensors[at]) for at in _BLOCKS.get()[number].gradients]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.number, ctx.instance = inputs
    ctx.save_for_backward(*tensors)
    ctx.made = output


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[list[Tensor | None], None, None]:
    tensors = list(ctx.saved_tensors)
    block = _BLOCKS.get()[ctx.number]
    asked = list(block.tangents.values())
    given = [
        torch.zeros_like(block.made[at]) if (gradient := gradients[at]) is None else gradient for at in asked
    ]
    found = torch.ops.shardyard.block_backward(tensors, given, ctx.number, ctx.instance)
    by_number = dict(zip(block.gradients, found, strict=True))
    return [by_number.get(at) for at in range(len(tensors))], None, None


_block.register_autograd(_backward, setup_context=_keep)
FORWARD, BACKWARD = torch.ops.shardyard.block.default, torch.ops.shardyard.block_backward.default


@contextmanager
def _standing_in(kinds: list[list[nn.Module]], run: Callable[[nn.Module, Any, int], Any]) -> Iterator[None]:
    """Modules whose forward is something else, given (module, (arguments, keyword arguments), number of its kind)."""
    changed: list[nn.Module] = []

    def standing(module: nn.Module, kind: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: run(module, (args, kwargs), kind)

    try:
        for kind, alike in enumerate(kinds):
            for module in alike:
                changed.append(module)
                module.forward = standing(module, kind)
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)


def _key(kind: int, leaves: list[Any], tree: pytree.TreeSpec) -> Hashable | None:
    about: list[Hashable] = []
    for each in leaves:
        if isinstance(each, Tensor):
            about.append((tuple(each.shape), each.dtype, each.requires_grad, each.stride()))
        elif (sign := sign_of_value(each)) is None:
            return None
        else:
            about.append(sign)
    return kind, tuple(about), str(tree), torch.is_grad_enabled()


def _like(value: Any) -> Any:
    """A tensor of the same shape, strides and dtype, and alike to be trained."""
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


def _versions(leaves: list[Any]) -> list[int]:
    """Version counters of the tensors among the leaves."""
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]


def _fresh(value: Any) -> Any:
    """A new tensor like a block's result, which the caller may change in place."""
    if not isinstance(value, Tensor):
        return value
    tensor = torch.empty_like(value, requires_grad=value.requires_grad)
    return tensor.clone() if value.requires_grad else tensor


@contextmanager
def observed(calls: Calls) -> Iterator[None]:
    """Runs within find how repeated blocks are called: each way is run once, then what it gave is given again."""

    def run(module: nn.Module, given: Any, kind: int) -> Any:
        leaves, tree = pytree.tree_flatten(given)
        key = _key(kind, leaves, tree)
        if key is None or key in calls.mutating:
            return type(module).forward(module, *given[0], **given[1])
        if key not in calls.by_key:
            arguments, versions = [_like(leaf) for leaf in leaves], _versions(leaves)
            returned = type(module).forward(module, *given[0], **given[1])
            if _versions(leaves) != versions:
                calls.mutating.add(key)
                return returned
            register_data_classes(returned)
            calls.by_key[key] = Call(module, tree, arguments, returned)
            calls.number(key)
        return pytree.tree_map(_fresh, calls.by_key[key].returned)

    with _standing_in(calls.kinds, run):
        yield


@contextmanager
def as_operators(calls: Calls) -> Iterator[None]:
    """Within, repeated blocks are operators."""

    def run(module: nn.Module, given: Any, kind: int) -> Any:
        leaves, tree = pytree.tree_flatten(given)
        key = _key(kind, leaves, tree)
        call = calls.by_key.get(key) if key is not None else None
        if call is None or call.block is None:
            return type(module).forward(module, *given[0], **given[1])
        calls.called.append(module)
        buffers = list(module.buffers())
        tensors = [
            *(each for each in leaves if isinstance(each, Tensor)),
            *module.parameters(),
            *(each.clone() for each in buffers),
        ]
        made = torch.ops.shardyard.block(tensors, calls.number(key), len(calls.called))
        returned, form = pytree.tree_flatten(call.returned)
        iterator = iter(made)
        outputs = [next(iterator) if isinstance(each, Tensor) else each for each in returned]
        for at, new in zip(call.block.written, iterator, strict=True):
            buffers[at].copy_(new.detach())
        return pytree.tree_unflatten(outputs, form)

    token = _BLOCKS.set(
        {calls.number(key): call.block for key, call in calls.by_key.items() if call.block is not None}
    )
    try:
        with _standing_in(calls.kinds, run):
            yield
    finally:
        _BLOCKS.reset(token)


class BlockModule(nn.Module):
    """A call of a block, of tensors alone; `within` makes the context that it runs in."""

    def __init__(self, call: Call, within: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.block, self.call, self.within = call.module, call, within

    @beginning
    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(each, Tensor) else each for each in self.call.arguments]
        args, kwargs = pytree.tree_unflatten(leaves, self.call.tree)
        held = (*leaves, *self.parameters(), *self.buffers())
        with self.within():
            returned = type(self.block).forward(self.block, *args, **kwargs)
            flat = apart(pytree.tree_leaves(returned), held)  # before buffers that were set anew are written
        return tuple(flat)


def apart(flat: Sequence[Any], given: Sequence[Any]) -> tuple[Tensor, ...]:
    """The tensors among results, each for itself: of views of one tensor, and of what was given, torch would make the
    results anew from that, and leave out their gradients."""
    those = {id(each) for each in given}
    tensors = (each for each in flat if isinstance(each, Tensor))
    return tuple(each.clone() if each._is_view() or id(each) in those else each for each in tensors)


def block_of(
    call: Call, module: fx.GraphModule, after: Callable[[fx.Graph, set[fx.Node]], frozenset[fx.Node]]
) -> Block:
    """The block of a joint graph of its `BlockModule`; `after` gives the nodes that depend on others."""
    traced = module.graph
    names = [f"block.{name}" for name, _ in call.module.named_parameters()]
    buffers = [f"block.{name}" for name, _ in call.module.named_buffers()]
    num_arguments = sum(isinstance(each, Tensor) for each in call.arguments)
    at_of = {name: num_arguments + at for at, name in enumerate([*names, *buffers])}

    def number(what: Any) -> int:
        match what:
            case torch_private.PlainAOTInput(idx=idx):
                return idx
            case torch_private.ParamAOTInput(target=name) | torch_private.BufferAOTInput(target=name):
                return at_of[name]
        raise AssertionError(f"a block begins with {what}")

    tensors: dict[fx.Node, int] = {}
    tangents: dict[fx.Node, int] = {}
    for node in traced.nodes:
        if node.op != "placeholder":
            continue
        match node.meta["desc"]:
            case torch_private.TangentAOTInput(output=torch_private.PlainAOTOutput(idx=idx)):
                tangents[node] = idx
            case what:
                tensors[node] = number(what)
    outputs: list[fx.Node] = []
    updates: dict[int, fx.Node] = {}
    gradients: dict[int, fx.Node] = {}
    (results,) = traced.output_node().args
    for node, what in zip(results, traced.output_node().meta["desc"], strict=True):  # type: ignore[arg-type]
        match what:
            case torch_private.PlainAOTOutput():
                outputs.append(node)
            case torch_private.InputMutationAOTOutput(
                mutated_input=torch_private.BufferAOTInput(target=name)
            ):
                updates[buffers.index(name)] = node
            case torch_private.GradAOTOutput(grad_of=of) if node is not None:
                gradients[number(of)] = node
            case torch_private.InputMutationAOTOutput():
                raise ValueError("a block changes one of its arguments in place")
    made = [node.meta["val"] for node in (*outputs, *updates.values())]
    constants = {node: getattr(module, str(node.target)) for node in traced.nodes if node.op == "get_attr"}
    every = [*outputs, *updates.values()]
    return Block(
        traced,
        tensors,
        tangents,
        every,
        gradients,
        after(traced, set(tangents)),
        made,
        list(updates),
        constants,
    )


def written_out(module: fx.GraphModule, calls: Calls) -> None:
    """Put the graphs of blocks in the place of their operators."""
    graph = module.graph
    by_number = {calls.number(key): call for key, call in calls.by_key.items()}
    constants: dict[fx.Node, fx.Node] = {}
    inside: dict[Any, dict[fx.Node, Any]] = {}
    operators = [
        node for node in graph.nodes if node.op == "call_function" and node.target in (FORWARD, BACKWARD)
    ]
    for node in operators:
        tensors: Any = node.args[0]
        number: Any = node.args[-2]
        call = by_number[number]
        block = call.block
        assert block is not None
        if node.target is FORWARD:
            here = inside[node.args[-1]] = {each: tensors[at] for each, at in block.tensors.items()}
            for each, value in block.constants.items():
                if each not in constants:
                    constants[each] = _constant(module, f"block_{number}_{each.target}", value)
                here[each] = constants[each]
            results = [*block.outputs]
        else:
            tangents: Any = node.args[1]
            here = inside[node.args[-1]]
            here.update(zip(block.tangents, tangents, strict=True))
            results = [*block.gradients.values()]
        instance: Any = node.args[-1]
        called = calls.called[instance - 1]
        path, layers = calls.paths.get(id(called), ""), renumbered(call.module, called)
        for copied in _copies(node, block, here):
            if (within := copied.meta.get("block")) is not None:
                copied.meta["block"] = ".".join(filter(None, (path, within)))
            if (region := copied.meta.get(REGION)) is not None:
                copied.meta[REGION] = f"{instance}.{region}"
            copied.meta[REGION] = node.meta.get(REGION) or copied.meta.get(REGION)
            _renumber(copied, layers)
        for user in list(node.users):
            assert user.target is getitem
            at: Any = user.args[1]
            user.replace_all_uses_with(here[results[at]])
            graph.erase_node(user)
    for node in reversed(operators):
        graph.erase_node(node)


def _constant(module: fx.GraphModule, name: str, value: Tensor) -> fx.Node:
    setattr(module, name, value)
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        node = module.graph.get_attr(name)
    node.meta["val"] = value
    return node


def _copies(before: fx.Node, block: Block, here: dict[fx.Node, Any]) -> Iterator[fx.Node]:
    """The nodes of a block's forward pass or backward pass, put before the operator that it is."""
    with before.graph.inserting_before(before):
        for node in block.graph.nodes:
            is_backward = node in block.backward
            if node.op == "call_function" and is_backward == (before.target is BACKWARD):
                here[node] = copied = before.graph.node_copy(node, lambda each: here[each])
                copied.meta["where"] = node.meta.get("where") or before.meta.get("where")
                yield copied


def _renumber(node: fx.Node, layers: Mapping[int, int]) -> None:
    """Key what one of our own operators draws by another layer."""
    if layers and getattr(node.target, "namespace", "") == "shardyard":
        names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
        node.args = tuple(
            layers.get(value, value) if name == "layer" and isinstance(value, int) else value
            for name, value in zip(names, node.args, strict=False)
        )
