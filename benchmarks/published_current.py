"""Runs of current releases on GB200 and GB300, the fit of the profile `megatron-26.06` on them, and held-out runs.

Sources: the performance summaries of Megatron-Bridge for its containers 26.06 and 26.08 (docs/performance-summary.md of
its repository). Rows of 26.06 on GB200 and GB300 are fitted; those of 26.08, with newer kernels, and those of 26.06 in
profiles of earlier releases are not. Left out: NVFP4, the Muon optimizer, Mamba layers, models without a preset.

`python -m benchmarks.published_current` prints the constants and the errors.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.published_rows import Row
from benchmarks.software_profiles import Run
from moe.plan.software import SOFTWARE, Host, Software, SoftwareName

_IN_TURN = {"overlap": False}
_NEW: SoftwareName = "megatron-26.06"


def _row(model: str, device: str, num_devices: int, degrees: tuple[int, int, int, int], micro_batch: int,
         global_batch: int, tokens_per_s: float, release: str) -> Row:  # fmt: skip
    return Row(model, device, num_devices, degrees, micro_batch, global_batch, tokens_per_s, _NEW, release,
               parallel=_IN_TURN)  # fmt: skip


CURRENT: tuple[Row, ...] = (
    _row("deepseek-v3-mtp", "gb300", 256, (1, 32, 2, 8), 1, 4096, 6338, "26.06"),
    _row("deepseek-v3-mtp", "gb300", 256, (1, 32, 2, 8), 1, 15360, 6422, "26.06"),
    _row("deepseek-v3-mtp", "gb200", 256, (1, 64, 4, 4), 1, 4096, 4969, "26.06"),
    _row("gpt-oss-120b", "gb300", 64, (1, 16, 1, 1), 4, 1280, 33166, "26.06"),
    _row("gpt-oss-120b", "gb200", 64, (1, 64, 1, 1), 4, 1280, 28947, "26.06"),
    _row("qwen3-30b-a3b", "gb300", 8, (1, 8, 1, 1), 8, 512, 45275, "26.06"),
    _row("qwen3-30b-a3b", "gb200", 8, (1, 8, 1, 1), 4, 512, 40706, "26.06"),
    _row("qwen3-235b-a22b", "gb300", 256, (1, 32, 4, 12), 2, 8192, 9033, "26.06"),
    _row("qwen3-235b-a22b", "gb200", 256, (1, 32, 8, 3), 1, 8192, 7376, "26.06"),
)
"""Runs that `megatron-26.06` is fitted on."""
HELD_OUT: tuple[Row, ...] = (
    _row("deepseek-v3-mtp", "gb300", 256, (1, 32, 2, 8), 1, 4096, 6288, "26.08"),
    _row("deepseek-v3-mtp", "gb200", 256, (1, 64, 4, 4), 1, 4096, 4912, "26.08"),
    _row("gpt-oss-120b", "gb300", 64, (1, 16, 1, 1), 4, 1280, 33024, "26.08"),
    _row("gpt-oss-120b", "gb200", 64, (1, 64, 1, 1), 4, 1280, 28672, "26.08"),
    _row("qwen3-30b-a3b", "gb300", 8, (1, 8, 1, 1), 8, 512, 44544, "26.08"),
    _row("qwen3-30b-a3b", "gb200", 8, (1, 8, 1, 1), 4, 512, 39936, "26.08"),
    _row("qwen3-235b-a22b", "gb300", 256, (1, 32, 4, 12), 2, 8192, 8816, "26.08"),
    _row("qwen3-235b-a22b", "gb200", 256, (1, 32, 8, 3), 1, 8192, 7280, "26.08"),
    Row("qwen3-30b-a3b", "h100", 16, (1, 16, 1, 1), 1, 1024, 8826, "megatron-deepep", "26.06", parallel=_IN_TURN),
    Row("llama3-405b", "gb300", 256, (4, 1, 8, 4), 1, 1536, 1048, "megatron-eager", "26.06", sequence_tokens=8192),
    Row("llama3-405b", "gb200", 256, (4, 1, 16, 4), 1, 1536, 843, "megatron-eager", "26.06", sequence_tokens=8192),
    Row("llama3-405b", "h100", 1024, (8, 1, 8, 8), 1, 1536, 326, "megatron-eager", "26.06", sequence_tokens=8192,
        parallel={"context": 2}),
)  # fmt: skip
"""Runs that are not used for any fit."""

Vector = NDArray[np.float64]


def current_by(constants: Vector) -> Software:
    """Software with constants: factor on the rate of exchanges, a layer in 100 us, passes over biases in tens."""
    rate, layer, passes = constants.tolist()
    host = Host(layer_s=1e-4 * layer, expert_s=0.0, run_s=0.0, sustained=1.0)
    return replace(SOFTWARE[_NEW], host=host, exchange_rate=rate, bias_passes=10 * passes)


def current_errors(constants: Vector, runs: Sequence[Run]) -> Vector:
    return np.array([run.error(current_by(constants)) for run in runs])


def fitted_current(runs: Sequence[Run]) -> Vector:
    solution = least_squares(
        current_errors, (3.0, 1.0, 3.0), args=(runs,), bounds=([1, 0, 0], [20, 40, 20]), loss="soft_l1", f_scale=0.1,
        diff_step=1e-3, max_nfev=30,
    )  # fmt: skip
    return np.asarray(solution.x)


def left_out_current(runs: Sequence[Run]) -> tuple[Vector, list[Vector]]:
    """(errors of each model and device, fitted on the others; constants of these fits)."""
    held_out_errors, fits = np.zeros(len(runs)), []
    for family in dict.fromkeys(run.family for run in runs):
        constants = fitted_current([run for run in runs if run.family != family])
        fits.append(constants)
        indices = [index for index, run in enumerate(runs) if run.family == family]
        held_out_errors[indices] = current_errors(constants, [runs[index] for index in indices])
    return held_out_errors, fits


def table() -> list[str]:
    """Predicted and published speeds, with the constants that plans use."""
    lines = ["| Model, GPUs, TP·EP·PP·VPP | release | software | published tokens/s a GPU | error | part in the fit |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in (*CURRENT, *HELD_OUT):
        error, is_fitted = Run.from_row(row).error(SOFTWARE[row.software]), row in CURRENT
        errors[is_fitted].append(error)
        lines.append(
            f"| {row.name} | {row.release} mb {row.micro_batch} gb {row.global_batch:,} | {row.software} | "
            f"{row.tokens_per_s:,.0f} | {exp(-error) - 1:+.0%} | {'yes' if is_fitted else 'held out'} |"
        )
    summaries = (
        f"{'fitted' if is_fitted else 'held out'} {fmean(map(abs, values)):.3f}, {median(values):+.3f}, "
        f"{exp(max(values, key=abs)):.2f}"
        for is_fitted, values in errors.items()
    )
    return [f"Mean |ln(predicted / published)|, median and worst as a factor: {'; '.join(summaries)}.", "", *lines]


def main() -> None:
    runs = [Run.from_row(row) for row in CURRENT]
    constants = fitted_current(runs)
    left_out, fits = left_out_current(runs)
    print("fitted", constants, "each left out", *fits)
    for run, fit_error, left_out_error in zip(runs, current_errors(constants, runs), left_out, strict=True):
        print(f"{run.row.name:48s} {exp(fit_error):5.2f} {exp(left_out_error):5.2f}")
    print(f"left out: mean {fmean(map(abs, left_out)):.3f}")
    print("\n".join(table()))


if __name__ == "__main__":
    main()
