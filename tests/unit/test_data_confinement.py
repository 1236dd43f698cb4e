"""Data paths stay under the roots, whatever a spec writes."""

import os

import fsspec
import pytest

from moe.data.locations import Locator
from moe.data.pairs import check, prepare
from moe.spec import JsonlSpec, ParallelTextSpec, SpecError, TextPair
from tests.refusals import refused
from tests.unit.data_corpora import job, sentences, write_jsonl

ATTACKS = {
    "parent": "{root}/../secret.jsonl",
    "parent after a folder": "{root}/folder/../../secret.jsonl",
    "parent in a URL": "file://{root}/../secret.jsonl",
    "parent that stays inside": "{root}/folder/../ok.jsonl",
    "link to a file": "{root}/link.jsonl",
    "link to a folder": "{root}/out/secret.jsonl",
    "link in a URL": "file://{root}/out/secret.jsonl",
    "link matched by a pattern": "{root}/l*.jsonl",
    "pattern beyond a link": "{root}/out/*.jsonl",
    "pattern of folders, one a link": "{root}/*/secret.jsonl",
    "outside": "{outside}/secret.jsonl",
    "outside, by pattern": "{outside}/*.jsonl",
    "outside, file://": "file://{outside}/secret.jsonl",
    "outside, local://": "local://{outside}/secret.jsonl",
    "outside, file:": "file:{outside}/secret.jsonl",
    "outside, file:///": "file:////{outside}/secret.jsonl",
    "outside, a host": "file://localhost{outside}/secret.jsonl",
    "outside, upper case": "FILE://{outside}/secret.jsonl",
    "sibling with the root's name as prefix": "{root}-more/secret.jsonl",
    "chain, simplecache": "simplecache::file://{outside}/secret.jsonl",
    "chain, filecache of an allowed file": "filecache::{root}/ok.jsonl",
    "chain, zip": "zip://secret.jsonl::file://{root}/ok.jsonl",
    "chain after an allowed path": "{root}/ok.jsonl::file://{outside}/secret.jsonl",
    "home": "~/secret.jsonl",
    "relative": "ok.jsonl",
    "relative, dotted": "./ok.jsonl",
    "data URL": "data:application/json,%7B%7D",
    "http": "http://169.254.169.254/latest/meta-data",
    "s3": "s3://bucket/secret.jsonl",
    "memory": "memory://secret.jsonl",
    "github": "github://owner:repository@main/secret.jsonl",
    "reference": "reference://secret.jsonl",
    "NUL": "{root}/ok.jsonl\0.txt",
    "process": "/proc/self/environ",
    "device": "/dev/zero",
    "pipe": "{root}/pipe",
    "folder": "{root}/folder",
    "the root itself": "{root}",
    "empty": "",
}


@pytest.fixture
def places(tmp_path):
    root, outside = tmp_path / "data", tmp_path / "outside"
    for folder in (root, root / "folder", outside, tmp_path / "data-more"):
        folder.mkdir()
    for allowed in (root / "ok.jsonl", root / "folder" / "secret.jsonl"):
        write_jsonl(allowed, sentences(20))
    for secret in (tmp_path / "secret.jsonl", outside / "secret.jsonl", tmp_path / "data-more" / "secret.jsonl"):
        write_jsonl(secret, sentences(20))
    (root / "link.jsonl").symlink_to(outside / "secret.jsonl")
    (root / "out").symlink_to(outside)
    os.mkfifo(root / "pipe")
    return {"root": root, "outside": outside}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_what_is_outside_is_refused_at_its_place(places, attack):
    path = attack.format(**places)
    ok = str(places["root"] / "ok.jsonl")
    roots = [str(places["root"])]
    for data, place in (
        (JsonlSpec(corpus="jsonl", paths=(ok, path)), "data.paths[1]"),
        (ParallelTextSpec(corpus="text", files=(TextPair(source=ok, target=path, lang="de"),)), "data.files[0].target"),
    ):
        with pytest.raises(SpecError) as error:
            check(data, roots)
        (problem,) = error.value.problems
        assert problem.path == place
        assert problem.value == path
        assert problem.rule
        assert problem.remedy


def test_an_error_never_tells_whether_something_outside_exists(places):
    def told(path):
        with refused("not_allowed", "data.paths[0]") as error:
            check(JsonlSpec(corpus="jsonl", paths=(path,)), [str(places["root"])])
        return error.value.problems[0].rule

    for folder in (places["outside"], places["root"] / "out"):
        assert told(f"{folder}/secret.jsonl") == told(f"{folder}/nothing.jsonl") == told(f"{folder}/*.jsonl")


