"""Run the server: `python -m tests.kubernetes.apiserver CONFIG`, a JSON file. Prints its port when it listens."""

import asyncio
import json
import signal
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.kubernetes.apiserver.access import Access
from tests.kubernetes.apiserver.app import App
from tests.kubernetes.apiserver.definitions import load_manifests
from tests.kubernetes.apiserver.registry import Registry
from tests.kubernetes.apiserver.store import Key, Store


async def serve(config: dict[str, Any]) -> None:
    """Serve until SIGTERM or the end of the standard input."""
    store = Store(Path(config["state"]) if config.get("state") else None)
    cache_dir = Path(config["cache_dir"]) if config.get("cache_dir") else None
    manifests = [m for path in config["definitions"] for m in load_manifests(Path(path), cache_dir)]
    registry = Registry(store, manifests)
    for namespace in config["namespaces"]:
        if store.get(Key("namespaces.", "", namespace)) is None:
            definition = registry.definition("", "v1", "namespaces")
            value = {"metadata": {"name": namespace}}
            registry.create(definition, "", value, manager="kube-apiserver", strict=True)
    app = App(registry, Access(config["identities"]), bookmark_s=config["bookmark_s"])
    runner = web.AppRunner(app.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    context = None
    if config.get("certificate"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config["certificate"], config["key"])
    listener = socket.create_server(("127.0.0.1", config["port"]), backlog=256)
    await web.SockSite(runner, listener, ssl_context=context).start()
    print(listener.getsockname()[1], flush=True)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    # Its input ends with the process that started it, also when that is killed.
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stopping.set)
    await stopping.wait()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text())))
