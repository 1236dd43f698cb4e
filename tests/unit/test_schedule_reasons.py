"""Reasons that a plan gives for its schedule, stage cut and context exchange."""

from typing import Any

import pytest

from moe.plan import Cluster, plan_job
from tests.unit.test_pipeline_problems import language_job


@pytest.mark.parametrize(
    ("parallel", "beginning"),
    [
        ({"pipeline": 2, "schedule": "gpipe"}, "schedule gpipe, as requested: "),
        ({"pipeline": 2, "virtual_stages": 2}, "2 virtual stages per rank, as requested: "),
        ({"pipeline": 2, "stages": [1, 3]}, "layers of each stage, in model order, as requested: 1+3"),
        ({"context": 2, "context_exchange": "heads"}, "context_exchange heads, as requested: "),
        ({"context": 2}, "context_exchange "),
    ],
)
def test_a_plan_names_its_schedule_stages_and_exchange(parallel: dict[str, Any], beginning: str) -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=2, device="h100")
    reasons = plan_job(language_job(2, parallel), cluster, 2).reasons
    assert [reason for reason in reasons if reason.startswith(beginning)]
