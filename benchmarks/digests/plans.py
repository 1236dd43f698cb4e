"""Plans of published and example jobs on several clusters."""

from pathlib import Path
from typing import Any

import yaml

from benchmarks.digests.item import Item, Items
from benchmarks.digests.mask import masked_plan, masked_problems
from benchmarks.published_rows import ROWS
from moe.plan import Cluster, plan_job, read_plan_request
from moe.spec import JobSpec, SpecError

EXAMPLES = Path(__file__).parents[2] / "examples"
SEARCHED = 25
"""With `--quick`, one of so many published runs is planned without its layout."""
CLUSTERS = {
    "2 CPUs": Cluster(num_nodes=1, devices_per_node=2, device="cpu"),
    "4 nodes of 2 CPUs": Cluster(num_nodes=4, devices_per_node=2, device="cpu"),
    "8 H100": Cluster(num_nodes=1, devices_per_node=8, device="h100"),
    "16 nodes of 8 H100": Cluster(num_nodes=16, devices_per_node=8, device="h100"),
    "32 nodes of 8 TPU v3": Cluster(num_nodes=32, devices_per_node=8, device="tpu-v3"),
}
JOBS: dict[str, dict[str, Any]] = {
    "gshard-tiny": {"model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"}},
    "gshard-128e-12l": {"model": {"preset": "gshard-128e-12l"}, "data": {"corpus": "catalogs"}},
    "qwen3-30b-a3b": {"model": {"preset": "qwen3-30b-a3b"}, "data": {"corpus": "synthetic", "max_tokens": 4096}},
}
BATCH_TOKENS = {"gshard-tiny": 8192, "gshard-128e-12l": 1 << 20, "qwen3-30b-a3b": 1 << 20}
OPTIONS: dict[str, dict[str, Any]] = {
    "searched": {},
    "elastic": {"resources": {"min_workers": 1, "max_workers": 8}},
    "recomputed": {"parallel": {"recompute": "full"}},
    "does not divide": {"parallel": {"expert": 3}},
}


def plan_content(spec: JobSpec | dict[str, Any], cluster: Cluster, num_workers: int | None = None) -> Any:
    """The plan, or the problems of a refusal, without wording."""
    try:
        job = JobSpec.parse(spec) if isinstance(spec, dict) else spec
        return masked_plan(plan_job(job, cluster, num_workers).model_dump(mode="json"))
    except SpecError as error:
        return {"refused": masked_problems([vars(problem) for problem in error.problems])}


def of_jobs(quick: bool) -> Items:
    for name in ("gshard-tiny",) if quick else JOBS:
        job, train = JOBS[name], {"num_steps": 10, "batch_tokens": BATCH_TOKENS[name]}
        for option, changes in OPTIONS.items():
            for cluster_name, cluster in CLUSTERS.items():
                yield Item(
                    f"{name}, {option}: {cluster_name}", plan_content({**job, "train": train, **changes}, cluster)
                )


def of_examples(quick: bool) -> Items:
    names = ("translate-100-to-english",) if quick else (
        "translate-100-to-english", "translate-longer", "gshard-600b", "deepseek-v3-1024-h100",
    )  # fmt: skip
    for name in names:
        path = EXAMPLES / f"{name}.yaml"
        request, fields = read_plan_request(path), yaml.safe_load(path.read_text())
        clusters = {"its own": request.cluster} if request.cluster else CLUSTERS
        if name == "gshard-600b":
            clusters = {"256 nodes": Cluster(num_nodes=256, devices_per_node=8, device="h100")}
        for cluster_name, cluster in clusters.items():
            assert cluster is not None
            yield Item(f"{name}: {cluster_name}", plan_content(request.spec, cluster, fields.get("num_workers")))


def items(quick: bool) -> Items:
    """Plans of jobs and examples on the clusters, and of published runs: in their layouts, and found by search."""
    yield from of_jobs(quick)
    yield from of_examples(quick)
    for number, row in enumerate(ROWS):
        label = f"{number}: {row.name}: {row.settings}"
        if number % 4 == 0 or not quick:
            yield Item(f"published: {label}", masked_plan(row.plan().model_dump(mode="json")))
        if number % SEARCHED == 0 or not quick:
            yield Item(f"published, searched: {label}", plan_content(row.job({}), row.cluster))
