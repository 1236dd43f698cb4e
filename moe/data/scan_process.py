"""Process that scans a user's corpus: `python -m moe.data.scan_process`, started by `moe.data.scan`."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from moe.data.corpus import Corpus
from moe.data.faults import Faults, OutOfTime
from moe.data.limited_process import take_limits
from moe.spec import ConversationsSpec, DocumentsSpec, JsonlSpec, ParallelTextSpec, Problem, SpecError


def _problems(data: object, roots: Sequence[str] | None, deadline: float) -> Iterator[Problem]:
    corpus = _corpus(data, roots)
    faults = Faults.from_spec(data, deadline)
    try:
        with suppress(OutOfTime):
            for _ in corpus.records(faults):
                pass
        faults.require_none()
    except SpecError as error:
        yield from error.problems


def _corpus(data: object, roots: Sequence[str] | None) -> Corpus:
    if isinstance(data, ConversationsSpec):
        from moe.data.conversations.template import ChatTemplate
        from moe.data.sequences.conversations import Conversations

        return Conversations(data, ChatTemplate({}, {}), roots)
    if isinstance(data, DocumentsSpec):
        from moe.data.sequences.documents import DocumentFiles

        return DocumentFiles(data, roots)
    if isinstance(data, JsonlSpec):
        from moe.data.pairs.jsonl import JsonlPairs

        return JsonlPairs(data, roots)
    from moe.data.pairs.parallel_text import ParallelText

    assert isinstance(data, ParallelTextSpec)
    return ParallelText(data, roots)


def _main() -> None:
    began = time.monotonic()
    take_limits()
    from pydantic import TypeAdapter

    from moe.spec.data import DataSpec

    request = json.loads(sys.stdin.buffer.read())
    data: object = TypeAdapter(DataSpec).validate_python(request["data"])
    problems = _problems(data, request["roots"], began + request["seconds"])
    sys.stdout.write(json.dumps([problem.to_dict() for problem in problems], default=str))


if __name__ == "__main__":
    _main()
