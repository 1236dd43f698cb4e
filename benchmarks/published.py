"""Predictions compared with published speeds: training runs, the planner's own choices for them, smaller models, and
the paper's family. `python -m benchmarks.published` writes the tables of docs/planner.md.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import exp
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import (  # fmt: skip
    measured_steps,
    published_adapters,
    published_current,
    published_cut_down,
    published_kernels,
    published_mpt,
    published_torchtitan,
    software_profiles,
)
from benchmarks.published_rows import ROWS, Row
from moe.plan import Cluster, Degrees, LayoutSearch, Plan
from moe.plan.candidate import Candidate, Options
from moe.plan.compare import compare
from moe.plan.quantities import time_kind_name
from moe.spec import JobSpec

NEWEST = ("zoo", "25.09", "26.04")
"""Releases whose layouts no later release replaced."""
LEAST_DIFFERENCE = 0.05
"""Least difference in speed between two runs whose order is checked."""
PAGE = Path(__file__).parents[1] / "docs" / "planner.md"


def mesh_of(tensor: int, expert: int, pipeline: int, context: int = 1, expert_tensor: int = 1) -> str:
    """Degrees as TP·EP·PP, with context and expert-tensor degrees above 1."""
    extra = (f"·CP{context}" if context > 1 else "") + (f"·ETP{expert_tensor}" if expert_tensor > 1 else "")
    return f"{tensor}·{expert}·{pipeline}{extra}"


def mesh_of_plan(plan: Plan) -> str:
    return mesh_of(
        plan.degrees.tensor,
        plan.degrees.expert,
        plan.degrees.pipeline,
        plan.degrees.context,
        plan.degrees.expert_tensor,
    )


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's Table 3: one expert of each layer per core."""

    num_experts: int
    num_layers: int
    batch_tokens: int
    steps_per_s: float

    @property
    def search(self) -> LayoutSearch:
        spec = JobSpec.parse(
            {
                "model": {"preset": f"gshard-{self.num_experts}e-{self.num_layers}l"},
                "data": {"corpus": "catalogs"},
                "train": {"num_steps": 1, "batch_tokens": self.batch_tokens, "optimizer": {"name": "adafactor"}},
                "resources": {"num_workers": self.num_experts},
            }
        )
        cluster = Cluster(num_nodes=self.num_experts // 8, devices_per_node=8, device="tpu-v3")
        return LayoutSearch(spec, cluster, load_skew=1.0)

    @property
    def candidate(self) -> Candidate:
        groups = self.search.spec.num_groups // self.num_experts
        return Candidate(Degrees(expert=self.num_experts), Options(micro_batch_groups=max(1, groups)))


PAPER = (
    PaperRow(2048, 36, 1 << 22, 0.72), PaperRow(2048, 12, 1 << 22, 2.15), PaperRow(512, 36, 1 << 20, 1.05),
    PaperRow(512, 12, 1 << 20, 3.28), PaperRow(128, 36, 1 << 20, 0.67), PaperRow(128, 12, 1 << 20, 2.16),
)  # fmt: skip


def table_of_runs(profiles: software_profiles.Profiles) -> list[str]:
    """Predicted and published speeds; the column 'left out' uses a fit without the model on that device."""
    lines = [
        "| Model, GPUs, TP·EP·PP·VPP | release, dtype, micro-batch | software | published tokens/s a GPU | predicted | "
        "error | left out | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors = zip(profiles.runs, profiles.fitted_errors, profiles.by_family.errors, strict=True)
    for run, error, left_out in errors:
        row, plan = run.row, run.row.plan()
        lines.append(
            f"| {row.name} | {row.settings} | {row.software} | {row.tokens_per_s:,.0f} | "
            f"{row.tokens_per_s / exp(error):,.0f} | {exp(-error) - 1:+.0%} | {exp(-left_out) - 1:+.0%} | "
            f"{plan.memory.total / 2**30:.0f} of {plan.memory.limit / 2**30:.0f} GiB |"
        )
    return lines


@dataclass(frozen=True)
class Choice:
    """The planner's choice for a model and cluster with published layouts."""

    rows: list[Row]
    parallel: dict[str, Any] = field(default_factory=dict)
    """Fields of `parallel` that the planner must keep."""

    @cached_property
    def best(self) -> list[Plan]:
        """The planner's five best plans, of different shapes."""
        row = self.rows[0]
        search = LayoutSearch(row.job(self.parallel), row.cluster, load_skew=1.0, profile="peer", software=row.software)
        ranking = search.ranking(row.num_devices, 5)
        return [search.plan_of(entry.candidate) for entry in ranking.fitting[:5]]

    @cached_property
    def published_plan(self) -> Plan:
        """Plan of the published layout that is predicted to be fastest."""
        return min((row.plan() for row in self.rows), key=lambda plan: plan.predicted.step_s)

    @property
    def gain(self) -> float:
        """Predicted gain in speed of the best plan over the published one."""
        return self.published_plan.predicted.step_s / self.best[0].predicted.step_s - 1

    @property
    def largest_saving(self) -> str:
        """Kind of time that the best plan saves most of, with seconds of a step in both plans."""
        terms = compare(self.published_plan, self.best[0]).time
        kind = min(terms, key=lambda term: terms[term].difference)
        return f"{time_kind_name(kind)}, {terms[kind].first:.1f} to {terms[kind].second:.1f} s"

    @property
    def places(self) -> list[int]:
        """Places of published degrees among the five best plans, from 1."""
        meshes = [mesh_of_plan(plan) for plan in self.best]
        published_meshes = [mesh_of(*row.degrees[:3]) for row in self.rows]
        return sorted({meshes.index(mesh) + 1 for mesh in published_meshes if mesh in meshes})


def choices(rows: Sequence[Row], **parallel: str) -> list[Choice]:
    """Choices, one for each model, cluster, software and batch. With `sharding="optimizer"`, rows that gather
    parameters are left out."""
    alike: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if parallel.get("sharding") != "optimizer" or not row.plan().candidate.gathers:
            alike.setdefault((*row.workload, row.software, row.global_batch), []).append(row)
    return [Choice(choice_rows, dict(parallel)) for choice_rows in alike.values()]


@dataclass(frozen=True)
class Pair:
    """Two published runs of one model on the same GPUs that differ in layout, options or software."""

    slower: Row
    faster: Row

    @property
    def with_speedup(self) -> float:
        """Published tokens per second of the faster run over those of the slower one."""
        return self.faster.tokens_per_s / self.slower.tokens_per_s

    @property
    def predicted_ratio(self) -> float:
        """Predicted tokens per second of the faster run over those of the slower one."""
        return self.faster.plan().tokens_per_s / self.slower.plan().tokens_per_s

    @property
    def name(self) -> str:
        return f"{self.slower.name} {self.slower.settings}, {self.faster.name} {self.faster.settings}"


def pairs(rows: Sequence[Row]) -> list[Pair]:
    """Pairs that differ in speed by more than `LEAST_DIFFERENCE`."""
    row_pairs = [
        Pair(*sorted(two, key=lambda row: row.tokens_per_s))
        for two in combinations(rows, 2)
        if two[0].workload == two[1].workload and two[0].run_as != two[1].run_as
    ]
    return [pair for pair in row_pairs if pair.with_speedup > 1 + LEAST_DIFFERENCE]


def table_of_pairs(profiles: software_profiles.Profiles) -> list[str]:
    """Pairs that are predicted in the wrong order, and the number of pairs in order, also with left-out fits."""
    rows = [run.row for run in profiles.runs]
    row_errors = zip(rows, profiles.by_family.errors, strict=True)
    log_errors = {(row.name, row.settings): error for row, error in row_errors}
    all_pairs = pairs(rows)
    num_pairs, wrong = len(all_pairs), [pair for pair in all_pairs if pair.predicted_ratio <= 1]
    left_out = [
        pair.with_speedup
        * exp(log_errors[pair.slower.name, pair.slower.settings] - log_errors[pair.faster.name, pair.faster.settings])
        for pair in all_pairs
    ]
    return [
        f"{num_pairs} pairs of published runs train one model on the same GPUs, in different layouts or with different "
        f"options or software, and differ in speed by more than {LEAST_DIFFERENCE:.0%}. {num_pairs - len(wrong)} of "
        f"them are predicted in the published order, and {sum(x > 1 for x in left_out)} if the fit leaves out the "
        "model's runs on that device. Releases and batches may differ, and a run may be in several pairs. Predicted in "
        "the wrong order:",
        "",
        "| slower | faster | published, times as fast | predicted |",
        "|---|---|---|---|",
        *(
            f"| {pair.slower.name}, {pair.slower.settings} | {pair.faster.name}, {pair.faster.settings} | "
            f"{pair.with_speedup:.2f} | {pair.predicted_ratio:.2f} |"
            for pair in wrong
        ),
    ]


def gains(rows: Sequence[Row]) -> str:
    """Predicted gains of the planner's own layouts, in a sentence."""
    summaries = []
    for parallel in ({}, {"sharding": "optimizer"}):
        values = [choice.gain for choice in choices(rows, **parallel)]
        summaries.append(
            f"{min(values):.1%} to {max(values):.0%} faster (median of {len(values)} cases: {median(values):.0%})"
        )
    return (
        "A case is a model on a cluster, with its software and batch. The planner's own layout is predicted to be "
        f"{summaries[0]} than the fastest published one. If neither may gather parameters for each micro-batch, it is "
        f"{summaries[1]}. The table has the sparse models in their newest releases:"
    )


def table_of_choices(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| Model | the planner's five (TP·EP·PP) | the first of them | published | faster by | largest saving | place "
        "of a published layout |",
        "|---|---|---|---|---|---|---|",
    ]
    for choice in choices(rows):
        first, row = choice.best[0], choice.rows[0]
        options = first.options
        text = f"micro-batch {options.micro_batch_groups}, recompute {options.recompute}, VPP {options.virtual_stages}"
        text += ", FSDP" if first.candidate.gathers else ""
        meshes = dict.fromkeys(mesh_of(*row.degrees[:3]) for row in choice.rows)
        lines.append(
            f"| {row.model}, {row.num_devices:,} {row.device} | {', '.join(map(mesh_of_plan, choice.best))} | {text}: "
            f"{first.flops_per_s_per_device / 1e12:.0f} TFLOP/s | {', '.join(meshes)} | {choice.gain:.0%} | "
            f"{choice.largest_saving} | {', '.join(map(str, choice.places)) or '–'} |"
        )
        print(lines[-1], file=sys.stderr)
    return lines


def table_of_the_paper() -> list[str]:
    lines = ["| Experts, layers | published s | predicted | error | share of all-to-all |", "|---|---|---|---|---|"]
    for row in PAPER:
        estimate = row.search.time.estimate(row.candidate)
        published_s = 1 / row.steps_per_s
        lines.append(
            f"| {row.num_experts}, {row.num_layers} | {published_s:.2f} | {estimate.step_s:.2f} | "
            f"{estimate.step_s / published_s - 1:+.0%} | {estimate.all_to_all_s / estimate.step_s:.0%} |"
        )
    return lines


def main() -> None:
    profiles = software_profiles.Profiles.from_rows(ROWS)
    sparse = [row for row in ROWS if row.is_sparse and row.release in NEWEST]
    tables = ["## Software", "", *profiles.table(), "",
            "## Published runs", "", *table_of_runs(profiles), "",
            "## Order of published runs", "", *table_of_pairs(profiles), "",
            "## What the planner would choose", "", gains(ROWS), "", *table_of_choices(sparse), "",
            "## Current releases on GB200 and GB300, and runs held out", "", *published_current.table(), "",
            "## torchtitan", "", *published_torchtitan.table(), "",
            "## Dense models by FSDP on A100 and H100, held out", "", *published_mpt.table(), "",
            "## Adapters on dense models, held out", "", *published_adapters.table(), "",
            "## Smaller models on 8 B200: memory of a device, milliseconds of a step", "",
            *published_cut_down.table(), "",
            "## Kernels of SimuMax's machines", "", *published_kernels.table(), "",
            "## Our own steps on one H200", "", *measured_steps.table(), "",
            "## The paper's family on TPU v3", "", *table_of_the_paper(), ""]  # fmt: skip
    head = PAGE.read_text().partition("<!-- tables -->")[0]  # read after the tables are built, which takes long
    PAGE.write_text("\n".join([head.rstrip(), "", "<!-- tables -->", "", *tables]))
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
