"""Data paths stay under the roots, whatever a spec contains."""

import os

import fsspec
import pytest

from moe.data.locations import Locator
from moe.data.pairs import check, prepare
from moe.spec import JsonlSpec, ParallelTextSpec, SpecError, TextPair
from tests.refusals import expect_problem
from tests.unit.data_corpora import job, sentences, write_jsonl

ATTACKS = (
    # Above the root, and through links that leave it
    "{root}/../secret.jsonl", "{root}/folder/../../secret.jsonl", "file://{root}/../secret.jsonl",
    "{root}/folder/../ok.jsonl", "{root}/link.jsonl", "{root}/out/secret.jsonl", "file://{root}/out/secret.jsonl",
    "{root}/l*.jsonl", "{root}/out/*.jsonl", "{root}/*/secret.jsonl",
    # Outside
    "{outside}/secret.jsonl", "{outside}/*.jsonl", "file://{outside}/secret.jsonl", "local://{outside}/secret.jsonl",
    "file:{outside}/secret.jsonl", "file:////{outside}/secret.jsonl", "file://localhost{outside}/secret.jsonl",
    "FILE://{outside}/secret.jsonl", "{root}-more/secret.jsonl",
    # Chains
    "simplecache::file://{outside}/secret.jsonl", "filecache::{root}/ok.jsonl",
    "zip://secret.jsonl::file://{root}/ok.jsonl", "{root}/ok.jsonl::file://{outside}/secret.jsonl",
    # Relative, or of other protocols
    "~/secret.jsonl", "ok.jsonl", "data:application/json,%7B%7D", "http://169.254.169.254/latest/meta-data",
    "s3://bucket/secret.jsonl", "github://owner:repository@main/secret.jsonl",
    # Not regular files
    "{root}/ok.jsonl\0.txt", "/proc/self/environ", "/dev/zero", "{root}/pipe", "{root}/folder", "{root}", "",
)  # fmt: skip
REMOTE_ATTACKS = (
    "memory://secret.jsonl", "memory://corpus-more/a.jsonl", "memory://corpus/../secret.jsonl",
    "memory://corpus/%2e%2e/secret.jsonl", "memory://corpus/..%2fsecret.jsonl", "memory://corpus\\..\\secret.jsonl",
    "memory://corpus/none.jsonl", "memory://corpus/none*.jsonl", "memory://corpus",
    "simplecache::memory://corpus/a.jsonl", "/corpus/a.jsonl",
)  # fmt: skip


def jsonl(*paths):
    return JsonlSpec(corpus="jsonl", paths=tuple(map(str, paths)))


@pytest.fixture
def outside_folder(tmp_path):
    return tmp_path / "outside"


@pytest.fixture
def root(tmp_path, outside_folder):
    root = tmp_path / "data"
    for folder in (root, root / "folder", outside_folder, tmp_path / "data-more"):
        folder.mkdir()
    for folder in (root / "folder", tmp_path, outside_folder, tmp_path / "data-more"):
        write_jsonl(folder / "secret.jsonl", sentences(20))
    write_jsonl(root / "ok.jsonl", sentences(20))
    (root / "link.jsonl").symlink_to(outside_folder / "secret.jsonl")
    (root / "out").symlink_to(outside_folder)
    os.mkfifo(root / "pipe")
    return root


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_outside_is_refused_at_its_place(root, outside_folder, attack):
    path, ok = attack.format(root=root, outside=outside_folder), str(root / "ok.jsonl")
    files = (TextPair(source=ok, target=path, lang="de"),)
    for data, place in (
        (jsonl(ok, path), "data.paths[1]"), (ParallelTextSpec(corpus="text", files=files), "data.files[0].target"),
    ):  # fmt: skip
        with pytest.raises(SpecError) as error:
            check(data, [str(root)])
        (problem,) = error.value.problems
        assert (problem.path, problem.value) == (place, path)


