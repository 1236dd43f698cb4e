"""Users' files in all their forms: compressed under any name, one JSON array, other encodings, other kinds."""

import bz2
import gzip
import io
import json
import lzma
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from moe.data import json_lines
from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.json_lines import rows
from moe.data.lines import Lines
from moe.data.locations import Location
from moe.data.sequences import check
from moe.data.sequences.corpora import build
from moe.spec import DocumentsSpec, ProblemCode, SpecError
from tests.grid import num_cases
from tests.refusals import expect_problem
from tests.unit import data_files

LINES = b'{"text": "one"}\r\n\r\n   \n{"text": "tw\xc3\xb6"}\n{"text": "three"}'
TEXTS = ["one", "twö", "three"]
PLACE = "data.sources[0].paths[0]"
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress,
    "zst": lambda content: bytes(pyarrow.compress(content, codec="zstd", asbytes=True)),
}  # fmt: skip


def spec_of(path: Path, **fields: Any) -> DocumentsSpec:
    return DocumentsSpec(corpus="documents", sources=({"paths": (str(path),), **fields},), held_out=0.0)


def texts(path: Path, **fields: Any) -> list[str]:
    check(spec_of(path, **fields), [str(path.parent)])
    return [document.text for document in build(spec_of(path, **fields)).documents()]


def lines_of(path: Path, **limits: Any) -> Lines:
    return Lines(DataFile("data", Location("file", str(path))), **limits)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["a.jsonl.{}", "a.jsonl.{}".upper(), "a.json.{}", "a.jsonl", "a.ndjson.gz"])
@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_compressed_files_are_recognized_by_their_content(kind: str, name: str, tmp_path: Path) -> None:
    path, compress = tmp_path / name.format(kind).replace("{}", kind.upper()), COMPRESSIONS[kind]
    path.write_bytes(compress(LINES))
    assert texts(path) == TEXTS
    path.write_bytes(compress(LINES + b"\n") + compress(b'{"text": "four"}\n'))
    assert texts(path) == [*TEXTS, "four"], "two compressed files, one appended to the other"
    path.write_bytes(LINES)
    assert texts(path) == TEXTS, "plain text under any name"


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_truncated_compressed_files_are_refused(kind: str, tmp_path: Path) -> None:
    random, path = Random(0), tmp_path / f"a.jsonl.{kind}"
    content = COMPRESSIONS[kind](b"".join(b'{"text": "%d"}\n' % random.getrandbits(200) for _ in range(2000)))
    for share in (0.4, 0.99):
        path.write_bytes(content[: int(len(content) * share)])
        with expect_problem("unreadable", PLACE) as error:
            texts(path)
        assert _offset(error.value) == path.stat().st_size


def _offset(error: SpecError) -> int:
    """Offset in the compressed file that an error names."""
    match = re.search(r"near byte ([\d,]+) of the compressed file", str(error))
    assert match is not None
    return int(match[1].replace(",", ""))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_damaged_compressed_files_are_refused_where_the_damage_is(kind: str, tmp_path: Path) -> None:
    """Whatever was read before is right; the place is the damaged part or the check sum behind it."""
    random, path = Random(kind), tmp_path / f"a.jsonl.{kind}"
    lines = [b'{"text": "%d"}\n' % random.getrandbits(200) for _ in range(20_000)]
    content = b"".join(data_files.COMPRESSIONS[kind](b"".join(part), random) for part in (lines[:9000], lines[9000:]))
    for _ in range(num_cases(12)):
        place = random.randrange(len(content) // 2, len(content) - 200)
        damaged = content[:place] + bytes([content[place] ^ random.randrange(1, 256)]) + content[place + 1 :]
        path.write_bytes(damaged)
        try:
            num_read = len(list(build(spec_of(path)).records(Faults())))
        except SpecError as raised:
            error = raised
        else:
            assert (kind, num_read) == ("zst", len(lines)), "only its frames need no check sum"
            continue
        (problem,) = error.problems
        assert (problem.code, problem.path) == ("unreadable", PLACE)
        assert place < _offset(error) <= len(damaged)


def test_windows_of_zstandard_are_bounded(tmp_path: Path) -> None:
    """A frame may ask for gigabytes of memory."""
    options = zstandard.ZstdCompressionParameters(window_log=28, compression_level=1)
    compressor = zstandard.ZstdCompressor(compression_params=options).compressobj()
    content = compressor.compress(Random(0).randbytes(1 << 21)) + compressor.flush()
    (tmp_path / "a.jsonl.zst").write_bytes(content)
    with expect_problem("unreadable", PLACE):
        list(build(spec_of(tmp_path / "a.jsonl.zst")).documents())


def _zip(content: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("a.jsonl", content)
    return target.getvalue()


def _parquet() -> bytes:
    target = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), target)
    return target.getvalue()


