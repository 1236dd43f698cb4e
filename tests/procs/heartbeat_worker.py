"""A worker process with heartbeats: `HOST PORT SECRET RANK PHASE HOW`. It prints `at work` once it is in the phase."""

import sys
import threading
import time

from moe.activity import doing
from service.run.heartbeat import HeartbeatAddress, begin_heartbeat, heartbeat_of_process


def main() -> None:
    host, port, secret, rank, phase, how = sys.argv[1:]
    begin_heartbeat(HeartbeatAddress(host, int(port), secret), int(rank), "this-node", "127.0.0.1")
    heartbeat = heartbeat_of_process()
    heartbeat.follow(lambda level, text: print(level, text, flush=True))
    with doing(phase, f"{phase} of a test"):  # type: ignore[arg-type]
        print("at work", flush=True)
        if how == "waits":
            wait_for_nobody()
        else:
            compute()


def wait_for_nobody() -> None:
    threading.Event().wait()


def compute() -> None:
    while True:
        sum(range(100_000))
        time.sleep(0)


if __name__ == "__main__":
    main()
