"""Runs an overlay's pods on this machine, from an image in buildah's storage, until it is interrupted."""

import argparse
import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from k8s.node import cgroups
from k8s.node.buildah import MountedImage
from k8s.node.manifests import Installation, NodeError, render
from k8s.node.node import API_PORT, Node

PROGRAMS = {"buildah": "buildah", "crun": "crun", "ip": "iproute2", "kubectl": "kubectl", "unshare": "util-linux"}
"""Programs that are called, and the packages that have them."""
NAMESPACES = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="docker/run_unprivileged.sh", description=__doc__)
    parser.add_argument("image", help="as docker/build_unprivileged.sh has named it")
    parser.add_argument("--overlay", default="local", help="name in k8s/overlays, or a folder (local)")
    parser.add_argument("--workers", type=int, help="pods of each worker group, instead of the overlay's replicas")
    parser.add_argument("--port", type=int, default=API_PORT, help=f"of the API on this machine ({API_PORT})")
    parser.add_argument("--folder", type=Path, default=Path("node"), help="for claims, secrets and logs (node)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    try:
        return run(options) if options.inside else start(options)
    except NodeError as error:
        print(f"run_unprivileged.sh: {error}", file=sys.stderr)
        return 2


def start(options: argparse.Namespace) -> int:
    """Start this program again in namespaces of its own, and wait for it. Its network is no more this machine's, and
    all its processes end with it. Its stdin is a channel that brings the API's socket from here, and whose end tells it
    when this process ends."""
    if os.geteuid() != 0:
        cgroups.check_rootless()
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise NodeError(f"{program} is not installed; install {package}")
    try:
        listener = socket.create_server(("127.0.0.1", options.port))
    except OSError as error:
        raise NodeError(
            f"port (={options.port}) cannot be used ({error.strerror}); choose another with --port"
        ) from None
    channel, channel_inside = socket.socketpair()
    # Without root's rights, a user namespace with the range of users that images need.
    user_namespace = [] if os.geteuid() == 0 else ["buildah", "unshare"]
    inside = [sys.executable, "-m", "k8s.node", *sys.argv[1:], "--inside"]
    process = subprocess.Popen([*user_namespace, *NAMESPACES, *inside], stdin=channel_inside.fileno())
    socket.send_fds(channel, [b"listener"], [listener.fileno()])
    channel_inside.close()

    def stop(number: int, frame: object) -> None:
        channel.close()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return process.wait()


def run(options: argparse.Namespace) -> int:
    # A terminal sends SIGINT to the whole group. It is handled here, since containers would inherit that it is ignored.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    channel = socket.socket(fileno=sys.stdin.fileno())
    _, (number,), _, _ = socket.recv_fds(channel, 64, 1)
    listener = socket.socket(fileno=number)
    installation = Installation.from_objects(render(options.overlay), options.workers)
    container = f"shardyard-node-{listener.getsockname()[1]}"
    with MountedImage(options.image, container) as image:
        node = Node(installation, image, options.folder.absolute(), listener)
        asyncio.run(_run_until_closed(node, channel))
    return 0


async def _run_until_closed(node: Node, channel: socket.socket) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(channel, stop.set)
    await node.run(stop)


if __name__ == "__main__":
    sys.exit(main())
