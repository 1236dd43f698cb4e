"""Files are opened, created and removed beneath a folder only, under any links and while links are swapped in."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.storage import confined

NAMES = ("a", "b", "c")
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
targets = st.lists(st.sampled_from((*NAMES, "..")), min_size=1, max_size=4).map("/".join)
trees = st.tuples(st.lists(paths, max_size=4), st.lists(st.tuples(paths, targets, st.booleans()), max_size=4))
Tree = tuple[list[str], list[tuple[str, str, bool]]]
"""Files, which hold `allowed`, and links: path, target, whether it is absolute."""


def build(top: Path, tree: Tree) -> Path:
    """A folder `root` next to a folder `secret`."""
    root = top / "root"
    for folder in (root, top / "secret"):
        folder.mkdir()
    (top / "secret" / "a").write_text("secret")
    files, links = tree
    for name in files:
        path = root / name
        if not any(parent.is_file() for parent in path.parents) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("allowed")
    for name, target, is_absolute in links:
        path = root / name
        if path.parent.is_dir() and not os.path.lexists(path):
            path.symlink_to(root / target if is_absolute else target)
    return root


@contextmanager
def repeating(action: Callable[[], None]) -> Iterator[None]:
    """Repeat an action in another thread during the block."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            action()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def until_both_happened(attempt: Callable[[], None], times: int) -> None:
    """Attempt something until it has both succeeded and failed this often."""
    counts = {True: 0, False: 0}
    while min(counts.values()) < times:
        try:
            attempt()
            counts[True] += 1
        except OSError:
            counts[False] += 1


def has_link_above(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)


@given(tree=trees, name=paths | st.just("../secret/a"))
def test_a_file_opens_as_with_open_if_it_is_beneath(
    tmp_path_factory: pytest.TempPathFactory, tree: Tree, name: str
) -> None:
    root = build(tmp_path_factory.mktemp("top"), tree)
    path = root / name
    try:
        with confined.open_file(str(root), str(path)) as file:
            content = file.read().decode()
    except OSError:
        assert not (path.is_file() and path.resolve().is_relative_to(root))
    else:
        assert path.resolve().is_relative_to(root)
        assert content == path.read_text() == "allowed"


@given(tree=trees, name=paths | st.just("../secret/a"))
def test_a_file_is_created_as_requested_and_never_through_a_link(
    tmp_path_factory: pytest.TempPathFactory, tree: Tree, name: str
) -> None:
    top = tmp_path_factory.mktemp("top")
    root = build(top, tree)
    path = root / name

    def contents() -> dict[Path, str]:
        return {file: file.read_text() for file in top.rglob("*") if file.is_file() and not file.is_symlink()}

    before, is_through_link = contents(), has_link_above(path)
    try:
        with confined.create(str(root), str(path)) as file:
            file.write(b"new")
    except OSError:
        assert contents() == before
        assert is_through_link or ".." in name or path.is_dir() or any(map(Path.is_file, path.parents))
    else:
        assert contents() == before | {path: "new"}
        assert not is_through_link


@given(tree=trees, name=paths | st.sampled_from(("../secret/a", ".")))
def test_a_path_is_removed_as_requested_and_never_through_a_link(
    tmp_path_factory: pytest.TempPathFactory, tree: Tree, name: str
) -> None:
    top = tmp_path_factory.mktemp("top")
    root = build(top, tree)
    path = root / name
    before, is_through_link = set(top.rglob("*")), has_link_above(path)
    try:
        confined.remove(str(root), str(path))
    except OSError:
        assert set(top.rglob("*")) == before
        assert is_through_link or ".." in name or path not in before
    else:
        assert set(top.rglob("*")) == {left for left in before if not left.is_relative_to(path)}
        assert not is_through_link


@pytest.mark.parametrize("part", ["folder", "folder/file"])
def test_a_link_that_is_swapped_in_is_never_followed(tmp_path: Path, part: str) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    for folder, content in ((root / "folder", "allowed"), (secret, "secret")):
        folder.mkdir(parents=True)
        (folder / "file").write_text(content)

    def swap() -> None:
        (root / "link").symlink_to(secret / Path(part).relative_to("folder"))
        (root / part).rename(root / "aside")
        (root / "link").rename(root / part)
        (root / part).unlink()
        (root / "aside").rename(root / part)

    def read() -> None:
        with confined.open_file(str(root), str(root / "folder/file")) as file:
            assert file.read() == b"allowed"

    with repeating(swap):
        until_both_happened(read, 300)


@pytest.mark.parametrize("part", ["folder", "folder/inner"])
def test_no_folder_that_is_swapped_for_a_link_is_written_into_or_removed_from(tmp_path: Path, part: str) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    for folder in (root, secret / "inner"):
        folder.mkdir(parents=True)
    (secret / "inner/file").write_text("secret")

    def swap() -> None:
        shutil.rmtree(root / part, ignore_errors=True)
        with suppress(OSError):  # created by the writer, or not yet there
            (root / part).symlink_to(secret / Path(part).relative_to("folder"))
        with suppress(OSError):
            (root / part).unlink()

    def write() -> None:
        with confined.create(str(root), str(root / "folder/inner/new")) as file:
            file.write(b"new")

    def remove() -> None:
        with suppress(OSError):
            write()
        confined.remove(str(root), str(root / "folder/inner"))

    with repeating(swap):
        until_both_happened(write, 10)
        until_both_happened(remove, 10)
    assert {path.name for path in secret.rglob("*")} == {"inner", "file"}
    assert (secret / "inner/file").read_text() == "secret"


def test_a_process_whose_own_folder_is_gone_opens_through_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("allowed")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with confined.open_file(str(tmp_path), str(tmp_path / "link")) as file:
        assert file.read() == b"allowed"


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for root, path in (("/", "/dev/null"), (tmp_path, tmp_path / "pipe"), (tmp_path, tmp_path / "folder")):
        with pytest.raises(OSError, match=r"not a regular file|is a folder"):
            confined.open_file(str(root), str(path))


def test_a_folder_is_listed_with_its_links_but_not_through_links_out_of_it(tmp_path: Path) -> None:
    root = build(tmp_path, (["a", "b/c"], [("out", "../secret", False), ("within", "b", False)]))
    for path, names in ((root, {"a", "b", "out", "within"}), (root / "b", {"c"}), (root / "within", {"c"})):
        with confined.listing(str(root), str(path)) as entries:
            assert {entry.name for entry in entries} == names
    for path in (root / "out", tmp_path / "secret", tmp_path):
        with pytest.raises(confined.Outside), confined.listing(str(root), str(path)):
            pass


def test_a_file_that_is_renamed_during_a_listing_hides_no_other(tmp_path: Path) -> None:
    """Writers seal a draft by renaming it."""
    expected = {f"sealed-{number}": number for number in range(50)}
    for name, size in expected.items():
        (tmp_path / name).write_text("x" * size)

    def seal() -> None:
        (tmp_path / "draft").touch()
        (tmp_path / "draft").rename(tmp_path / "new")

    with repeating(seal):
        for _ in range(300):
            sizes = confined.sizes(str(tmp_path), str(tmp_path))
            assert {name: size for name, size in sizes.items() if name.startswith("sealed")} == expected


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")

    def write_and_fail() -> None:
        with confined.create(str(tmp_path), str(tmp_path / "file")) as file:
            file.write(b"after")
            assert (tmp_path / "file").read_text() == "before"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "before"}
