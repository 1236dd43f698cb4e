"""A sweep on PostgreSQL: chosen, with its curves, history and webhook, and deleted."""

from pathlib import Path

from tests.processes import await_that
from tests.service.control_plane import ControlPlane
from tests.service.receiver import receiver
from tests.service.test_sweeps import HALVING, await_end, get_sweep, post_sweep


def test_a_sweep_runs_to_its_end_and_is_deleted(url: str, tmp_path: Path) -> None:
    own_networks = {"webhook_networks": ["127.0.0.0/8"], "webhook_interval_s": 0.05}
    plane = ControlPlane(tmp_path, database_url=url, **own_networks)
    try:
        plane.start()
        with receiver() as server:
            plane.http.post("/v1/webhooks", json={"name": "hook", "url": server.url, "states": ["succeeded"]})
            ended = await_end(plane, post_sweep(plane, HALVING)["id"])
            await_that(lambda: len(server.received) == 1)
        assert [member["step"] for member in ended["members"]] == [20, 6, 6, *[2] * 6]
        assert [decision["kind"] for decision in ended["decisions"]] == ["choose", "choose", "end"]
        best = f"/v1/jobs/{ended['members'][0]['job']}"
        curves = plane.http.get(f"{best}/curves", params={"name": "loss"}).json()
        assert curves["curves"]["loss"]["step"] == list(range(1, 21))
        history = plane.http.get(f"{best}/history", params={"kind": "state", "limit": 1}).json()
        assert history["items"][0]["data"]["state"] == "succeeded"
        assert plane.http.get(f"{best}/logs/lines").status_code == 200
        assert plane.http.delete(f"/v1/sweeps/{ended['id']}").status_code == 202
        await_that(lambda: plane.http.get(f"/v1/sweeps/{ended['id']}").status_code == 410,
                   lambda: str(get_sweep(plane, ended["id"])))  # fmt: skip
        assert plane.list_jobs() == []
    finally:
        plane.close()
