"""Token by token, a language model computes what one pass over the whole row does: at every position, for rows that
begin later than others, are dropped, reordered or doubled, and for windows that have forgotten most of a row."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.layers.cache import KVCache
from moe.spec import LanguageModelSpec
from moe.spec.routers import ExpertChoiceSpec
from moe.tasks.language import LanguageModel, build_model
from tests.grid import num_cases
from tests.parity.language_models import ATTENTIONS, VOCABULARY, language_model
from tests.parity.random_language import language_models
from tests.parity.trajectory import Degrees

CLOSE = 1e-10


class Rows:
    """Rows that grow, in KV caches and as plain lists."""

    def __init__(self, model: LanguageModel, prompts: list[list[int]], room: int) -> None:
        self.model, self.rows = model, [list(prompt) for prompt in prompts]
        length = max(map(len, prompts))
        tokens = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
        starts = torch.tensor([length - len(prompt) for prompt in prompts])
        self.state = model.start(len(prompts), room)
        padding = torch.arange(length) < starts[:, None] if bool(starts.any()) else None
        self.check(model.extend(tokens, self.state, padding))

    def go_on(self, tokens: Tensor) -> None:
        """`tokens` `[B, N]`"""
        self.rows = [row + new for row, new in zip(self.rows, tokens.tolist(), strict=True)]
        self.check(self.model.extend(tokens, self.state))

    def take(self, rows: list[int]) -> None:
        self.state.take_rows(torch.tensor(rows, dtype=torch.int64))
        self.rows = [self.rows[row] for row in rows]

    def check(self, logits: Tensor) -> None:
        """Compare with a pass over each row by itself, without padding."""
        for row, row_logits in zip(self.rows, logits, strict=True):
            torch.testing.assert_close(row_logits, self.model(torch.tensor([row]))[0, -1], rtol=CLOSE, atol=CLOSE)


def sensitive_model(spec: LanguageModelSpec) -> LanguageModel:
    """A model whose logits would show a wrong cache."""
    model = build_model(spec, dtype=torch.float64).eval()
    for parameter in model.parameters():
        parameter.mul_(1.5)
    return model


@torch.no_grad()
@settings(max_examples=num_cases(20), deadline=None, phases=[Phase.explicit, Phase.generate], print_blob=True)
@given(data=st.data())
def test_any_model_goes_on_as_it_would_from_the_whole_row(data: st.DataObject) -> None:
    def looks_ahead(spec: LanguageModelSpec) -> bool:
        return spec.moe is not None and isinstance(spec.moe.routing, ExpertChoiceSpec)

    spec = data.draw(language_models(Degrees()).filter(lambda spec: not looks_ahead(spec)), "model")
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4), "prompts")
    steps = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=16), "steps")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "tokens"))
    prompts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    rows = Rows(sensitive_model(spec), prompts, max(lengths) + sum(steps))
    for num_new in steps:
        if rows.rows and data.draw(st.integers(0, 3)) == 0:
            indices = st.integers(0, len(rows.rows) - 1)
            rows.take(data.draw(st.lists(indices, min_size=0, max_size=4), "rows"))
        rows.go_on(torch.randint(VOCABULARY, (len(rows.rows), num_new), generator=generator))


@pytest.mark.sample(2)
@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_long_after_a_window_has_forgotten_the_prompt(attention: str) -> None:
    """Windows of 3, whose room of 6 is filled many times over, and two chunks of the delta rule."""
    rows = Rows(
        sensitive_model(language_model(attention, router="softmax_topk")), [[4, 5, 6, 7, 8, 9, 10], [11], [12, 13]], 160
    )
    for step in range(12):
        rows.go_on(torch.full((len(rows.rows), 1), 20 + step))
    rows.take([2, 0, 0])
    rows.go_on(torch.arange(3 * 65).view(3, 65))
    rows.take([1])
    for step in range(6):
        rows.go_on(torch.tensor([[40 + step]]))


@pytest.mark.parametrize("window", [1, 2, 5])
def test_columns_forget_what_is_behind_the_window_and_nothing_else(window: int) -> None:
    """However many come at a time, the last `window` and the new ones are there, in room for twice the window."""
    for sizes in ([1] * 40, [2 * window + 3, 1, 1, 1], [1, 3, 2, 5, 1, 1, 4] * 4, [window, window, window, 1, 1]):
        like = torch.empty(0, dtype=torch.float64)
        columns, all_columns = (
            KVCache.empty(sum(sizes), window, like, ((2,), 3)),
            torch.zeros(2, 0, 3, dtype=torch.float64),
        )
        for number, size in enumerate(sizes):
            new = torch.full((2, size, 3), float(number), dtype=torch.float64)
            all_columns = torch.cat((all_columns, new), 1)
            (block,) = columns.append(new)
            assert torch.equal(block, all_columns[:, all_columns.shape[1] - block.shape[1] :])
            assert block.shape[1] >= min(window - 1 + size, all_columns.shape[1]), "what the new ones look back at"
            assert columns._tensors[0].shape[1] <= 2 * window
