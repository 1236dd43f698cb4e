"""The default process group of a worker group, which listens where its workers have to reach it and nowhere else.

Left to itself, torch's rendezvous store listens on every address of the machine, and whoever reaches it may list and
write its keys: it knows no token. Here its socket is bound first: to loopback where all workers are on one machine,
else to the address by which the cluster knows the node. gloo and NCCL are given the interface of that address.

The driver imports this module, and torch is imported in the workers alone: it takes seconds.
"""

import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.train.backend import Backend, BackendConfig

from moe.interface import LOOPBACK, listen_on
from service.run.heartbeat import HeartbeatAddress, begin_heartbeat

if TYPE_CHECKING:
    import torch.distributed as dist

FIRST_HEARTBEAT_TIMEOUT_S = 60.0
"""Longest wait for each worker process's first heartbeat, which is its first task."""
LEAVE_TIMEOUT_S = 5.0
"""A group whose collective is stuck does not take part in its own end."""

_log = logging.getLogger(__name__)

_store: list["dist.TCPStore"] = []
"""Store of rank 0's process, from its opening until the process group is made."""


def meeting_addresses(nodes: Sequence[str]) -> list[str]:
    """Addresses to listen on by rank, from those of the ranks' nodes; loopback if all are of one machine."""
    on_one_machine = len(set(nodes)) == 1 or all(ipaddress.ip_address(node).is_loopback for node in nodes)
    return [LOOPBACK] * len(nodes) if on_one_machine else list(nodes)


def node_address() -> str:
    """The address by which the cluster knows the node of this process."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def open_store(address: str, timeout_s: float) -> int:
    """Have the group's store listen on an address of this machine; answers with its port. Rank 0 calls it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        port = int(listener.getsockname()[1])
        _store[:] = [_tcp_store(address, port, timeout_s, master_listen_fd=os.dup(listener.fileno()))]
    return port


def join(rank: int, addresses: Sequence[str], port: int, timeout_s: float) -> None:
    """Make the group, of gloo, with the others: all ranks call it, once rank 0 has opened the store at `port`."""
    import torch.distributed as dist

    listen_on(addresses[rank])
    store = _store.pop() if rank == 0 else _tcp_store(addresses[0], port, timeout_s)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=len(addresses), timeout=timedelta(seconds=timeout_s)
    )


def leave() -> None:
    """End the group in this process, if it has joined one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _tcp_store(
    address: str, port: int, timeout_s: float, master_listen_fd: int | None = None
) -> "dist.TCPStore":
    import torch.distributed as dist

    return dist.TCPStore(
        address,
        port,
        is_master=master_listen_fd is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=master_listen_fd,
    )


def _begin(heartbeats: HeartbeatAddress, rank: int) -> str:
    """Begin this worker's heartbeat; answers with the address of its node."""
    begin_heartbeat(heartbeats, rank, ray.get_runtime_context().get_node_id())
    return node_address()


class _Gloo(Backend):
    """Ray Train's hooks at the start and the end of a worker group."""

    share_cuda_visible_devices = True  # a node's workers number its GPUs alike

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, GlooConfig)
        timeout_s = backend_config.timeout_s
        # Before anything else, so that a worker that freezes while it imports torch is noticed, too.
        nodes = ray.get(
            [
                worker_group.execute_single_async(rank, _begin, backend_config.heartbeats, rank)
                for rank in range(len(worker_group))
            ],
            timeout=FIRST_HEARTBEAT_TIMEOUT_S,
        )
        addresses = meeting_addresses(nodes)
        port = worker_group.execute_single(0, open_store, addresses[0], timeout_s)
        ray.get(
            [
                worker_group.execute_single_async(rank, join, rank, addresses, port, timeout_s)
                for rank in range(len(addresses))
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        try:
            ray.get(worker_group.execute_async(leave), timeout=LEAVE_TIMEOUT_S)
        except GetTimeoutError:
            _log.warning("the workers' process group did not end within %g s", LEAVE_TIMEOUT_S)
        except RayError as error:  # of a worker that died, which is told of elsewhere
            _log.info("the workers' process group did not end in order: %s", type(error).__name__)


@dataclass
class GlooConfig(BackendConfig):
    """A process group of gloo, made as this module says, whose collectives end after `timeout_s` seconds; its workers
    send their heartbeats to `heartbeats`."""

    timeout_s: float
    heartbeats: HeartbeatAddress

    @property
    def backend_cls(self) -> type[_Gloo]:
        return _Gloo
