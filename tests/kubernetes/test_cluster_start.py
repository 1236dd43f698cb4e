"""The control plane of the benchmark `cluster_start` passes its start's checks and offers both kinds of cluster."""

from pathlib import Path

import pytest

from benchmarks import cluster_start
from tests.kubernetes.api_server import ApiServer


@pytest.mark.slow
def test_a_standing_cluster_and_one_for_each_job(api_server: ApiServer, tmp_path: Path) -> None:
    token_path = tmp_path / "token"
    token_path.write_text("ray-token")
    no_dashboard = "http://127.0.0.1:1"
    with cluster_start.control_plane(tmp_path, api_server, no_dashboard, token_path) as client:
        jobs = [client.submit(cluster_start.spec(cluster)) for cluster in cluster_start.CLUSTERS]
        assert {job.data["spec"]["resources"]["cluster"] for job in jobs} == {"shared", "own"}
