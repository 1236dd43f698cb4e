"""A port of this machine that leads to a pod, as `kubectl port-forward` makes one."""

import asyncio
import socket
from contextlib import suppress


async def forward(listener: socket.socket, address: str, port: int) -> None:
    """Pass each connection of `listener` on to a pod. The listener may be of another network namespace."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # the pod is not there, or either side has closed
            pod_reader, pod_writer = await asyncio.open_connection(address, port)
            await asyncio.gather(_copy(reader, pod_writer), _copy(pod_reader, writer))
        writer.close()

    server = await asyncio.start_server(connect, sock=listener)
    async with server:
        await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while block := await reader.read(1 << 16):
            writer.write(block)
            await writer.drain()
    finally:
        writer.close()
