"""A captured graph with its hints: annotations inserted, and the requested placement of each node."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.hints.annotate import PLACED, hint_of
from moe.sharding.hints.device_arrays import Order, common_order, shape_of_array
from moe.sharding.hints.hints import Devices, Hint, Pin, axes_named, hint_to_plain, match_hints, pin_of
from moe.sharding.operands import is_operator, shape_of
from moe.sharding.placement import MAX_AXES
from moe.spec import spec_error


@dataclass(frozen=True)
class RequestedPlacement:
    """A hint on one tensor."""

    origin: str
    """Origin of the hint: the pattern, or the line of an annotation."""
    hint: Hint
    node: fx.Node


@dataclass(frozen=True, eq=False)
class AnnotatedGraph:
    """A captured graph with its requested placements. Hints on inputs and parameters have become annotation nodes."""

    capture: CapturedGraph
    requested_placements: tuple[RequestedPlacement, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that hints name, in order."""
        return axes_named(request.hint for request in self.requested_placements)

    def devices(self, mesh: Mapping[str, int], ignored_hints: frozenset[str] = frozenset()) -> Order:
        """Device at each place of a mesh that agrees with every requested array of devices. Raises SpecError where no
        order does."""
        arrays = (
            (request.hint.ids, len(shape_of(request.node)), _path(request.origin, self._name(request)))
            for request in self.requested_placements
            if isinstance(request.hint, Devices) and request.origin not in ignored_hints
        )
        return common_order(arrays, mesh)

    def mesh_of_arrays(self) -> dict[str, int] | None:
        """Mesh with an axis for each split dimension of the array of devices that splits the most dimensions; None
        without arrays, or if hints name axes. Raises SpecError if it splits more dimensions than a mesh may have
        axes."""
        longest: list[int] = []
        for request in self.requested_placements:
            if not isinstance(request.hint, Devices):
                continue
            cuts = [size for size in shape_of_array(request.hint.ids) if size > 1]
            if len(cuts) > MAX_AXES:
                path = _path(request.origin, self._name(request))
                rule = f"must split at most {MAX_AXES} dimensions, the maximum number of mesh axes"
                remedy = "split fewer dimensions into more parts"
                raise spec_error("unsupported", path, f"shape {shape_of_array(request.hint.ids)}", rule, remedy)
            longest = max(longest, cuts, key=len)
        return None if self.axes or not longest else {f"axis{number}": size for number, size in enumerate(longest)}

    def pins(self, mesh: Mapping[str, int], ignored_hints: frozenset[str] = frozenset()) -> dict[str, Pin]:
        """Requested placements, by node. Raises SpecError for dimensions and axes that do not exist, and for
        two placements requested for one tensor."""
        pins: dict[str, Pin] = {}
        requests: dict[str, RequestedPlacement] = {}
        devices = self.devices(mesh, ignored_hints)
        for request in self.requested_placements:
            if request.origin in ignored_hints:
                continue
            num_dims = len(shape_of(request.node))
            pin = pin_of(request.hint, num_dims, mesh, request.origin, self._name(request), devices)
            earlier_pin = pins.get(request.node.name)
            if earlier_pin is not None and earlier_pin != pin:
                earlier = requests[request.node.name]
                rule = f"contradicts {earlier.origin} (={earlier.hint}) for the same tensor"
                remedy = "drop one of the two"
                raise spec_error("conflict", request.origin, str(request.hint), rule, remedy)
            pins[request.node.name], requests[request.node.name] = pin, request
        return {
            name: tuple(
                None if degree == 1 else placement for placement, degree in zip(pin, mesh.values(), strict=True)
            )
            for name, pin in pins.items()
        }

    def _name(self, request: RequestedPlacement) -> str | None:
        """Name of the parameter, buffer or input that the pattern of a requested placement matches; None if the origin
        has it already."""
        leaf = self.capture.leaves.get(request.node)
        if leaf is None and request.origin.startswith("hints["):
            leaf = self.capture.leaves.get(request.node.all_input_nodes[0])
        return None if leaf is None or repr(leaf.name) in request.origin else leaf.name


def _path(hint_path: str, line: str | None) -> str:
    return f"{hint_path} ({line})" if line else hint_path


