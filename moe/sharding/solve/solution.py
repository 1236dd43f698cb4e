"""Limits given to an integer program, and its solution. No torch."""

from dataclasses import dataclass

from moe.sharding.propagation.assignment import Assignment


@dataclass(frozen=True)
class MemoryLimits:
    """Memory that a rank may use, and optimizer state per byte of a trained parameter."""

    memory_bytes: float
    optimizer_slots: float = 2.0
    """Bytes of optimizer state for each byte of a trained parameter. The gradient takes one more byte."""


@dataclass(frozen=True, eq=False)
class ShardingSolution:
    """The cheapest assignment, with the costs of a step on one rank."""

    assignment: Assignment
    seconds: float
    memory_bytes: float
    relaxed_s: float
    """Lower bound: the cost of the program's linear relaxation."""
    was_whole: bool
    """Whether the solution of the relaxation was integral."""
    num_variables: int
    largest_bytes: float
    """Peak bytes: operands and results of the largest operator, plus recomputed tensors of the largest block."""
