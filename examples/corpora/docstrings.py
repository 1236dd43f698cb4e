"""Conversations of real text without a download: functions of installed packages and their docstrings.

    python -m examples.corpora.docstrings FOLDER

`chat.jsonl` has a conversation per line, `preference.jsonl` pairs of answers: the function's docstring, and another's.
`unpaired_preference.jsonl` has one of them per line, with a label.
"""

import argparse
import ast
import json
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from moe.data.sequences.corpora import build
from moe.spec import PackagesSpec

_PROMPT = "Say in a line what this does:\n\n"
NUM_FUNCTIONS = 4000
_MAX_CHARS, _MAX_ANSWER_CHARS = 800, 200


def functions() -> Iterator[tuple[str, str]]:
    """(source without docstring, first line of the docstring) of distinct short functions."""
    sources = set()
    for document in build(PackagesSpec(corpus="packages")).documents():
        for node in ast.walk(ast.parse(document.text)):
            if not isinstance(node, ast.FunctionDef) or not (docstring := ast.get_docstring(node)):
                continue
            answer = docstring.partition("\n")[0].strip()
            node.body = node.body[1:] or [ast.Pass()]
            source = ast.unparse(node)
            if len(source) <= _MAX_CHARS and 12 <= len(answer) <= _MAX_ANSWER_CHARS and source not in sources:
                sources.add(source)
                yield source, answer


def make(folder: Path, num_functions: int = NUM_FUNCTIONS) -> dict[Path, int]:
    """Write the files from that many functions; return their numbers of records."""
    folder.mkdir(parents=True, exist_ok=True)
    examples = list(islice(functions(), num_functions))
    chats = (
        {"messages": [{"role": "user", "content": _PROMPT + source}, {"role": "assistant", "content": answer}]}
        for source, answer in examples
    )
    preferences = (
        {"prompt": _PROMPT + source, "chosen": answer, "rejected": next_answer}
        for (source, answer), (_, next_answer) in pairwise(examples)
        if answer != next_answer
    )
    labelled = (
        {"prompt": _PROMPT + source, "completion": answer if number % 2 else next_answer, "label": bool(number % 2)}
        for number, ((source, answer), (_, next_answer)) in enumerate(pairwise(examples))
        if answer != next_answer
    )
    files = {
        folder / "chat.jsonl": chats,
        folder / "preference.jsonl": preferences,
        folder / "unpaired_preference.jsonl": labelled,
    }
    return {path: _write(path, rows) for path, rows in files.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for path, number in make(parser.parse_args().folder).items():
        print(f"{path}: {number:,} records")


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


if __name__ == "__main__":
    main()