def annotate_graph(capture: CapturedGraph, hints: Mapping[str, Hint]) -> AnnotatedGraph:
    """The captured graph with its hints; the graph is changed in place. Raises SpecError for a hint that matches
    nothing and for two that contradict each other."""
    leaves = {leaf.name: node for node, leaf in capture.leaves.items()}
    tensor_nodes = {
        name: node for name, node in leaves.items() if capture.leaves[node].kind in ("parameter", "buffer", "input")
    }
    states = {f"{kind}.{name}": leaves[name] for name in capture.gradients for kind in ("gradients", "optimizer")}
    input_hints = _input_hints(capture, hints)
    spread = input_hints | {
        "inputs.*" if pattern == "inputs" else pattern: hint
        for pattern, hint in hints.items()
        if pattern != "inputs" or not input_hints
    }
    state_hints = {
        pattern: hint for pattern, hint in spread.items() if pattern.startswith(("gradients.", "optimizer."))
    }
    tensor_hints = {pattern: hint for pattern, hint in spread.items() if pattern not in state_hints}
    first_names = _first_names(capture, (*tensor_nodes, *states))
    matches = match_hints(tensor_hints, _with_others(tensor_nodes, first_names), first_names) | match_hints(
        state_hints, _with_others(states, first_names), first_names
    )
    hints_by_name = {
        name: (pattern, hint)
        for name, (pattern, hint) in matches.items()
        if first_names.get(pattern, pattern) == name
        or shape_of((tensor_nodes | states)[name])  # patterns do not apply to scalars
    }
    requested_placements: list[RequestedPlacement] = []
    for name, (pattern, hint) in hints_by_name.items():
        is_of_inputs = pattern == "inputs.*" or (pattern in input_hints and pattern not in hints)
        path = f"hints[{('inputs' if is_of_inputs else pattern)!r}]"
        if name in states:
            requested_placements.append(RequestedPlacement(path, hint, states[name]))
            continue
        node = tensor_nodes[name]
        is_stored = capture.leaves[node].kind != "input" and not {f"gradients.{name}", f"optimizer.{name}"} & set(
            hints_by_name
        )
        requested_placements.append(
            RequestedPlacement(path, hint, node if is_stored else _insert_annotation(capture.graph.graph, node, hint))
        )
    for node in capture.graph.graph.nodes:
        if (
            is_operator(node)
            and node.target is PLACED
            and not any(request.node is node for request in requested_placements)
        ):
            line = node.meta.get("line") or node.name
            requested_placements.append(
                RequestedPlacement(f"the annotation at {line}", hint_of(str(node.args[1])), node)
            )
    capture.graph.graph.lint()
    return AnnotatedGraph(capture, tuple(requested_placements))


def _first_names(capture: CapturedGraph, names: Iterable[str]) -> dict[str, str]:
    """Names of tied parameters in the graph, by their other names; likewise of their gradients and optimizer state."""
    known_names = set(names)
    return {
        f"{kind}{alias}": f"{kind}{first}"
        for alias, first in capture.first_names.items()
        for kind in ("", "gradients.", "optimizer.")
        if alias != first and f"{kind}{first}" in known_names
    }


def _with_others(names: Iterable[str], first: Mapping[str, str]) -> list[str]:
    known_names = dict.fromkeys(names)
    return [*known_names, *(alias for alias, name in first.items() if name in known_names)]


def _input_hints(capture: CapturedGraph, hints: Mapping[str, Hint]) -> dict[str, Hint]:
    """The hint of `inputs` for each input that is not a scalar. It counts as a full name, so it precedes patterns."""
    hint = hints.get("inputs")
    if hint is None:
        return {}
    return {leaf.name: hint for leaf in capture.leaves.values() if leaf.kind == "input" and leaf.shape}


def _insert_annotation(graph: fx.Graph, node: fx.Node, hint: Hint) -> fx.Node:
    """Insert an annotation after a parameter, buffer or input, and have its users use the annotation."""
    last = next(candidate for candidate in reversed(graph.nodes) if candidate.op == "placeholder")
    with graph.inserting_after(last):
        annotation = graph.call_function(PLACED, (node, json.dumps(hint_to_plain(hint))))
    annotation.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(annotation, delete_user_cb=lambda user: user is not annotation)
    return annotation
