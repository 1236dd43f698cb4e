"""`*` in the paths of a corpus: its matches, its time, and the limit on names it examines."""

import os
from collections import Counter
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe.data.locations import Locator
from moe.spec import SpecError
from moe.spec.patterns import matches
from moe.storage import confined
from moe.storage.links import MAX_LINK_PARTS, MAX_LINKS, MAX_PARTS, follow_links
from tests.refusals import expect_problem

names = st.text("ab.", max_size=10)
patterns = st.text("ab.*", max_size=10)


@given(patterns, names)
@example("a*a", "a")
@example("*ab*ab", "abab")
@example("*ab*ab", "ab")
@example("**", "")
def test_a_pattern_matches_what_fnmatch_says(pattern: str, name: str) -> None:
    assert matches(pattern, name) == fnmatchcase(name, pattern)


@given(st.text(min_size=1, max_size=30), st.lists(st.integers(0, 30), max_size=4))
def test_other_characters_stand_for_themselves(name: str, cuts: list[int]) -> None:
    """Also characters with a meaning in other kinds of patterns: ? [ ] ( ) + . and line ends."""
    pattern = name
    for cut in cuts:
        pattern = pattern[:cut] + "*" + pattern[cut:]
    assert matches(pattern, name)
    assert matches(name, name + "x") == name.endswith("*")


def test_its_time_grows_with_the_lengths_alone() -> None:
    """A backtracking matcher would take longer than the age of the universe over a thousand stars."""
    pattern = "*a" * 1000 + "*b"
    assert not matches(pattern, "a" * 2000)
    assert matches(pattern, "a" * 2000 + "b")


SPLIT = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3)
PARTS = st.lists(st.text("ab*", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.lists(SPLIT, max_size=8), PARTS)
def test_files_are_found_as_by_looking_at_all_of_them(tmp_path_factory, files, pattern) -> None:
    root = tmp_path_factory.mktemp("root")
    for parts in files:
        path = root.joinpath(*parts)
        if not path.exists() and not any(parent.is_file() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def fits(path: Path) -> bool:
        parts = path.relative_to(root).parts
        return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))

    expected = {str(path) for path in root.rglob("*") if path.is_file() and fits(path)}
    locator, full_pattern = Locator([str(root)]), f"{root}/{'/'.join(pattern)}"
    if expected:
        locations = locator.locate("data.paths[0]", full_pattern)
        assert [location.path for location in locations] == sorted(expected, key=lambda path: path.split("/"))
    else:
        with pytest.raises(SpecError, match=r"matches no file|does not exist|is a folder"):
            locator.locate("data.paths[0]", full_pattern)


def test_all_patterns_of_a_corpus_together_examine_a_limited_number_of_names(tmp_path: Path) -> None:
    for folder in range(5):
        (tmp_path / f"f{folder}").mkdir()
        for file in range(6):
            (tmp_path / f"f{folder}/{file}.jsonl").touch()
    locator = Locator([str(tmp_path)], max_names=50)
    assert len(locator.locate("data.paths[0]", f"{tmp_path}/*/*.jsonl")) == 30  # after 35 names
    locator.locate("data.paths[1]", f"{tmp_path}/f0/0.jsonl")
    locator.locate("data.paths[2]", f"{tmp_path}/f0/*")
    with expect_problem("too_large", "data.paths[3]"):
        locator.locate("data.paths[3]", f"{tmp_path}/*/*none*")


@pytest.mark.parametrize("pattern", ["{dots}*.jsonl", "*/{deep}x.jsonl", "*/{dots}sub/*.jsonl"])
def test_a_name_costs_a_few_steps_however_long_its_pattern_is(tmp_path, monkeypatch, pattern) -> None:
    """Counted, not timed: every step on the way to a file is one of these calls."""
    for number in range(50):
        (tmp_path / f"f{number}/sub").mkdir(parents=True)
        (tmp_path / f"f{number}/sub/a.jsonl").touch()
        (tmp_path / f"{number}.jsonl").touch()
    calls: Counter[str] = Counter()
    for module, name in ((os, "lstat"), (os, "open"), (os, "readlink"), (os.path, "realpath")):

        def count_call(*arguments: Any, _name: str = name, _call: Any = getattr(module, name), **keywords: Any) -> Any:
            calls[_name] += 1
            return _call(*arguments, **keywords)

        monkeypatch.setattr(module, name, count_call)
    full_pattern = f"{tmp_path}/{pattern.format(dots='./' * 1000, deep='a/' * 40)}"
    with suppress(SpecError):
        assert len(Locator([str(tmp_path)]).locate("data.paths[0]", full_pattern)) == 50
    assert calls["realpath"] < 5
    assert calls["lstat"] + calls["open"] + calls["readlink"] < 100 * 4 * len(tmp_path.parts)


