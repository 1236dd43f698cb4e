"""The choice of an expert backend by measured costs, which are stored once per machine."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe.experts import BACKENDS, cheapest, measure, measurement
from moe.experts.experts import Cost
from moe.experts.measurement import Shape, stored_or_measured
from tests.unit.test_experts import NARROW, ONEDNN, H, M, Products

COSTS = {"segments": Cost(1.0, 1.0), "batched": Cost(0.0, 0.8)}
IN_16 = {"segments": Cost(0.0, 1.0, row_multiple=16), "batched": Cost(0.0, 1.0)}


@pytest.mark.parametrize(
    ("costs", "counts", "backend"),
    [
        (COSTS, [10, 10], "batched"), (COSTS, [10, 18], "batched"), (COSTS, [10, 19], "segments"),  # 28.8 against 29
        ({"segments": Cost(9.0, 9.0), "batched": Cost(0.0, 0.1)}, [1, 9, 0], "segments"),
        (COSTS, [0, 0], "segments"), ({"batched": Cost(0.0, 0.1)}, [9, 0, 0, 0], "batched"), ({}, [4, 4], "segments"),
        (IN_16, [17, 9], "batched"), (IN_16, [16, 11], "segments"),  # 34 against 48, 32 against 32
    ],
)  # fmt: skip
def test_the_cheapest_backend_is_chosen(costs: dict[str, Cost], counts: list[int], backend: str) -> None:
    assert cheapest(costs, counts) is BACKENDS[backend]


@pytest.mark.parametrize(("count", "num_multiplied"), [(0, 0), (1, 16), (256, 256), (257, 288), (1025, 1152)])
def test_predicted_rows_are_multiplied(count: int, num_multiplied: int) -> None:
    segments, cost = BACKENDS["segments"], Cost(0.5, 1.0, row_multiple=16)
    assert cost.seconds(segments, [count, 1200]) == 0.5 + num_multiplied + 1200
    assert Cost(0.5, 1.0).seconds(segments, [count, 1200]) == 0.5 + count + 1200
    x, w = torch.ones(count + 1200, M).bfloat16(), torch.ones(2, M, H).bfloat16()
    with Products() as products:
        segments.forward(x, w, [count, 1200])
    assert not count or (num_multiplied if ONEDNN else count) in {rows for rows, _, _ in products.sizes}


def test_large_experts_are_measured_in_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement in bfloat16 takes at least 16 rows, which is more than enough for large experts."""
    w_in, flops_per_row = torch.ones(2, M, H, dtype=torch.bfloat16), 2 * 6 * M * H
    few_rows, many_rows = (16, 32) if ONEDNN else (4, 8)
    for limit, rounds in ((many_rows * flops_per_row, 5), (many_rows * flops_per_row / 2, 2), (1.0, 1)):
        # Fewer operations than on a real machine: the subject is the number of rows, not the time.
        monkeypatch.setattr(measurement, "_FLOPS_MEASURED", {"cpu": limit})
        with FlopCounterMode(display=False) as counter:
            assert set(measure(w_in)) == {"segments", "batched"} | NARROW
        num_passes = (2 + len(NARROW)) * (1 + rounds)
        assert counter.get_total_flops() == num_passes * (few_rows + many_rows) * flops_per_row


def test_a_measurement_is_stored_and_the_first_one_decides(tmp_path) -> None:
    w_in, backends = torch.randn(4, M, H), set(BACKENDS) - {"widened"}
    costs = stored_or_measured(w_in, tmp_path)
    assert set(costs) == backends
    assert all(cost.fixed_s >= 0 and cost.per_row_s >= 0 for cost in costs.values())
    (path,) = tmp_path.iterdir()
    assert path.stem == Shape.from_weight(w_in).key
    assert stored_or_measured(w_in, tmp_path) == costs
    path.write_text(json.dumps({"segments": {"fixed_s": 1.0, "per_row_s": 2.0}}))
    assert stored_or_measured(w_in, tmp_path) == {"segments": Cost(1.0, 2.0)}
    for invalid in ("torn", "{}", json.dumps({"batched": {"fixed_s": 1.0, "per_row_s": 2.0}})):
        path.write_text(invalid)
        assert set(stored_or_measured(w_in, tmp_path)) == backends
    assert set(measure(w_in.double())) == {"segments", "batched"}
    assert set(stored_or_measured(w_in, path / "not-a-folder")) == backends
    for dtype, multiple in ((torch.float32, 1), (torch.bfloat16, 16 if ONEDNN else 1)):
        narrow = torch.ones(2, M, H, dtype=dtype)
        assert measure(narrow)["segments"].row_multiple == multiple
        assert ("-rows16-" in Shape.from_weight(narrow).key) == (multiple == 16), "measured anew"
