"""The driver's heartbeat server; keeps the latest heartbeat of each rank."""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import ValidationError

from service.run.heartbeat import Beat, HeartbeatAddress, Introduction

MAX_LINE_BYTES = 1 << 16
INTRODUCTION_TIMEOUT_S = 10.0
"""A connection without an introduction by then is closed."""
TICK_S = 1.0
PAUSE_S = 5.0
"""If the event loop did not run for longer, this process was stopped: ranks are not to blame."""


@dataclass
class RankState:
    """Last heartbeat of a connected worker process."""

    introduction: Introduction
    beat: Beat
    heard_at: float
    wants_stacks: bool = field(default=False)

    @property
    def rank(self) -> int:
        return self.introduction.rank

    def silent_s(self, now_s: float) -> float:
        return now_s - self.heard_at


class HeartbeatServer:
    """Receives heartbeats in its own thread until `close`."""

    def __init__(self, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ranks: dict[int, RankState] = {}
        """Ranks by connection number, until the connection closes with its process."""
        self._closed: dict[int, Introduction] = {}
        """Ranks of this worker group whose connection has closed."""
        self._num_connections = 0
        self._lock = threading.Lock()
        self.is_ending = False
        """Whether the driver's node is about to end, which answers tell the ranks."""
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, host, 0, limit=MAX_LINE_BYTES))
        port = int(self._server.sockets[0].getsockname()[1])
        self.address = HeartbeatAddress(host, port, secrets.token_hex(16))
        self._writers: set[asyncio.StreamWriter] = set()
        self._pauses = self._loop.create_task(self._notice_pauses())
        self._thread = threading.Thread(target=self._loop.run_forever, name="heartbeats", daemon=True)
        self._thread.start()

    def ranks(self) -> list[RankState]:
        """The connected processes, by rank."""
        with self._lock:
            return sorted(self._ranks.values(), key=lambda state: state.rank)

    def closed(self) -> list[Introduction]:
        """Processes of the newest worker group whose connection has closed, by rank."""
        with self._lock:
            return [self._closed[rank] for rank in sorted(self._closed)]

    def close(self) -> None:
        """End the thread and all connections."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()  # a stopped process would never read the pending data
        # Handlers end when their connections close; asyncio would log cancelled ones as errors.
        while self._writers:
            await asyncio.sleep(0)
        self._pauses.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        number = self._num_connections
        self._writers.add(writer)
        try:
            async with asyncio.timeout(INTRODUCTION_TIMEOUT_S):
                introduction = Introduction.model_validate_json(await reader.readline())
            if not secrets.compare_digest(introduction.secret.encode(), self.address.secret.encode()):
                return
            while line := await reader.readline():
                beat = Beat.model_validate_json(line)
                with self._lock:
                    state = self._ranks.get(number) or self._new_state(number, introduction, beat)
                    state.beat, state.heard_at = beat, self._clock()
                    answer = {"stacks": state.wants_stacks, **({"ending": True} if self.is_ending else {})}
                    state.wants_stacks = False
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (OSError, ValidationError, ValueError):
            pass  # a dead process or a stranger; workers reconnect
        finally:
            with self._lock:
                if number in self._ranks:
                    closed = self._ranks.pop(number).introduction
                    self._closed[closed.rank] = closed
            writer.close()
            self._writers.discard(writer)

    def _new_state(self, number: int, introduction: Introduction, beat: Beat) -> RankState:
        """State of a new connection. Replaces its rank's older one: a lost node's never closes."""
        connected = [state.introduction for state in self._ranks.values() if state.rank == introduction.rank]
        closed = self._closed.pop(introduction.rank, None)
        if any(introduction != former for former in [*connected, closed or introduction]):
            self._closed.clear()  # another worker group: all closed connections were of the one before
        self._ranks = {
            connection: state for connection, state in self._ranks.items() if state.rank != introduction.rank
        }
        self._ranks[number] = RankState(introduction, beat, self._clock())
        return self._ranks[number]

    async def _notice_pauses(self) -> None:
        last_s = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._clock()
            if (away_s := now_s - last_s) > PAUSE_S:
                with self._lock:
                    for state in self._ranks.values():
                        state.heard_at += away_s
            last_s = now_s
