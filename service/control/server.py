"""The control plane as a process: at SIGTERM it ends streams and releases the lease."""

import asyncio
import logging
import resource
import signal
import socket
import sys
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, cast

import structlog
import uvicorn

from service.control.app import create_app
from service.control.launcher.launcher import Launcher
from service.control.listen.connection import ClientConnection
from service.control.listen.connections import ConnectionLimits, Connections
from service.control.listen.log_rate_limit import LogRateLimit
from service.control.report.hub import Hub
from service.settings import Settings

TAKEN_AT_A_TIME = 64
"""Connections accepted at a time: far fewer than allowed per address, so that requests are read before more are
accepted."""
QUEUE = 2048
"""Backlog of connections in the kernel."""
SPARE_DESCRIPTORS = 256
"""File descriptors for the database, storage, the cluster, and files being read."""
log = structlog.get_logger(__name__)


def serve(settings: Settings, launcher: Launcher, listening: socket.socket | None = None) -> None:
    """Serve until SIGTERM or SIGINT; on the bound socket `listening`, if given."""
    _log_to_stderr()
    app = create_app(settings, launcher)
    connections: Connections[ClientConnection] = Connections(_limits(settings))
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        # Not uvloop, which comes with other packages and accepts connections in its own way.
        loop="asyncio",
        http=cast(Any, partial(ClientConnection, connections)),
        backlog=TAKEN_AT_A_TIME,
        timeout_keep_alive=settings.keep_alive_s,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # no proxy is trusted to name clients
        ws="none",
        log_level="warning",
        timeout_graceful_shutdown=max(1, round(settings.shutdown_s)),
    )
    _log_no_floods()  # after uvicorn has set up its loggers
    _Server(config, app.state.hub, connections).run(sockets=[listening or config.bind_socket()])


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            LogRateLimit(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # Plain tracebacks: rich ones print local variables, which include tokens.
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _log_no_floods() -> None:
    """Rate-limit library logs that strangers can cause."""
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(LogRateLimit().filter)


def _limits(settings: Settings) -> ConnectionLimits:
    """Limits from the settings, within the limit of open files."""
    limits = ConnectionLimits(
        max_connections=settings.max_connections,
        max_strangers=settings.max_unauthenticated,
        max_strangers_per_address=settings.max_unauthenticated_per_address,
        header_timeout_s=settings.header_timeout_s,
        body_timeout_s=settings.body_timeout_s,
        min_body_bytes_per_s=settings.min_body_bytes_per_s,
        write_timeout_s=settings.write_timeout_s,
    )
    num_reserved = limits.max_strangers + TAKEN_AT_A_TIME + SPARE_DESCRIPTORS
    room = allow_descriptors(limits.max_connections + num_reserved) - num_reserved
    if room >= limits.max_connections:
        return limits
    log.warning(
        "max_connections lowered: the process's limit of open files is too small (ulimit -n)",
        max_connections=limits.max_connections,
        held=max(1, room),
    )
    return replace(limits, max_connections=max(1, room))


class _Server(uvicorn.Server):
    """Closes slow connections, and ends endless event streams at a signal."""

    def __init__(self, config: uvicorn.Config, hub: Hub, connections: Connections[ClientConnection]) -> None:
        super().__init__(config)
        self._hub, self._connections = hub, connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUE)  # asyncio accepts as many at a time as its backlog

    async def main_loop(self) -> None:
        looking = asyncio.create_task(self._look())
        try:
            await super().main_loop()
        finally:
            looking.cancel()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._connections.limits.look_interval_s)
            for connection in self._connections.list_connections():
                connection.look()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's handler would raise the signal again at the end, so that a clean exit would look like a crash.
        self._hub.close()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def allow_descriptors(num_descriptors: int) -> int:
    """Raise the soft limit towards `num_descriptors`, up to the hard limit; returns the number allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num_descriptors:
        soft = num_descriptors if hard == resource.RLIM_INFINITY else min(num_descriptors, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return num_descriptors if soft == resource.RLIM_INFINITY else soft
