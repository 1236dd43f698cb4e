"""The process that generates: what it tells, and how it ends."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from moe.spec.generation import GenerationSpec
from service.generator.messages import GeneratorMessage, Load
from service.generator.process import GeneratorError, GeneratorProcess
from tests.processes import await_that
from tests.unit.train_runs import corpus, job, run

Result = TypeVar("Result")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a small translation job that has trained two steps: any generator will do here."""
    folder = tmp_path_factory.mktemp("trained")
    run(job(corpus(folder), train={"num_steps": 2}), folder / "storage", folder / "cache")
    return str(folder / "storage")


@pytest.fixture(autouse=True)
def _found_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process of this checkout's code: it is found as an operator would have it found."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def with_process(storage: str, use: Callable[[GeneratorProcess], Awaitable[Result]]) -> Result:
    async def started() -> Result:
        process = await GeneratorProcess.start(Load(storage=storage, root=None))
        try:
            await process.wait_until_loaded()
            return await use(process)
        finally:
            await process.end()
            assert not psutil.pid_exists(process.pid)

    return asyncio.run(started())


async def made(process: GeneratorProcess, prompt: str, spec: GenerationSpec | None = None) -> list[GeneratorMessage]:
    return [told async for told in process.stream_messages(prompt, spec or GenerationSpec())]


@pytest.mark.slow
def test_texts_are_made_one_after_the_other(storage: str) -> None:
    async def use(process: GeneratorProcess) -> list[list[GeneratorMessage]]:
        return [await made(process, "ein Wort"), await made(process, "ein Wort", GenerationSpec(max_tokens=2))]

    long, short = with_process(storage, use)
    assert [told.kind for told in long] == ["begun", "text", "end"]
    assert (short[-1].reason, short[-1].num_tokens) == ("max_tokens", 2)
    assert long[1].text.startswith(short[1].text)


def test_a_text_that_is_broken_off_leaves_the_process_to_the_next(storage: str) -> None:
    async def use(process: GeneratorProcess) -> list[GeneratorMessage]:
        making = process.stream_messages("ein Wort", GenerationSpec())
        assert (await anext(making)).kind == "begun"
        await process.break_off()
        assert process.runs
        return await made(process, "ein Wort")

    assert with_process(storage, use)[-1].kind == "end"


@pytest.mark.slow
def test_one_that_is_killed_is_told_by_its_signal(storage: str) -> None:
    async def use(process: GeneratorProcess) -> None:
        psutil.Process(process.pid).kill()
        with pytest.raises(GeneratorError, match="ended \\(signal SIGKILL\\)"):
            await made(process, "ein Wort")
        assert not process.runs

    with_process(storage, use)


def test_what_cannot_be_loaded_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(GeneratorError, match="there is no committed checkpoint under"):
        with_process(str(tmp_path), lambda process: made(process, ""))


@pytest.mark.slow
def test_it_ends_with_whoever_started_it_also_by_sigkill(storage: str) -> None:
    code = f"""
import asyncio
from service.generator.messages import Load
from service.generator.process import GeneratorProcess

async def main():
    process = await GeneratorProcess.start(Load(storage={storage!r}, root=None))
    print(process.pid, flush=True)
    await process.wait_until_loaded()
    print("loaded", flush=True)
    await asyncio.Event().wait()  # until it is killed

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starting:
        assert starting.stdout is not None
        child = psutil.Process(int(starting.stdout.readline()))
        assert starting.stdout.readline() == "loaded\n"
        starting.kill()
    await_that(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_it_has_none_of_the_services_secrets(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDYARD_TOKEN", "a-secret-of-the-service")  # as the service has it; the child is real

    async def use(process: GeneratorProcess) -> dict[str, str]:
        return psutil.Process(process.pid).environ()

    assert not any(name.startswith("SHARDYARD_") for name in with_process(storage, use))
