"""Real gloo processes that stay up between tests, and run a named function on every rank."""

import gc
import importlib
import multiprocessing
import multiprocessing.context
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT_S = 300


def forkserver_with_torch() -> multiprocessing.context.ForkServerContext:
    """A context whose new processes have torch already: importing it takes seconds in each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the server, and so of all its processes
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "tests.parity.trajectory"])
    return context


@contextmanager
def rank_processes(
    function: Callable[..., None], num_ranks: int, *arguments: Any, patience_s: float = 5.0
) -> Iterator[list[Connection]]:
    """Processes that run `function(rank, *arguments, connection)`, as this end of each connection; killed at the end.
    For ranks that create their own process group."""
    context, connections, processes = forkserver_with_torch(), [], []
    for rank in range(num_ranks):
        parent_connection, child_connection = context.Pipe()
        connections.append(parent_connection)
        processes.append(context.Process(target=function, args=(rank, *arguments, child_connection), daemon=True))
        processes[-1].start()
        child_connection.close()
    try:
        yield connections
        for process in processes:
            process.join(patience_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def receive(connection: Connection) -> Any:
    assert connection.poll(TIMEOUT_S), "a rank hangs"
    return connection.recv()


def _serve(rank: int, world_size: int, rendezvous: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from moe.interface import LOOPBACK, listen_on

    torch.set_num_threads(1)
    listen_on(LOOPBACK)
    _share_gloo_device()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    while (request := pipe.recv()) is not None:
        _free_process_groups()  # all ranks have answered: none waits for another
        gc.freeze()  # objects that exist now, as of modules imported since, stay: later collections are quick
        module, name, arguments = request
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


def _share_gloo_device() -> None:
    """Have all process groups of this process use one gloo device. By default each group has its own, with a thread
    that wakes a hundred times a second."""
    from torch.distributed import ProcessGroupGloo, Store

    from moe.interface import LOOPBACK

    device, init = ProcessGroupGloo.create_device(hostname=LOOPBACK), ProcessGroupGloo.__init__

    def init_on_device(group: ProcessGroupGloo, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        init(group, store, rank, world_size, options)

    ProcessGroupGloo.__init__ = init_on_device  # type: ignore[method-assign]


def _free_process_groups() -> None:
    """Free the process groups of earlier runs, whose threads wake a hundred times a second.

    Reference cycles of sharded models hold these groups, and so does DTensor's cache of operations.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    gc.collect()


class Ranks:
    """`world_size` processes; `run(function, *arguments)` returns the results of all, in rank order.

    They are usable until a run fails. Then some may wait in a collective for ever, and others may have sent answers
    that nobody read, so all are ended.
    """

    def __init__(self, world_size: int, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        context = forkserver_with_torch()
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = os.path.join(self._folder.name, "rendezvous")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            parent_pipe, child_pipe = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, rendezvous, child_pipe), daemon=True)
            process.start()
            child_pipe.close()
            self._pipes.append(parent_pipe)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Raise an error of any rank as text. A rank that does not answer in time is an error too."""
        try:
            return self._answers(function, arguments)
        except BaseException:
            self._end(patience_s=0)
            raise

    @property
    def is_ended(self) -> bool:
        return not self._processes

    def _answers(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, arguments))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(answers) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer {function.__name__}")
            for pipe in ready:
                good, answers[waiting[pipe]] = pipe.recv()  # type: ignore[index, union-attr]
                if not good:  # the others may now wait for it in a collective: do not wait for them
                    raise AssertionError(f"rank {waiting[pipe]}:\n{answers[waiting[pipe]]}")  # type: ignore[index]
        return [answers[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """Ask the processes to end, and kill those that do not."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        self._end(patience_s=5)

    def _end(self, patience_s: float) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.join(timeout=patience_s)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._pipes, self._processes = [], []
        self._folder.cleanup()


class Pools:
    """Ranks by world size, started at first use, and restarted after a run on them failed."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._pools: dict[int, Ranks] = {}

    def __getitem__(self, world_size: int) -> Ranks:
        if world_size not in self._pools or self._pools[world_size].is_ended:
            self._pools[world_size] = Ranks(world_size, self._timeout_s)
        return self._pools[world_size]

    def close(self) -> None:
        for ranks in self._pools.values():
            ranks.close()