OTHERS: dict[str, tuple[bytes, ProblemCode]] = {
    **{encoding: (LINES.decode().encode(encoding), "invalid_encoding")
       for encoding in ("utf-16", "utf-16-le", "utf-32", "latin-1")},
    "utf-16-be": (b"\xfe\xff" + LINES.decode().encode("utf-16-be"), "invalid_encoding"),
    "nul": (b"\0" * 100, "invalid_encoding"),
    "zip": (_zip(LINES), "wrong_type"),
    "parquet": (_parquet(), "wrong_type"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "wrong_type"),
}  # fmt: skip


@pytest.mark.parametrize("format", ["jsonl", "text"])
@pytest.mark.parametrize("kind", OTHERS)
def test_files_of_other_kinds_are_refused(kind: str, format: str, tmp_path: Path) -> None:
    content, code = OTHERS[kind]
    (tmp_path / "a").write_bytes(content)
    location = ", line 4" if kind == "latin-1" else ""
    for act in (check, lambda spec, roots: list(build(spec).documents())):
        with expect_problem(code, PLACE, f"{tmp_path}/a{location}"):
            act(spec_of(tmp_path / "a", format=format), [str(tmp_path)])


@pytest.mark.parametrize("text", ["BZh is no compression\n", "PK", "ORCHESTRA", "\ufeffword", "%PD", "[", "Ob"])
def test_text_that_begins_like_another_kind_is_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert texts(tmp_path / "a.txt") == [text.removeprefix("\ufeff")]


def random_row(random: Random) -> dict[str, Any]:
    text = "".join(random.choice('ab"\\[]{},:\n é天😀') for _ in range(random.randrange(60)))
    return {"text": text, "n": random.choice([1, -2.5e7, None, True, [], [{"a": [text]}], {"": {}}])}


@pytest.mark.parametrize("seed", range(40))
def test_an_array_is_read_as_its_items(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any formatting, and wherever a chunk ends within it."""
    random = Random(seed)
    monkeypatch.setattr(json_lines, "_CHUNK_BYTES", random.randrange(1, 50))
    items = [random_row(random) for _ in range(random.randrange(12))]
    text = json.dumps(items, indent=random.choice([None, 0, 3]), ensure_ascii=random.random() < 0.5)
    space, mark = random.choice(["", "\n", " \r\n\t"]), random.choice([b"", b"\xef\xbb\xbf"])
    (tmp_path / "a.json").write_bytes(mark + f"{space}{text}{space}".encode())
    read = list(rows(lines_of(tmp_path / "a.json"), Faults()))
    assert [row.values for row in read] == items
    assert [row.position for row in read] == [f", item {number + 1}" for number in range(len(items))]


@pytest.mark.parametrize(
    ("text", "location", "code"),
    [
        ('[{"text": "a"}, {"text": }]', ", item 2", "invalid_syntax"),
        ('[{"text": "a"}, 7, {"text": "b"}]', ", item 2", "wrong_type"),
        ('[{"text": "a"}', ", item 1", "invalid_syntax"),
        ('[{"text": "a"}, {"te', ", item 2", "invalid_syntax"),
        ('[{"text": "a"}] [1]', ", item 1", "invalid_syntax"),
        ('[{"text": "a"},]', ", item 1", "invalid_syntax"),
        ('[{"text": "a"} {"text": "b"}]', ", item 1", "invalid_syntax"),
        ("[", ", item 1", "invalid_syntax"),
        ('{\n  "text": "a"\n}', "", "invalid_syntax"),
    ],
)
def test_mistakes_in_an_array_are_named_by_item(text: str, location: str, code: ProblemCode, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with expect_problem(code, PLACE, f"{tmp_path}/a.json{location}"):
        texts(tmp_path / "a.json")


@pytest.mark.parametrize("lines", [[], ['{"text": "a"}'], ["{", '{"text": "a"}']])
def test_a_truncated_first_record_is_one_bad_record(lines: list[str], tmp_path: Path) -> None:
    """Not the beginning of an object over several lines."""
    (tmp_path / "a.jsonl").write_text("\n".join(["{", *lines]))
    faults = Faults()
    read = list(rows(lines_of(tmp_path / "a.jsonl"), faults))
    assert [row.position for row in read] == [f", line {len(lines) + 1}"] * bool(lines)
    assert (faults.num_records, faults.num_bad) == (len(lines) + 1, len(lines) + 1 - len(read))


def test_white_space_in_an_array_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" + " " * (2 * json_lines._CHUNK_BYTES) + '{"text": "a"}]')
    with expect_problem("too_large", "data"):
        list(rows(lines_of(path, max_line_bytes=1000), Faults()))
    assert len(list(rows(lines_of(path), Faults()))) == 1


@pytest.mark.parametrize(
    "content", [b"", b"\n \n", b"\xef\xbb\xbf\n", b"[]", gzip.compress(b"", mtime=0), b'{"text": " "}']
)
def test_a_file_without_text_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with expect_problem("empty", "data.sources[0].paths"):
        list(build(spec_of(tmp_path / "a.jsonl")).documents())
