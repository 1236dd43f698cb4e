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
from tests.sharding.odd import odd, random_hints
from tests.sharding.on_ranks import cores

WEIGHT_DECAY, MAXIMIZE = (0.0, 0.1), (False, True)
DRAWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "SGD": {"lr": (0.05,), "momentum": (0.0, 0.9), "weight_decay": WEIGHT_DECAY, "maximize": MAXIMIZE},
    "Adam": {"lr": (1e-2,), "weight_decay": WEIGHT_DECAY, "amsgrad": (False, True), "maximize": MAXIMIZE},
    "AdamW": {"lr": (1e-2,), "weight_decay": WEIGHT_DECAY, "amsgrad": (False, True), "maximize": MAXIMIZE},
    "Adamax": {"lr": (1e-2,), "weight_decay": WEIGHT_DECAY, "maximize": MAXIMIZE},
    "NAdam": {"lr": (1e-2,), "weight_decay": WEIGHT_DECAY, "decoupled_weight_decay": (False, True)},
    "RAdam": {"lr": (1e-2,), "weight_decay": WEIGHT_DECAY, "decoupled_weight_decay": (False, True)},
    "RMSprop": {"lr": (1e-2,), "momentum": (0.0, 0.9), "centered": (False, True), "maximize": MAXIMIZE},
    "Rprop": {"lr": (1e-2,), "maximize": MAXIMIZE},
    "Adagrad": {"lr": (1e-2,), "lr_decay": (0.0, 0.1), "weight_decay": WEIGHT_DECAY, "maximize": MAXIMIZE},
    "Adadelta": {"lr": (1.0,), "weight_decay": WEIGHT_DECAY, "maximize": MAXIMIZE},
    "ASGD": {"lr": (1e-2,), "t0": (1.0, 1e6), "weight_decay": WEIGHT_DECAY, "maximize": MAXIMIZE},
}  # fmt: skip
"""Options of those that work on parts, of which one each is drawn."""
FUSED = ("Adam", "AdamW")
"""Those whose fused form DTensors have on CPUs."""
WITHOUT_SHARDS = ("Rprop",)
"""Those of which torch refuses shards, as DTensors do not have what they write with."""
OTHERS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Those that use several elements at a time, or none that are dense."""
MESHES: tuple[dict[str, int], ...] = ({"a": 2}, {"a": 4}, {"a": 2, "b": 2})
STEPS = 4


def test_every_optimizer_of_torch_is_decided():
    exported = {
        name for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }  # fmt: skip
    assert exported == {*DRAWN, *OTHERS}


def _drawn(name: str, draw: random.Random) -> dict[str, Any]:
    options = {key: draw.choice(values) for key, values in DRAWN[name].items()}
    if name == "SGD" and options["momentum"]:
        options |= {"nesterov": True} if draw.random() < 0.5 else {"dampening": draw.choice((0.0, 0.3))}
    form = draw.choice(("foreach", "plain", "default", *(["fused"] if name in FUSED else [])))
    return options | {"foreach": {"foreach": True}, "plain": {"foreach": False}, "fused": {"fused": True}}.get(form, {})


def _schedule(optimizer: Optimizer, draw: random.Random) -> Callable[[float], None]:
    """A scheduler, as what follows each step."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: lr_scheduler.StepLR(optimizer, 2, 0.5),
        lambda: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        lambda: lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1, cycle_momentum=False),
        lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    )
    scheduler = draw.choice(kinds)()
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        return scheduler.step
    return lambda _: scheduler.step()


def _groups(module: nn.Module, draw: random.Random) -> list[dict[str, Any]]:
    """All parameters, the frozen one too, in two groups of which one has a weight decay of its own."""
    names = [name for name, _ in module.named_parameters()]
    second = set(draw.sample(names, 3))
    groups = [[each for each in names if (each in second) == chosen] for chosen in (False, True)]
    return [{"params": list(map(module.get_parameter, each))} for each in groups]


def _plan(module: nn.Module, batch: Any, mesh: dict[str, int], seed: int) -> sharding.ShardingPlan:
    hints = random_hints(module, mesh, random.Random(seed))
    return sharding.plan(module, batch, cores(math.prod(mesh.values())), hints, mesh=mesh)


