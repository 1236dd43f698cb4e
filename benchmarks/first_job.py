"""Time from a cold `shardyard up` to the first step of README's job by `curl`: how long a new user waits.

Cold means that nothing is cached: the state folder and the machine's cache folder are new. A second run uses another
state folder and keeps the machine's cache.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import results
from service.client import Client

ROOT = Path(__file__).parents[1]
LIMIT_S = 60.0
"""Limit on two idle cores."""
DEADLINE_S = 900.0


def main() -> None:
    figures: dict[str, Any] = {"limit_s": LIMIT_S}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "another_state_folder"):
            run = first_step(Path(folder, name), Path(folder, "machine"))
            figures[name] = run
            print(
                f"{name}: up in {run['up_s']:.1f} s; first step {run['first_step_s']:.1f} s after 'up' was typed "
                f"(limit {LIMIT_S:g}); data took rank 0 {run['data_s']} s",
                flush=True,
            )
    figures["load_average_after"] = round(os.getloadavg()[0], 2)
    print(results.write("first_job", figures))


def first_step(state_dir: Path, machine_cache: Path) -> dict[str, Any]:
    """Seconds from the start of `up`; the job is posted as soon as the control plane answers."""
    state_dir.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDYARD_")}
    log = state_dir / "up.log"
    began = time.monotonic()
    with log.open("wb") as log_io:
        up = subprocess.Popen(
            [sys.executable, "-m", "service.cli.main", "up", "--stop-ray", "--port=0", f"--state-dir={state_dir}"],
            env={**environment, "XDG_CACHE_HOME": str(machine_cache)}, stdout=log_io, stderr=log_io,
            start_new_session=True,
        )  # fmt: skip
    try:
        url = _url(up, log, began)
        up_s = time.monotonic() - began
        data_s: float | None = None
        with Client(url, token="") as client:
            for event in client.submit(by_curl()).events():
                if event.data.get("record") == "phase" and event.data.get("name") == "data":
                    data_s = event.data["seconds"]
                if event.kind == "metric":
                    return {
                        "up_s": round(up_s, 1),
                        "first_step_s": round(time.monotonic() - began, 1),
                        "data_s": data_s,
                    }
        raise RuntimeError("the job ended without a step")
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(DEADLINE_S)


def by_curl() -> dict[str, Any]:
    """README's job."""
    [body] = re.findall(r"-d '(\{.*?\})'", (ROOT / "README.md").read_text(), re.DOTALL)[:1]
    spec: dict[str, Any] = json.loads(body)
    spec["train"]["num_steps"] = 1
    return spec


def _url(up: "subprocess.Popen[bytes]", log: Path, began: float) -> str:
    while time.monotonic() - began < DEADLINE_S:
        if match := re.search(r"API +(http://\S+)", log.read_text()):
            return match[1]
        if up.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"'up' does not answer:\n{log.read_text()}")


if __name__ == "__main__":
    main()
