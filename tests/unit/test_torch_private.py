"""Each private part of torch that `moe.sharding` and `moe.parallel` use is there, and does what it is used for;
`moe.sharding` uses them in `torch_private.py` alone."""

import ast
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from moe.sharding import torch_private

SHARDING = Path(torch_private.__file__).parent
PARALLEL = SHARDING.parent / "parallel"

_DESCRIPTORS = "torch._functorch._aot_autograd.descriptors."
_FAKE = "torch._subclasses.fake_tensor."
_DTENSOR = "torch.distributed.tensor."
_KNOWN = _DTENSOR + "DTensor._op_dispatcher.sharding_propagator."

USED = {
    "torch.distributed.distributed_c10d._get_default_store": "ranks wait for rank 0 beyond the timeout of collectives",
    **{"torch._foreach_" + name: "many tensors are updated by one call" for name in ("copy_", "mul_", "norm")},
    "torch._decomp.get_decompositions": "operators are written with simpler ones",
    "torch._functorch._aot_autograd.utils.KNOWN_TYPES": "values that no graph takes are told in words",
    "torch._library.opaque_object.is_opaque_type": "values that no graph takes are told in words",
    "torch._functorch.aot_autograd.aot_export_joint_with_descriptors": "forward and backward pass are one graph",
    **{_DESCRIPTORS + name: "what a graph's arguments and results are" for name in (
        "BackwardTokenAOTInput", "BackwardTokenAOTOutput", "BufferAOTInput", "ForwardTokenAOTInput",
        "ForwardTokenAOTOutput", "GradAOTOutput",
        "InputMutationAOTOutput", "ParamAOTInput", "PlainAOTInput", "PlainAOTOutput", "TangentAOTInput",
    )},
    _FAKE + "FakeTensorMode": "a module is captured without weights",
    _FAKE + "DataDependentOutputException": "a module that reads a tensor's values is told in words",
    _FAKE + "DynamicOutputShapeException": "a shape that depends on the data is told in words",
    _FAKE + "UnsupportedOperatorException": "an operator without a fake form is told in words",
    "torch._subclasses.FakeTensor": "whether a tensor is traced",
    "torch._is_functional_tensor": "whether a tensor is traced",
    "torch.fx.experimental.proxy_tensor.get_proxy_mode": "whether a tensor is traced",
    "torch._C._get_mkldnn_enabled": "recurrent layers are traced as products",
    "torch._C._set_mkldnn_enabled": "recurrent layers are traced as products",
    "torch.compiler._is_compiling_flag": "users' code knows that it is traced",
    "torch._dynamo.OptimizedModule": "a module that is compiled already is told in words",
    "torch.nn.Module._compiled_call_impl": "a module that is compiled already is told in words",
    "torch._higher_order_ops.effects.with_effects": "operators with an effect are found",
    "torch.Tensor._backward_hooks": "hooks of gradients are told in words",
    "torch.Tensor._post_accumulate_grad_hooks": "hooks of gradients are told in words",
    "torch.utils.checkpoint.CheckpointFunction": "what is recomputed is captured once",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator": "what is recomputed is captured once",
    "torch.fx.traceback.preserve_node_meta": "nodes are marked with the user's line",
    "torch.fx.traceback.current_meta": "nodes are marked with the user's line",
    "torch._ops.OpOverload": "whether a node calls an operator",
    "torch.distributed._composable.contract.REGISTRY_KEY": "fully_shard is refused on modules around applied ones",
    "torch.distributed._composable.contract.STATE_KEY": "fully_shard is refused on applied modules",
    "torch.distributed.fsdp._traversal_utils": "its lookups in an applied module are no wrapper's",
    "torch.amp.GradScaler._unscale_grads_": "ranks leave out the same steps",
    "torch.utils._pytree.tree_flatten": "nested arguments and results",
    "torch.utils._pytree.tree_map_only": "nested arguments and results",
    "torch.distributed.device_mesh.DeviceMesh": "DTensor is asked on a mesh on which nothing is sent",
    _DTENSOR + "_dtensor_spec.DTensorSpec": "DTensor's rules are asked",
    _DTENSOR + "_dtensor_spec.TensorMeta": "DTensor's rules are asked",
    _DTENSOR + "DTensor._spec": "gradients are DTensors like their parameters",
    _DTENSOR + "_op_schema.OpSchema": "DTensor's rules are asked",
    _DTENSOR + "_ops.single_dim_strategy._expand_single_dim_strategy_to_mesh": "DTensor's rules of one axis are asked",
    **{_KNOWN + name: "DTensor's rules are found" for name in (
        "op_to_shape_and_stride_idx", "op_to_scalar_shape_adjuster", "op_to_schema_info",
        "op_to_schema_info_for_single_dim_strategy", "op_single_dim_strategy_funcs", "op_strategy_funcs",
        "_wrap_with_op_strategy",
    )},
}  # fmt: skip
"""Private parts, or those whose form is not promised, and what each is used for."""


