"""Process that scans a user's corpus: `python -m moe.data.scan_process`, started by `moe.data.scan`."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from moe.data.corpus import Corpus
from moe.data.faults import DeadlineExceeded, Faults
from moe.data.limited_process import apply_limits
from moe.spec import ConversationsSpec, PairsSpec, Problem, SequencesSpec, SpecError


def _problems(data: object, roots: Sequence[str] | None, deadline: float) -> Iterator[Problem]:
    corpus = _corpus(data, roots)
    faults = Faults.from_spec(data, deadline)
    try:
        with suppress(DeadlineExceeded):
            for _ in corpus.records(faults):
                pass
        faults.require_none()
    except SpecError as error:
        yield from error.problems


def _corpus(data: object, roots: Sequence[str] | None) -> Corpus:
    """Corpus of a spec. Conversations get an empty chat template, since their records are read but not rendered."""
    if isinstance(data, ConversationsSpec):
        from moe.data.conversations.template import ChatTemplate
        from moe.data.sequences.conversations import Conversations

        return Conversations(data, ChatTemplate({}, {}), roots)
    if isinstance(data, PairsSpec):
        from moe.data.pairs import corpora

        return corpora.build(data, roots)
    from moe.data.sequences.corpora import build

    assert isinstance(data, SequencesSpec)
    return build(data, roots)


def _main() -> None:
    began = time.monotonic()
    apply_limits()
    from pydantic import TypeAdapter

    from moe.spec.data import DataSpec

    request = json.loads(sys.stdin.buffer.read())
    data: object = TypeAdapter(DataSpec).validate_python(request["data"])
    problems = _problems(data, request["roots"], began + request["seconds"])
    sys.stdout.write(json.dumps([problem.to_dict() for problem in problems], default=str))


if __name__ == "__main__":
    _main()
