"""Gangs on a cluster of two nodes with two declared GPUs each, which is what placement considers."""

import os
import subprocess
import sys
from collections import defaultdict

import psutil
import pytest

from service.control.launcher.ray_jobs import RayJobsLauncher
from service.head.local_head import LocalHead
from service.head.ray_start import Node
from tests.processes import DEADLINE_S
from tests.ray.control_plane import ControlPlane, await_checkpoint, job_spec, kill_node, worker_group

DRAIN = """
import sys, time
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

address, node_id = sys.argv[1:]
reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
in_ten_minutes_ms = int(time.time() + 600) * 1000
accepted, why = GcsClient(address=address).drain_node(node_id, reason, "spot", in_ten_minutes_ms)
assert accepted, why
"""
"""What `ray drain-node` does, which would ask the head at another address of this machine."""


@pytest.fixture(scope="module")
def gpu_nodes(head: LocalHead) -> LocalHead:
    """The head with two more nodes, which stay, and do not affect jobs without GPUs."""
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
def test_gpus_that_only_the_books_have_are_not_trained_without(gpu_nodes: LocalHead, plane: ControlPlane) -> None:
    job = plane.client.submit(job_spec(resources={"num_workers": 1}, parallel={"expert": 1}))
    assert job.wait(200).state == "failed", job.data
    assert "was assigned a GPU but finds none" in job.reason
    assert "resources.device=cpu" in job.reason
    assert (job.data["attempt"], job.step) == (1, 0)


@pytest.mark.slow
def test_a_preempted_node_spends_no_retry(gpu_nodes: LocalHead, plane: ControlPlane) -> None:
    """The node is drained, as clusters announce a preemption, and then removed."""
    nodes = gpu_nodes.add_node(num_cpus=2, num_gpus=2)  # replaces the removed node
    spec = job_spec(resources={"num_workers": 2, "gpus_per_worker": "auto", "device": "cpu"}, retry={"max_failures": 0})
    job = plane.client.submit(spec)
    await_checkpoint(job, 10)
    pid = worker_group(job)[0]["pid"]
    number = next(number for number, node in enumerate(nodes.nodes) if _belongs_to(node, pid))
    [node_id] = [facts for facts in _node_ids(nodes) if facts[1] == f"127.0.0.{1 + number}"]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(nodes.token_path)}
    command = [sys.executable, "-c", DRAIN, nodes.address, node_id[0]]
    subprocess.run(command, env={**os.environ, **token}, check=True, timeout=DEADLINE_S)
    kill_node(nodes, number)
    assert job.wait(DEADLINE_S).state == "succeeded", job.data
    assert job.data["failures"] == 0
    [recovery] = [event for event in job.events() if event.data.get("record") == "recovering"]
    assert recovery.data["preempted"] is True


@pytest.mark.slow
def test_a_lost_node_is_named_with_its_ranks(gpu_nodes: LocalHead, plane: ControlPlane) -> None:
    nodes = gpu_nodes.newest().add_node(num_cpus=2, num_gpus=2)  # replaces the lost node
    spec = job_spec(
        resources={"num_workers": 4, "gpus_per_worker": "auto", "device": "cpu"},
        parallel={"expert": 4}, retry={"kinds": {"lost": {"max_failures": 1}}, "max_failures": 0},
    )  # fmt: skip
    job = plane.client.submit(spec)
    await_checkpoint(job, 10)
    workers = worker_group(job)
    number = next(number for number, node in enumerate(nodes.nodes) if _belongs_to(node, workers[-1]["pid"]))
    kill_node(nodes, number)
    assert job.wait(DEADLINE_S).state == "succeeded", job.data
    [recovery] = [event for event in job.events() if event.data.get("record") == "recovering"]
    place = f"127.0.0.{1 + number} ({workers[-1]['host']})"
    assert recovery.data["reason"] == f"node {place} was lost; ranks 2-3 ran there"
    assert recovery.data["kind"] == "lost"


@pytest.mark.slow
def test_a_cluster_is_measured_within_nodes_and_across(gpu_nodes: LocalHead) -> None:
    """Its GPUs are only declared: the actual CPUs are measured."""
    launcher = RayJobsLauncher(gpu_nodes.dashboard_url, sys.executable, gpu_nodes.token_path)
    facts = launcher.calibrate()
    launcher.close()
    assert facts.device == "cpu"
    assert facts.flops_per_s["float32"] > 1e9
    assert facts.within_node_bytes_per_s is not None
    assert facts.across_nodes_bytes_per_s is not None
    assert min(facts.within_node_bytes_per_s, facts.across_nodes_bytes_per_s) > 1e6
    assert facts.latency_s is not None
    assert facts.across_latency_s is not None


@pytest.mark.slow
def test_the_clusters_facts_are_what_its_nodes_have(gpu_nodes: LocalHead) -> None:
    launcher = RayJobsLauncher(gpu_nodes.dashboard_url, "python", gpu_nodes.token_path)
    facts = launcher.cluster()
    assert sorted((node.cpus, node.gpus) for node in facts.nodes) == [(2, 2), (2, 2), (6, 0)]
    assert all(node.memory_bytes > 1 << 28 for node in facts.nodes)
    launcher.close()


def _belongs_to(node: Node, pid: int) -> bool:
    """Whether a process belongs to a node."""
    parents = {parent.pid for parent in psutil.Process(pid).parents()}
    return any(process.pid in parents for process in node.processes)


def _node_ids(head: LocalHead) -> list[tuple[str, str]]:
    """(id, address) of the living nodes."""
    launcher = RayJobsLauncher(head.dashboard_url, "python", head.token_path)
    facts = launcher.cluster()
    launcher.close()
    return [(node.id, node.ip) for node in facts.nodes]
