"""Host times and shares of `moe/plan/software.py`, fitted on published runs, and predictions for runs that are left
out.

`python -m benchmarks.software_profiles` prints the constants, their bounds, and the errors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.published_cut_down import MEASURED, CutDown
from benchmarks.published_rows import ROWS, Row
from moe.plan.candidate import Candidate
from moe.plan.cost.time import TimeModel
from moe.plan.profile import find_profile
from moe.plan.software import SOFTWARE, Host, Software, SoftwareName
from moe.spec import JobSpec

Vector = NDArray[np.float64]
FREE = ("eager layer", "eager expert", "eager run", "fused layer", "fused expert", "fused run", "graphs layer",
        "graphs expert", "sustained", "bias passes")  # fmt: skip
"""Fitted constants: seconds in units of 100 us, passes in tens. With CUDA graphs the time of a run is 0."""
_BEGIN = np.array([2.5, 3.0, 20.0, 10.0, 1.5, 2.0, 2.5, 0.1, 0.95, 7.0])
_STEPS_LEFT_OUT = 8
"""Steps of a fit without some runs, starting from the constants of all runs."""
_MOST = np.array([40.0, 20.0, 60.0, 40.0, 20.0, 60.0, 40.0, 20.0, 1.0, 20.0])


@dataclass(frozen=True)
class Run:
    """A published run and its layout; unknown options are those that are predicted to be fastest."""

    row: Row
    candidate: Candidate

    @classmethod
    def from_row(cls, row: Row) -> "Run":
        return cls(row, row.plan().candidate)

    @cached_property
    def _job(self) -> JobSpec:
        return self.row.job(self.row.known_parallel)

    def error(self, software: Software) -> float:
        """ln(predicted / published) of its step."""
        model = TimeModel(self._job, self.row.cluster, find_profile("peer"), software)
        return log(model.step_s(self.candidate) / self.row.measured_step_s)

    @property
    def family(self) -> tuple[str, str]:
        """Model and device, for all releases."""
        return self.row.model.removesuffix("-mtp"), self.row.device


def software_by(constants: Vector, name: SoftwareName) -> Software:
    """The profile of this name with these constants."""
    value_by_name = dict(zip(FREE, constants.tolist(), strict=True))
    host = {"megatron-graphs": "graphs", "megatron-deepep": "fused"}.get(name, "eager")
    return replace(
        SOFTWARE[name], bias_passes=10 * value_by_name["bias passes"],
        host=Host(
            layer_s=1e-4 * value_by_name[f"{host} layer"], expert_s=1e-4 * value_by_name[f"{host} expert"],
            run_s=1e-4 * value_by_name.get(f"{host} run", 0.0), sustained=value_by_name["sustained"],
        ),
    )  # fmt: skip


def errors(constants: Vector, runs: Sequence[Run]) -> Vector:
    return np.array([run.error(software_by(constants, run.row.software)) for run in runs])


def fit_constants(runs: Sequence[Run], begin: Vector = _BEGIN, max_steps: int = 25) -> Vector:
    """Constants with the least errors; large errors count linearly, not squared."""
    solution = least_squares(
        errors, begin, args=(runs,), bounds=(0.0 * _MOST, _MOST), loss="soft_l1", f_scale=0.1, diff_step=1e-3,
        max_nfev=max_steps,
    )  # fmt: skip
    return np.asarray(solution.x)


@dataclass(frozen=True)
class LeftOut:
    """Errors of runs that were left out of the fit, and the constants of these fits."""

    errors: Vector
    fits: tuple[Vector, ...]


def left_out(runs: Sequence[Run], key: Callable[[Run], object], begin: Vector) -> LeftOut:
    """Leave out all runs with the same key together, one key at a time."""
    held_out_errors, fits = np.zeros(len(runs)), []
    for run_key in dict.fromkeys(map(key, runs)):
        constants = fit_constants([run for run in runs if key(run) != run_key], begin, _STEPS_LEFT_OUT)
        fits.append(constants)
        left_out_indices = [index for index, run in enumerate(runs) if key(run) == run_key]
        held_out_errors[left_out_indices] = errors(constants, [runs[index] for index in left_out_indices])
    return LeftOut(held_out_errors, tuple(fits))


def ends(fits: Sequence[Vector], name: SoftwareName) -> tuple[Host, Host]:
    """Hosts of the fits with the least and the most time for a layer of eight experts."""

    def host_s(host: Host) -> float:
        return host.layer_s + 8 * host.expert_s + host.run_s / 4

    hosts = sorted((software_by(constants, name).host for constants in fits), key=host_s)
    return hosts[0], hosts[-1]


@dataclass(frozen=True)
class Profiles:
    """Fitted profiles of published runs, and predictions for runs left out of the fits."""

    runs: tuple[Run, ...]
    constants: Vector
    fitted_errors: Vector
    by_run: LeftOut
    by_family: LeftOut

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> "Profiles":
        runs = tuple(map(Run.from_row, rows))
        constants = fit_constants(runs)
        return cls(
            runs, constants, errors(constants, runs),
            left_out(runs, lambda run: (run.row.name, run.row.settings), constants),
            left_out(runs, lambda run: run.family, constants),
        )  # fmt: skip

    def indices_of(self, name: SoftwareName | None) -> list[int]:
        """Indices of the runs of one profile, or of all runs for None."""
        return [index for index, run in enumerate(self.runs) if name in (None, run.row.software)]

    def table(self) -> list[str]:
        """Mean |ln(predicted / published)|, the median, and the worst as a factor."""
        lines = ["| Profile | runs | error of the fit: mean, median, worst | fit without the run "
                 "| fit without its model on its device |",
                 "|---|---|---|---|---|"]  # fmt: skip
        for name in (None, *dict.fromkeys(run.row.software for run in self.runs)):
            indices = self.indices_of(name)
            summaries = (
                _summary(errors[indices].tolist())
                for errors in (self.fitted_errors, self.by_run.errors, self.by_family.errors)
            )
            lines.append(f"| {name or 'all'} | {len(indices)} | {' | '.join(summaries)} |")
        plain = plain_errors(fitted_plain(PLAIN_STEPS), PLAIN_STEPS)
        held_out = left_out_plain()
        lines.append(
            f"| megatron-plain | {len(plain)} | {_summary(plain.tolist())} | – | {_summary(held_out.tolist())} |"
        )
        return lines


def _summary(errors: Sequence[float]) -> str:
    worst = max(errors, key=abs)
    return f"{fmean(map(abs, errors)):.3f}, {median(errors):+.3f}, {exp(worst):.2f}"


@dataclass(frozen=True)
class PlainStep:
    """A step of a smaller model that Megatron-Core ran with its defaults."""

    row: CutDown
    num_micro_batches: int

    def error(self, software: Software) -> float:
        search, candidate = self.row.search(self.num_micro_batches)
        model = TimeModel(search.spec, search.cluster, search.profile, software)
        return log(1000 * model.step_s(candidate) / self.row.measured_ms[self.num_micro_batches])


PLAIN_STEPS = [PlainStep(row, times) for row in MEASURED for times in row.measured_ms]


def plain_by(constants: Vector) -> Software:
    """Software with constants: layer and expert in 100 us, sustained share."""
    layer, expert, sustained_share = constants.tolist()
    host = Host(layer_s=1e-4 * layer, expert_s=1e-4 * expert, run_s=0.0, sustained=sustained_share)
    return replace(SOFTWARE["megatron-plain"], host=host)


def plain_errors(constants: Vector, steps: Sequence[PlainStep]) -> Vector:
    return np.array([step.error(plain_by(constants)) for step in steps])


def fitted_plain(steps: Sequence[PlainStep]) -> Vector:
    solution = least_squares(
        plain_errors, (3.0, 1.0, 0.65), args=(steps,), bounds=([0, 0, 0.2], [40, 20, 1]), loss="soft_l1",
        f_scale=0.05, diff_step=1e-3, max_nfev=30,
    )  # fmt: skip
    return np.asarray(solution.x)


def left_out_plain() -> Vector:
    """Errors of each model, fitted on the others."""
    held_out_errors = np.zeros(len(PLAIN_STEPS))
    for model in {step.row.model for step in PLAIN_STEPS}:
        constants = fitted_plain([step for step in PLAIN_STEPS if step.row.model != model])
        indices = [index for index, step in enumerate(PLAIN_STEPS) if step.row.model == model]
        held_out_errors[indices] = plain_errors(constants, [PLAIN_STEPS[index] for index in indices])
    return held_out_errors


def main() -> None:
    profiles = Profiles.from_rows(ROWS)
    named_constants = zip(FREE, profiles.constants, strict=True)
    print(", ".join(f"{name} {value:.4g}" for name, value in named_constants))
    print("plain", fitted_plain(PLAIN_STEPS))
    print("\n".join(profiles.table()))
    for name in dict.fromkeys(run.row.software for run in profiles.runs):
        print(name, software_by(profiles.constants, name).host, *ends(profiles.by_family.fits, name))
    print()
    run_errors = zip(profiles.runs, profiles.fitted_errors, profiles.by_family.errors, strict=True)
    for run, fit_error, left_out_error in run_errors:
        row = run.row
        print(f"{row.software:16s} {row.name:48s} {row.settings:28s} {exp(fit_error):5.2f} {exp(left_out_error):5.2f}")


if __name__ == "__main__":
    main()
