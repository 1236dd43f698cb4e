"""Reasons of plans in which a fused exchange goes beyond what was measured."""

import pytest

from moe.plan import Cluster, Degrees
from moe.plan.search.pricing_warnings import extrapolated_exchange_warning
from moe.plan.software import SOFTWARE


@pytest.mark.parametrize(
    ("device", "software", "expert", "reason"),
    [
        ("h100", "megatron-deepep", 32, ""),
        ("h100", "megatron-deepep", 64, "over 8 nodes is extrapolated: measurements on h100 cover up to 4 nodes"),
        ("h100", "megatron-graphs", 40, "over 5 nodes"),
        ("b200", "megatron-deepep", 16, "over 2 nodes is extrapolated: measurements on b200 cover one node"),
        ("b200", "megatron-deepep", 8, ""),
        ("a100-80", "megatron-deepep", 8, "never measured on a100-80: priced as a plain one"),
        ("a100-80", "megatron-deepep", 1, ""),
        ("h100", "megatron-eager", 64, ""),
    ],
)  # fmt: skip
def test_what_was_not_measured_is_a_reason(device: str, software: str, expert: int, reason: str) -> None:
    cluster = Cluster(num_nodes=16, devices_per_node=8, device=device)
    reasons = "".join(
        extrapolated_exchange_warning(SOFTWARE[software], cluster, Degrees(expert=expert, data=128 // expert))
    )  # type: ignore[index]
    assert reason in reasons
    assert bool(reason) == bool(reasons)