def test_of_a_folder_with_one_outward_link_that_link_is_named(places):
    (places["root"] / "folder/away.jsonl").symlink_to(places["outside"] / "secret.jsonl")
    for pattern in ("folder/*.jsonl", "folder/away.jsonl", "*er/away.jsonl"):
        with refused("not_allowed", "data.paths[0]") as caught:
            check(JsonlSpec(corpus="jsonl", paths=(f"{places['root']}/{pattern}",)), [str(places["root"])])
        (problem,) = caught.value.problems
        assert problem.rule.endswith(f": {places['root']}/folder/away.jsonl")
        assert str(places["outside"]) not in str(problem)


def test_links_outside_that_lead_in_a_circle_are_not_told(places):
    (places["outside"] / "circle").symlink_to(places["outside"] / "circle")
    (places["root"] / "folder/away.jsonl").symlink_to(places["outside"] / "circle")
    with refused("not_allowed", "data.paths[0]") as caught:
        check(JsonlSpec(corpus="jsonl", paths=(f"{places['root']}/folder/away.jsonl",)), [str(places["root"])])
    (problem,) = caught.value.problems
    assert "outside the folders" in problem.rule


def test_preparing_is_confined_as_checking_is(places, tmp_path):
    spec = job({"corpus": "jsonl", "paths": [str(places["root"] / "link.jsonl")]})
    with refused("not_allowed", "data.paths[0]"):
        prepare(spec.data, spec.model, tmp_path / "cache", roots=[str(places["root"])])


@pytest.mark.parametrize("part", ["file", "folder"])
def test_a_file_swapped_for_a_link_between_its_check_and_its_reading_is_not_read(places, part):
    (location,) = Locator([str(places["root"])]).locate("data.paths[0]", str(places["root"] / "folder/secret.jsonl"))
    if part == "file":
        (places["root"] / "folder/secret.jsonl").unlink()
        (places["root"] / "folder/secret.jsonl").symlink_to(places["outside"] / "secret.jsonl")
    else:
        (places["root"] / "folder").rename(places["root"] / "aside")
        (places["root"] / "folder").symlink_to(places["outside"])
    with pytest.raises(OSError, match="lies outside"), location.open():
        pass
    with pytest.raises(OSError, match="lies outside"):
        location.fingerprint()


def test_links_that_stay_beneath_are_followed(places):
    """As in a cache of models, where every name is a link to content beside it."""
    (places["root"] / "blobs").mkdir()
    (places["root"] / "ok.jsonl").rename(places["root"] / "blobs/a1b2")
    (places["root"] / "ok.jsonl").symlink_to("blobs/a1b2")
    (places["root"] / "linked").symlink_to(places["root"] / "blobs")
    for path in ("ok.jsonl", "linked/a1b2", "o*.jsonl", "link*d/a*"):
        check(JsonlSpec(corpus="jsonl", paths=(str(places["root"] / path),)), [str(places["root"])])


@pytest.mark.parametrize("root", ["{root}", "{root}/", "file://{root}", "local://{root}", "{root}-link", "/"])
def test_what_lies_under_a_root_is_allowed_however_the_root_is_written(places, root):
    places["root"].with_name("data-link").symlink_to(places["root"])
    for path in ("{root}/ok.jsonl", "file://{root}/ok.jsonl", "{root}-link/ok.jsonl", "{root}/o*.jsonl"):
        check(JsonlSpec(corpus="jsonl", paths=(path.format(**places),)), [root.format(**places)])


def test_no_roots_allow_nothing_and_say_how_to_allow_something(places):
    with refused("not_allowed", "data.paths[0]"):
        check(JsonlSpec(corpus="jsonl", paths=(str(places["root"] / "ok.jsonl"),)), [])


@pytest.fixture
def memory():
    store = fsspec.filesystem("memory")
    for name in ("/corpus/a.jsonl", "/corpus/b.jsonl", "/corpus-more/a.jsonl", "/secret.jsonl"):
        store.pipe_file(name, b'{"source": "Haus", "target": "house", "lang": "de"}\n')
    yield "memory://corpus"
    for name in ("/corpus", "/corpus-more", "/secret.jsonl"):
        store.rm(name, recursive=True)


def test_remote_files_are_allowed_under_remote_roots(memory):
    check(JsonlSpec(corpus="jsonl", paths=("memory://corpus/a.jsonl", "memory://corpus/*.jsonl")), [memory])


@pytest.mark.parametrize(
    "attack",
    [
        "memory://secret.jsonl",
        "memory://corpus-more/a.jsonl",
        "memory://corpus/../secret.jsonl",
        "memory://corpus/%2e%2e/secret.jsonl",
        "memory://corpus/..%2fsecret.jsonl",
        "memory://corpus\\..\\secret.jsonl",
        "memory://corpus/none.jsonl",
        "memory://corpus/none*.jsonl",
        "memory://corpus",
        "simplecache::memory://corpus/a.jsonl",
        "/corpus/a.jsonl",
    ],
)
def test_remote_roots_confine_too(memory, attack):
    with pytest.raises(SpecError) as error:
        check(JsonlSpec(corpus="jsonl", paths=(attack,)), [memory])
    assert error.value.problems[0].path == "data.paths[0]"
