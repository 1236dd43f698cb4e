"""Exchanges beside arithmetic in an integer program: what of them is waited for.

Parameters are gathered and gradients are added up beside the arithmetic of their pass: of D seconds of these beside A
of arithmetic, max((1 - overlap) D, D - A) count.
"""

from moe.sharding.solve.integer_program import IntegerProgram

_UNIT_S = 1e-6
"""Of time in the program, whose tolerances are absolute."""


class Waiting:
    """Of the forward and of the backward pass, on devices that hide a share `overlap` of such exchanges."""

    def __init__(self, program: IntegerProgram, overlap: float) -> None:
        self._program, self._overlap = program, overlap
        self._exchanges: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
        self._arithmetic: dict[bool, list[tuple[int, float]]] = {False: [], True: []}

    def compute(self, variable: int, seconds: float, *, backward: bool) -> None:
        """Arithmetic where the variable is 1."""
        self._arithmetic[backward].append((variable, seconds))

    def exchange(self, seconds: float, *, backward: bool) -> int:
        """A variable that says whether there is an exchange of so many seconds."""
        if not self._overlap:
            return self._program.variable(seconds)
        variable = self._program.variable()
        self._exchanges[backward].append((variable, seconds))
        return variable

    def end(self) -> None:
        """Have what is waited for cost its time."""
        for backward, exchanges in self._exchanges.items():
            if not exchanges:
                continue
            program = self._program
            wait, in_all = (program.variable(cost, upper=float("inf")) for cost in (_UNIT_S, 0.0))
            program.equal(
                [*((variable, seconds / _UNIT_S) for variable, seconds in exchanges), (in_all, -1.0)], 0.0
            )
            program.row([(wait, 1.0), (in_all, self._overlap - 1)], lower=0.0)
            covering = ((variable, seconds / _UNIT_S) for variable, seconds in self._arithmetic[backward])
            program.row([(wait, 1.0), (in_all, -1.0), *covering], lower=0.0)
