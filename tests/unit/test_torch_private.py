"""Every private part of torch in `moe.sharding`, `moe.parallel` and attention exists, and `moe.sharding` uses them in
`torch_private.py` alone. Their behaviour is tested in tests/sharding."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback":
        "gradients that are computed after a backward pass are reduced",
    **{"torch.ops.aten._scaled_dot_product_flash_attention" + name: "blocks of attention return their log-sum-exps"
       for name in ("", "_backward", "_for_cpu", "_for_cpu_backward")},
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
def test_a_private_part_of_torch_exists(name: str) -> None:
    member: Any = torch
    for index, part in enumerate(parts := name.split(".")):
        prefix = ".".join(parts[: index + 1])
        try:
            member = importlib.import_module(prefix)
        except ImportError:
            if not hasattr(member, part):
                pytest.fail(
                    f"torch {torch.__version__} has no {prefix}, by which moe sees to it that {USED[name]}: "
                    "find what took its place, and change moe/sharding/torch_private.py or moe/parallel"
                )
            member = getattr(member, part)


def _private(tree: ast.AST) -> Iterator[str]:
    """Private names of torch in a file; operators do not count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("torch."))
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


def test_private_parts_are_used_in_one_file_only() -> None:
    everywhere = {"torch.utils._pytree"}
    uses = {
        f"{path.relative_to(SHARDING)}: {name}"
        for path in SHARDING.rglob("*.py")
        if path.name != "torch_private.py"
        for name in _private(ast.parse(path.read_text()))
        if _is_private(name) and name not in everywhere
    }
    assert not uses, "these belong in torch_private.py"


def test_each_private_part_in_use_is_listed() -> None:
    files = [SHARDING / "torch_private.py", *PARALLEL.rglob("*.py")]
    names = {name for file in files for name in _private(ast.parse(file.read_text())) if _is_private(name)}
    missing = {name for name in names if not any(prefix == name or prefix.startswith(name + ".") for prefix in USED)}
    assert not missing, "these have no line in USED"


def test_compilation_and_hooks_of_gradients_are_seen() -> None:
    with torch_private.compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()
    with_hook, with_post_hook, plain = (torch.zeros(1, requires_grad=True) for _ in range(3))
    with_hook.register_hook(lambda gradient: gradient)
    with_post_hook.register_post_accumulate_grad_hook(lambda tensor: None)
    assert [torch_private.has_hooks(tensor) for tensor in (with_hook, with_post_hook, plain)] == [True, True, False]
