"""Settings of a model's `generation_config.json`, as transformers reads them."""

import json
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from moe.spec.errors import SpecError
from moe.spec.generation import GenerationSpec
from moe.tasks.decoding.penalty import RepetitionPenalty
from moe.tasks.decoding.sampling import _eligible_tokens
from moe.tasks.language.generation_config import FILE, GenerationConfig
from tests.refusals import expect_problem

VOCABULARY = 40


def config_of(**fields: Any) -> GenerationConfig:
    return GenerationConfig.of_files({FILE: json.dumps(fields).encode()})


@pytest.mark.parametrize(("fields", "request_fields", "expected"), [
    ({}, {}, {"temperature": 0}),
    ({}, {"temperature": 0.7}, {"temperature": 0.7}),
    ({"do_sample": True}, {}, {"temperature": 1, "top_k": 50}),
    ({"do_sample": True, "top_k": None}, {}, {"temperature": 1, "top_k": 50}),
    ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}, {},
     {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 1.0, "top_k": 0},
     {"temperature": 1.0, "top_k": 0, "top_p": 0.9}),
    ({"do_sample": True, "repetition_penalty": 1.05}, {"temperature": 0},
     {"temperature": 0, "repetition_penalty": 1.05}),
    ({"do_sample": True, "repetition_penalty": 1.05}, {"num_beams": 3},
     {"temperature": 0, "num_beams": 3, "repetition_penalty": 1.05}),
    ({"do_sample": True, "temperature": 0.0, "top_k": 3}, {}, {"temperature": 0}),
    ({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}, {}, {"temperature": 0, "repetition_penalty": 1.1}),
    ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.3}, {"temperature": 0.3, "top_p": 0.9}),
    ({"do_sample": True, "top_k": -1}, {"top_k": 4}, {"temperature": 1, "top_k": 4}),
    ({"do_sample": True, "top_p": "0.9"}, {"temperature": 0}, {"temperature": 0}),
])  # fmt: skip
def test_a_request_wins_over_the_file(
    fields: dict[str, Any], request_fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = config_of(**fields)
    assert config.complete(GenerationSpec(**request_fields)) == GenerationSpec(**expected)
    assert config.notes == ()


@pytest.mark.parametrize(("fields", "code", "key", "value"), [
    ({"do_sample": True, "temperature": -1}, "out_of_range", "temperature", -1),
    ({"do_sample": True, "top_k": "many"}, "wrong_type", "top_k", "many"),
    ({"do_sample": "yes"}, "wrong_type", "do_sample", "yes"),
    ({"repetition_penalty": 0}, "out_of_range", "repetition_penalty", 0),
])  # fmt: skip
def test_invalid_settings_are_refused_by_their_key(fields: dict[str, Any], code: Any, key: str, value: Any) -> None:
    with expect_problem(code, f"{FILE}:{key}", value):
        config_of(**fields).complete(GenerationSpec())


def test_a_sampling_option_needs_a_temperature_of_the_request_or_the_file() -> None:
    spec = GenerationSpec(top_p=0.5)
    assert config_of(do_sample=True).complete(spec).top_p == 0.5
    with expect_problem("not_applicable", "top_p", 0.5):
        config_of().complete(spec)
    with expect_problem("not_applicable", "top_p", 0.5):
        GenerationSpec(top_p=0.5, num_beams=2)
    with expect_problem("not_applicable", "log_probs", True):
        GenerationSpec(log_probs=True, num_beams=2)


def test_keys_that_change_the_text_and_are_not_supported_are_named() -> None:
    config = config_of(
        eos_token_id=[1, 2], max_new_tokens=2048, no_repeat_ngram_size=0, typical_p=0.9, num_beams=1, use_cache=True,
        presence_penalty=1.5, bad_words_ids=None, suppress_tokens=[],
    )  # fmt: skip
    keys = ["max_new_tokens (=2048)", "presence_penalty (=1.5)", "typical_p (=0.9)"]
    assert [[key in note for note in config.notes] for key in keys] == torch.eye(3, dtype=torch.bool).tolist()


def test_defaults_of_transformers_are_no_remark() -> None:
    defaults = (
        transformers.GenerationConfig().to_dict() | transformers.GenerationConfig._get_default_generation_params()
    )
    limits = {key: defaults.pop(key) for key in ("max_length", "max_new_tokens")}
    assert len(defaults) > 20
    assert config_of(**defaults).notes == ()
    assert len(config_of(**limits).notes) == 1


@given(
    st.integers(0, 999), st.floats(0.2, 3), st.integers(0, 12), st.floats(0.05, 1), st.floats(0, 1),
    st.floats(0.5, 2), st.lists(st.integers(0, VOCABULARY - 1), max_size=20),
)  # fmt: skip
def test_scores_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, prompt: list[int]
) -> None:
    draws = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, VOCABULARY, generator=draws, dtype=torch.float64)
    penalized = RepetitionPenalty(penalty, [prompt[:-1]], VOCABULARY, logits.device)
    if prompt:
        penalized.append(torch.tensor(prompt[-1:]))
    scores = penalized.apply(logits)
    expected = logits
    if prompt:
        expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt]), logits.clone())
    torch.testing.assert_close(scores, expected, rtol=0, atol=0)

    spec = GenerationSpec(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    warpers = theirs.LogitsProcessorList([theirs.TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(theirs.TopKLogitsWarper(top_k))
    warpers += [theirs.TopPLogitsWarper(top_p), theirs.MinPLogitsWarper(min_p)]
    scaled = (scores - scores.amax(-1, keepdim=True)) / temperature
    filtered = scaled.masked_fill(~_eligible_tokens(scaled, spec), -torch.inf)
    torch.testing.assert_close(
        filtered.softmax(-1), warpers(torch.tensor([prompt]), expected).softmax(-1), rtol=0, atol=1e-12
    )


def test_without_a_file_nothing_changes() -> None:
    for files, num_notes in (({}, 0), ({FILE: b"{}\n"}, 0), ({FILE: b"{'top_k': 1}"}, 1), ({FILE: b"[1]"}, 1)):
        config = GenerationConfig.of_files(files)
        assert (config.complete(GenerationSpec()).temperature, len(config.notes)) == (0, num_notes)
    with pytest.raises(SpecError):
        GenerationSpec(min_p=1.5)
