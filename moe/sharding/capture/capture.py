"""Capture of a module: forward pass, loss and backward pass as one graph, under fake tensors, without weights."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from moe.overrides import overriding
from moe.plan.cluster.cluster import Cluster
from moe.sharding import torch_private
from moe.sharding.arguments import call, names_of_inputs, register_data_classes, signature_of
from moe.sharding.bindings.bindings import BINDINGS
from moe.sharding.capture import blocks
from moe.sharding.capture.admission import admit
from moe.sharding.capture.block_paths import note_blocks
from moe.sharding.capture.effects import Effects
from moe.sharding.capture.faked import fake, with_fake_tensors
from moe.sharding.capture.refusals import cannot, check_returned, effect, in_place_change, opaque
from moe.sharding.capture.registered import written_back
from moe.sharding.capture.siblings import find_repeats
from moe.sharding.capture.simplify import CHECKS, FREE, simplify
from moe.sharding.capture.substitutes import Substitutes, cond, grouped_experts
from moe.sharding.decompositions.decomposed import decompositions
from moe.sharding.hints.annotate import capturing
from moe.sharding.hints.manual import PARTS, ManualPart
from moe.sharding.lines import REGION, LineMarker, beginning, note_lines, recomputed_region
from moe.sharding.operands import RECOMPUTED, is_operator
from moe.spec import SpecError, spec_error

aten = torch.ops.aten

LeafKind = Literal["parameter", "buffer", "input", "tangent", "constant"]


@dataclass(frozen=True)
class GraphInput:
    """A tensor that a captured graph takes or contains as a constant."""

    kind: LeafKind
    name: str
    """Name of a parameter or buffer in the module; path of an input (`inputs.0`), or of a tangent's output."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """Joint graph of a module: forward pass, loss and backward pass."""

    graph: fx.GraphModule
    leaves: dict[fx.Node, GraphInput]
    outputs: tuple[fx.Node | Any, ...]
    """Flattened results of the module: nodes, and values that are not tensors."""
    output_tree: pytree.TreeSpec
    updates: dict[str, fx.Node]
    """New values of buffers."""
    gradients: dict[str, fx.Node]
    """Gradients by parameter. Parameters that no output depends on have none."""
    first_names: dict[str, str]
    """Names in the graph: of a parameter, the first of its names, by each of its names; of an input, its path by the
    name of forward's argument."""
    parts: dict[str, ManualPart]
    """Manual parts, by name."""
    digest: str
    """Hash of all that is computed: operators, arguments, shapes, dtypes."""

    @property
    def input_bytes(self) -> int:
        """Bytes of inputs and tangents, which are whole on every rank."""
        return sum(
            leaf.dtype.itemsize * math.prod(leaf.shape)
            for leaf in self.leaves.values()
            if leaf.kind in ("input", "tangent")
        )

    @property
    def backward(self) -> frozenset[fx.Node]:
        """Nodes of the backward pass: those that depend on a tangent, recomputed ones, and views and operators without
        operands that only the backward pass uses."""
        first = {node for node, leaf in self.leaves.items() if leaf.kind == "tangent"}
        first |= {node for node in self.graph.graph.nodes if RECOMPUTED in node.meta}
        nodes = set(_dependents(self.graph.graph, first))
        for node in reversed(self.graph.graph.nodes):
            is_again = is_operator(node) and (node.target in FREE or not node.all_input_nodes)
            if is_again and node.users and all(user in nodes for user in node.users):
                nodes.add(node)
        return frozenset(nodes)


def _digest(graph: fx.Graph) -> str:
    lines = [
        f"{node.name}={node.target}{node.args}{node.kwargs}:{_signature(node.meta.get('val'))}"
        + (f":again in {region}" if (region := node.meta.get(REGION)) else "")
        for node in graph.nodes
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _signature(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)}{value.dtype}"
    if isinstance(value, list | tuple):
        return str([_signature(element) for element in value])
    return str(value)


def _dependents(graph: fx.Graph, nodes: set[fx.Node]) -> frozenset[fx.Node]:
    dependents = set(nodes)
    for node in graph.nodes:
        if node.op != "output" and any(input_node in dependents for input_node in node.all_input_nodes):
            dependents.add(node)
    return frozenset(dependents)


