"""What-if plans: a grid over values of the spec or cluster, and the smallest cluster."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from moe.plan.cluster.cluster import Cluster
from moe.plan.cluster.pools import Pools, cluster_of
from moe.plan.plan import FewestWorkers, Plan
from moe.plan.profile import ProfileName
from moe.plan.request import PlanRequest
from moe.plan.search.pools import no_cluster_fits, plan_on_cluster
from moe.plan.search.search import LayoutSearch
from moe.spec import JobSpec, ResourcesSpec, SpecError, spec_error

MAX_CELLS = 64

_MODEL: dict[str, tuple[str, ...]] = {
    "experts": ("model", "moe", "num_experts"),
    "top_k": ("model", "moe", "top_k"),
    "hidden_dim": ("model", "moe", "hidden_dim"),
    "capacity_factor": ("model", "moe", "capacity_factor"),
    "batch_tokens": ("train", "batch_tokens"),
    "dtype": ("train", "dtype"),
    "max_tokens": ("data", "max_tokens"),
}
_CLUSTER: dict[str, str] = {"nodes": "num_nodes", "devices": "devices_per_node", "device": "device"}
_COUNTS = ("nodes", "devices")
AXES = (*_MODEL, *_CLUSTER)


@dataclass(frozen=True)
class Cell:
    """One combination of values, and its plan, or why there is none."""

    values: Mapping[str, str]
    plan: Plan | None
    why_not: str = ""


def parse_axes(text: str) -> dict[str, list[str]]:
    """Parse `experts=128,256,nodes=64` into `{"experts": ["128", "256"], "nodes": ["64"]}`. Raises SpecError."""
    values_by_axis: dict[str, list[str]] = {}
    axis = None
    for part in text.split(","):
        name, equals, value = part.strip().rpartition("=")
        if equals:
            axis = name
        if axis not in AXES or not value:
            raise spec_error("invalid_syntax", "--what-if", text,
                             f"must set {', '.join(AXES)}, each to one or more values",
                             "write it as experts=128,256,nodes=64")  # fmt: skip
        if axis in _COUNTS and not value.isdecimal():
            raise spec_error(
                "wrong_type", "--what-if", f"{axis}={value}", "must be a whole number", f"write it as {axis}=8"
            )
        values_by_axis.setdefault(axis, []).append(value)
    cells = 1
    for values in values_by_axis.values():
        cells *= len(values)
    if cells > MAX_CELLS:
        raise spec_error(
            "out_of_range", "--what-if", text, f"makes {cells} plans; the limit is {MAX_CELLS}", "remove some"
        )
    return values_by_axis


def grid(request: PlanRequest, cluster: Cluster | Pools, axes: Mapping[str, Sequence[str]]) -> list[Cell]:
    """Plan each combination of `axes` values, the last varying fastest.

    If the number of nodes or devices varies, every device has a worker; otherwise the number of workers is the job's,
    the request's or the goal's. With pools, each plan is on the best one. Raises SpecError if nodes vary with pools: no
    pool is named.
    """
    if isinstance(cluster, Pools) and (node_axes := [axis for axis in axes if axis in _CLUSTER]):
        raise spec_error("conflict", "--what-if", node_axes[0],
                         "applies to one kind of nodes, but the cluster has pools",
                         "omit it, or describe one pool as the cluster")  # fmt: skip
    cells = []
    query = replace(request.query, top=1)
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        try:
            spec, changed_cluster = _with_values(request.spec, cluster, values)
            cells.append(Cell(values, plan_on_cluster(spec, changed_cluster, query)))
        except SpecError as error:
            cells.append(Cell(values, None, str(error.problems[0])))
    return cells


def _with_values(spec: JobSpec, cluster: Cluster | Pools, values: Mapping[str, str]) -> tuple[JobSpec, Cluster | Pools]:
    fields = spec.model_dump(mode="json", exclude_unset=True)
    facts = cluster.model_dump(mode="json")
    for axis, text in values.items():
        if axis in _MODEL:
            _set(fields, _MODEL[axis], _value(text))
        else:
            facts[_CLUSTER[axis]] = _value(text)
            facts["torus"] = None
            if axis == "device":  # reset the fields of the old device
                facts |= dict.fromkeys(("device_facts", "links", "calibration", "memory_bytes", "price_per_hour"))
    if values.keys() & {"nodes", "devices"}:
        workers = facts["num_nodes"] * facts["devices_per_node"]
        fields["resources"] = ResourcesSpec(num_workers=workers).model_dump(mode="json", exclude_unset=True)
    return JobSpec.parse(fields), cluster_of(facts)


def _set(fields: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *parts, last = path
    for part in parts:
        fields = fields.setdefault(part, {})
        if fields is None:
            raise spec_error("unknown_key", ".".join(path), value, "does not apply to this model", "omit it")
    fields[last] = value


def _value(text: str) -> int | float | str:
    kinds: tuple[Callable[[str], int | float], ...] = (int, float)
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def smallest_cluster(
    spec: JobSpec, cluster: Cluster, profile: ProfileName | None = None
) -> tuple[Cluster, FewestWorkers]:
    """Return (smallest cluster of this kind that can run the job, one worker per device, or else holds it; fewest
    workers for both). Raises SpecError if none holds it."""
    search = LayoutSearch(spec, cluster, profile=profile)
    fewest = search.fewest()
    num_devices = fewest.to_run or fewest.in_any_layout
    if num_devices is None:
        raise SpecError(no_cluster_fits())
    return cluster.sized_for(num_devices), fewest
