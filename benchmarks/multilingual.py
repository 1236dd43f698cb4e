"""GShard's Figure 6 at small scale: one model for all languages compared with one per language (arXiv 2006.16668, 4.2).

There are twelve languages, four each with many, some and few pairs. Each has its own model of the same size, trained
for as many steps on only that language's pairs. It is trained with two regularizations, and the better one on the
evaluated pairs counts; the shared model has only one. Both are trained with experts and dense. The evaluated pairs come
from messages that no model has seen in any language. Recorded runs are not repeated, so an interrupted benchmark
continues.
"""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import results
from benchmarks.learning import LAYOUT, training
from moe.data.pairs import PreparedPairs, TokenStore
from moe.data.pairs.pair import Pair
from moe.spec import JobSpec, read_job
from moe.tasks.build import build_task
from service.settings import Settings

ROOT = Path(__file__).parents[1]
EXAMPLE, DOCS = ROOT / "examples" / "translate-longer.yaml", ROOT / "docs"
MODELS = {"experts": "gshard-tiny", "dense": "gshard-tiny-dense"}
REGULARISED: dict[str, dict[str, float]] = {
    "light": {"dropout": 0.1, "label_smoothing": 0.0},
    "strong": {"dropout": 0.3, "label_smoothing": 0.1},
}
"""The preset's dropout, which the shared model has, or three times that and label smoothing."""
HELD_OUT_MESSAGES = 0.1
"""More than in the example: even a language with few pairs is evaluated on at least 50."""
MIN_HELD_OUT, MAX_HELD_OUT = 50, 400
LANGUAGES_PER_THIRD = 4
EVERY_STEPS = 1000
ALL = "all"


class Run(NamedTuple):
    """One training run."""

    model: str
    """Key of `MODELS`."""
    trained_on: str
    """A language, or `ALL`."""
    regularisation: str

    def spec(self) -> JobSpec:
        settings = REGULARISED[self.regularisation]
        fields = read_job(EXAMPLE).model_dump(mode="json", exclude_defaults=True)
        fields["model"] = {"preset": MODELS[self.model], "dropout": settings["dropout"]}
        fields["data"]["held_out_messages"] = HELD_OUT_MESSAGES
        fields["train"] |= {
            "label_smoothing": settings["label_smoothing"],
            "evaluation": {"max_pairs": MAX_HELD_OUT, "num_examples": 0},
        }

        return JobSpec.parse(fields | {"resources": {"num_workers": 1}, "parallel": "auto"})

    def with_experts(self) -> JobSpec:
        """Job of the twin with experts, whose batches the dense model uses too."""
        return self._replace(model="experts").spec()


def chosen_languages(corpus: PreparedPairs) -> list[str]:
    """Twelve languages, evenly spaced by number of pairs, without regional variants and languages with too few
    held-out pairs."""
    facts = corpus.stats["languages"]
    by_pairs = sorted(
        (lang for lang in facts if lang.isalpha() and facts[lang]["unseen"] >= MIN_HELD_OUT),
        key=lambda lang: (-facts[lang]["train"], lang),
    )
    places = np.linspace(0, len(by_pairs) - 1, 3 * LANGUAGES_PER_THIRD).round().astype(int)
    return [by_pairs[place] for place in places]


def of_language(corpus: PreparedPairs, lang: str, folder: Path) -> PreparedPairs:
    """One language's part of a prepared corpus with the same tokenizer, written into `folder` unless it exists."""

    def part(name: str, store: TokenStore) -> TokenStore:
        if not (folder / name).exists():
            rows = np.flatnonzero(np.asarray(store.lang_ids) == store.langs.index(lang))
            texts = [store.text(int(row)) for row in rows]
            pairs = [Pair(lang, source, target) for source, target, _ in texts]
            ids = [[side(int(row))[:-1] for row in rows] for side in (store.source, store.target)]
            TokenStore.write(folder / name, pairs, *ids, [lang])
        return TokenStore(folder / name)

    folder.mkdir(parents=True, exist_ok=True)
    facts = {**corpus.stats, "languages": {lang: corpus.stats["languages"][lang]}}
    unseen = part("unseen", corpus.held_out["unseen"])
    return replace(corpus, train=part("train", corpus.train), held_out={"unseen": unseen}, stats=facts)


