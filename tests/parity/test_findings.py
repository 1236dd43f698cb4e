"""Findings of runs of parts of the grid are combined and compared bit for bit."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from moe.spec import LanguageModelSpec
from tests.parity.__main__ import part
from tests.parity.combinations import OPTIONS, ROUTERS, model_of, train_of
from tests.parity.digests import digest_of_tensors, digests_of
from tests.parity.findings import Findings, combine, differences, read, read_all, read_or_run
from tests.parity.grid import NAMES, OF_ADAPTERS, model_of_row
from tests.parity.language_models import ATTENTIONS
from tests.parity.row import Row
from tests.parity.trajectory import Degrees, Shape, run

SAME = {"without": len(ROUTERS), "all": len(ROUTERS)}


def findings(number: int = 1, num_parts: int = 1, commit: str = "a") -> Findings:
    names = NAMES[number - 1 :: num_parts]
    rows = tuple(Row(name, 2, SAME, SAME, {f"switch, under {name}": {"losses": "1", "routing": "2"}}) for name in names)
    return Findings(commit, 3.0, rows)


def test_what_was_found_at_the_same_commit_is_not_run_again(tmp_path: Path) -> None:
    path, (old_row, new_row, *_) = tmp_path / "1-of-1.json", findings().rows

    def fail() -> Row:
        raise AssertionError("it was run again")

    assert read_or_run(path, "a", lambda: old_row).rows == (old_row,)
    assert read_or_run(path, "a", fail).rows == (old_row,)
    for commit in ("b", "b-dirty", "b-dirty"):  # uncommitted changes may differ each time
        row, old_row, new_row = new_row, new_row, old_row
        assert read_or_run(path, commit, partial(replace, row)).rows == (row,)
        assert (read(path).commit, read(path).rows) == (commit, (row,))
    differing_row = replace(old_row, num_same={"without": 0})
    assert read_or_run(path, "c", lambda: differing_row).rows == (differing_row,)
    assert read_or_run(path, "c", lambda: new_row).rows == (new_row,), "one that differs is"


def test_rows_of_one_commit_are_put_together(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        findings(number, 3).write(tmp_path / f"{number}-of-3.json")
    assert read_all(tmp_path).rows == findings().rows
    with pytest.raises(ValueError, match=r"these are of \['a', 'b'\]"):
        combine([findings(1, 2, "a"), findings(2, 2, "b")])
    assert part("2/3") == (2, 3)
    for text in ("0/3", "4/3", "1", "1/0", "-1/2", f"1/{len(NAMES) + 1}"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no K/N"):
            part(text)


def test_what_differs_is_named(tmp_path: Path) -> None:
    before = findings()
    digests = [{"losses": "1", "routing": "3"}, {}, {"losses": "1", "routing": "2"}]  # {}: it did not end
    rows = [
        replace(row, digests={f"switch, under {row.name}": digest})
        for row, digest in zip(before.rows[:3], digests, strict=True)
    ]
    after = Findings("b", 3.0, (*rows, *before.rows[4:]))
    assert differences(before, after) == [
        f"switch, under {NAMES[0]}: routing differ",
        f"switch, under {NAMES[1]}: did not end",
        f"switch, under {NAMES[3]}: only before",
    ]
    assert not differences(before, replace(before, commit="b"))
    before.write(tmp_path / "whole.json")
    assert read(tmp_path / "whole.json") == before


def test_a_digest_knows_every_bit_and_no_name() -> None:
    matrix, scalar = torch.ones(3, 2, dtype=torch.bfloat16), torch.tensor(0.0)
    assert digest_of_tensors([matrix, scalar]) == digest_of_tensors([scalar, matrix.t().contiguous().t()])
    assert digest_of_tensors([matrix, scalar]) != digest_of_tensors([matrix, -scalar])
    assert digest_of_tensors([matrix, matrix]) != digest_of_tensors([matrix])


def test_the_digests_of_a_trajectory_see_each_thing_that_it_records() -> None:
    def digests(router_fields: dict[str, object], peak_lr: float = 2.5e-3, num_steps: int = 2) -> dict[str, str]:
        optimizer = train_of().optimizer.model_copy(update={"peak_lr": peak_lr})
        return digests_of(run(model_of(**router_fields), train_of(optimizer=optimizer), Degrees(), Shape(), num_steps))

    first = digests({})
    assert first == digests({})
    assert set(first) == {"losses", "layers", "routing", "gradients", "parameters", "moments"}
    assert all(value != first[kind] for kind, value in digests(ROUTERS["switch"]).items())
    nearly = digests({}, peak_lr=2.5e-3 * (1 + 1e-12))
    assert {kind for kind in first if nearly[kind] != first[kind]} >= {"parameters", "gradients", "losses"}


@pytest.mark.slow
def test_the_grid_meets_every_kind_of_attention_and_of_adapter() -> None:
    """In rows of the language model, whose models take turns, and under each layout that splits adapters."""
    language_rows = [index for index, name in enumerate(NAMES) if name.startswith("language, ")]
    assert len(language_rows) == sum(name.startswith("translation, ") for name in NAMES)
    combinations = {
        (attention, setting)
        for index in language_rows
        for option in OPTIONS
        for router in ROUTERS
        for attention in [model_of_row(index, option, router)[0].removesuffix(f", {router}")]
        for setting in (NAMES[index], option, router)
    }
    settings = (*(NAMES[index] for index in language_rows), *OPTIONS, *ROUTERS)
    assert combinations == {(attention, setting) for attention in ATTENTIONS for setting in settings}

    rows = [index for index, name in enumerate(NAMES) if name.startswith("adapters, ")]
    assert {NAMES[index].partition(": ")[0].removeprefix("adapters, ") for index in rows} == set(OF_ADAPTERS)
    models = [model_of_row(index, option, router)[1] for index in rows for option in OPTIONS for router in ROUTERS]
    adapters = [model.adapter for model in models if isinstance(model, LanguageModelSpec)]
    assert len(adapters) == len(models)
    assert all(adapters)
    for field in ("rank", "alpha", "rank_stabilized", "dropout", "targets"):
        assert len({getattr(adapter, field) for adapter in adapters}) > 1
    repeated_models = [model_of_row(rows[0], "without", router)[1] for router in ROUTERS]
    assert repeated_models == models[: len(ROUTERS)], "the same in every run"
