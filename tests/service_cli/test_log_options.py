"""`shardyard logs` with its options, and the client's lines over connections that break."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from service.client import Client, Patience
from service.wire.events import rfc3339
from tests.service.control_plane import ControlPlane
from tests.service.test_streams import write_log
from tests.service_cli.command import shardyard
from tests.service_cli.contract_server import JOB_ID, Script, serving
from tests.service_cli.test_commands import submit


def test_the_command(plane: ControlPlane, job_file: Path) -> None:
    job_id = submit(plane, job_file)
    storage = Path(plane.await_state(job_id, "succeeded")["storage"])
    now = datetime.now(UTC)
    for worker, ages in (("a1.driver", (4000, 30)), ("a1.g0.rank-0", (3900, 20, 10))):
        lines = [f"{rfc3339(now - timedelta(seconds=age))} info age {age}\n" for age in ages]
        write_log(storage, worker, 0, "".join(lines))

    def ages(*options: str) -> list[int]:
        done = shardyard("logs", job_id, *options, url=plane.url)
        assert done.returncode == 0, done.stderr
        return [int(line.split()[-1]) for line in done.stdout.splitlines()]

    assert ages("--tail", "3") == [30, 20, 10]
    assert ages("--since", "10m", "--worker", "g0.rank-0") == [20, 10]
    assert ages("--grep", "age 3", "--tail", "1") == [30]
    assert ages("--attempt", "1", "--tail", "1") == [10]
    told = shardyard("logs", job_id, "--tail", "1", "--json", url=plane.url).stdout
    assert {"attempt", "worker", "message", "time"} == set(json.loads(told))
    wrong = shardyard("logs", job_id, "--since", "yesterday", url=plane.url)
    assert (wrong.returncode, "query.since (='yesterday') must be a duration" in wrong.stderr) == (2, True)
    none = shardyard("logs", job_id, "--attempt", "99", "--follow", url=plane.url)
    assert (none.returncode, none.stdout) == (2, "")
    assert none.stderr == f"shardyard: {job_id} has no attempt 99: it had 1; use a lower number, or omit --attempt\n"


def line(worker: str, second: int) -> dict:
    time = f"2026-01-31T12:00:0{second}.000000Z"
    return {"attempt": 1, "worker": worker, "message": str(second), "time": time, "position": [0, second]}


def test_the_newest_lines_are_not_told_again_after_a_connection_broke() -> None:
    """What came after the first of them is asked for, and what was handed on is passed over."""
    script = Script(job={"state": "succeeded", "name": "x"})
    script.logs = [
        ([line("a", 3), line("b", 4), line("a", 5)], False),
        ([line("a", 3), line("a", 5), line("a", 6), line("b", 4), line("b", 7)], True),
    ]
    quick = Patience(away_s=2.0, silence_s=0.3, first_pause_s=0.005, longest_pause_s=0.05)
    with serving(script) as url, Client(url, patience=quick) as client:
        lines = list(client.job(JOB_ID).logs(follow=True, tail=3, grep="x y"))
    assert [each["message"] for each in lines] == ["3", "4", "5", "6", "7"]
    asked = [parse_qs(urlsplit(path).query) for _, path, _, _ in script.requests if "/logs" in path]
    assert asked == [
        {"follow": ["true"], "tail": ["3"], "grep": ["x y"]},
        {"follow": ["true"], "since": ["2026-01-31T12:00:03.000000Z"], "grep": ["x y"]},
    ]
