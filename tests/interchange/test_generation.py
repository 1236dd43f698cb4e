"""Texts of a folder's model under its `generation_config.json`, compared with those of transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe.export.base import load_base
from moe.spec.generation import GenerationSpec
from moe.tasks.language.generation import generate
from tests.interchange import tiny
from tests.unit import chats

PROMPT = [5, 60, 61, 60, 62, 61, 60]
PENALTY = 1.3


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_penalized_text_is_that_of_transformers(num_beams: int, tmp_path: Path) -> None:
    model = tiny.their_model("qwen3_moe", vocab_size=480)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(0.02)
    tiny.folder_of(model, tmp_path, dtype=torch.float32)
    for name, content in chats.tokenizer_files("").items():
        (tmp_path / name).write_bytes(content)
    config = {"eos_token_id": 1, "do_sample": False, "top_k": 20, "repetition_penalty": PENALTY}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))

    generator = load_base(str(tmp_path), 64, "float32")
    spec = GenerationSpec(max_tokens=16, num_beams=num_beams, **({"length_penalty": 0.0} if num_beams > 1 else {}))
    spec, notes = generator.with_model_settings(spec)
    assert (spec.repetition_penalty, spec.temperature, notes) == (PENALTY, 0, ())
    texts = [
        generate(generator._model, [PROMPT], spec.model_copy(update={"repetition_penalty": p})) for p in (PENALTY, None)
    ]
    assert texts[0] != texts[1], "the penalty matters"

    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    options = {"do_sample": False, "num_beams": num_beams, "length_penalty": 0.0, "max_new_tokens": 16}
    reference.generation_config.eos_token_id = reference.generation_config.pad_token_id = None
    output_ids = reference.generate(torch.tensor([PROMPT]), repetition_penalty=PENALTY, **options)
    assert texts[0] == output_ids[:, len(PROMPT) :].tolist()
