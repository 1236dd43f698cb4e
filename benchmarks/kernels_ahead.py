"""Kernels compiled ahead of any GPU: `python -m benchmarks.kernels_ahead`.

Triton compiles every kernel of a layer of 128 experts and 8 choices per token, with the tiles that
`moe.kernels.configs` has for each architecture, and the kernels of norms, rotations and optimizers. Printed are
registers per thread, bytes of them spilled to memory, and shared memory per program. Needs Triton, but no GPU.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks import results
from moe.kernels import adamw, capacity, combine, norm, products, rotary, routing, routing_programs, rows
from moe.kernels.configs import CANDIDATES, Config, Configs

CAPABILITIES = (80, 90, 100)
_BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_POINTERS = {
    **dict.fromkeys(("choice_ptr", "first_row_ptr", "row_ptr", "count_ptr", "counts_ptr"), "*i32"),
    **dict.fromkeys(("before_ptr", "total_ptr", "block_ptr", "group_row_ptr"), "*i32"),
    **dict.fromkeys(("expert_ptr", "chosen_ptr", "unit_counts_ptr", "last_load_ptr", "table_ptr"), "*i64"),
    **dict.fromkeys(("position_ptr", "length_ptr", "load_ptr"), "*i64"),
    **dict.fromkeys(("kept_ptr", "padding_ptr", "real_ptr"), "*i1"),
    **dict.fromkeys(("weight_ptr", "d_weight_ptr", "d_w_ptr", "partial_ptr", "logits_ptr", "bias_ptr"), "*fp32"),
    **dict.fromkeys(("probability_ptr", "sums_ptr", "slope_ptr", "part_ptr", "aux_loss_ptr", "z_loss_ptr"), "*fp32"),
    **dict.fromkeys(("rate_ptr", "cos_ptr", "sin_ptr"), "*fp32"),
    "factor_ptr": "*fp64",
    "found_inf_ptr": "*fp32",
    **dict.fromkeys(
        (
            "entropy_ptr",
            "weighted_loss_ptr",
            "d_weighted_ptr",
            "scalars_ptr",
            "sum_ptr",
            "d_aux_ptr",
            "d_z_ptr",
            "d_logits_ptr",
        ),
        "*fp32",
    ),
}
"""Pointers that are not to operands."""
_WEIGHTS = ("w_in", "w_gate", "w_out", "w_1", "w_2", "w_3")
"""Pointers to operands, or descriptors of them."""
_ODD = {
    "num_tiles", "num_experts", "num_rows", "first_bias", "num_bias", "num_scopes", "num_blocks", "num_choices",
    "scope_tokens", "first_column", "group_rows", "tiles_per_part", "num_heads", "num_positions", "group_tokens",
    "num_groups", "capacity",
}  # fmt: skip
"""Integers that need not be multiples of 16."""
_REALS = (
    "scale", "scaling_factor", "aux_scale", "z_scale", "batch_units", "batch_tokens", "eps", "decay",
    "gradient_weight1", "gradient_weight2", "step_size", "denominator_factor",
)  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled."""

    kernel: str
    variant: str
    capability: int
    registers: int
    """Per thread, of 255."""
    spilled_bytes: int
    """Per thread."""
    shared_bytes: int
    """Per program."""


