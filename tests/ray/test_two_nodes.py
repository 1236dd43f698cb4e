"""Gangs on a cluster of two nodes with two GPUs each: GPUs in the books, which is what placement goes by."""

import sys
from collections import defaultdict

import pytest

from service.control.launcher.ray_jobs import RayJobsLauncher
from service.head.local_head import LocalHead
from tests.ray.control_plane import ControlPlane, job_spec, worker_group


@pytest.fixture(scope="module")
def gpu_nodes(head: LocalHead) -> LocalHead:
    """The head with two more nodes; they stay, and leave jobs that ask for no GPU alone."""
    return head.add_node(num_cpus=2, num_gpus=2).add_node(num_cpus=2, num_gpus=2)


@pytest.mark.slow
def test_expert_groups_stay_within_a_node(gpu_nodes: LocalHead, plane: ControlPlane) -> None:
    spec = job_spec(
        train={"num_steps": 3, "batch_tokens": 2048, "evaluation": {"max_pairs": 4}},
        resources={"num_workers": 4, "gpus_per_worker": "auto", "device": "cpu"},
        parallel={"expert": 2, "data": 2},
    )
    job = plane.client.submit(spec)
    workers = worker_group(job)
    assert [worker["rank"] for worker in workers] == [0, 1, 2, 3]
    ranks_by_node = defaultdict(list)
    for worker in workers:
        ranks_by_node[worker["node"]].append(worker["rank"])
    assert list(ranks_by_node.values()) == [[0, 1], [2, 3]]
    assert job.wait(200).state == "succeeded", job.data


@pytest.mark.slow
def test_gpus_that_only_the_books_have_are_not_trained_without(
    gpu_nodes: LocalHead, plane: ControlPlane
) -> None:
    job = plane.client.submit(job_spec(resources={"num_workers": 1}, parallel={"expert": 1}))
    assert job.wait(200).state == "failed", job.data
    assert "holds a GPU by the cluster's books and finds none" in job.reason
    assert "resources.device=cpu" in job.reason
    assert (job.data["attempt"], job.step) == (1, 0)


@pytest.mark.slow
def test_a_cluster_is_measured_within_nodes_and_across(gpu_nodes: LocalHead) -> None:
    """Its GPUs are in the books only: what is there is measured."""
    launcher = RayJobsLauncher(gpu_nodes.dashboard_url, sys.executable, gpu_nodes.token_path)
    found = launcher.calibrate()
    launcher.close()
    assert found.device == "cpu"
    assert found.flops_per_s["float32"] > 1e9
    assert found.within_node_bytes_per_s is not None
    assert found.across_nodes_bytes_per_s is not None
    assert min(found.within_node_bytes_per_s, found.across_nodes_bytes_per_s) > 1e6
    assert found.latency_s is not None
    assert found.across_latency_s is not None


def test_the_clusters_facts_are_what_its_nodes_have(gpu_nodes: LocalHead) -> None:
    launcher = RayJobsLauncher(gpu_nodes.dashboard_url, "python", gpu_nodes.token_path)
    facts = launcher.cluster()
    assert sorted((node.cpus, node.gpus) for node in facts.nodes) == [(2, 2), (2, 2), (6, 0)]
    assert all(node.memory_bytes > 1 << 28 for node in facts.nodes)
    launcher.close()
