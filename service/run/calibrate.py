"""Measures a cluster's devices and links: `python -m service.run.calibrate`, as a job of that cluster.

Up to two workers on each of up to two nodes exchange data in simultaneous pairs. The printed `Calibration` is used
for all devices, although a link out of a node that more devices share would be loaded more.
"""

import logging
import sys
import time
from typing import Any

from moe.plan import Calibration
from service.run.driver import workers_environment
from service.wire.launch import CALIBRATION_MARK

MAX_NODES, MAX_WORKERS_OF_A_NODE = 2, 2
PLACING_TIMEOUT_S, MEASURING_TIMEOUT_S = 120, 120
"""Timeouts of the workers' start and of the measurement: shorter than any caller's."""


class NoRoom(Exception):
    """The cluster has no free resources to measure."""


def measure_cluster() -> Calibration:
    """Calibration of the cluster that this job runs on. Raises NoRoom."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from service.run.process_group import meeting_addresses

    ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING,
             runtime_env={"env_vars": workers_environment(gpus_per_worker=0)})  # fmt: skip
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    resource = "GPU" if any(node["Resources"].get("GPU") for node in nodes) else "CPU"
    worker_nodes = _worker_nodes(nodes, resource)
    if not worker_nodes:
        raise NoRoom("no node of the cluster has a CPU for workers")
    ranks: list[Any] = [
        ray.remote(_Rank).options(
            num_cpus=1, num_gpus=1 if resource == "GPU" else 0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote()
        for node in worker_nodes
    ]  # fmt: skip
    began = time.monotonic()
    try:
        has_gpus = ray.get([rank.has_gpu.remote() for rank in ranks], timeout=PLACING_TIMEOUT_S)
        nodes_of_ranks = ray.get([rank.node_address.remote() for rank in ranks], timeout=PLACING_TIMEOUT_S)
        addresses = meeting_addresses(nodes_of_ranks)
        port = ray.get(ranks[0].open_store.remote(addresses[0]), timeout=PLACING_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        raise NoRoom(f"{len(ranks)} workers were not placed within {PLACING_TIMEOUT_S} s") from None
    distinct_nodes = list(dict.fromkeys(worker_nodes))
    node_numbers = [distinct_nodes.index(node) for node in worker_nodes]
    device = "cuda" if all(has_gpus) else "cpu"
    measurements = [
        rank.measure.remote(index, node_numbers, addresses, port, device) for index, rank in enumerate(ranks)
    ]
    try:
        calibrations: list[Calibration] = ray.get(measurements, timeout=MEASURING_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        wait_s = time.monotonic() - began
        raise NoRoom(f"{len(ranks)} workers did not measure their links within {wait_s:.0f} s") from None
    return calibrations[0]


def _worker_nodes(nodes: list[dict[str, Any]], resource: str) -> list[str]:
    """Node id of each worker, on the nodes with the most of a resource."""
    slots = {
        node["NodeID"]: int(min(node["Resources"].get("CPU", 0), node["Resources"].get(resource, 0))) for node in nodes
    }
    largest = sorted((node for node in slots if slots[node] > 0), key=lambda node: (-slots[node], node))
    return [node for node in largest[:MAX_NODES] for _ in range(min(slots[node], MAX_WORKERS_OF_A_NODE))]


class _Rank:
    """Actor of one rank."""

    def node_address(self) -> str:
        from service.run.process_group import node_address

        return node_address()

    def open_store(self, address: str) -> int:
        from service.run.process_group import open_store

        return open_store(address, MEASURING_TIMEOUT_S)

    def has_gpu(self) -> bool:
        from moe.parallel.accelerator import has_gpu

        return has_gpu()

    def measure(self, rank: int, nodes: list[int], addresses: list[str], port: int, device: str) -> Calibration:
        import torch
        import torch.distributed as dist

        from moe.calibrate.rates import measure
        from service.run.process_group import join

        torch.set_num_threads(1)
        join(rank, addresses, port, MEASURING_TIMEOUT_S)
        try:
            return measure(device, nodes)
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    try:
        print(CALIBRATION_MARK + measure_cluster().model_dump_json())
    except NoRoom as error:
        sys.exit(str(error))  # the last line of the log, which the control plane quotes