def variants() -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """(kernel, name, constants) of what layers launch."""
    tiled = {"PER_TOKEN": 8, "EXPERTS": 128}
    # Strides of 1 are constants, as when Triton compiles for a launch.
    first = {**tiled, "stride_h": 1, "WRITES_PRODUCTS": True, "WRITES_HIDDEN": True}
    hidden = {**tiled, "stride_m": 1}
    for activation in ("relu", "gelu", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped"):
        is_gated = activation not in ("relu", "gelu")
        activated = {"ACTIVATION": activation, "ALPHA": 1.702, "LIMIT": 7.0, "IS_GATED": is_gated}
        biases = {"HAS_BIAS": not is_gated, "HAS_GATE_BIAS": False}
        if activation == "swiglu_clamped":
            biases = {"HAS_BIAS": True, "HAS_GATE_BIAS": True}
        for rank in (0, 16):
            adapter = {"RANK": rank, "BLOCK_RANK": 16}
            name = f"{activation}{', adapter' * (rank > 0)}"
            yield products.first_products, name, {**first, **activated, **biases, **adapter}
            yield products.hidden_gradients, name, {**hidden, **activated, **adapter}
    product = {**tiled, "GATHERS": False, "HAS_BIAS": False}
    yield products.product, "w_out", {**product, "TERMS": 1, **{f"stride_column_{term}": 1 for term in (1, 2, 3)}}
    for terms in (2, 3):
        inner = {f"stride_inner_{term}": 1 for term in (1, 2, 3)}
        yield products.product, f"{terms} gradients", {**product, "TERMS": terms, **inner}
    biased = {**product, "GATHERS": True, "HAS_BIAS": True, "TERMS": 2}
    yield products.product, "bias, gathered", {**biased, **{f"stride_column_{term}": 1 for term in (1, 2, 3)}}
    for gathered in ("x", "d_y"):
        gathers = {"GATHERS_X": gathered == "x", "GATHERS_D_Y": gathered == "d_y"}
        yield products.weight_gradient, f"{gathered} gathered", {"PER_TOKEN": 8, **gathers, "ADDS": True}
    yield combine.combine, "weighted", {"PER_TOKEN": 8, "IS_WEIGHTED": True, "BLOCK": 1024}
    sums = {"PER_TOKEN": 8, "GATHERS": True, "ADDS": True, "BLOCK_ROWS": 32, "BLOCK": 128}
    yield combine.sum_by_expert, "gathered", sums
    parts = {"PER_TOKEN": 8, "PARTS": 12, "BLOCK_PARTS": 16, "HAS_BIAS": True, "BLOCK": 1024}
    yield combine.gradients_of_weights, "", parts
    yield rows._scan_counts, "", {"BLOCKS": 64, "EXPERTS": 16}
    yield capacity._scan_queued, "", {"BLOCKS": 64, "EXPERTS": 16}
    for width in (128, 2048, 7168):
        sizes = norm.Tile.of_width(width)
        tile = {
            "ONE_PLUS": False, "BLOCK_ROWS": sizes.rows, "BLOCK": sizes.columns, "num_warps": sizes.num_warps,
        }  # fmt: skip
        yield norm.normalize, f"{width} columns", tile
        yield norm.normalize_backward, f"{width} columns", {**tile, "HAS_WEIGHT_GRADIENT": True}
    heads = {"INVERSE": True, "HEADS_FIRST": False, "UNROTATED": 0, "BLOCK_ROWS": 32, "PAIRS": 64}
    parts = {"INVERSE": True, "HEADS_FIRST": True, "UNROTATED": 256, "BLOCK_ROWS": 16, "PAIRS": 32}
    for name, interleaved in (("half", False), ("interleaved", True)):
        yield rotary.rotate_rows, name, {**heads, "INTERLEAVED": interleaved}
        yield rotary.rotate_rows, f"{name}, a part", {**parts, "INTERLEAVED": interleaved}
    fields = {"HAS_FACTOR": True, "MAY_SKIP": True, "FIELDS": adamw.NUM_FIELDS, "ALIGNMENT": 16, "BLOCK": adamw.BLOCK}
    yield adamw.adamw_kernel, "", fields
    for num_experts in (128, 512):
        block = {"EXPERTS": num_experts, "BLOCK": rows.block_choices(num_experts)}
        yield rows._count_choices, f"{num_experts} experts", block
        yield rows._scatter_choices, f"{num_experts} experts", block
        yield capacity._count_queued, f"{num_experts} experts", {**block, "TOP_K": 8}
        admission = {**block, "TOP_K": 8, "num_warps": capacity.NUM_WARPS}
        yield capacity._admit, f"{num_experts} experts", admission
    for scores, groups, num_experts in (("softmax", 1, 128), ("sigmoid", 8, 256), ("softmax", 1, 512)):
        constants = routing.TopKConstants(8, scores, renormalizes=True, scaling_factor=1.0).for_kernel(num_experts)
        limits = {"GROUPS": groups, "GROUPS_PER_TOKEN": max(1, groups // 2), "NUM_BEST": 2}
        yield (
            routing_programs.route,
            f"{scores}, {num_experts}",
            {**constants, **limits, "HAS_PADDING": True, "HAS_BIAS": scores == "sigmoid"},
        )
        differentiated = {
            "HAS_PADDING": True,
            "HAS_CAPACITY": True,
            "HAS_WEIGHT": True,
            "HAS_AUX": False,
            "HAS_Z": False,
        }
        differentiated |= {"HAS_WEIGHTED": True, "BY_LAST_LOAD": False}
        yield routing_programs.route_backward, f"{scores}, {num_experts}", {**constants, **differentiated}
    sums = {"NUM_EXPERTS": 128, "BLOCKS": 64, "TOP_K": 8}
    for by_last_load in (False, True):
        balance = {"ALL_EXPERTS": 128, "EXPERTS": 16, "BY_LAST_LOAD": by_last_load, "HAS_LAST_LOAD": by_last_load}
        yield routing_programs.balance, "by last load" if by_last_load else "", {**sums, **balance}
    yield (
        routing_programs.summarize,
        "",
        {**sums, "ALL_EXPERTS": 128, "NUM_PARTS": 8, "PARTS": 8, "BY_LAST_LOAD": False},
    )


_NOT_AUTOTUNED = ("relu", "gelu", "adapter", "clamped", "bias", "3 gradients")
"""Parts of the names of variants with biases, adapters or clamps, which always have the default configuration."""


def configs_to_compile(kernel: Any, variant: str, capability: int, dtype: str) -> list[Config | None]:
    """Configurations to compile: None for the default, then the candidates for autotuning."""
    if dtype == "fp32" or any(part in variant for part in _NOT_AUTOTUNED):
        return [None]
    return [None, *CANDIDATES[capability // 10].get(kernel.__name__, ())]


def compile_ahead(
    kernel: Any, variant: str, constants: dict[str, Any], capability: int, dtype: str, config: Config | None = None
) -> Compiled:
    """Compile a kernel for operands of a dtype, as Triton names it, with the default or another configuration."""
    configs = Configs.for_capability(capability // 10, 132, itemsize=4 if dtype == "fp32" else 2)
    weights = dict[str, str]()
    options = {name: value for name, value in constants.items() if name == "num_warps"}
    constants = {name: value for name, value in constants.items() if name not in options}
    if config is not None:
        tile = f"{config.block_rows} x {config.block_columns} x {config.block_inner}"
        variant = f"{variant}, {tile}, {config.num_warps}w {config.num_stages}s{' TMA' * config.uses_tma}"
    else:
        config = configs.by_kernel.get(kernel.__name__)
    if config is not None:
        sizes = ("BLOCK_ROWS", "BLOCK_COLUMNS", "BLOCK_INNER")
        if kernel is products.weight_gradient:
            sizes = ("BLOCK_INPUTS", "BLOCK_OUTPUTS", "BLOCK_ROWS")
        blocks = dict(zip(sizes, (config.block_rows, config.block_columns, config.block_inner), strict=True))
        constants = {**constants, **blocks, "PRECISION": "tf32"}
        if "ACCESS" in kernel.arg_names:
            constants["ACCESS"], weights = _weight_types(kernel, constants, config, dtype)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    names: list[str] = kernel.arg_names
    operands = {name: f"*{dtype}" for name in names if name.endswith("_ptr")} | weights
    signature = {
        name: "constexpr"
        if name in constants
        else {**operands, **_POINTERS, **dict.fromkeys(_REALS, "fp32")}.get(name, "i32")
        for name in names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in constants and name not in _ODD and name not in _REALS and "desc" not in signature[name]
    }
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)
    registers, spilled_bytes = _usage(compiled.asm["ptx"])
    return Compiled(kernel.__name__, variant, capability, registers, spilled_bytes, compiled.metadata.shared)


def _weight_types(kernel: Any, constants: dict[str, Any], config: Config, dtype: str) -> tuple[str, dict[str, str]]:
    """(how a kernel loads weights, types of its operands). Inputs' gradients are products with transposed matrices."""
    names = [name for name in _WEIGHTS if name in kernel.arg_names]
    if not config.uses_tma:
        return "pointers", dict.fromkeys(names, f"*{dtype}")
    block = [1, config.block_inner, config.block_columns]
    if "stride_inner_1" in constants or "stride_m" in constants:
        return "tma_transposed", dict.fromkeys(
            names, f"tensordesc<{dtype}{[1, config.block_columns, config.block_inner]}>"
        )
    return "tma", dict.fromkeys(names, f"tensordesc<{dtype}{block}>")


def _usage(ptx: str) -> tuple[int, int]:
    """(registers, bytes of registers spilled to memory) per thread, as the assembler counts them."""
    architecture = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    assert architecture is not None
    assembler = _BINARIES / ("ptxas-blackwell" if int(architecture[2]) >= 100 else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [assembler, "--verbose", f"--gpu-name={architecture[1]}", file.name, "--output-file", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", report), re.search(r"(\d+) bytes spill stores", report)
    assert registers is not None, report
    assert spilled is not None, report
    return int(registers[1]), int(spilled[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtype", default="bf16", choices=("bf16", "fp16", "fp32"), help="dtype of the operands (bf16)"
    )
    parser.add_argument("--capability", type=int, nargs="*", default=CAPABILITIES, help="80, 90, 100")
    parser.add_argument("--out", type=Path, help="write the result to this file instead of benchmarks/results")
    arguments = parser.parse_args()
    compiled = []
    print(f"{'kernel':20} {'variant':44} {'sm':>4} {'registers':>9} {'spilled':>8} {'shared':>8}")
    for capability in arguments.capability:
        for kernel, variant, constants in variants():
            for config in configs_to_compile(kernel, variant, capability, arguments.dtype):
                entry = compile_ahead(kernel, variant, constants, capability, arguments.dtype, config)
                compiled.append(entry)
                print(
                    f"{entry.kernel:20} {entry.variant:44} {capability:4} {entry.registers:9} "
                    f"{entry.spilled_bytes:8} {entry.shared_bytes:8}",
                    flush=True,
                )
    record = {"triton": triton.__version__, "kernels": [asdict(entry) for entry in compiled]}
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1))
    else:
        results.write(f"kernels_ahead_{arguments.dtype}", record)


if __name__ == "__main__":
    main()
