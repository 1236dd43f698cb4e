"""Graphs of device work: launches recorded once and replayed together, as CUDA graphs."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class GraphRecorder:
    """Records graphs on one stream, in one memory pool: graphs of a recorder never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._pool, self._stream = self._module.graph_pool_handle(), self._module.Stream(device)

    def warm_up(self, function: Callable[[], Result]) -> Result:
        """Return `function()`, run on the recorder's stream, where kernels compile and libraries allocate before a
        recording, which allows neither."""
        current_stream = self._module.current_stream()
        self._stream.wait_stream(current_stream)
        with self._module.stream(self._stream):
            result = function()
        current_stream.wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """(result of `function`, replay). Nothing is computed yet; each replay overwrites the result's tensors.

        Replays read and write the same memory as `function`, with the same numbers of the host. RuntimeError if
        `function` waits for the device or copies from the host.
        """
        graph = self._module.CUDAGraph()
        # Not "global": another thread prepares the next batch meanwhile.
        with self._module.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return result, graph.replay