def test_patterns_follow_links_and_match_files_that_are_not_hidden(tmp_path: Path) -> None:
    def locate(pattern: str) -> list[str]:
        return [location.path for location in Locator([str(tmp_path)]).locate("data.paths[0]", f"{tmp_path}/{pattern}")]

    (tmp_path / "blobs/deep").mkdir(parents=True)
    (tmp_path / "blobs/deep/a.jsonl").touch()
    (tmp_path / "one").mkdir()
    for link, target in {"one/link": tmp_path / "blobs", "two": "one", "three": "three"}.items():
        (tmp_path / link).symlink_to(target)
    assert locate("*/link/deep/*.jsonl") == [f"{tmp_path}/blobs/deep/a.jsonl"] * 2
    for name in ("a.jsonl", ".hidden.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "b.jsonl").mkdir()
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "d.jsonl").symlink_to("a.jsonl")
    assert locate("*.jsonl") == [f"{tmp_path}/a.jsonl"] * 2  # the second by its link
    assert locate(".h*") == [f"{tmp_path}/.hidden.jsonl"]


def test_parts_of_link_targets_count_as_examined_names(tmp_path: Path) -> None:
    """Each step is a name, however many chains of links there are and however long their targets."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/a").touch()
    for chain in range(20):
        for link in range(10):
            target = "blobs/a" if link == 9 else f"chain-{chain}.{link + 1}"
            (tmp_path / f"chain-{chain}.{link}").symlink_to("blobs/../" * 100 + target)
    pattern = f"{tmp_path}/chain-*.0"
    with expect_problem("too_large", "data.paths[0]"):
        Locator([str(tmp_path)], max_names=5_000).locate("data.paths[0]", pattern)
    locations = Locator([str(tmp_path)]).locate("data.paths[0]", pattern)
    assert [location.path for location in locations] == [f"{tmp_path}/blobs/a"] * 20


@pytest.mark.parametrize("num_links", [MAX_LINKS, MAX_LINKS + 1, 2000])
def test_a_chain_of_links_is_followed_as_far_as_the_kernel_would(tmp_path: Path, num_links: int) -> None:
    (tmp_path / "0").touch()
    for number in range(num_links):
        (tmp_path / f"{number + 1}").symlink_to(f"{number}")
    last, locator = f"{tmp_path}/{num_links}", Locator([str(tmp_path)])
    if num_links == MAX_LINKS:
        assert [location.path for location in locator.locate("data.paths[0]", last)] == [f"{tmp_path}/0"]
        return
    with expect_problem("unreadable", "data.paths[0]"):
        locator.locate("data.paths[0]", last)
    for read, message in (
        (open, "Too many levels"),
        (partial(confined.open_file, str(tmp_path)), f"more than {MAX_LINKS} links"),
    ):
        with pytest.raises(OSError, match=message):
            read(last).close()


def test_links_that_wander_lead_nowhere(tmp_path: Path) -> None:
    """A few links that repeat one folder lead to thousands of places, each of them deep."""
    deep = tmp_path.joinpath(*["d"] * (MAX_PARTS - len(tmp_path.parts) - 1))
    deep.mkdir(parents=True)
    (deep / "0").touch()
    for number in range(6):
        (deep / f"{number + 1}").symlink_to(f"../{deep.name}/" * 500 + f"{number}")
    assert follow_links(f"{deep}/4") == f"{deep}/0"
    with pytest.raises(OSError, match=f"links of more than {MAX_LINK_PARTS:,} parts together"):
        follow_links(f"{deep}/6")
    with expect_problem("unreadable", "data.paths[0]"):
        Locator([str(tmp_path)]).locate("data.paths[0]", f"{deep}/6")


def test_what_lies_very_deep_is_refused_by_name_and_by_link(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * MAX_PARTS)
    deep.mkdir(parents=True)
    (deep / "a.jsonl").touch()
    (tmp_path / "link").symlink_to(deep)
    for path in (f"{deep}/a.jsonl", f"{tmp_path}/link/a.jsonl", f"{tmp_path}/l*/*.jsonl"):
        with pytest.raises(SpecError, match=f"more than {MAX_PARTS} folders deep"):
            Locator([str(tmp_path)]).locate("data.paths[0]", path)


@given(st.lists(st.tuples(SPLIT, st.lists(st.sampled_from(["a", "b", "..", ".", ""]), max_size=5)), max_size=6), SPLIT)
def test_links_lead_where_the_library_s_own_walk_leads(tmp_path_factory, links, path_parts) -> None:
    root = tmp_path_factory.mktemp("root")
    for parts, target in links:
        path = root.joinpath(*parts)
        with suppress(OSError):
            if Path(os.path.realpath(path.parent)).is_relative_to(root):  # links may lead out
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to("/".join(target) or ".")
    path = f"{root}/{'/'.join(path_parts)}"
    try:
        assert follow_links(path) == os.path.realpath(path)
    except OSError:
        with pytest.raises(OSError, match="Too many levels"):
            os.stat(path)
