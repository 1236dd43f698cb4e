"""Every optimizer of torch equals one device on shards of parameters, or torch refuses it."""

import gc
import math
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer

from moe import sharding
from moe.sharding.applied.dtensors import local
from tests.grid import one_seed_each
from tests.parity.gloo_ranks import Pools
from tests.sharding.modules import perceptron
from tests.sharding.odd import odd, random_hints
from tests.sharding.on_ranks import Built, apply_on_one_device, cores, is_close, shard_of_whole, unlike

DECAYS, TRUTH = (0.0, 0.1), (False, True)
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "SGD": {"lr": (0.05,), "momentum": (0.0, 0.9), "weight_decay": DECAYS, "maximize": TRUTH},
    "Adam": {"lr": (1e-2,), "weight_decay": DECAYS, "amsgrad": TRUTH, "maximize": TRUTH},
    "AdamW": {"lr": (1e-2,), "weight_decay": DECAYS, "amsgrad": TRUTH, "maximize": TRUTH},
    "Adamax": {"lr": (1e-2,), "weight_decay": DECAYS, "maximize": TRUTH},
    "NAdam": {"lr": (1e-2,), "weight_decay": DECAYS, "decoupled_weight_decay": TRUTH},
    "RAdam": {"lr": (1e-2,), "weight_decay": DECAYS, "decoupled_weight_decay": TRUTH},
    "RMSprop": {"lr": (1e-2,), "momentum": (0.0, 0.9), "centered": TRUTH, "maximize": TRUTH},
    "Rprop": {"lr": (1e-2,), "maximize": TRUTH},
    "Adagrad": {"lr": (1e-2,), "lr_decay": (0.0, 0.1), "weight_decay": DECAYS, "maximize": TRUTH},
    "Adadelta": {"lr": (1.0,), "weight_decay": DECAYS, "maximize": TRUTH},
    "ASGD": {"lr": (1e-2,), "t0": (1.0, 1e6), "weight_decay": DECAYS, "maximize": TRUTH},
}
"""Options of elementwise optimizers; one value of each option is drawn."""
FUSED = ("Adam", "AdamW")
"""Optimizers whose fused form DTensors support on CPUs."""
WITHOUT_SHARDS = ("Rprop",)
"""Elementwise optimizers that torch refuses on shards, because DTensors lack an operator."""
OTHERS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Optimizers that are not elementwise, or take no dense gradients."""
MESHES: tuple[dict[str, int], ...] = ({"a": 2}, {"a": 4}, {"a": 2, "b": 2})
STEPS = 4
SPLIT = {"*.weight": sharding.Split(0)}


class ByNorm(torch.optim.SGD):
    """A layer-wise rate by the gradient's norm, which is not that of a shard."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad / parameter.grad.norm()


def test_every_optimizer_of_torch_is_listed():
    kinds = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    optimizer_names = {name for name, kind in kinds.items() if issubclass(kind, Optimizer) and kind is not Optimizer}
    assert optimizer_names == {*OPTIONS, *OTHERS}


def apply_on_ranks(module_and_batch: Built, hints: Any, **options: Any) -> sharding.Applied:
    world = dist.get_world_size()
    return sharding.apply(
        module_and_batch[0], sharding.plan(*module_and_batch, cores(world), hints, mesh={"all": world}, **options)
    )


def step_with_closure(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    """One step with a closure, as L-BFGS needs it; returns the loss."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        return loss

    closure()
    return optimizer.step(closure)  # type: ignore[arg-type,return-value]


def build_optimizer(name: str, parameters: list[nn.Parameter]) -> Optimizer:
    if name == "Muon":
        parameters = [parameter for parameter in parameters if parameter.dim() == 2]
    return ByNorm(parameters) if name == "ByNorm" else getattr(torch.optim, name)(parameters)


def _random_options(name: str, draw: random.Random) -> dict[str, Any]:
    options = {key: draw.choice(values) for key, values in OPTIONS[name].items()}
    if name == "SGD" and options["momentum"]:
        options |= {"nesterov": True} if draw.random() < 0.5 else {"dampening": draw.choice((0.0, 0.3))}
    form = draw.choice(("foreach", "plain", "default", *(["fused"] if name in FUSED else [])))
    return options | {"foreach": {"foreach": True}, "plain": {"foreach": False}, "fused": {"fused": True}}.get(form, {})


def _schedule(optimizer: Optimizer, draw: random.Random) -> Callable[[float], None]:
    """A random scheduler, to be called after each step with the loss."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: lr_scheduler.StepLR(optimizer, 2, 0.5),
        lambda: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        lambda: lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1, cycle_momentum=False),
        lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    )
    scheduler = draw.choice(kinds)()
    is_by_loss = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    return scheduler.step if is_by_loss else lambda _: scheduler.step()


def _groups(module: nn.Module, draw: random.Random) -> list[dict[str, Any]]:
    """All parameters, also the frozen one, in two random groups."""
    names = [name for name, _ in module.named_parameters()]
    second = set(draw.sample(names, 3))
    groups = [[name for name in names if (name in second) == is_second] for is_second in (False, True)]
    return [{"params": list(map(module.get_parameter, group))} for group in groups]


