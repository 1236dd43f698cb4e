"""A driver that trains nothing: takes its steps, hands in records, obeys requests, leaves a result.

Its further behaviour comes from the job's labels: `step_ms`, `die_at` (a step of the first attempt; with
`2-3`, one of each of the first two), `commits` (tells of a checkpoint of each step), `deaf`
(obeys nothing), `crash` (dies before it can say anything), `fail` (a result that says so), `hold` (goes on while this
file is there), `quiet` (says and does nothing but obey), `silent` (speaks to nobody).
"""

import json
import os
import sys
import threading
import time
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


class Sender:
    """Keeps every record until the control plane has it."""

    def __init__(self, launch: dict[str, Any]) -> None:
        self._launch = launch
        self._records: list[dict[str, Any]] = []
        self._num_sent = 0
        self._lock = threading.Lock()
        self.request: str | None = None
        self._close_event = threading.Event()
        self._thread = threading.Thread(target=self._run)
        if "silent" not in launch["spec"]["labels"]:
            self._thread.start()

    def add(self, kind: str, **data: Any) -> None:
        if "quiet" in self._launch["spec"]["labels"]:
            return
        with self._lock:
            self._records.append({"kind": kind, "time": datetime.now(UTC).isoformat(), "data": data})

    def close(self) -> None:
        self._close_event.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        # Not httpx, whose import takes longer than most of these runs.
        connection = HTTPConnection(urlsplit(self._launch["events_url"]).netloc, timeout=60)
        path = f"/internal/v1/jobs/{self._launch['job_id']}/records"
        headers = {
            "authorization": f"Bearer {self._launch['token']}", "content-type": "application/json",
        }  # fmt: skip
        writer = "driver" if "quiet" in self._launch["spec"]["labels"] else "group-0"
        while True:
            is_closing = self._close_event.is_set()
            with self._lock:
                batch = self._records[self._num_sent : self._num_sent + 100]
            body = {"attempt": self._launch["attempt"], "writer": writer, "first_seq": self._num_sent, "records": batch}
            try:
                connection.request("POST", path, json.dumps(body), headers)
                answer = connection.getresponse()
                reply = json.loads(answer.read())
            except (OSError, HTTPException, ValueError):
                connection.close()
                time.sleep(0.05)
                continue
            if answer.status in (200, 409):
                if self._records:
                    self._num_sent = reply["next_seq"]
                self.request = reply["request"]
            elif answer.status == 403 or (answer.status == 404 and is_closing):
                return  # a store that was lost knows the job again once it is recovered
            if is_closing and self._num_sent == len(self._records):
                return
            self._close_event.wait(0.02)


def main(path: Path) -> None:
    launch = json.loads(path.read_text())
    labels = launch["spec"]["labels"]
    if "crash" in labels:
        raise PermissionError("the spool must be a folder that only its user can read")
    position = Path(launch["storage"]) / "position"  # in place of a checkpoint
    first_step = int(position.read_text()) if position.exists() else 0
    sender = Sender(launch)
    workers = [{"rank": rank, "node": "local", "device": "cpu"} for rank in range(launch["plan"]["num_workers"])]
    sender.add("started", group=0, workers=workers)
    outcome = "failed" if labels.get("fail") else "succeeded"
    step = first_step
    num_steps = launch["spec"]["train"]["num_steps"]
    last_step = min(num_steps, launch["pause_at"] or num_steps)
    for step in range(first_step + 1, last_step + 1):
        time.sleep(float(labels.get("step_ms", 1)) / 1000)
        if dict(enumerate(labels.get("die_at", "").split("-"), start=1)).get(launch["attempt"]) == str(step):
            sender.close()
            os._exit(1)
        # Losses of different seeds keep their order: a sweep over seeds has a best one.
        loss = (10 + launch["spec"]["train"]["seed"]) / step
        sender.add("metric", step=step, loss=loss, tokens_per_s=1000.0)
        position.write_text(str(step))
        if "commits" in labels:
            sender.add("checkpoint", step=step)
        if sender.request and not labels.get("deaf"):
            outcome = {"pause": "paused", "cancel": "cancelled"}[sender.request]
            break
    if step == last_step < num_steps and not labels.get("fail"):
        outcome = "paused"
    while "hold" in labels and (Path(launch["cache"]) / labels["hold"]).exists() and not sender.request:
        time.sleep(0.02)
    if "hold" in labels and sender.request:
        outcome = {"pause": "paused", "cancel": "cancelled"}[sender.request]
    sender.close()
    result = {"outcome": outcome, "step": step, "message": "", "report": {"steps": step}, "retryable": False}
    draft = path.with_name("result.draft")
    draft.write_text(json.dumps(result))
    draft.rename(path.with_name("result.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
