"""Process that tries a model's tokenizer: `python -m moe.data.sequences.tokenizer_trial`, started by
`moe.data.sequences.model_tokenizer`. It loads no specs, whose classes would take most of its time."""

import json
import sys
from collections.abc import Iterator
from string import ascii_letters, digits, punctuation

from moe.data.limited_process import apply_limits

_RUN_CHARS = 400


def _stress_texts() -> Iterator[str]:
    """Texts that backtracking patterns take long for: runs of each character, and of pairs of kinds, that end in a
    mismatch."""
    for run in (*ascii_letters, *digits, *punctuation, " ", "\t", "\n", "\r\n", "é", "中", "\u0301", "😀", "\x00"):
        for end in ("!", "b\n", " 1", ""):
            yield run * _RUN_CHARS + end
    for pair in ("aA", "a1", "a ", "a\n", " \n", "a'", "1,", "a_", "é中", ".-"):
        yield pair * _RUN_CHARS + "!"


def _main() -> None:
    apply_limits()
    from moe.data.tokenizer import Tokenizer

    request = json.loads(sys.stdin.buffer.read())
    try:
        tokenizer = Tokenizer.of_model(request["tokenizer"], bos_id=None, eos_id=0)
    except ValueError as error:
        sys.stdout.write(json.dumps({"problem": str(error)[:300]}))
        return
    for text in (*_stress_texts(), *request["texts"]):
        tokenizer.encode(text)
    sys.stdout.write(json.dumps({"num_ids": tokenizer.num_ids}))


if __name__ == "__main__":
    _main()
