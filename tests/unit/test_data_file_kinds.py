"""Users' files as people have them: compressed whatever their name, one array of JSON, other encodings, other kinds."""

import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from moe.data import json_lines
from moe.data.conversations.records import conversation_of
from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.json_lines import rows
from moe.data.lines import Lines
from moe.data.locations import Location
from moe.data.sequences import check
from moe.data.sequences.corpora import build
from moe.spec import DocumentsSpec, ProblemCode, SpecError
from tests.refusals import refused

LINES = b'{"text": "one"}\r\n\r\n   \n{"text": "tw\xc3\xb6"}\n{"text": "three"}'
TEXTS = ["one", "twö", "three"]


def _zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": _zstd,
}  # fmt: skip


def spec_of(path: Path, **fields: Any) -> DocumentsSpec:
    return DocumentsSpec(corpus="documents", sources=({"paths": (str(path),), **fields},), held_out=0.0)


def texts(path: Path, **fields: Any) -> list[str]:
    check(spec_of(path, **fields), [str(path.parent)])
    return [document.text for document in build(spec_of(path, **fields)).documents()]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ["a.jsonl.{}", "a.jsonl.{}".upper(), "a.json.{}", "a.jsonl", "a.ndjson.gz"])
@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_compressed_files_are_read_by_what_they_are(kind: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name.format(kind).replace("{}", kind.upper())
    path.write_bytes(COMPRESSIONS[kind](LINES))
    assert texts(path) == TEXTS
    path.write_bytes(COMPRESSIONS[kind](LINES + b"\n") + COMPRESSIONS[kind](b'{"text": "four"}\n'))
    assert texts(path) == [*TEXTS, "four"], "two of them behind each other, as tools append them"
    path.write_bytes(LINES)
    assert texts(path) == TEXTS, "whatever the name says"


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_compressed_files_that_end_too_early_are_told(kind: str, tmp_path: Path) -> None:
    random = Random(0)
    content = b"".join(b'{"text": "%d"}\n' % random.getrandbits(200) for _ in range(2000))
    whole = COMPRESSIONS[kind](content)
    for part in (0.4, 0.99):
        (tmp_path / f"a.jsonl.{kind}").write_bytes(whole[: int(len(whole) * part)])
        with refused("unreadable", "data.sources[0].paths[0]"):
            texts(tmp_path / f"a.jsonl.{kind}")


def _zip(content: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("a.jsonl", content)
    return target.getvalue()


OTHERS: dict[str, tuple[bytes, ProblemCode, str]] = {
    "utf-16": (LINES.decode().encode("utf-16"), "invalid_encoding", "is UTF-16 text, not UTF-8"),
    "utf-16-be": (b"\xfe\xff" + LINES.decode().encode("utf-16-be"), "invalid_encoding", "is UTF-16 text"),
    "utf-16 without a mark": (LINES.decode().encode("utf-16-le"), "invalid_encoding", "starts with NUL bytes, "
                                                            "like UTF-16 text"),
    "utf-32": (LINES.decode().encode("utf-32"), "invalid_encoding", "is UTF-32 text"),
    "latin-1": (LINES.decode().encode("latin-1"), "invalid_encoding", "is not UTF-8 text at byte 13 of the"),
    "zip": (_zip(LINES), "wrong_type", "is a Zip archive"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "wrong_type", "is a Git LFS pointer"),
    "nul": (b"\0" * 100, "invalid_encoding", "starts with NUL bytes, like UTF-16 text"),
}  # fmt: skip


@pytest.mark.parametrize("format", ["jsonl", "text"])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_are_refused_by_what_they_are(kind: str, format: str, tmp_path: Path) -> None:
    content, code, rule = OTHERS[kind]
    (tmp_path / "a").write_bytes(content)
    for act in (check, lambda spec, roots: list(build(spec).documents())):
        with pytest.raises(SpecError) as error:
            act(spec_of(tmp_path / "a", format=format), [str(tmp_path)])
        problem = error.value.problems[0]
        assert (problem.code, str(problem.value).startswith(f"{tmp_path}/a")) == (code, True)
        assert rule.removesuffix(" 13 of the") in problem.rule


def test_parquet_under_another_name_is_told(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "a.jsonl")
    with refused("wrong_type", "data.sources[0].paths[0]"):
        texts(tmp_path / "a.jsonl")


@pytest.mark.parametrize("text", ["BZh is no compression\n", "PK", "ORCHESTRA", "\ufeffword", "%PD", "[", "Ob"])
def test_text_that_begins_like_another_kind_is_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert texts(tmp_path / "a.txt") == [text.removeprefix("\ufeff")]


def some_row(random: Random) -> dict[str, Any]:
    text = "".join(random.choice('ab"\\[]{},:\n é天😀') for _ in range(random.randrange(60)))
    return {"text": text, "n": random.choice([1, -2.5e7, None, True, [], [{"a": [text]}], {"": {}}])}


@pytest.mark.parametrize("seed", range(40))
def test_an_array_is_read_as_its_items(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is written, wherever a part of it ends."""
    random = Random(seed)
    monkeypatch.setattr(json_lines, "_CHUNK_BYTES", random.randrange(1, 50))
    given = [some_row(random) for _ in range(random.randrange(12))]
    text = json.dumps(given, indent=random.choice([None, 0, 3]), ensure_ascii=random.random() < 0.5)
    space = random.choice(["", "\n", " \r\n\t"])
    mark = random.choice([b"", b"\xef\xbb\xbf"])
    (tmp_path / "a.json").write_bytes(mark + f"{space}{text}{space}".encode())
    found = list(rows(Lines(DataFile("data", Location("file", str(tmp_path / "a.json")))), Faults()))
    assert [row.values for row in found] == given
    assert [row.where for row in found] == [f", item {number + 1}" for number in range(len(given))]


@pytest.mark.parametrize(
    ("text", "where", "rule"),
    [
        ('[{"text": "a"}, {"text": }]', ", item 2", "is not JSON"),
        ('[{"text": "a"}, 7, {"text": "b"}]', ", item 2", "is a number, not an object"),
        ('[{"text": "a"}', ", item 1", "is followed by neither"),
        ('[{"text": "a"}, {"te', ", item 2", "is not JSON"),
        ('[{"text": "a"}] [1]', ", item 1", "is followed by more"),
        ('[{"text": "a"},]', ", item 1", "is followed by a comma"),
        ('[{"text": "a"} {"text": "b"}]', ", item 1", "is followed by neither"),
        ("[", ", item 1", "is not JSON"),
        ('["text"]', ", item 1", "is a string, not an object"),
        ('{\n  "text": "a"\n}', "", "is a JSON object over several lines, not one per line"),
    ],
)
def test_mistakes_of_an_array_are_told_by_item(text: str, where: str, rule: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SpecError) as error:
        texts(tmp_path / "a.json")
    assert str(error.value.problems[0].value) == f"{tmp_path}/a.json{where}"
    assert rule in error.value.problems[0].rule


@pytest.mark.parametrize("others", [[], ['{"text": "a"}'], ["{", '{"text": "a"}']])
def test_a_first_record_that_was_cut_short_is_one_bad_record(others: list[str], tmp_path: Path) -> None:
    """And no object over several lines."""
    (tmp_path / "a.jsonl").write_text("\n".join(["{", *others]))
    faults = Faults()
    read = list(rows(Lines(DataFile("data", Location("file", str(tmp_path / "a.jsonl")))), faults))
    assert [row.where for row in read] == [f", line {len(others) + 1}"] * bool(others)
    assert (faults.num_records, faults.num_bad) == (len(others) + 1, len(others) + 1 - len(read))


def test_white_space_of_an_array_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" + " " * (2 * json_lines._CHUNK_BYTES) + '{"text": "a"}]')
    place = Location("file", str(tmp_path / "a.json"))
    with refused("too_large", "data"):
        list(rows(Lines(DataFile("data", place), max_line_bytes=1000), Faults()))
    assert len(list(rows(Lines(DataFile("data", place)), Faults()))) == 1


def test_a_file_of_nothing_is_told(tmp_path: Path) -> None:
    for content in (b"", b"\n \n", b"\xef\xbb\xbf\n", b"[]", gzip.compress(b"")):
        (tmp_path / "a.jsonl").write_bytes(content)
        with refused("empty", "data.sources[0].paths"):
            list(build(spec_of(tmp_path / "a.jsonl")).documents())


@pytest.mark.parametrize(
    "name", ["human", "Human", "USER", " user ", "gpt", "GPT", "bing", "Bard", "chatgpt", "Assistant"]
)
def test_names_of_roles_are_those_of_published_files(name: str) -> None:
    is_user = name.strip().lower() in ("human", "user")
    said = {"from": name, "value": "x"}
    others = ({"from": "human", "value": "q"}, {"from": "gpt", "value": "a"})
    pair = [said, others[1]] if is_user else [others[0], said]
    found = conversation_of({"conversations": pair})
    assert [message["role"] for message in found.messages] == ["user", "assistant"]
