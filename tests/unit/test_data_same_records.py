"""Every kind of file gives the same records as JSON Lines with the same data, however it is split."""

from glob import glob
from pathlib import Path
from random import Random
from typing import Any

import pytest

from moe.data.conversations.template import ChatTemplate
from moe.data.faults import Faults
from moe.data.pairs import corpora as pairs
from moe.data.sequences.conversations import Conversations
from moe.data.sequences.corpora import build
from moe.spec import ChatSpec, DocumentsSpec, JsonlSpec, PreferenceSpec
from tests.grid import num_cases
from tests.unit import chats
from tests.unit.data_files import WRITERS, Rows


def some_text(random: Random) -> str:
    return "".join(random.choice('ab"\\[]{},:\n\t é天😀\u2028') for _ in range(random.randrange(1, 30)))


def conversation(random: Random) -> dict[str, Any]:
    row = chats.conversation(random, chats.STRUCTURES["chatml"])
    for message in row["messages"]:
        if random.random() < 0.3:
            message["name"] = random.choice([None, "x"])
        if message["role"] == "assistant" and random.random() < 0.3:
            message["weight"] = 1
    return {**row, "source": random.choice([None, "web"])}


def document(random: Random) -> dict[str, Any]:
    return {"text": some_text(random), "meta": {"url": random.choice([None, "u"])}, "n": random.randrange(9)}


def preference(random: Random) -> dict[str, Any]:
    row = {"prompt": some_text(random), "chosen": "a" + some_text(random), "rejected": "b" + some_text(random)}
    return row | ({"system": some_text(random)} if random.random() < 0.5 else {})


def pair(random: Random) -> dict[str, Any]:
    return {"lang": random.choice(["de", "fr"]), "source": some_text(random), "target": some_text(random), "id": 3}


ROWS = {"documents": document, "chat": conversation, "preference": preference, "jsonl": pair}


def records_of(corpus: str, **files: Any) -> list[Any]:
    """All records that a corpus reads from files, as its preparation sees them."""
    faults = Faults()
    if corpus == "documents":
        suffixes = {Path(path).name.split(".")[1] for pattern in files.get("paths", ()) for path in glob(pattern)}
        format = next((suffix if suffix in ("parquet", "arrow") else "jsonl" for suffix in suffixes), None)
        data = DocumentsSpec(corpus="documents", sources=({**files, "format": format},))
        read = list(build(data).records(faults))
    elif corpus == "jsonl":
        read = list(pairs.build(JsonlSpec(corpus="jsonl", **files)).records(faults))
    else:
        kind = ChatSpec if corpus == "chat" else PreferenceSpec
        entries = Conversations(kind(corpus=corpus, **files), ChatTemplate({}, {}), None).records(faults)
        read = [entry.conversations for entry in entries]  # type: ignore[attr-defined]
    faults.require_none()
    return read


def write(kind: str, folder: Path, rows: Rows, random: Random) -> dict[str, Any]:
    """Write rows as a kind of files. Returns the fields of a spec that name them."""
    folder.mkdir()
    WRITERS[kind](folder, rows, random)
    return {"paths": [f"{folder}/*"]}


@pytest.mark.sample(7)
@pytest.mark.parametrize("corpus", ROWS)
@pytest.mark.parametrize("kind", list(WRITERS)[1:])
def test_every_kind_of_file_has_the_records_of_json_lines(kind: str, corpus: str, tmp_path: Path) -> None:
    random = Random(f"{kind} {corpus}")
    for number in range(num_cases(12)):
        rows = [ROWS[corpus](random) for _ in range(random.randrange(1, 40))]
        plain = write("json lines", tmp_path / f"plain-{number}", rows, random)
        other = write(kind, tmp_path / f"other-{number}", rows, random)
        assert records_of(corpus, **other) == records_of(corpus, **plain)
