"""Fits of constants by least errors, and errors of held-out shapes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.kernels.tables import Array, Mask, Table, groups, take

K = TypeVar("K")
Figures = dict[str, Any]
_FOLDS = 5


def minimize_error(
    make: Callable[[list[float]], K],
    errors: Callable[[K], Array],
    limits: Sequence[tuple[float, float, float]],
    *,
    weights: float | Array = 1.0,
    smooth: float = 0.05,
    scales: Sequence[float] = (1.0,),
) -> K:
    """Kernel with the least mean |error|, smoothed within `smooth` of 0.

    `limits` are the start, minimum and maximum of each constant; the search is over their logarithms. `scales` are
    factors on the starts, with one search for each.
    """
    first, low, high = (np.log(np.array(triple)) for triple in zip(*limits, strict=True))

    def kernel(logarithms: Array) -> K:
        return make([float(value) for value in np.exp(logarithms)])

    def residuals(logarithms: Array) -> Array:
        error = errors(kernel(logarithms))
        residual = np.sign(error) * np.sqrt(weights * (np.sqrt(smooth * smooth + error * error) - smooth))
        return np.asarray(residual, np.float64)

    runs = [
        least_squares(
            residuals, np.clip(first + np.log(scale), low + 1e-6, high - 1e-6), bounds=(low, high), max_nfev=150
        )
        for scale in scales
    ]
    return kernel(min(runs, key=lambda run: float(run.cost)).x)


def drop_negligible(value: float, minimum: float) -> float:
    """`value`, or 0 if it is near the minimum of the search, which stands for 0."""
    return value if value > 10 * minimum else 0.0


def folds(table: Table, names: Sequence[str], seed: int = 0) -> NDArray[np.int64]:
    """Fold of each row; rows that are equal in these columns share a fold."""
    number = groups(table, names)
    return np.asarray(np.random.default_rng(seed).permutation(number.max() + 1)[number] % _FOLDS)


def held_out(
    table: Table, fold: NDArray[np.int64], fit: Callable[[Table], K], errors: Callable[[K, Table], Array]
) -> Array:
    """Error of each row with constants fitted without its fold."""
    held_out_errors = np.zeros(len(fold))
    for number in np.unique(fold):
        rows = fold == number
        held_out_errors[rows] = errors(fit(take(table, ~rows)), take(table, rows))
    return held_out_errors


def figure(errors: Array) -> Figures:
    """Errors of a set of rows: their number, the mean |ln(predicted / measured)| and the median of the logarithm."""
    if not len(errors):
        return {"rows": 0}
    return {
        "rows": len(errors),
        "error": round(float(np.abs(errors).mean()), 4),
        "median": round(float(np.median(errors)), 4),
    }


def by_regime(errors: Array, regimes: Mapping[str, Mask]) -> dict[str, Figures]:
    """Figures of the regimes that have rows."""
    return {name: figure(errors[rows]) for name, rows in regimes.items() if rows.any()}


def between(values: Array, edges: Mapping[str, tuple[float, float]]) -> dict[str, Mask]:
    """Rows whose value is at least the first of two edges and below the second, by name."""
    return {name: (values >= low) & (values < high) for name, (low, high) in edges.items()}