def device_of(cluster: Cluster) -> torch.device:
    """The device that programs of a cluster are captured for and run on: a GPU if the cluster and this machine have
    GPUs, else the CPU."""
    return torch.device("cuda" if cluster.calibrated_device.kind == "cuda" and torch.cuda.is_available() else "cpu")


@torch.inference_mode(False)
@torch.enable_grad()
def capture(
    module: nn.Module,
    sample: Sequence[Any],
    loss: Callable[[Any], Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> CapturedGraph:
    """The joint graph of `module(*sample)`, followed by `loss` of its result if given. The sample may end in
    `Keywords`.

    The module may be on the meta device, and is left unchanged. Of tensors in `sample`, only shapes and dtypes are
    used. Raises SpecError, naming the user's line, for code that cannot be captured and for side effects that a program
    would not have.
    """
    admit(module, sample)
    if isinstance(loss, nn.Module) and list(loss.parameters()):
        rule = "has parameters, which are not part of the program"
        remedy = "call it in the module's forward and return the loss"
        raise spec_error("unsupported", "loss", type(loss).__name__, rule, remedy)
    mode = torch_private.FakeTensorMode(allow_non_fake_inputs=True)
    arguments = tuple(fake(value, mode, device) for value in sample)
    wrapper = _TracedModule(module, loss)
    parts: dict[str, ManualPart] = {}
    with (
        mode,
        ExitStack() as stack,
        torch_private.marking_nodes() as mark,
        capturing(),
        overriding(BINDINGS),
        torch_private.compiling(),
    ):
        token = PARTS.set(parts)
        stack.callback(PARTS.reset, token)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch_private.without_mkldnn())
        stack.enter_context(torch_private.checkpointing(recomputed_region))
        stack.enter_context(torch_private.cond_as(cond))
        stack.enter_context(grouped_experts(module))
        stack.enter_context(with_fake_tensors(module, mode, torch.device(device)))
        wrapper.mark = mark
        try:
            effects, observations = Effects(module), list[blocks.Calls]()
            wrapper.line_of, wrapper.begin = effects.line_of, effects.clear_caches
            stack.callback(effects.put_back)
            effects.check(lambda: observations.append(_observe(wrapper, arguments)))
            calls = observations[-1]
            calls.paths = {id(submodule): path for path, submodule in module.named_modules()}
            for call in calls.by_key.values():
                call.block = _block(call, wrapper)
            with blocks.as_operators(calls):
                graph_module = torch_private.joint_graph(stack, wrapper, arguments, decompositions())
            _check_changes(wrapper, arguments, graph_module)
        except SpecError:
            raise
        except Exception as error:
            raise cannot(module, error, lambda: wrapper(*arguments)) from error
    names = names_of_inputs(signature_of(module), sample)
    return _read(module, graph_module, wrapper, calls, parts, names)


def _check_changes(wrapper: "_TracedModule", arguments: tuple[Any, ...], graph_module: fx.GraphModule) -> None:
    """Raise SpecError if an input or a parameter is changed in place."""
    for descriptor in graph_module.graph.output_node().meta["desc"]:
        match descriptor:
            case torch_private.InputMutationAOTOutput(mutated_input=torch_private.PlainAOTInput(idx=number)):
                leaf = pytree.tree_leaves(arguments)[number]
                raise in_place_change(wrapper.module, lambda: wrapper(*arguments), f"inputs.{number}", leaf, True)
            case torch_private.InputMutationAOTOutput(mutated_input=torch_private.ParamAOTInput(target=name)):
                parameter, name = wrapper.get_parameter(name), name.removeprefix("module.")
                raise in_place_change(wrapper.module, lambda: wrapper(*arguments), name, parameter, False)


def _observe(wrapper: "_TracedModule", arguments: tuple[Any, ...]) -> blocks.Calls:
    """Run the module, and return the calls of its repeated blocks."""
    calls, token = blocks.Calls(find_repeats(wrapper.module)), PARTS.set({})
    try:
        with blocks.observe_calls(calls):
            wrapper(*arguments)
    finally:
        PARTS.reset(token)
    return calls


def _block(call: blocks.Call, wrapper: "_TracedModule") -> blocks.CapturedBlock:
    module = blocks.BlockModule(call, lambda: _mark_lines(wrapper, call.module))
    tensors = tuple(argument for argument in call.arguments if isinstance(argument, Tensor))
    with ExitStack() as stack:
        graph_module = torch_private.joint_graph(stack, module, tensors, decompositions())
    note_lines(graph_module.graph)
    return blocks.block_of(call, graph_module, _dependents)


@contextmanager
def _mark_lines(wrapper: "_TracedModule", module: nn.Module) -> Iterator[None]:
    """Context in which a module is run: operators are marked with the user's lines, and buffers may be reassigned."""
    wrapper.begin()
    with LineMarker(wrapper.mark, module), Substitutes(), written_back(module, wrapper.line_of):
        yield


TENSOR = object()
"""Placeholder for a tensor among the results of a module."""


class _TracedModule(nn.Module):
    """The module followed by its loss. Each operator is marked with the user's line and the module that it belongs
    to."""

    def __init__(self, module: nn.Module, loss: Callable[[Any], Tensor] | None) -> None:
        super().__init__()
        self.module, self.loss = module, loss
        self.mark: Callable[[dict[str, str] | None], None] = lambda marks: None
        self.line_of: Callable[[str], str] = lambda name: type(module).__name__
        self.begin: Callable[[], None] = lambda: None
        """Preparation of a run."""
        self.tree: pytree.TreeSpec | None = None
        self.flat: list[Any] = []

    @beginning
    def forward(self, *arguments: Any) -> Any:
        inputs = (*pytree.tree_leaves(arguments), *self.parameters(), *self.buffers())
        with _mark_lines(self, self.module):
            output = call(self.module, arguments)
            if self.loss is not None:
                output = self.loss(output)
            register_data_classes(output)
            flat, self.tree = pytree.tree_flatten(output)
            results = blocks.copy_aliases(flat, inputs)  # before reassigned buffers are written
        self.mark(None)
        check_returned(self.module, flat)
        self.flat = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat]
        return results


