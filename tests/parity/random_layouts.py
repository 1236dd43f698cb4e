"""Random layouts of up to four ranks: every degree and option, some of which do not fit the model that is drawn."""

from dataclasses import dataclass, replace
from typing import Any, get_args

from hypothesis import strategies as st

from moe.plan.candidate import EXCHANGES, SCHEDULES, SHARDINGS
from moe.plan.schedule import min_micro_batches
from moe.spec import (
    AdafactorSpec,
    LanguageModelSpec,
    MoESpec,
    MuonSpec,
    OptimizerSpec,
    SpecError,
    TrainSpec,
    TranslationModelSpec,
)
from moe.spec.parallel import PipelineSchedule
from moe.spec.train import UNPAIRED_LOSSES, PreferenceLoss
from tests.parity.combinations import ROUTERS, train_of
from tests.parity.random_language import FREEZES, language_models
from tests.parity.sequences import ALL, ANSWERS, PAIRS, SOME
from tests.parity.trajectory import Degrees, Model, Shape, run

MAX_RANKS = 4
NUM_STEPS = 2
OPTIMIZERS: tuple[OptimizerSpec, ...] = (
    train_of().optimizer,
    AdafactorSpec(name="adafactor", eps=1e-18),
    MuonSpec(name="muon", peak_lr=2.5e-3, weight_decay=0.1),
)
_maybe = st.booleans()


@dataclass(frozen=True)
class Case:
    """A training under a layout."""

    model: Model
    train: TrainSpec
    degrees: Degrees
    shape: Shape


Answer = list[dict[str, Any]] | set[tuple[str, str]]
"""Records of the steps, or (code, path) of the problems for which a layout is refused."""


