"""Expert loads by label are the same under every layout."""

from dataclasses import replace

import pytest
import torch

from moe.parallel import Layout
from moe.records import LabelLoads
from moe.tasks.batch_context import BatchContext
from moe.tasks.label_loads import LabelLoadCounter
from moe.tasks.language.model import LanguageModel, build_model
from tests.parity.gloo_ranks import Pools
from tests.parity.language_models import ATTENTIONS
from tests.parity.test_pipeline_evaluation import four_layers
from tests.parity.trajectory import Degrees

NUM_ROWS, NUM_POSITIONS = 10, 8
LAYOUTS = (
    Degrees(pipeline=2, expert=2, tensor=2),
    Degrees(context=2, data=2, fsdp=2, expert=2),
    Degrees(pipeline=2, virtual_stages=2, data=2),
)


@torch.no_grad()
def label_loads(degrees: Degrees) -> LabelLoads | None:
    layout = Layout.build(replace(degrees, micro_batch_groups=1).plan(8))
    model = build_model(four_layers(next(iter(ATTENTIONS))), layout, seed=3, dtype=torch.float64)
    assert isinstance(model, LanguageModel)
    tokens = torch.arange(NUM_ROWS * NUM_POSITIONS).view(NUM_ROWS, NUM_POSITIONS) * 7 % 60
    documents = torch.zeros_like(tokens).masked_fill(tokens % 9 == 0, -1)
    counter = LabelLoadCounter(model, layout, "source", ["a", "b", "c"])
    own_rows = layout.local_groups(NUM_ROWS)
    for rows in torch.arange(own_rows.start, own_rows.stop).split(NUM_ROWS // layout.data_ranks // 2):
        context = BatchContext(training=False, rows_per_group=1, documents=documents[rows])
        with counter.counting(rows % 3):
            model.hidden_states(tokens[rows], context)
    loads = counter.sum_over_ranks()
    layout.close()
    return loads


@pytest.mark.sample(2)
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_loads_by_label_do_not_see_the_layout(ranks: Pools, degrees: Degrees) -> None:
    expected = label_loads(Degrees())
    assert expected is not None
    assert expected.labels == ("a", "b", "c")
    assert len(expected.layers) > 1
    for loads in ranks[degrees.workers].run(label_loads, degrees):
        assert loads == expected