def train(run: Run, corpus: PreparedPairs, by_lang: dict[str, PreparedPairs], cache: Path) -> list[dict[str, Any]]:
    """Loss, chrF and BLEU of each language of the run, every `EVERY_STEPS` steps."""
    torch.set_num_threads(1)
    langs = list(by_lang) if run.trained_on == ALL else [run.trained_on]
    data, curve = corpus if run.trained_on == ALL else by_lang[run.trained_on], []
    for snapshot in training(run.spec(), data, cache, batches_of=run.with_experts()):
        if snapshot.step % EVERY_STEPS == 0:
            evaluate = partial(snapshot.state.task.evaluate, snapshot.state.model, LAYOUT)
            reports = {lang: evaluate(by_lang[lang]).sets["unseen"] for lang in langs}
            scores = {
                lang: {"loss": report.loss, **report.subsets["all"].model.to_plain()}
                for lang, report in reports.items()
            }
            curve.append({"step": snapshot.step, "languages": scores})
    return curve


def runs(records: list[dict[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    """All figures so far, after each run: recorded runs, then the missing ones, one per core at a time."""
    cache = Settings().cache_dir
    corpus = build_task(Run("experts", ALL, "light").spec()).prepare(cache, report=print)
    by_lang = {lang: of_language(corpus, lang, folder / lang) for lang in chosen_languages(corpus)}
    facts = corpus.stats["languages"]
    languages = {
        lang: {"pairs": facts[lang]["train"], "measured_on": min(facts[lang]["unseen"], MAX_HELD_OUT)}
        for lang in by_lang
    }
    yield {"languages": languages, "runs": records}
    all_runs = [
        *(Run(model, ALL, "light") for model in MODELS),
        *(Run(model, lang, regularisation) for lang in by_lang for model in MODELS for regularisation in REGULARISED),
    ]
    missing = [run for run in all_runs if not any(Run(*record["run"]) == run for record in records)]
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=spawning) as pool:
        training_now = {pool.submit(train, run, corpus, by_lang, cache): run for run in missing}
        for future in as_completed(training_now):
            run, curve = training_now[future], future.result()
            print(f"{run}: {curve[-1]}", flush=True)
            records = [*records, {"run": list(run), "curve": curve}]
            yield {"languages": languages, "runs": records}


class Gain(NamedTuple):
    """Gain of the shared model over a language's own model."""

    own_setting: str
    """Regularization of the language's own model that is better at the end."""
    all_loss: float
    own_loss: float
    all_chrf: float
    own_chrf: float
    chrf: float
    bleu: float
    chrf_at_best: float
    """Gain over the checkpoint of the language's own models with the lowest loss."""


def gain(record: dict[str, Any], model: str, lang: str) -> Gain | None:
    """Gain for one model and language; None while a run is missing."""
    curves = {Run(*run["run"]): run["curve"] for run in record["runs"]}
    for_all, of_lang = Run(model, ALL, "light"), [Run(model, lang, regularisation) for regularisation in REGULARISED]
    if not curves.keys() >= {for_all, *of_lang}:
        return None
    own_curves = {run.regularisation: curves[run] for run in of_lang}
    last = {name: curve[-1]["languages"][lang] for name, curve in own_curves.items()}
    better = min(last, key=lambda name: last[name]["loss"])
    moments = [point["languages"][lang] for curve in own_curves.values() for point in curve]
    of_all, of_own, best = (
        curves[for_all][-1]["languages"][lang], last[better], min(moments, key=lambda point: point["loss"]),
    )  # fmt: skip
    return Gain(
        better, of_all["loss"], of_own["loss"], of_all["chrf"], of_own["chrf"],
        of_all["chrf"] - of_own["chrf"], of_all["bleu"] - of_own["bleu"], of_all["chrf"] - best["chrf"],
    )  # fmt: skip


def table(record: dict[str, Any]) -> list[str]:
    """Markdown table: one row per language and model, most pairs first."""
    lines = [
        "| Language | pairs | measured on | model | loss: all, own | chrF: all, own | gain in chrF | in BLEU "
        "| in chrF over own at its best moment | own's regularisation |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for lang, facts in record["languages"].items():
        for model in MODELS:
            if (change := gain(record, model, lang)) is None:
                continue
            lines.append(
                f"| {lang} | {facts['pairs']:,} | {facts['measured_on']} | {model} "
                f"| {change.all_loss:.2f}, {change.own_loss:.2f} | {change.all_chrf:.1f}, {change.own_chrf:.1f} "
                f"| {change.chrf:+.1f} | {change.bleu:+.1f} | {change.chrf_at_best:+.1f} | {change.own_setting} |"
            )
    return lines


def outcome(record: dict[str, Any]) -> str:
    """Languages for which the shared model is better, in words."""

    def listing(langs: list[str]) -> str:
        return f"{len(langs)} ({', '.join(langs)})" if langs else "none"

    sentences = []
    for model in MODELS:
        gains = {lang: change for lang in record["languages"] if (change := gain(record, model, lang))}
        surer = listing([lang for lang, change in gains.items() if change.all_loss < change.own_loss])
        better = listing([lang for lang, change in gains.items() if change.chrf > 0])
        sentences.append(
            f"{model.capitalize()}: the shared model has the lower loss for {surer} of "
            f"{len(gains)} languages, and the higher chrF for {better}."
        )
    return " ".join(sentences)


def draw(record: dict[str, Any], path: Path) -> None:
    """Gain in chrF by language, most pairs first: zero is the language's own model, as in the paper."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "shardyard"
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(9, 4.5), constrained_layout=True)
    langs = list(record["languages"])
    for model, color in zip(MODELS, ("C0", "C1"), strict=True):
        gains = [(place, change) for place, lang in enumerate(langs) if (change := gain(record, model, lang))]
        places = [place for place, _ in gains]
        panel.plot(
            places, [change.chrf for _, change in gains], "o-", color=color, label=f"{model}, own model at the end"
        )
        panel.plot(
            places, [change.chrf_at_best for _, change in gains], ".:", color=color,
            label=f"{model}, own model at its best moment",
        )  # fmt: skip
    panel.axhline(0, color="black", linewidth=1)
    panel.set_xticks(range(len(langs)), [f"{lang}\n{record['languages'][lang]['pairs']:,}" for lang in langs])
    panel.set_xlabel("language, and its pairs in training")
    panel.set_ylabel("gain in chrF, unseen English")
    panel.set_title("One model for all languages beside a model for each")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    path = results.FOLDER / "multilingual.json"
    records = json.loads(path.read_text())["figures"]["runs"] if path.is_file() else []
    with tempfile.TemporaryDirectory() as folder:
        for figures in runs(records, Path(folder)):
            if len(figures["runs"]) > len(records):
                results.write("multilingual", figures)
    lines = table(figures)
    print("\n".join(lines))
    draw(figures, DOCS / "multilingual.svg")
    spec, strong = Run("experts", ALL, "light").spec(), REGULARISED["strong"]
    (DOCS / "multilingual.md").write_text(
        "# One model for all languages, compared with one per language\n\n"
        "This page is written by `make quality`. Figure 6 of the paper at small scale. Each of twelve languages has a "
        f"model of its own, all of the same size, trained for {spec.train.num_steps:,} steps of "
        f"{spec.train.batch_tokens:,} positions on the language's pairs, with the same tokenizer. One shared model "
        "divides as many steps among all languages. All are measured on messages that no model has seen in any "
        "language. A language's own model is the better of two, by the loss on the measured pairs themselves: one with "
        "dropout 0.1, as in the shared model, and one with dropout "
        f"{strong['dropout']} and label smoothing {strong['label_smoothing']}. This choice favors the language's own "
        f"model, and so does the last gain, which is relative to its best checkpoint, taken every {EVERY_STEPS:,} "
        "steps. Losses are in nats per target token. One seed.\n\n"
        f"{outcome(figures)} The equal number of steps decides this figure: the shared model divides its steps among "
        "all languages, while a language's own model passes over few pairs many times, and is confident of its words, "
        "right or wrong. So the figure shows the cost of sharing steps and, in the losses of the languages with the "
        "fewest pairs, the benefit of shared words. It does not show the gain of the paper's models, which train until "
        "every language has had enough.\n\n"
        "![Gain in chrF by language](multilingual.svg)\n\n" + "\n".join(lines) + "\n"
    )
    print(f"written to {path}, docs/multilingual.md and docs/multilingual.svg")


if __name__ == "__main__":
    main()