def _part(applied: sharding.Applied, name: str, whole: Tensor) -> Tensor:
    of = applied.shards()[name]
    return whole[tuple(slice(at, at + size) for at, size in zip(of.offsets, of.part.shape, strict=True))]


def _differences(
    name: str, module: nn.Module, applied: sharding.Applied, batch: Any, seed: int, is_local: bool = False
) -> Iterator[str]:
    """After some steps of one optimizer, with what else is drawn for it."""
    optimizers, schedules, options = [], [], dict[str, Any]()
    for each in (module, applied):
        draw = random.Random(f"{name}{seed}")
        options = _drawn(name, draw)
        optimizer = getattr(torch.optim, name)(_groups(each, draw), **options)
        optimizers.append(sharding.local_steps(optimizer) if is_local and each is applied else optimizer)
        schedules.append(_schedule(optimizers[-1], draw))
    for step in range(STEPS):
        losses = []
        for each, optimizer, schedule in zip((module, applied), optimizers, schedules, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            losses.append(each(*batch))
            losses[-1].backward()
            optimizer.step()
            schedule(float(losses[-1].detach()))
        if not torch.allclose(*losses, rtol=1e-10, atol=1e-10):
            yield f"{name} {options}: losses {losses} of step {step}"
    for key, whole in module.named_parameters():
        found = applied.get_parameter(key)
        if not torch.allclose(local(found.detach()), _part(applied, key, whole), rtol=1e-10, atol=1e-10):
            yield f"{name} {options}: {key}"
        if (found.grad is None) != (whole.grad is None):
            yield f"{name} {options}: gradient of {key}"


def elementwise_on_ranks(mesh: dict[str, int], seed: int, is_local: bool = False) -> tuple[list[str], int]:
    """(what differs, number of empty parts)."""
    module, batch = odd(seed)
    start = {name: each.detach().clone() for name, each in module.named_parameters()}
    applied = sharding.apply(module, _plan(module, batch, mesh, seed))
    wrong: list[str] = []
    for name in sorted({*DRAWN} - {*(() if is_local else WITHOUT_SHARDS)}):
        with torch.no_grad():
            for key, value in start.items():
                module.get_parameter(key).copy_(value)
                local(applied.get_parameter(key)).copy_(_part(applied, key, value))
        wrong += _differences(name, module, applied, batch, seed, is_local)
    empty = sum(not local(each).numel() for each in applied.parameters())
    sharding.close(applied)
    return wrong, empty


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "seed"), one_seed_each(MESHES), ids=str)
def test_elementwise_ones_equal_one_device(ranks: Pools, mesh: dict[str, int], seed: int):
    found = ranks[math.prod(mesh.values())].run(elementwise_on_ranks, mesh, seed)
    assert [wrong for wrong, _ in found] == [[]] * len(found)
    assert any(empty for _, empty in found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_steps_on_plain_shards_equal_one_device(ranks: Pools, mesh: dict[str, int], seed: int):
    found = ranks[math.prod(mesh.values())].run(elementwise_on_ranks, mesh, seed, True)
    assert [wrong for wrong, _ in found] == [[]] * len(found)


def states_on_ranks() -> list[str]:
    """What differs between an optimizer's state after local steps and after steps on DTensors, or a closure's loss."""
    module, batch = odd()
    world, wrong = dist.get_world_size(), []
    plan = sharding.plan(module, batch, cores(world), {"*.weight": sharding.Split(0)}, mesh={"all": world})
    applied = sharding.apply(module, plan)
    start = {name: local(each.detach()).clone() for name, each in applied.named_parameters()}
    for name in sorted({*DRAWN} - {*WITHOUT_SHARDS}):
        states = []
        for steps in (lambda optimizer: optimizer, sharding.local_steps):
            with torch.no_grad():
                for key, value in start.items():
                    local(applied.get_parameter(key)).copy_(value)
            optimizer = steps(getattr(torch.optim, name)(applied.parameters(), 0.01))

            def closure(optimizer: Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = applied(*batch)
                loss.backward()
                return loss

            for _ in range(2):
                loss = optimizer.step(closure)
                optimizer.load_state_dict(optimizer.state_dict())  # other tensors, as after a checkpoint
            states.append({"loss": loss.detach(), **{
                f"{at}.{key}": value for at, state in optimizer.state_dict()["state"].items()
                for key, value in state.items()
            }})  # fmt: skip
        on_dtensors, on_shards = states
        assert on_dtensors.keys() == on_shards.keys()
        for key, value in on_dtensors.items():
            ours, where = on_shards[key], getattr(value, "placements", None)
            is_same = type(ours) is type(value) and getattr(ours, "placements", None) == where
            if isinstance(value, Tensor) and not (is_same and torch.equal(local(ours), local(value))):
                wrong.append(f"{name}: {key}")
    sharding.close(applied)
    return wrong


@pytest.mark.slow
def test_states_stay_dtensors_with_steps_on_plain_shards(ranks: Pools):
    assert ranks[2].run(states_on_ranks) == [[], []]


def test_steps_on_plain_shards_end_as_they_began_after_an_error():
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
    for other in (torch.optim.Adafactor([parameter]), ByNorm([parameter])):
        with pytest.raises(TypeError):
            sharding.local_steps(other)


def fused_on_ranks(micro_batches: int) -> list[str]:
    """What differs from one device after fused steps on shards whose padding is cut off behind each row."""
    torch.manual_seed(0)
    module, x = (nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double(), torch.randn(4, 5, dtype=torch.float64))
    world = dist.get_world_size()
    plan = sharding.plan(
        module, (x,), cores(world), {"0.weight": sharding.Split(1)}, lambda y: y.square().sum(),
        mesh={"all": world}, micro_batches=micro_batches,
    )  # fmt: skip
    applied = sharding.apply(module, plan, loss=lambda y: y.square().sum())
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01, fused=True) for each in (module, applied)]
    for _ in range(2):
        module(x).square().sum().backward()
        applied(x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [
        name for name, whole in module.named_parameters()
        if not torch.allclose(local(applied.get_parameter(name).detach()), _part(applied, name, whole), atol=1e-12)
    ]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_fused_steps_on_shards_that_end_in_padding_equal_one_device(ranks: Pools, micro_batches: int):
    assert ranks[2].run(fused_on_ranks, micro_batches) == [[], []]


class ByNorm(torch.optim.SGD):
    """A layer-wise rate: the norm of a shard would be another than that of the whole."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.data -= 0.1 * each.grad / each.grad.norm()


def _made(name: str, parameters: list[nn.Parameter]) -> Optimizer:
    if name == "Muon":
        return torch.optim.Muon([each for each in parameters if each.dim() == 2])
    return ByNorm(parameters) if name == "ByNorm" else getattr(torch.optim, name)(parameters)


def others_on_ranks() -> dict[str, str]:
    """Of each: that it equals one device, that torch refuses it, or what differs."""
    world, outcomes = dist.get_world_size(), {}
    for name in (*OTHERS, *WITHOUT_SHARDS, "ByNorm"):
        module, batch = odd()
        plan = sharding.plan(module, batch, cores(world), {"*.weight": sharding.Split(0)}, mesh={"all": world})
        applied = sharding.apply(module, plan)
        pair = [_made(name, list(each.parameters())) for each in (module, applied)]
        outcomes[name] = "equal"
        for _ in range(2):
            for each, optimizer in zip((module, applied), pair, strict=True):

                def closure(each: nn.Module = each, optimizer: Optimizer = optimizer, batch: Any = batch) -> Tensor:
                    optimizer.zero_grad()
                    loss = each(*batch)
                    loss.backward()
                    return loss

                closure()
                try:
                    optimizer.step(closure)  # type: ignore[arg-type]
                except Exception as error:
                    outcomes[name] = f"refused: {type(error).__name__}: {error}"
        atol = 0.02 if name == "Muon" else 1e-9  # it multiplies in bfloat16
        if outcomes[name] == "equal":
            for key, whole in module.named_parameters():
                if not torch.allclose(
                    local(applied.get_parameter(key).detach()), _part(applied, key, whole), atol=atol
                ):
                    outcomes[name] = f"differs: {key}"
        sharding.close(applied)
    return outcomes


@pytest.mark.slow
def test_others_equal_one_device_or_are_refused_by_torch(ranks: Pools):
    for outcomes in ranks[2].run(others_on_ranks):
        assert outcomes["ByNorm"] == "equal"
        assert [each for each in outcomes.items() if each[1] != "equal" and not each[1].startswith("refused")] == []


def whole_on_ranks() -> list[str]:
    """Of optimizers that look at whole tensors, on parameters that no rank has a part of: what differs."""
    module, batch = odd()
    world = dist.get_world_size()
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    batch = (batch[1],)
    plan = sharding.plan(module, batch, cores(world), {"?.*": sharding.Replicate()},
                         lambda y: y.square().mean(), mesh={"all": world})  # fmt: skip
    applied = sharding.apply(module, plan, loss=lambda y: y.square().mean())
    wrong = []
    for name in ("Adafactor", "Muon", "LBFGS"):
        pair = [_made(name, list(each.parameters())) for each in (module, applied)]
        for _ in range(3):
            for each, optimizer in zip((module, applied), pair, strict=True):

                def closure(each: nn.Module = each, optimizer: Optimizer = optimizer) -> Tensor:
                    optimizer.zero_grad()
                    loss = each(*batch)
                    loss = loss if each is applied else loss.square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)  # type: ignore[arg-type]
        for key, whole in module.named_parameters():
            if not torch.allclose(local(applied.get_parameter(key)), whole, rtol=1e-10, atol=1e-10):
                wrong.append(f"{name}: {key}")
    sharding.close(applied)
    return wrong


@pytest.mark.slow
def test_whole_parameters_may_have_any(ranks: Pools):
    assert ranks[2].run(whole_on_ranks) == [[], []]


def test_other_optimizers_are_left_alone_and_nothing_is_kept():
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    parameter = nn.Parameter(torch.ones(3, 2))
    for name in ("Adafactor", "LBFGS", "Muon"):
        parameter.grad = torch.ones(3, 2)
        _made(name, [parameter]).step(lambda: 1.0)
    module, batch = odd()
    applied = sharding.apply(module, sharding.plan(module, batch, cores(1), mesh={"all": 1}))
    optimizer = torch.optim.AdamW(applied.parameters())
    applied(*batch).backward()
    optimizer.step()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
    gone = weakref.ref(applied)
    del applied, optimizer
    gc.collect()
    assert gone() is None


def scaled_on_ranks() -> list[str]:
    """Of steps by a scaler of losses, where in the second the last rank alone has a gradient that is not finite, what
    differs from one device."""
    world, wrong = dist.get_world_size(), []
    for options in ({"foreach": False}, {"fused": True}):
        for unscales in (False, True):
            module, batch = odd()
            hints = {"*.weight": sharding.Split(0)}
            plan = sharding.plan(module, batch, cores(world), hints, mesh={"all": world})
            applied = sharding.apply(module, plan)
            pair = [(each, torch.optim.AdamW(each.parameters(), **options), torch.amp.GradScaler("cpu", 1024.0))
                    for each in (module, applied)]  # fmt: skip
            for step in range(3):
                for each, optimizer, scaler in pair:
                    optimizer.zero_grad()
                    scaler.scale(each(*batch)).backward()
                    if step == 1 and (each is module or dist.get_rank() == world - 1):
                        local(each.get_parameter("first.weight").grad)[-1] = math.inf
                    if unscales:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
            if pair[0][2].get_scale() != 512.0 or pair[1][2].get_scale() != 512.0:
                wrong.append(f"{options} {unscales}: scale {pair[1][2].get_scale()}")
            wrong += [
                f"{options} {unscales}: {name}" for name, whole in module.named_parameters()
                if not torch.allclose(local(applied.get_parameter(name)), _part(applied, name, whole), atol=1e-10)
            ]  # fmt: skip
            sharding.close(applied)
    return wrong


def test_all_ranks_leave_out_a_step_where_one_has_a_gradient_that_is_not_finite(ranks: Pools):
    assert ranks[2].run(scaled_on_ranks) == [[], []]
