"""A mixed-integer linear program, built row by row. HiGHS solves its linear relaxation first."""

import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import highspy
import numpy as np

INFINITY = highspy.kHighsInf

EXACT, GAP = 3_000, 0.01
"""Number of variables up to which the optimum is proved. Larger programs are solved to within the share `GAP` of it."""
Terms = Iterable[tuple[int, float]]


@cache
def _swallow_banner() -> None:
    """Suppress the banner that the first solver of a process prints on standard output."""
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)


def _solver() -> highspy.Highs:
    _swallow_banner()
    return highspy.Highs()


@dataclass(frozen=True)
class Solution:
    """Values of a program's variables."""

    values: np.ndarray
    objective: float
    lower_bound: float
    """Objective of the linear relaxation."""
    was_integral: bool
    """Whether the solution of the relaxation was integral."""


class IntegerProgram:
    """An integer program: variables are at least 0, and integer variables are 0 or 1."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._upper: list[float] = []
        self._is_integer: list[bool] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._values: list[float] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []

    @property
    def num_variables(self) -> int:
        return len(self._costs)

    @property
    def num_rows(self) -> int:
        return len(self._row_lower)

    def variable(self, cost: float = 0.0, *, is_integer: bool = False, upper: float = 1.0) -> int:
        self._costs.append(cost)
        self._upper.append(upper)
        self._is_integer.append(is_integer)
        return len(self._costs) - 1

    def row(self, terms: Terms, lower: float = -INFINITY, upper: float = INFINITY) -> None:
        for column, value in terms:
            self._columns.append(column)
            self._values.append(value)
        self._starts.append(len(self._columns))
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def equal(self, terms: Terms, value: float) -> None:
        self.row(terms, value, value)

    def solve(self, max_cost: float = INFINITY, *, quick: bool = False) -> Solution | None:
        """The cheapest solution, the same one each time; None if there is none, or if all cost more than `max_cost`.
        With `quick`, the cheapest solution of a large program in which variables that are integral in the relaxation
        keep their values."""
        relaxation = self._run(is_relaxed=True)
        if relaxation is None or relaxation[1] > max_cost:
            return None
        values, lower_bound = relaxation
        is_integral = np.array(self._is_integer) & (np.abs(values - values.round()) < 1e-6)
        if is_integral.sum() == sum(self._is_integer):
            return Solution(values, lower_bound, lower_bound, True)
        solution = None
        if self.num_variables >= EXACT:
            # usually few variables are left, and their optimum is good enough for the whole program
            solution = self._run(
                is_relaxed=False,
                fixed_values={int(column): round(values[column]) for column in is_integral.nonzero()[0]},
            )
        if solution is None or (not quick and solution[1] > lower_bound * (1 + GAP)):
            exact = self._run(is_relaxed=False)
            solution = min(filter(None, (solution, exact)), key=lambda candidate: candidate[1], default=None)
        if solution is not None and not quick:  # within the gap, more variables may be 1 than necessary
            solution = (
                self._run(is_relaxed=True, upper_bounds=np.where(self._is_integer, solution[0].round(), INFINITY))
                or solution
            )
        return None if solution is None else Solution(*solution, lower_bound, False)

    def _run(
        self, is_relaxed: bool, fixed_values: Mapping[int, float] | None = None, upper_bounds: np.ndarray | None = None
    ) -> tuple[np.ndarray, float] | None:
        """(values, objective); None if there is no solution. Variables in `fixed_values` have these values; all have at
        most their `upper_bounds`."""
        solver = _solver()
        options = {
            "output_flag": False,
            "threads": 1,
            "random_seed": 1,
            "mip_max_nodes": 1000,
            "mip_rel_gap": 1e-6 if self.num_variables < EXACT else GAP,
            "mip_abs_gap": 1e-9,
            # most variables are flows: simplifying them takes longer than solving the program
            "presolve": "off" if is_relaxed and upper_bounds is None else "choose",
        }
        for option, value in options.items():
            solver.setOptionValue(option, value)
        scale = 1e6  # tolerances are absolute, so costs are in microseconds
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self.num_variables, self.num_rows
        model.col_cost_ = np.array(self._costs) * scale
        lower, upper = np.zeros(self.num_variables), np.array(self._upper)
        if upper_bounds is not None:
            upper = np.minimum(upper, upper_bounds)
        for column, value in (fixed_values or {}).items():
            lower[column] = upper[column] = value
        model.col_lower_, model.col_upper_ = lower, upper
        model.row_lower_, model.row_upper_ = np.array(self._row_lower), np.array(self._row_upper)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._starts)
        model.a_matrix_.index_ = np.array(self._columns)
        model.a_matrix_.value_ = np.array(self._values)
        if not is_relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            model.integrality_ = [kinds[is_integer] for is_integer in self._is_integer]
        solver.passModel(model)
        solver.run()
        status = solver.getModelStatus()
        is_solved = status == highspy.HighsModelStatus.kOptimal
        if status == highspy.HighsModelStatus.kSolutionLimit:  # limit of nodes: the best solution so far, if any
            is_solved = solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if not is_solved:
            return None
        values = np.array(solver.getSolution().col_value)
        objective = solver.getInfo().objective_function_value
        return values, objective / scale if math.isfinite(objective) else objective