def _differences(
    name: str, module: nn.Module, applied: sharding.Applied, batch: Any, seed: int, is_local: bool
) -> Iterator[str]:
    """Differences after some steps of one optimizer with random options and a random scheduler."""
    optimizers, schedules, options = [], [], dict[str, Any]()
    for model in (module, applied):
        draw = random.Random(f"{name}{seed}")
        options = _random_options(name, draw)
        optimizer = getattr(torch.optim, name)(_groups(model, draw), **options)
        optimizers.append(sharding.local_steps(optimizer) if is_local and model is applied else optimizer)
        schedules.append(_schedule(optimizers[-1], draw))
    for step in range(STEPS):
        losses = []
        for model, optimizer, schedule in zip((module, applied), optimizers, schedules, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            losses.append(model(*batch))
            losses[-1].backward()
            optimizer.step()
            schedule(float(losses[-1].detach()))
        if not is_close(*losses):
            yield f"{name} {options}: losses {losses} of step {step}"
    for wrong in unlike(applied, module, ("value",)):
        yield f"{name} {options}: {wrong}"
    for key, parameter in module.named_parameters():
        if (applied.get_parameter(key).grad is None) != (parameter.grad is None):
            yield f"{name} {options}: gradient of {key}"


def elementwise_on_ranks(mesh: dict[str, int], seed: int, is_local: bool = False) -> tuple[list[str], int]:
    """(differences, number of empty shards)"""
    module, batch = odd(seed)
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    hints = random_hints(module, mesh, random.Random(seed))
    plan = sharding.plan(module, batch, cores(math.prod(mesh.values())), hints, mesh=mesh)
    applied = sharding.apply(module, plan)
    wrong: list[str] = []
    for name in sorted({*OPTIONS} - {*(() if is_local else WITHOUT_SHARDS)}):
        with torch.no_grad():
            for key, value in start.items():
                module.get_parameter(key).copy_(value)
                local(applied.get_parameter(key)).copy_(shard_of_whole(applied, key, value))
        wrong += _differences(name, module, applied, batch, seed, is_local)
    num_empty = sum(not local(parameter).numel() for parameter in applied.parameters())
    sharding.close(applied)
    return wrong, num_empty


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "seed"), one_seed_each(MESHES), ids=str)
def test_elementwise_optimizers_equal_one_device(ranks: Pools, mesh: dict[str, int], seed: int):
    results = ranks[math.prod(mesh.values())].run(elementwise_on_ranks, mesh, seed)
    assert [wrong for wrong, _ in results] == [[]] * len(results)
    assert any(num_empty for _, num_empty in results)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_local_steps_equal_one_device(ranks: Pools, mesh: dict[str, int], seed: int):
    results = ranks[math.prod(mesh.values())].run(elementwise_on_ranks, mesh, seed, True)
    assert [wrong for wrong, _ in results] == [[]] * len(results)


def states_on_ranks() -> list[str]:
    """Differences in states and losses between local steps and steps on DTensors."""
    module, batch = odd()
    applied, wrong = apply_on_ranks((module, batch), SPLIT), []
    start = {name: local(parameter.detach()).clone() for name, parameter in applied.named_parameters()}
    for name in sorted({*OPTIONS} - {*WITHOUT_SHARDS}):
        states = []
        for wrap in (lambda optimizer: optimizer, sharding.local_steps):
            with torch.no_grad():
                for key, value in start.items():
                    local(applied.get_parameter(key)).copy_(value)
            optimizer = wrap(getattr(torch.optim, name)(applied.parameters(), 0.01))
            for _ in range(2):
                loss = step_with_closure(applied, optimizer, batch)
                optimizer.load_state_dict(optimizer.state_dict())  # other tensors, as after a checkpoint
            slots = optimizer.state_dict()["state"].items()
            states.append({f"{index}.{key}": value for index, state in slots for key, value in state.items()})
            states[-1]["loss"] = loss.detach()
        on_dtensors, on_shards = states
        assert on_dtensors.keys() == on_shards.keys()
        for key, value in on_dtensors.items():
            local_value, placements = on_shards[key], getattr(value, "placements", None)
            is_same = type(local_value) is type(value) and getattr(local_value, "placements", None) == placements
            if isinstance(value, Tensor) and not (is_same and torch.equal(local(local_value), local(value))):
                wrong.append(f"{name}: {key}")
    sharding.close(applied)
    return wrong


@pytest.mark.slow
def test_states_stay_dtensors_with_local_steps(ranks: Pools):
    assert ranks[2].run(states_on_ranks) == [[], []]