def test_an_error_never_tells_whether_something_outside_exists(root, outside_folder):
    def rule(path):
        with expect_problem("not_allowed", "data.paths[0]") as error:
            check(jsonl(path), [str(root)])
        return error.value.problems[0].rule

    for folder in (outside_folder, root / "out"):
        assert rule(f"{folder}/secret.jsonl") == rule(f"{folder}/nothing.jsonl") == rule(f"{folder}/*.jsonl")
    with expect_problem("not_allowed", "data.paths[0]"):  # without roots nothing is allowed
        check(jsonl(root / "ok.jsonl"), [])


def test_an_outward_link_is_named_without_its_target(root, outside_folder):
    (root / "folder/away.jsonl").symlink_to(outside_folder / "secret.jsonl")
    (outside_folder / "circle").symlink_to(outside_folder / "circle")
    (root / "circle.jsonl").symlink_to(outside_folder / "circle")
    with expect_problem("not_allowed", "data.paths[0]", f"{root}/circle.jsonl"):
        check(jsonl(root / "circle.jsonl"), [str(root)])
    for pattern in ("folder/*.jsonl", "folder/away.jsonl", "*er/away.jsonl"):
        with expect_problem("not_allowed", "data.paths[0]") as error:
            check(jsonl(root / pattern), [str(root)])
        (problem,) = error.value.problems
        assert problem.rule.endswith(f": {root}/folder/away.jsonl")
        assert str(outside_folder) not in str(problem)


def test_preparing_is_confined_as_checking_is(root, tmp_path):
    spec = job({"corpus": "jsonl", "paths": [str(root / "link.jsonl")]})
    with expect_problem("not_allowed", "data.paths[0]"):
        prepare(spec.data, spec.model, tmp_path / "cache", roots=[str(root)])


@pytest.mark.parametrize("part", ["folder/secret.jsonl", "folder"])
def test_a_path_swapped_for_a_link_after_its_check_is_not_read(root, outside_folder, part):
    (location,) = Locator([str(root)]).locate("data.paths[0]", str(root / "folder/secret.jsonl"))
    (root / part).rename(root / "aside")
    (root / part).symlink_to(outside_folder if part == "folder" else outside_folder / "secret.jsonl")
    with pytest.raises(OSError, match="outside"), location.open():
        pass
    with pytest.raises(OSError, match="outside"):
        location.fingerprint()


@pytest.mark.parametrize("spelling", ["{root}", "{root}/", "file://{root}", "local://{root}", "{root}-link", "/"])
def test_what_is_under_a_root_is_allowed_however_the_root_is_written(root, spelling):
    """Also through links that stay under it, as in a model cache."""
    root.with_name("data-link").symlink_to(root)
    (root / "blobs").mkdir()
    (root / "ok.jsonl").rename(root / "blobs/a1b2")
    (root / "ok.jsonl").symlink_to("blobs/a1b2")
    (root / "linked").symlink_to(root / "blobs")
    for path in ("{root}/ok.jsonl", "file://{root}/ok.jsonl", "{root}-link/ok.jsonl", "{root}/o*.jsonl",
                 "{root}/linked/a1b2", "{root}/link*d/a*"):  # fmt: skip
        check(jsonl(path.format(root=root)), [spelling.format(root=root)])


@pytest.fixture
def memory():
    store = fsspec.filesystem("memory")
    for name in ("/corpus/a.jsonl", "/corpus/b.jsonl", "/corpus-more/a.jsonl", "/secret.jsonl"):
        store.pipe_file(name, b'{"source": "Haus", "target": "house", "lang": "de"}\n')
    yield "memory://corpus"
    for name in ("/corpus", "/corpus-more", "/secret.jsonl"):
        store.rm(name, recursive=True)


def test_remote_roots_allow_and_confine(memory):
    check(jsonl("memory://corpus/a.jsonl", "memory://corpus/*.jsonl"), [memory])
    for attack in REMOTE_ATTACKS:
        with pytest.raises(SpecError) as error:
            check(jsonl(attack), [memory])
        assert error.value.problems[0].path == "data.paths[0]"
