"""llama.cpp in a process of its own: `ask(requests)` returns logits of token ids, and ids of texts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def ask(requests: list[dict[str, Any]]) -> list[Any]:
    """For each request `{file, ids}` the float32 logits `[T, V]`, for each `{file, texts}` the ids of each text."""
    lines = [json.dumps(request, default=str) for request in requests]
    answer = subprocess.run(
        [sys.executable, __file__], input="\n".join(lines), capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.returncode == 0, answer.stderr[-6000:]
    return [json.loads(line) for line in answer.stdout.splitlines()]


def _answer(request: dict[str, Any]) -> list[Any]:
    import cyllama.llama.llama_cpp as llama

    class Model(llama.LlamaModel):
        @property
        def n_vocab(self) -> int:
            """Attribute that the package's own `get_logits` misses."""
            return int(self.get_vocab().n_vocab)

    llama.disable_logging()
    options = llama.LlamaModelParams()
    options.n_gpu_layers = 0
    model = Model(str(Path(request["file"])), options, verbose=False)
    if "texts" in request:
        vocabulary = model.get_vocab()
        return [vocabulary.tokenize(text, True, True) for text in request["texts"]]
    options = llama.LlamaContextParams()
    options.n_ctx = options.n_batch = options.n_ubatch = 64
    options.type_k = options.type_v = options.flash_attn_type = 0
    options.n_threads = options.n_threads_batch = 1
    context = llama.LlamaContext(model, options, verbose=False)
    rows = []
    for position, token in enumerate(request["ids"]):
        batch = llama.LlamaBatch(n_tokens=1, embd=0, n_seq_max=1)
        batch.add(token, position, [0], True)
        context.decode(batch)
        rows.append(list(context.get_logits()))
    return rows


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))))
