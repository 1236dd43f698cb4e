"""A step's totals: what the device decides is what the host reads."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.tasks.task import IndexerLoss, RankBatch
from moe.train.moe_layers import LayerFacts
from moe.train.signals import Signals
from moe.train.summed_totals import COLUMNS, DeviceTotals, SummedTotals

NUM_EXPERTS = 2
SUMS = st.sampled_from((0.0, 1.5, 1e300, math.inf, math.nan))


@given(st.data())
def test_the_device_finds_what_is_not_finite_in_the_record(data: st.DataObject) -> None:
    coefficients = st.sampled_from((0.0, 0.01))
    facts = [LayerFacts(number, NUM_EXPERTS, data.draw(coefficients), data.draw(coefficients))
             for number in range(data.draw(st.integers(0, 2)))]  # fmt: skip
    losses = [data.draw(st.one_of(SUMS, st.just(-math.inf))) for _ in range(3)]
    rows = torch.ones(len(facts), len(COLUMNS) + 2 * NUM_EXPERTS, dtype=torch.float64)
    for row in rows:
        for name in ("aux_loss", "z_loss", "entropy"):
            row[COLUMNS.index(name)] = data.draw(SUMS)
    indexer = IndexerLoss(torch.tensor(0.0), 1, data.draw(coefficients))
    norm = torch.tensor(data.draw(SUMS), dtype=torch.float64)
    totals = DeviceTotals(
        losses=torch.tensor(losses, dtype=torch.float64), rows=rows, signals=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        means={"reward": torch.tensor([3.0, 2.0], dtype=torch.float64)}, grad_norm=norm,
        numbers={"temperature": torch.tensor(data.draw(SUMS))},
    )  # fmt: skip
    summed = SummedTotals(totals, None, facts, RankBatch(7, [], 10, 20), indexer)
    assert summed.found_inf().item() == (not summed.record.is_finite)
    assert summed.signals == Signals("pause", 2, 3, 4)
    assert SummedTotals(totals, Signals("finish"), facts, RankBatch(7, [], 10, 20), indexer).signals.request == "finish"
