"""Exposed time of exchanges in an integer program.

Gathers of parameters and reductions of gradients overlap with the arithmetic of their pass: of D seconds of exchanges
during A seconds of arithmetic, max((1 - overlap) D, D - A) are exposed.
"""

from moe.sharding.solve.integer_program import IntegerProgram

_UNIT_S = 1e-6
"""Unit of time in the program: the solver's tolerances are absolute, so its numbers should be near 1."""


class Waiting:
    """Exposed time of the forward pass and of the backward pass. Arithmetic can hide a share `overlap` of exchanges."""

    def __init__(self, program: IntegerProgram, overlap: float) -> None:
        self._program, self._overlap = program, overlap
        self._exchanges: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
        self._arithmetic: dict[bool, list[tuple[int, float]]] = {False: [], True: []}

    def compute(self, variable: int, seconds: float, *, backward: bool) -> None:
        """Count seconds of arithmetic if the variable is 1."""
        self._arithmetic[backward].append((variable, seconds))

    def exchange(self, seconds: float, *, backward: bool) -> int:
        """A variable that is 1 if an exchange that takes `seconds` is made."""
        if not self._overlap:
            return self._program.variable(seconds)
        variable = self._program.variable()
        self._exchanges[backward].append((variable, seconds))
        return variable

    def end(self) -> None:
        """Add the exposed time of all exchanges to the cost."""
        for backward, exchanges in self._exchanges.items():
            if not exchanges:
                continue
            program = self._program
            wait, in_all = (program.variable(cost, upper=float("inf")) for cost in (_UNIT_S, 0.0))
            program.equal([*((variable, seconds / _UNIT_S) for variable, seconds in exchanges), (in_all, -1.0)], 0.0)
            program.row([(wait, 1.0), (in_all, self._overlap - 1)], lower=0.0)
            covering = ((variable, seconds / _UNIT_S) for variable, seconds in self._arithmetic[backward])
            program.row([(wait, 1.0), (in_all, -1.0), *covering], lower=0.0)
