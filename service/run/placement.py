"""Reason why Ray cannot place the workers of this driver's run."""

from typing import Any


def explain_placement(num_workers: int, cpus_each: int, gpus_each: int) -> str | None:
    """Resources that the cluster lacks for this driver's pending placement group; None if none is pending."""
    import ray
    from ray.util import placement_group_table

    job_id = ray.get_runtime_context().get_job_id()  # suffix of the ids of this job's placement groups
    gangs = placement_group_table()
    if not any(id.endswith(job_id) and gang["state"] == "PENDING" for id, gang in gangs.items()):
        return None
    return missing_resources(
        {"CPU": num_workers * cpus_each, "GPU": num_workers * gpus_each},
        ray.cluster_resources(),  # type: ignore[no-untyped-call]
        ray.available_resources(),  # type: ignore[no-untyped-call]
    )


def nodes_of_gang() -> list[str]:
    """Node ids of this driver's placed workers."""
    import ray
    from ray.util import placement_group_table

    job_id = ray.get_runtime_context().get_job_id()
    gangs = [gang for id, gang in placement_group_table().items() if id.endswith(job_id)]
    nodes = [node for gang in gangs if gang["state"] == "CREATED" for node in gang["bundles_to_node_id"].values()]
    return list(dict.fromkeys(nodes))


def missing_resources(demand: dict[str, int], total: dict[str, Any], free: dict[str, Any]) -> str:
    """Resources that prevent a placement group: too few in the cluster, else not free."""
    scarce_names = [name for name, count in demand.items() if total.get(name, 0) < count]
    if scarce_names:
        return (
            "the cluster has only " + " and ".join(f"{total.get(name, 0):g} {name}s" for name in scarce_names) + " now"
        )
    busy_names = [name for name, count in demand.items() if free.get(name, 0) < count]
    if busy_names:
        return "other programs hold the cluster's resources: " + " and ".join(
            f"{free.get(name, 0):g} of {total[name]:g} {name}s are free" for name in busy_names
        )
    return "the free resources are spread over nodes in parts that are too small"
