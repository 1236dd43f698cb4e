"""Finds a trained model by job id, with or without a control plane, or by path."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.newest import NoCheckpoint, best_complete, fault_of, newest_complete
from moe.train.checkpoint.spec_changes import MAX_SPEC_BYTES, SPEC
from service.cli.failures import CommandError, Misuse
from service.cli.local import DEMO_FOLDER, settings_for
from service.cli.server import require_id
from service.client import ApiError, Client, ClientError
from service.client.errors import BadToken, BadUrl
from service.wire.uses import refusal

if TYPE_CHECKING:
    from moe.export.trained_model import TrainedModel


_BEST = "@best"


def find_checkpoint(job: str, url: str | None, state_dir: Path | None) -> str:
    """fsspec URL of the newest intact checkpoint of `job`: an id, a job's folder, or a checkpoint's; with `@best`
    appended, of the best one. An exported model's folder is returned as is. Raises Misuse if nothing is found,
    CommandError without an intact checkpoint."""
    wants_best = job.endswith(_BEST) and not Path(job).exists()
    job = job.removesuffix(_BEST) if wants_best else job
    require_id(job)
    if "://" in job or "/" in job or Path(job).is_dir():
        _refuse_another_tools(job)
        if all((Path(job) / name).is_file() for name in ("config.json", "model.safetensors")):
            if wants_best:
                raise Misuse(f"{_BEST} applies to a job, but {job} is an exported model; omit it")
            return job
        return _in_folder(job, wants_best)
    searched = list[str]()
    for storage in _storages(job, url, state_dir, searched):
        if Folder(storage).names():
            return _in_folder(storage, wants_best)
        searched.append(storage)
    raise Misuse(f"there is no job {job!r}: looked in {', '.join(searched)}; give its id, or its checkpoint's folder")


def _refuse_another_tools(path: str) -> None:
    """Raises Misuse for a local path that is missing or in another tool's format."""
    folder = Folder(path)
    if not folder.is_local:
        return
    local = Path(folder.path_of(""))
    if not local.exists():
        raise Misuse(f"{path} does not exist; give a job's id, or the folder of a job or of a checkpoint")
    if "model_type" in _fields(local / "config.json"):
        raise Misuse(
            f"{path} holds a model in Hugging Face format, which transformers and vLLM load; give "
            f"the job that made it, or train it in a job with 'model: {{from: {path}}}'"
        )
    if "peft_type" in _fields(local / "adapter_config.json"):
        raise Misuse(
            f"{path} holds a PEFT adapter, which PEFT loads on top of its base model; give the job that made "
            f"it, or train it in a job with 'adapter: {{from: {path}}}'"
        )


def _fields(config: Path) -> dict[str, object]:
    with suppress(OSError, ValueError, RecursionError):
        if isinstance(fields := json.loads(config.read_bytes()), dict):
            return fields
    return {}


def load_model(checkpoint: str) -> "TrainedModel":
    """Load a checkpoint or an exported model. Raises Misuse if the folder holds none, CommandError if it is
    incomplete."""
    from moe.export.load import load_trained
    from moe.export.model_folder import ExportError  # imports torch, which takes seconds
    from moe.train.checkpoint.checkpointer import CheckpointError

    try:
        return load_trained(checkpoint)
    except ExportError as error:
        raise Misuse(str(error)) from None
    except CheckpointError as error:
        raise CommandError(str(error)) from None


def _storages(job: str, url: str | None, state_dir: Path | None, searched: list[str]) -> Iterator[str]:
    """Possible storage of the job: the control plane's answer, then local storage roots."""
    try:
        with Client(url) as client:
            searched.append(client.url)
            yield client.job(job).storage
    except ApiError as error:
        if error.status not in (404, 422):
            raise
    except ClientError as error:
        if url is not None or isinstance(error, BadUrl | BadToken):
            raise  # no fallback for an explicit or invalid URL
        searched[-1:] = []
    settings = settings_for(state_dir=state_dir)
    for root in (*settings.storage_roots, str(settings.state_dir / DEMO_FOLDER / "storage")):
        yield f"{root.rstrip('/')}/{job}"


def require_use(checkpoint: str, command: str, job: str) -> None:
    """Raises Misuse with the right command if `command` does not apply to this kind of model. Passes for an unknown
    kind, for which loading fails with a reason. Does not import torch."""
    if (kind := _kind(checkpoint)) is not None and (words := refusal(kind, command, job)) is not None:
        raise Misuse(words)


def _kind(checkpoint: str) -> str | None:
    folder = Folder(checkpoint)
    for name in (SPEC, "config.json"):
        try:
            fields = json.loads(folder.read(name, max_bytes=MAX_SPEC_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        model = fields.get("model") if isinstance(fields, dict) else None
        if isinstance(model, dict):
            return str(model.get("kind", "translation"))  # not written by older releases
    return None


def _in_folder(url: str, wants_best: bool) -> str:
    folder, _, name = url.rstrip("/").rpartition("/")
    if markers.order(name) and wants_best:
        raise Misuse(f"{_BEST} applies to a job, but {url} is a checkpoint; omit it, or give the job's folder")
    if markers.order(name):
        if (fault := fault_of(Folder(folder), name)) is not None:
            raise CommandError(f"the checkpoint {url} cannot be used: {fault}")
        return url
    try:
        storage = Folder(url.rstrip("/"))
        return best_complete(storage) if wants_best else newest_complete(storage)
    except (NoCheckpoint, OSError) as error:
        raise CommandError(str(error)) from None
