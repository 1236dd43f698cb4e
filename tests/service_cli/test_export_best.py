"""`export JOB@best` as it is typed."""

from pathlib import Path

import pytest
from torch import equal

from moe.export.load import load_trained
from moe.storage.folder import Folder
from moe.train.checkpoint.newest import best_complete, newest_complete
from tests.service_cli.command import OF_MODELS, check_refused, output_of
from tests.unit.language_runs import documents, language_job
from tests.unit.train_runs import run


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storage of a job whose losses decrease, so that its highest one is that of the first evaluation."""
    folder = tmp_path_factory.mktemp("best")
    evaluation = {"every_steps": 1, "num_examples": 0}
    spec = language_job(
        documents(folder / "data"),
        train={"evaluation": evaluation},
        checkpoint={"every_steps": 100, "keep": 1, "keep_best": {"metric": "held_out", "mode": "max"}},
    )
    run(spec, folder / "storage", folder / "cache")
    return folder / "storage"


def test_weights_are_those_of_the_best_evaluation(storage: Path, tmp_path: Path) -> None:
    best, newest = (find(Folder(str(storage))) for find in (best_complete, newest_complete))
    assert best != newest
    for job, checkpoint in ((f"{storage}@best", best), (str(storage), newest)):
        target = tmp_path / Path(checkpoint).name
        output_of("export", job, target, modules=OF_MODELS)
        exported, expected = (load_trained(path).model.state_dict() for path in (str(target), checkpoint))
        assert exported.keys() == expected.keys()
        assert all(equal(exported[name], expected[name]) for name in expected)


def test_a_job_without_a_best_checkpoint_is_refused(storage: Path, tmp_path: Path) -> None:
    checkpoint = newest_complete(Folder(str(storage)))
    check_refused("@best applies to a job", "export", f"{checkpoint}@best", tmp_path / "out")
    assert not (tmp_path / "out").exists()