@pytest.mark.parametrize("name", USED)
def test_it_is_there(name: str) -> None:
    found: Any = torch
    for at, part in enumerate(parts := name.split(".")):
        prefix = ".".join(parts[: at + 1])
        try:
            found = importlib.import_module(prefix)
        except ImportError:
            if not hasattr(found, part):
                pytest.fail(
                    f"torch {torch.__version__} has no {prefix}, by which moe sees to it that {USED[name]}: "
                    "find what took its place, and change moe/sharding/torch_private.py or moe/parallel"
                )
            found = getattr(found, part)


def _private(tree: ast.AST) -> Iterator[str]:
    """Private names of torch that a file uses; operators are none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("torch."))
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if (
                name.startswith("torch.")
                and not name.startswith("torch.ops.")
                and name.replace(".", "").replace("_", "").isalnum()
            ):
                yield name


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_they_are_used_in_one_file_alone() -> None:
    everywhere = {"torch.utils._pytree"}
    found = {
        f"{path.relative_to(SHARDING)}: {name}"
        for path in SHARDING.rglob("*.py")
        if path.name != "torch_private.py"
        for name in _private(ast.parse(path.read_text()))
        if _is_private(name) and name not in everywhere
    }
    assert not found, "these belong in torch_private.py"


def test_each_that_is_used_stands_above() -> None:
    files = [SHARDING / "torch_private.py", *PARALLEL.rglob("*.py")]
    used = {name for file in files for name in _private(ast.parse(file.read_text())) if _is_private(name)}
    unnamed = {name for name in used if not any(each == name or each.startswith(name + ".") for each in USED)}
    assert not unnamed, "these have no line in USED"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        self.seen.add_(1)
        return (x @ self.w,)


def test_a_joint_graph_says_what_its_arguments_and_results_are() -> None:
    mode = torch_private.FakeTensorMode(allow_non_fake_inputs=True)
    with mode, ExitStack() as stack:
        traced = torch_private.joint_graph(stack, Small(), (torch.empty(4, 3),), {})
    kinds = [type(each.meta["desc"]) for each in traced.graph.find_nodes(op="placeholder")]
    assert kinds == [torch_private.ParamAOTInput, torch_private.BufferAOTInput, torch_private.PlainAOTInput,
                     torch_private.TangentAOTInput]  # fmt: skip
    after = [type(each) for each in traced.graph.output_node().meta["desc"] if each is not None]
    assert {torch_private.InputMutationAOTOutput, torch_private.PlainAOTOutput, torch_private.GradAOTOutput} <= {*after}


def test_nodes_have_the_marks_that_were_set() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch_private.marking_nodes() as mark:

        def function(x: Tensor) -> Tensor:
            mark({"where": "here"})
            return torch.sin(x)

        traced = make_fx(function)(torch.ones(2))
    (node,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert torch_private.marks_of(node) == {"where": "here"}


def test_within_compiling_torch_says_that_it_compiles() -> None:
    assert not torch.compiler.is_compiling()
    with torch_private.compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_function_runs_once_within_its_region(use_reentrant: bool) -> None:
    called, regions = [], []

    @contextmanager
    def region() -> Iterator[None]:
        regions.append(len(called))
        yield
        regions.append(len(called))

    def function(x: Tensor) -> Tensor:
        called.append(x)
        return x.exp()

    x = torch.zeros(3, requires_grad=True)
    with torch_private.checkpointing(region):
        torch.utils.checkpoint.checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
    assert (len(called), regions) == (1, [0, 1])
    assert torch.equal(x.grad, torch.ones(3))
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
    assert len(called) == 3


def test_hooks_of_gradients_are_seen() -> None:
    one, other, plain = (torch.zeros(1, requires_grad=True) for _ in range(3))
    one.register_hook(lambda gradient: gradient)
    other.register_post_accumulate_grad_hook(lambda tensor: None)
    assert [torch_private.has_hooks(each) for each in (one, other, plain)] == [True, True, False]


def test_dtensor_says_how_it_splits() -> None:
    first, second = torch.empty(4, 6, device="meta"), torch.empty(6, 8, device="meta")
    offered = torch_private.strategies(
        torch.ops.aten.mm.default, ((first, second), {}), first @ second, [Shard(1), Replicate()],
        torch_private.two_ranks(),
    )  # fmt: skip
    shown = {(", ".join(map(str, before)), ", ".join(map(str, after))) for before, after in offered}
    assert {("S(0), R", "S(0)"), ("R, S(1)", "S(1)"), ("S(1), S(0)", "P(sum)")} <= shown