def _read(
    module: nn.Module,
    graph_module: fx.GraphModule,
    wrapper: _TracedModule,
    calls: blocks.Calls,
    parts: dict[str, ManualPart],
    names_of_inputs: dict[str, str],
) -> CapturedGraph:
    """The captured graph of a joint graph: blocks copied in, simplified, with results and leaves by the module's
    names."""
    graph, first = graph_module.graph, _first_names(module)
    note_lines(graph)
    _without_tokens(graph)
    outputs, updates, gradients = _split_outputs(graph, wrapper.flat, first)
    graph.output_node().args = ((*outputs, *updates.values(), *gradients.values()),)
    blocks.inline_blocks(graph_module, calls)
    leaves = _leaves(graph_module, first)
    simplify(graph, _dependents(graph, {node for node, leaf in leaves.items() if leaf.kind == "tangent"}))
    note_blocks(module, graph)
    present, graph_outputs = set(graph.nodes), iter(graph.output_node().args[0])  # type: ignore[arg-type]
    assert wrapper.tree is not None
    return CapturedGraph(
        graph_module,
        {node: leaf for node, leaf in leaves.items() if node in present},
        tuple(next(graph_outputs) for _ in outputs),
        wrapper.tree,
        {name: next(graph_outputs) for name in updates},
        {name: next(graph_outputs) for name in gradients},
        first_names=first | names_of_inputs,
        parts=parts,
        digest=_digest(graph),
    )


def _split_outputs(
    graph: fx.Graph, flat: Sequence[Any], first_names: dict[str, str]
) -> tuple[list[Any], dict[str, fx.Node], dict[str, fx.Node]]:
    """(results of the module: `flat` with nodes in place of `TENSOR`; new values of buffers; gradients)."""
    outputs, updates, gradients = list(flat), dict[str, fx.Node](), dict[str, fx.Node]()
    tensor_indices = (index for index, value in enumerate(flat) if value is TENSOR)
    output = graph.output_node()
    for node, descriptor in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
        match descriptor:
            case torch_private.InputMutationAOTOutput(mutated_input=torch_private.BufferAOTInput(target=name)):
                updates[name.removeprefix("module.")] = node
            case torch_private.PlainAOTOutput():
                outputs[next(tensor_indices)] = node
            case torch_private.GradAOTOutput(grad_of=torch_private.ParamAOTInput(target=name)):
                if node is not None:
                    name = first_names[name.removeprefix("module.")]
                    gradients[name] = _sum(graph, gradients[name], node) if name in gradients else node
            case torch_private.GradAOTOutput() | None:
                pass
            case _:
                raise AssertionError(f"unexpected output of a graph: {descriptor}")
    return outputs, updates, gradients


