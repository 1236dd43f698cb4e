"""The choice of a backend for experts: by what was measured, which is stored once for a machine."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe.experts import BACKENDS, cheapest, measure, measurement
from moe.experts.experts import Cost
from moe.experts.measurement import Shape, stored_or_measured
from tests.unit.test_experts import NARROW, ONEDNN, H, M, Products


def test_the_cheapest_by_what_was_measured() -> None:
    costs = {"segments": Cost(1.0, 1.0), "batched": Cost(0.0, 0.8)}
    assert cheapest(costs, [10, 10]) is BACKENDS["batched"]
    assert cheapest(costs, [10, 18]) is BACKENDS["batched"]  # 28.8 against 29
    assert cheapest(costs, [10, 19]) is BACKENDS["segments"]
    assert cheapest({"segments": Cost(9.0, 9.0), "batched": Cost(0.0, 0.1)}, [1, 9, 0]) is BACKENDS["segments"]
    assert cheapest(costs, [0, 0]) is BACKENDS["segments"]
    assert cheapest({"batched": Cost(0.0, 0.1)}, [9, 0, 0, 0]) is BACKENDS["batched"], "there is no other"
    assert cheapest({}, [4, 4]) is BACKENDS["segments"]


def test_rows_that_are_taken_along_cost_too() -> None:
    taking_16 = {"segments": Cost(0.0, 1.0, row_multiple=16), "batched": Cost(0.0, 1.0)}
    assert cheapest(taking_16, [17, 9]) is BACKENDS["batched"], "34 against 48"
    assert cheapest(taking_16, [16, 11]) is BACKENDS["segments"], "32 against 32"
    for dtype, multiple in ((torch.float32, 1), (torch.bfloat16, 16 if ONEDNN else 1)):
        w_in = torch.ones(2, M, H, dtype=dtype)
        assert measure(w_in)["segments"].row_multiple == multiple
        assert ("-rows16-" in Shape.from_weight(w_in).key) == (multiple == 16), "measured anew"


@pytest.mark.parametrize(("count", "multiplied"), [(0, 0), (1, 16), (256, 256), (257, 288), (1025, 1152)])
def test_what_is_predicted_is_what_is_multiplied(count: int, multiplied: int) -> None:
    segments, cost = BACKENDS["segments"], Cost(0.5, 1.0, row_multiple=16)
    assert cost.seconds(segments, [count, 1200]) == 0.5 + multiplied + 1200
    assert Cost(0.5, 1.0).seconds(segments, [count, 1200]) == 0.5 + count + 1200
    x, w = torch.ones(count + 1200, M).bfloat16(), torch.ones(2, M, H).bfloat16()
    with Products() as products:
        segments.forward(x, w, [count, 1200])
    taken = {rows for rows, _, _ in products.sizes}
    assert not count or (multiplied if ONEDNN else count) in taken


def test_large_experts_are_measured_in_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bfloat16 16 rows are the least that is measured; of large experts these are more than enough."""
    w_in, flops_per_row = torch.ones(2, M, H, dtype=torch.bfloat16), 2 * 6 * M * H
    few, many = (16, 32) if ONEDNN else (4, 8)
    num_backends = 2 + len(NARROW)

    def measured(limit: float) -> int:
        # fewer operations than a machine is measured with: the number of rows is the subject, not the time
        monkeypatch.setattr(measurement, "_FLOPS_MEASURED", {"cpu": limit})
        with FlopCounterMode(display=False) as counted:
            assert set(measure(w_in)) == {"segments", "batched"} | NARROW
        return counted.get_total_flops()

    assert measured(many * flops_per_row) == num_backends * (1 + 5) * (few + many) * flops_per_row
    assert measured(many * flops_per_row / 2) == num_backends * (1 + 2) * (few + many) * flops_per_row
    assert measured(1.0) == num_backends * (1 + 1) * (few + many) * flops_per_row


def test_a_measurement_is_stored_and_the_first_one_decides(tmp_path) -> None:
    w_in = torch.randn(4, M, H)
    costs = stored_or_measured(w_in, tmp_path)
    assert set(costs) == set(BACKENDS) - {"widened"}
    assert all(cost.fixed_s >= 0 and cost.per_row_s >= 0 for cost in costs.values())
    (path,) = tmp_path.iterdir()
    assert path.stem == Shape.from_weight(w_in).key
    assert stored_or_measured(w_in, tmp_path) == costs
    path.write_text(json.dumps({"segments": {"fixed_s": 1.0, "per_row_s": 2.0}}))
    assert stored_or_measured(w_in, tmp_path) == {"segments": Cost(1.0, 2.0)}
    for useless in ("torn", "{}", json.dumps({"batched": {"fixed_s": 1.0, "per_row_s": 2.0}})):
        path.write_text(useless)
        assert set(stored_or_measured(w_in, tmp_path)) == set(BACKENDS) - {"widened"}
    assert set(measure(w_in.double())) == {"segments", "batched"}
    assert set(stored_or_measured(w_in, path / "not-a-folder")) == set(BACKENDS) - {"widened"}
