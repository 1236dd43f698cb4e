"""Plans on node pools: devices, memory and prices as the pods get them."""

from typing import Any

import pytest

from moe.spec import JobSpec
from service.control.launcher.kuberay.pools import cluster_facts, worker_pods
from service.control.scheduling.planning import plan_for, planning_cluster
from service.node_pool import NodePool
from tests.service.control_plane import spec

GIB = 1024**3
H100 = {"name": "h100", "nodes": 4, "gpus_per_node": 8, "cpus_per_node": 64, "memory": 512 * GIB, "accelerator": "H100"}
CPUS = {"name": "cpu", "nodes": 4, "gpus_per_node": 0, "cpus_per_node": 16, "memory": 64 * GIB}


def job(num_workers: int, **resources: Any) -> JobSpec:
    return JobSpec.parse(spec(resources={"num_workers": num_workers, **resources}))


def test_the_device_is_the_pools() -> None:
    cluster = planning_cluster(job(8), cluster_facts([NodePool(**H100), NodePool(**CPUS)]))
    assert cluster is not None
    assert (cluster.device, cluster.num_nodes, cluster.devices_per_node) == ("h100", 4, 8)
    assert cluster.memory_bytes >= 79 * GIB
    given = planning_cluster(job(8), cluster_facts([NodePool(**H100, accelerator_memory="94Gi")]))
    assert given is not None
    assert given.memory_bytes == 94 * GIB


@pytest.mark.parametrize("num_workers", [1, 3, 16, 20])
def test_memory_of_a_worker_is_its_share_of_its_pod(num_workers: int) -> None:
    pool = NodePool(**CPUS)
    cluster = planning_cluster(job(num_workers, gpus_per_worker=0), cluster_facts([pool]))
    assert cluster is not None
    pods = worker_pods(pool, num_workers, 1, 0)
    assert cluster.memory_bytes * pods.workers_per_pod <= pods.memory_bytes


@pytest.mark.parametrize(("num_workers", "num_billed"), [(1, 1), (4, 4), (8, 8)])
def test_the_price_is_that_of_the_pods(num_workers: int, num_billed: int) -> None:
    pool = NodePool(**H100, node_price_per_hour=80)
    plan = plan_for(job(num_workers), cluster_facts([pool]))
    assert plan is not None
    assert plan.money is not None
    assert plan.money.per_hour == 10 * num_billed == worker_pods(pool, num_workers, 1, 1).price_per_hour
    free = plan_for(job(num_workers), cluster_facts([NodePool(**H100)]))
    assert free is not None
    assert free.money is None