def _leaves(graph_module: fx.GraphModule, first: dict[str, str]) -> dict[fx.Node, GraphInput]:
    """Tensors that a graph takes or contains, each once. Other placeholders are erased."""
    graph, leaves = graph_module.graph, dict[fx.Node, GraphInput]()
    nodes_by_name: dict[tuple[str, str], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            value = getattr(graph_module, str(node.target))
            if not isinstance(value, Tensor):
                raise opaque(node, value)
            leaves[node] = GraphInput("constant", str(node.target), tuple(value.shape), value.dtype)
        elif node.op == "placeholder":
            kind, name = _leaf(node.meta["desc"])
            value, name = node.meta.get("val"), first.get(name, name)
            if not isinstance(value, Tensor):  # None or a number, which the graph contains as a constant
                graph.erase_node(node)
                continue
            if (kind, name) in nodes_by_name:  # one tensor under several names
                node.replace_all_uses_with(nodes_by_name[kind, name])
                graph.erase_node(node)
                continue
            nodes_by_name[kind, name] = node
            leaves[node] = GraphInput(kind, name, tuple(value.shape), value.dtype)
    return leaves


def _first_names(module: nn.Module) -> dict[str, str]:
    """The first name of each parameter and buffer, by each of its names."""
    names: dict[int, str] = {}
    named_parameters = module.named_parameters(remove_duplicate=False)
    return {name: names.setdefault(id(parameter), name) for name, parameter in named_parameters}


def _without_tokens(graph: fx.Graph) -> None:
    """Remove the ordering tokens of operators that check a value, and marks for a profiler. Raises SpecError for other
    operators with side effects."""
    for node in reversed(graph.nodes):
        if node.target in _PROFILED:
            graph.erase_node(node)
        elif node.target is torch_private.with_effects:
            token, operator, *_ = node.args
            if operator not in CHECKS:
                raise effect(node)
            for user in list(node.users):
                user.replace_all_uses_with(token)
                graph.erase_node(user)
            graph.erase_node(node)
    output = graph.output_node()
    outputs = [
        (node, descriptor)
        for node, descriptor in zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
        if not isinstance(descriptor, torch_private.ForwardTokenAOTOutput | torch_private.BackwardTokenAOTOutput)
    ]
    output.args, output.meta["desc"] = (
        (tuple(node for node, _ in outputs),),
        [descriptor for _, descriptor in outputs],
    )
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], torch_private.ForwardTokenAOTInput | torch_private.BackwardTokenAOTInput):
            graph.erase_node(node)


_PROFILED = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
    torch.ops.profiler._record_function_enter.default,
    torch.ops.profiler._record_function_exit.default,
}


def _sum(graph: fx.Graph, first: fx.Node, second: fx.Node) -> fx.Node:
    """Sum of the gradients of one parameter under two names."""
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(aten.add.Tensor, (first, second))
    node.meta["val"], node.meta["line"] = first.meta["val"], second.meta.get("line")
    return node


def _leaf(descriptor: Any) -> tuple[LeafKind, str]:
    match descriptor:
        case torch_private.ParamAOTInput(target=name):
            return "parameter", name.removeprefix("module.")
        case torch_private.BufferAOTInput(target=name):
            return "buffer", name.removeprefix("module.")
        case torch_private.PlainAOTInput(idx=number):
            return "input", f"inputs.{number}"
        case torch_private.TangentAOTInput(output=torch_private.PlainAOTOutput(idx=number)):
            return "tangent", f"outputs.{number}"
    raise AssertionError(f"unexpected input of a graph: {descriptor}")
