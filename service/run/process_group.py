"""Default process group of a worker group, listening only where its workers reach it.

By default, torch's rendezvous store listens on every address, without authentication. Here its socket is bound first:
to loopback for workers on one machine, else to the node's address in the cluster, whose interface gloo and NCCL also
use.

The driver imports this module; only workers import torch, which takes seconds.
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
"""Longest wait for a worker's first heartbeat, its first task."""
LEAVE_TIMEOUT_S = 5.0
"""Longest wait for workers to destroy the group; stuck ones never do."""

_log = logging.getLogger(__name__)

_store: list["dist.TCPStore"] = []
"""Store of rank 0's process, until the process group is initialized."""


def meeting_addresses(nodes: Sequence[str]) -> list[str]:
    """Each rank's address to listen on, from node addresses; loopback on one machine."""
    is_single_machine = len(set(nodes)) == 1 or all(ipaddress.ip_address(node).is_loopback for node in nodes)
    return [LOOPBACK] * len(nodes) if is_single_machine else list(nodes)


def node_address() -> str:
    """This node's address in the cluster."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def open_store(address: str, timeout_s: float) -> int:
    """Start the group's store on rank 0, on an address of this machine; returns its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        port = int(listener.getsockname()[1])
        _store[:] = [_tcp_store(address, port, timeout_s, master_listen_fd=os.dup(listener.fileno()))]
    return port


def join(rank: int, addresses: Sequence[str], port: int, timeout_s: float) -> None:
    """Initialize the gloo process group, on all ranks, after rank 0 has started the store."""
    import torch.distributed as dist

    listen_on(addresses[rank])
    store = _store.pop() if rank == 0 else _tcp_store(addresses[0], port, timeout_s)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=len(addresses), timeout=timedelta(seconds=timeout_s)
    )


def leave() -> None:
    """Destroy this process's group, if initialized."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _tcp_store(address: str, port: int, timeout_s: float, master_listen_fd: int | None = None) -> "dist.TCPStore":
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
    """Start this worker's heartbeat and return its node's address."""
    address = node_address()
    begin_heartbeat(heartbeats, rank, ray.get_runtime_context().get_node_id(), address)
    return address


class _Gloo(Backend):
    """Ray Train's hooks at the start and end of a worker group."""

    share_cuda_visible_devices = True  # all workers of a node see the same GPU numbers

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, GlooConfig)
        timeout_s = backend_config.timeout_s
        # First of all, so that a worker that freezes while importing torch is noticed.
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
        except RayError as error:  # a worker died, which is reported elsewhere
            _log.info("the workers' process group ended with an error: %s", type(error).__name__)


@dataclass
class GlooConfig(BackendConfig):
    """A gloo process group with a collective timeout of `timeout_s`; workers send heartbeats to `heartbeats`."""

    timeout_s: float
    heartbeats: HeartbeatAddress

    @property
    def backend_cls(self) -> type[_Gloo]:
        return _Gloo
