"""Plans jobs on a running cluster, from its facts."""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import ValidationError

from moe.plan import (
    DEVICES,
    Cluster,
    DeviceFacts,
    LayoutSearch,
    Plan,
    PlanQuery,
    Pools,
    largest_divisible,
    plan_on_cluster,
)
from moe.plan.cluster.cluster import pools_problem
from moe.plan.cluster.device_names import find_device, unknown_gpu
from moe.plan.executable import check_requested_features
from moe.spec import JobSpec, ModuleModelSpec, Problem, SpecError
from service.control.launcher.launcher import ClusterFacts, NodeFacts
from service.control.launcher.slots import slots
from service.control.scheduling.admission import Admit, admit, gpus_per_worker, nodes_by_pool

_UNKNOWN_GPU_MEMORY_BYTES = 16 * 1024**3


def planning_cluster(spec: JobSpec, facts: ClusterFacts) -> Cluster | None:
    """Devices that the job's workers would run on, one per worker; None if no node holds a worker."""
    facts = facts.for_job(spec.resources)
    gpus, cpus = gpus_per_worker(spec.resources, facts), spec.resources.cpus_per_worker
    facts = _of_first_pool(spec, facts)
    num_slots = {node.id: slots(node.cpus, node.gpus, cpus, gpus) for node in facts.nodes}
    nodes = [node for node in facts.nodes if num_slots[node.id] > 0]
    if not nodes:
        return None
    per_node = min(num_slots[node.id] for node in nodes)
    # All devices are taken to be as small as the smallest one, so that the plan fits all of them.
    num_nodes = max(1, sum(num_slots.values()) // per_node)
    kind = spec.resources.trains_on(gpus)
    if kind == "cuda":
        device: str | DeviceFacts = _gpu_of(nodes)
        memory_bytes = min(_gpu_memory_bytes(node) for node in nodes)
    else:
        device = "cpu"
        # In a node pool, workers get no more than their share of a node, even if fewer workers run on it.
        shares_node = nodes[0].pool and not nodes[0].exclusive
        workers_per_node = per_node if shares_node else min(per_node, spec.resources.max_num_workers)
        memory_bytes = min(node.memory_bytes for node in nodes) // workers_per_node
    return Cluster.model_validate(
        {
            "num_nodes": num_nodes,
            "devices_per_node": per_node,
            "device": device,
            "memory_bytes": max(1, memory_bytes),
            "calibration": next(
                (calibration for calibration in facts.calibrations if calibration.device == kind), None
            ),
            **_price_of_device(nodes, per_node, spec.resources.max_num_workers),
        }
    )


def _price_of_device(nodes: Sequence[NodeFacts], per_node: int, max_workers: int) -> dict[str, float | int]:
    """Price and billing unit of one device. Nodes are billed whole, unless the job takes a share of one."""
    prices = [node.price_per_hour for node in nodes if node.price_per_hour is not None]
    if len(prices) < len(nodes):
        return {}
    takes_share = max_workers < per_node and not nodes[0].exclusive
    return {"price_per_hour": max(prices) / per_node, "billing_unit": 1 if takes_share else per_node}


def _of_first_pool(spec: JobSpec, facts: ClusterFacts) -> ClusterFacts:
    """Facts of the node pool that the job would run on if all were empty."""
    pool = first_pool(spec, facts)
    return facts.of_pool(pool) if pool else facts


def first_pool(spec: JobSpec, facts: ClusterFacts) -> str:
    """Node pool that the job would run on if all were empty; "" on a standing Ray cluster."""
    facts = facts.for_job(spec.resources)
    pools = nodes_by_pool(facts, gpus_per_worker(spec.resources, facts))
    if len(pools) < 2:
        return next(iter(pools), "")
    verdict = admit(spec.resources, facts, gangs={})
    return verdict.gang.pool if isinstance(verdict, Admit) else next(iter(pools))


def plan_for(spec: JobSpec, facts: ClusterFacts, query: PlanQuery = PlanQuery(to_run=True)) -> Plan | None:
    """Plan on this cluster; None if it holds no worker. Raises SpecError."""
    cluster = planning_cluster(spec, facts)
    return None if cluster is None else plan_on(spec, cluster, query)


def module_cluster(spec: JobSpec, cluster: Cluster | Pools, num_workers: int | None = None) -> Cluster:
    """Devices that a module job is planned for, one per worker; by default as many as it may use. Raises SpecError
    for pools."""
    if isinstance(cluster, Pools):
        raise SpecError(pools_problem())
    if num_workers is None:
        resources = spec.resources
        num_workers = max(resources.min_num_workers, min(resources.max_num_workers, cluster.num_devices))
    return cluster.exactly(num_workers)


def plans_to_try(spec: JobSpec, facts: ClusterFacts, num_workers: int) -> tuple[Plan, ...]:
    """Fastest runnable plans of a new job; empty if the cluster holds no worker."""
    cluster = planning_cluster(spec, facts)
    return () if cluster is None else tuple(LayoutSearch(spec, cluster).best_to_run(num_workers))


def plan_on(spec: JobSpec, cluster: Cluster | Pools, query: PlanQuery = PlanQuery(to_run=True)) -> Plan:
    """Plan on a cluster. Raises SpecError, also for numbers that overflow."""
    resources = spec.resources
    is_ranged = query.num_workers is None and resources.min_num_workers < resources.max_num_workers
    if is_ranged and query.goal is None and isinstance(cluster, Cluster):
        max_workers = max(resources.min_num_workers, min(resources.max_num_workers, cluster.num_devices))
        divisible = largest_divisible(LayoutSearch(spec, cluster), max_workers)
        query = replace(query, num_workers=divisible if divisible != max_workers else None)
    try:
        plan = plan_on_cluster(spec, cluster, query)
    except (ValidationError, ArithmeticError):
        raise SpecError(_too_large(spec)) from None
    skew = query.load_skew
    if skew is None or spec.model.moe is None:
        return plan
    reason = f"the busiest expert is planned with {skew:.3g} times the mean load, as measured in the newest steps"
    return plan.model_copy(update={"reasons": (*plan.reasons, reason)})


def _too_large(spec: JobSpec) -> Problem:
    num_weights = f"{spec.model.num_parameters():.0e}" if spec.model.num_parameters() < 10**300 else "too many"
    return Problem("does_not_fit", "model", f"{num_weights} weights", "is too large to plan", "use smaller numbers")


def check_degrees(spec: JobSpec) -> None:
    """Raises SpecError for a spec without a layout on any cluster. Module jobs pass: only planning knows their
    module."""
    if isinstance(spec.model, ModuleModelSpec):
        return
    check_requested_features(spec)
    workers = spec.resources.max_num_workers
    unlimited_cluster = Cluster(num_nodes=1, devices_per_node=workers, memory_bytes=2**53 - 1)
    try:
        search = LayoutSearch(spec, unlimited_cluster)
        search.check(largest_divisible(search, workers))
    except (ValidationError, ArithmeticError):
        raise SpecError(_too_large(spec)) from None


def _device_type(node: NodeFacts) -> str | None:
    """Type in `DEVICES`; None for an unknown GPU."""
    return find_device(node.accelerator or "", node.accelerator_memory_bytes)


def _gpu_of(nodes: Sequence[NodeFacts]) -> str | DeviceFacts:
    """Type of these nodes' GPUs, the slowest of several; assumed facts for an unknown type."""
    for node in nodes:
        if _device_type(node) is None:
            return unknown_gpu(node.accelerator or "", _gpu_memory_bytes(node))
    types = {device for node in nodes if (device := _device_type(node)) is not None}
    return min(sorted(types), key=lambda name: max(DEVICES[name].peak_flops_per_s.values()))


def _gpu_memory_bytes(node: NodeFacts) -> int:
    if node.accelerator_memory_bytes:
        return node.accelerator_memory_bytes
    device = _device_type(node)
    return _UNKNOWN_GPU_MEMORY_BYTES if device is None else DEVICES[device].memory_bytes