def run_or_refuse(case: Case) -> Answer:
    """Train on this rank."""
    try:
        return run(case.model, case.train, case.degrees, case.shape, NUM_STEPS)
    except SpecError as error:
        return {(problem.code, problem.path) for problem in error.problems}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A model, how it is trained, and a layout."""
    degrees = draw(layouts())
    fitting = degrees if draw(st.integers(0, 7)) else Degrees()
    model = draw(st.one_of(translation_models(fitting), *[_language_models(fitting, degrees)] * 3))
    if model.moe is None:
        degrees = replace(
            degrees, expert=1, expert_tensor=1, expert_fsdp=1, data=degrees.stage_workers, num_chunks=1, max_rows=None,
            ranks_per_node=None,
        )  # fmt: skip
    if degrees.pipeline > 1 and draw(_maybe):
        degrees = replace(degrees, stages=draw(_stages(degrees, num_blocks(model))))
    groups, rows = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    if degrees.pipeline > 1 and draw(st.integers(0, 7)):
        groups = max(groups, _least_groups(degrees))
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    if isinstance(model, TranslationModelSpec):
        shape = Shape(groups, rows, draw(st.integers(2, 7)), draw(st.integers(2, 5)))
        return Case(model, train_of(optimizer=optimizer), degrees, shape)
    learned = draw(st.sampled_from([ALL] * 5 + [SOME, PAIRS, ANSWERS]))
    lengths = [1, 2, 11, 40, 65] if learned in (ALL, SOME) else [11, 40]
    shape = Shape(groups, rows, draw(st.sampled_from(lengths)), 1, learned)
    fields: dict[str, Any] = {}
    if learned in (PAIRS, ANSWERS):
        losses = [loss for loss in get_args(PreferenceLoss) if (loss in UNPAIRED_LOSSES) == (learned == ANSWERS)]
        fields["preference_loss"] = draw(st.sampled_from(losses))
    freezes = FREEZES if model.adapter is None else FREEZES[:1]  # otherwise no parameter may be left to train
    return Case(model, train_of(optimizer=optimizer, freeze=draw(st.sampled_from(freezes)), **fields), degrees, shape)


def num_blocks(model: Model) -> int:
    """Layers that stages are cut from."""
    if isinstance(model, TranslationModelSpec):
        return model.num_encoder_layers + model.num_decoder_layers
    return model.num_layers


@st.composite
def layouts(draw: st.DrawFn) -> Degrees:
    """Both meshes over up to four ranks, with the options of a plan."""
    num_ranks = draw(st.sampled_from([1, 2, 2, 3, 4, 4, 4, 4]))
    pipeline = draw(_divisors(num_ranks))
    stage = num_ranks // pipeline
    tensor = draw(_divisors(stage))
    replicas = stage // tensor
    expert = draw(_divisors(stage))
    expert_tensor = draw(_divisors(stage // expert))
    data = stage // expert // expert_tensor
    options: dict[str, Any] = {
        "context": draw(_divisors(replicas)), "fsdp": draw(_divisors(replicas)), "expert_fsdp": draw(_divisors(data)),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "micro_batch_groups": draw(st.sampled_from([1, 1, 2, 8] if pipeline == 1 else [1, 1, 2])),
    }  # fmt: skip
    if options["context"] > 1:
        options["context_exchange"] = draw(st.sampled_from(EXCHANGES))
    if options["fsdp"] * options["expert_fsdp"] > 1:
        options["sharding"] = draw(st.sampled_from([*SHARDINGS, "parameters", "parameters"]))
    if stage > data:
        options |= {
            "num_chunks": draw(st.sampled_from([1, 1, 2, 3])), "max_rows": draw(st.sampled_from([None, None, 9])),
            "ranks_per_node": draw(st.sampled_from([None, None, *_divisors_of(stage // data)])),
        }  # fmt: skip
    if pipeline > 1:
        schedule = draw(st.sampled_from([None, *SCHEDULES]))
        options |= {"schedule": schedule, "virtual_stages": draw(_virtual_stages(schedule))}
    degrees = {"expert": expert, "data": data, "tensor": tensor, "expert_tensor": expert_tensor, "pipeline": pipeline}
    return Degrees(**degrees, **options)


def _virtual_stages(schedule: PipelineSchedule | None) -> st.SearchStrategy[int]:
    """Virtual stages of a rank, most often a number that the schedule has."""
    match schedule:
        case None:
            return st.sampled_from([1, 2])
        case "interleaved":
            return st.sampled_from([2] * 8 + [3] * 3 + [1])
        case "zb_v":
            return st.sampled_from([2] * 11 + [1])
        case _:
            return st.sampled_from([1] * 11 + [2])


def _least_groups(degrees: Degrees) -> int:
    """Groups of a batch that give every data rank the micro-batches that its schedule needs."""
    least = min_micro_batches(degrees.pipeline_schedule, degrees.pipeline)
    return degrees.data_ranks * ((least - 1) * degrees.micro_batch_groups + 1)


def _divisors_of(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from(_divisors_of(number))


@st.composite
def _stages(draw: st.DrawFn, degrees: Degrees, num_layers: int) -> tuple[int, ...]:
    """Layers of each virtual stage; if there are too few layers, as many ones as there are stages."""
    num_stages = degrees.pipeline * degrees.virtual_stages
    if num_layers < num_stages:
        return (1,) * num_stages
    cuts = sorted(draw(st.permutations(range(1, num_layers)))[: num_stages - 1])
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, num_layers], strict=True))


def _language_models(fitting: Degrees, degrees: Degrees) -> st.SearchStrategy[LanguageModelSpec]:
    """Models that mostly have a layer for each stage."""
    num_stages = degrees.pipeline * degrees.virtual_stages
    if num_stages == 1:
        return language_models(fitting)
    return language_models(fitting, st.sampled_from([num_stages + more for more in (-1, 0, 0, 0, 1, 1, 2)]))


@st.composite
def translation_models(draw: st.DrawFn, degrees: Degrees) -> TranslationModelSpec:
    """Encoders and decoders of a few layers, with a router of any kind."""
    experts = dict(draw(st.sampled_from(list(ROUTERS.values()))))
    if "num_expert_groups" not in experts:
        experts["num_experts"] = draw(st.sampled_from([4, 12]))
    model_dim = 4 * draw(st.integers(2, 5))
    hidden_dim = degrees.expert_tensor * draw(st.integers(1, 6))
    moe = MoESpec(**{"num_experts": 4, "group_tokens": 64, "model_dim": model_dim, "hidden_dim": hidden_dim, **experts})
    num_layers = st.integers(2, max(3, degrees.pipeline * degrees.virtual_stages // 2 + 1))
    return TranslationModelSpec(
        model_dim=model_dim, num_heads=degrees.tensor * draw(st.integers(1, 2)), head_dim=2 * draw(st.integers(1, 4)),
        ffn_dim=degrees.tensor * draw(st.integers(1, 6)), num_encoder_layers=draw(num_layers),
        num_decoder_layers=draw(num_layers), source_vocab_size=300, target_vocab_size=300,
        dropout=draw(st.sampled_from([0.0, 0.1])), moe_every=draw(st.sampled_from([1, 2])), moe=moe,
    )  # fmt: skip