def test_local_steps_restore_parameters_after_an_error():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = sharding.local_steps(torch.optim.AdamW([parameter], betas=(0.9, 0.9)))
    parameter.grad = torch.ones(3)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is parameter
    optimizer.param_groups[0]["betas"] = (0.9, 0.9)
    optimizer.step()
    assert set(optimizer.state) == {parameter}
    for other_optimizer in (torch.optim.Adafactor([parameter]), ByNorm([parameter])):
        with pytest.raises(TypeError):
            sharding.local_steps(other_optimizer)


def fused_on_ranks(micro_batches: int) -> list[str]:
    """Differences from one device after fused steps on shards with padding at the end of each row."""
    torch.manual_seed(0)
    module, batch = perceptron(5, 4, 3).double(), (torch.randn(4, 5, dtype=torch.float64),)
    applied = apply_on_ranks((module, batch), {"layers.0.weight": sharding.Split(1)}, micro_batches=micro_batches)
    optimizers = [torch.optim.AdamW(model.parameters(), 0.01, fused=True) for model in (module, applied)]
    for _ in range(2):
        for model, optimizer in zip((module, applied), optimizers, strict=True):
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
    return unlike(applied, module, ("value",), 1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_fused_steps_on_padded_shards_equal_one_device(ranks: Pools, micro_batches: int):
    assert ranks[2].run(fused_on_ranks, micro_batches) == [[], []]


def other_optimizers_on_ranks(is_sharded: bool) -> dict[str, str]:
    """Outcomes by optimizer: "equal" to one device, "refused" by torch with the error, or the differences."""
    outcomes = {}
    for name in (*OTHERS, *WITHOUT_SHARDS, "ByNorm") if is_sharded else ("Adafactor", "Muon", "LBFGS"):
        module, batch = odd()
        if not is_sharded:
            module, batch = perceptron(5, 6, 4).double(), batch[1:]
        applied = apply_on_ranks((module, batch), SPLIT if is_sharded else {"layers.*": sharding.Replicate()})
        pair = [(model, build_optimizer(name, list(model.parameters()))) for model in (module, applied)]
        outcomes[name] = "equal"
        for _ in range(2):
            for model, optimizer in pair:
                try:
                    step_with_closure(model, optimizer, batch)
                except Exception as error:
                    outcomes[name] = f"refused: {type(error).__name__}: {error}"
        is_coarse = is_sharded and name == "Muon"  # it multiplies in bfloat16
        if outcomes[name] == "equal":
            outcomes[name] = ", ".join(unlike(applied, module, ("value",), 0.02 if is_coarse else 1e-9)) or "equal"
        sharding.close(applied)
    return outcomes


@pytest.mark.slow
def test_other_optimizers_equal_one_device_or_are_refused_by_torch(ranks: Pools):
    for outcomes in ranks[2].run(other_optimizers_on_ranks, True):
        assert outcomes["ByNorm"] == "equal"
        assert [entry for entry in outcomes.items() if entry[1] != "equal" and not entry[1].startswith("refused")] == []


@pytest.mark.slow
def test_replicated_parameters_may_have_any_optimizer(ranks: Pools):
    for outcomes in ranks[2].run(other_optimizers_on_ranks, False):
        assert set(outcomes.values()) == {"equal"}


@pytest.mark.slow
def test_other_optimizers_are_unchanged_and_modules_are_released():
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    parameter = nn.Parameter(torch.ones(3, 2))
    for name in ("Adafactor", "LBFGS", "Muon"):
        parameter.grad = torch.ones(3, 2)
        build_optimizer(name, [parameter]).step(lambda: 1.0)
    module, batch = odd()
    applied = apply_on_one_device(module, *batch)
    optimizer = torch.optim.AdamW(applied.parameters())
    applied(*batch).backward()
    optimizer.step()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
    reference = weakref.ref(applied)
    del applied, optimizer
    gc.collect()
    assert reference() is None


def scaled_on_ranks() -> list[str]:
    """Differences from one device after steps with a gradient scaler. In the second step only the last rank has an
    infinite gradient."""
    wrong = []
    for options in ({"foreach": False}, {"fused": True}):
        for unscales in (False, True):
            module, batch = odd()
            applied = apply_on_ranks((module, batch), SPLIT)
            triples = [(model, torch.optim.AdamW(model.parameters(), **options), torch.amp.GradScaler("cpu", 1024.0))
                       for model in (module, applied)]  # fmt: skip
            for step in range(3):
                for model, optimizer, scaler in triples:
                    optimizer.zero_grad()
                    scaler.scale(model(*batch)).backward()
                    if step == 1 and (model is module or dist.get_rank() == dist.get_world_size() - 1):
                        local(model.get_parameter("first.weight").grad)[-1] = math.inf
                    if unscales:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
            wrong += [f"scale {scaler.get_scale()}" for _, _, scaler in triples if scaler.get_scale() != 512.0]
            wrong += [f"{options} {unscales}: {difference}" for difference in unlike(applied, module, ("value",))]
            sharding.close(applied)
    return wrong


@pytest.mark.slow
def test_all_ranks_skip_a_step_if_one_has_an_infinite_gradient(ranks: Pools):
    assert ranks[2].run(scaled_on_ranks) == [[], []]
