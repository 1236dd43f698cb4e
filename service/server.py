"""The control plane as a process: at SIGTERM it ends its streams, lets go of the lease, and exits."""

import signal
import socket
import sys
from types import FrameType

import structlog
import uvicorn

from service.app import create_app
from service.launch.launcher import Launcher
from service.report.hub import Hub
from service.settings import Settings


def serve(settings: Settings, launcher: Launcher, listening: socket.socket | None = None) -> None:
    """Serves until SIGTERM or SIGINT, on `listening` if a socket is given, which is then already bound."""
    _log_to_stderr()
    app = create_app(settings, launcher)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody in front of this service is trusted to name clients
        ws="none",
        log_level="warning",
        timeout_graceful_shutdown=max(1, round(settings.shutdown_s)),
    )
    _Server(config, app.state.hub).run(sockets=[listening] if listening else None)


def _log_to_stderr() -> None:
    """Standard output is for what a command was asked; decisions and why go where logs go."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # Not the fancy tracebacks: they print local variables, and some of those are tokens.
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


class _Server(uvicorn.Server):
    """Ends event streams when a signal asks the server to: by themselves they would go on for days."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again at the end, and an orderly exit would look like a death.
        self._hub.close()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
