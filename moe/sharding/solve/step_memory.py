"""Memory of a rank in an integer program."""

from collections.abc import Iterable

import numpy as np

from moe.sharding.solve.integer_program import IntegerProgram

_UNIT_BYTES = 2.0**20
"""Unit of memory in the program: the solver's tolerances are absolute, so its numbers should be near 1."""

_UNIT_S = 1e-12
"""Cost of one unit of peak memory, in seconds. It keeps the variables of the peaks at their lower bounds."""


class StepMemory:
    """Memory held for the whole step, plus two peaks: the operands and results of the largest operator, and the
    recomputed tensors of the largest block."""

    def __init__(self, program: IntegerProgram) -> None:
        self._program = program
        self._operator, self._block = (program.variable(_UNIT_S, upper=float("inf")) for _ in range(2))
        self._variables: list[tuple[int, float]] = []

    def hold(self, variable: int, num_bytes: float) -> None:
        """Count bytes for the whole step if the variable is 1."""
        self._variables.append((variable, num_bytes))

    def add_operator(self, num_bytes: Iterable[tuple[int, float]]) -> None:
        """Add an operator: bytes of its operands and results, by the variables of its options."""
        self._bound_peak(self._operator, num_bytes)

    def add_block(self, num_bytes: Iterable[tuple[int, float]]) -> None:
        """Add a recomputed block: bytes of its recomputed tensors, by variables."""
        self._bound_peak(self._block, num_bytes)

    def _bound_peak(self, peak: int, num_bytes: Iterable[tuple[int, float]]) -> None:
        terms = ((variable, variable_bytes / _UNIT_BYTES) for variable, variable_bytes in num_bytes)
        self._program.row([(peak, -1.0), *terms], upper=0.0)

    def limit(self, memory_bytes: float) -> None:
        """Add the constraint that memory stays within the limit."""
        terms = ((variable, variable_bytes / _UNIT_BYTES) for variable, variable_bytes in self._variables)
        self._program.row([*terms, (self._operator, 1.0), (self._block, 1.0)], upper=memory_bytes / _UNIT_BYTES)

    def largest_bytes(self, values: np.ndarray) -> float:
        """The two peaks together, in a solution."""
        return float(values[self._operator] + values[self._block]) * _UNIT_BYTES

    def used_bytes(self, values: np.ndarray) -> float:
        return sum(
            float(values[variable]) * variable_bytes for variable, variable_bytes in self._variables
        ) + self.largest_bytes(values)
