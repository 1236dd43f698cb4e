"""A request for a plan, with its module captured."""

from dataclasses import dataclass

from moe.sharding.capture.capture import CapturedGraph, capture, device_of
from moe.sharding.propagation.annotated_graph import AnnotatedGraph, annotate_graph
from moe.sharding.rules.registry import Rules
from moe.sharding.solve.recompute import recompute_checkpointed
from moe.sharding.solve.request import ShardingRequest
from moe.sharding.solve.solution import MemoryLimits

SPARE = 1 / 16
"""Share of a device's memory that plans leave free for what they do not count: tensors between operators, exchanges in
flight, fragmentation of the allocator."""


@dataclass(frozen=True, eq=False)
class CapturedRequest:
    """A captured module with its hints, and the memory that it may take."""

    request: ShardingRequest
    capture: CapturedGraph
    annotated_graph: AnnotatedGraph
    limits: MemoryLimits
    ignored_hints: frozenset[str]
    """Hints that are ignored, by their origin."""


def capture_request(request: ShardingRequest, ignored_hints: frozenset[str] = frozenset()) -> CapturedRequest:
    """Capture the module of a request. Raises SpecError for a module or a hint that no plan can be made for."""
    captured_graph = capture(request.model, request.sample, request.loss, device_of(request.cluster))
    annotations = annotate_graph(captured_graph, request.hints)
    recompute_checkpointed(captured_graph)
    Rules(request.replicate).check(captured_graph.graph.graph)
    memory_bytes = request.cluster.memory_bytes * (1 - SPARE) - captured_graph.input_bytes
    limits = MemoryLimits(memory_bytes, request.optimizer_slots)
    return CapturedRequest(request, captured_graph, annotations, limits, ignored_hints)
