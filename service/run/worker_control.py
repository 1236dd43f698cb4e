"""Requests to a worker, and notices that its node or its driver's is about to end."""

from moe.train.control import Control, Request
from service.run.end_notice import has_notice
from service.run.heartbeat import Heartbeat


class WorkerControl(Control):
    """Control of one rank."""

    def __init__(self, requests: Control, heartbeat: Heartbeat | None) -> None:
        self._requests, self._heartbeat = requests, heartbeat

    def poll(self) -> Request | None:
        return self._requests.poll()

    def is_preempted(self) -> bool:
        return has_notice() or (self._heartbeat is not None and self._heartbeat.driver_is_ending)
