"""The tracker process: `python -m service.tracker.child`.

Reads `TrackerOrder`s from standard input and writes `TrackerReply`s to standard output; prints of libraries go to
standard error.
"""

import os
import signal
import sys
import threading

from service.tracker.messages import TrackerOrder, TrackerReply
from service.tracker.run_writer import RunWriter

NICENESS = 10
"""On a machine that also trains, training comes first."""


def main() -> None:
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.nice(NICENESS)
    lock = threading.Lock()

    def reply(message: TrackerReply) -> None:
        with lock:
            output.write(message.model_dump_json(exclude_defaults=True) + "\n")
            output.flush()

    writers: dict[tuple[str, str], RunWriter] = {}
    for line in sys.stdin.buffer:
        order = TrackerOrder.model_validate_json(line)
        key = (order.job_id, order.tracker)
        if order.open is not None and key not in writers:
            writers[key] = RunWriter(order.open, reply)
        if (writer := writers.get(key)) is not None:
            writer.put(order)
            if order.close:
                del writers[key]
    # The parent has ended, and its successor will send unconfirmed steps to another process. So the processes of
    # libraries, which belong to this process's group, must not go on writing.
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
