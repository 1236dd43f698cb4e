"""What an integer program is asked, and what it answers. No torch."""

from dataclasses import dataclass

from moe.sharding.propagation.assignment import Assignment


@dataclass(frozen=True)
class MemoryLimits:
    """Memory that a rank may use, and what each byte of a trained parameter costs beside itself."""

    memory_bytes: float
    optimizer_slots: float = 2.0
    """Bytes of optimizer state for each byte of a trained parameter, whose gradient takes as many as itself."""


@dataclass(frozen=True, eq=False)
class ShardingSolution:
    """The cheapest assignment, with the costs of a step on one rank."""

    assignment: Assignment
    seconds: float
    memory_bytes: float
    relaxed_s: float
    """Bound of the relaxation."""
    was_whole: bool
    """Whether the relaxation's own solution was one of the integer program."""
    num_variables: int
    largest_bytes: float
    """Of the operands and results of one operator, and of what is computed again of one block."""
