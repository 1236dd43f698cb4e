"""Predicted activations, compared with the memory of a forward and backward pass under fake tensors."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from moe.layers.nll import smoothed_nll
from moe.parallel import Layout, discard_gradients, keep_buffers, local_parameters
from moe.plan import Cluster, Degrees
from moe.plan.candidate import RECOMPUTES, Candidate, Options, Recompute
from moe.plan.cost.memory import MemoryModel
from moe.plan.profile import OURS
from moe.spec import JobSpec, LanguageModelSpec, TranslationModelSpec
from moe.spec.form import stored_bytes
from moe.tasks.batch_context import BatchContext
from moe.tasks.build import build_model
from moe.tasks.language.batches import SequencesBatch
from moe.train.moe_layers import MoELayers

ROWS, LENGTH = 32, 64
SEQUENCE = 128
"""Tokens of a row of a language model."""
DTYPES = ("float32", "bfloat16")
MODELS: dict[str, dict[str, Any]] = {
    "the demo's": {"preset": "gshard-tiny"},
    "gated experts and shared ones": {
        "preset": "gshard-tiny",
        "moe": {"router": "softmax_topk", "top_k": 2, "activation": "swiglu", "hidden_dim": 512,
                "shared_hidden_dim": 512, "group_tokens": 512, "num_experts": 4},
    },
    "wider, deeper, with dropout": {
        "preset": "gshard-tiny", "model_dim": 256, "num_heads": 8, "ffn_dim": 1024, "num_encoder_layers": 4,
        "num_decoder_layers": 2, "dropout": 0.1,
        "moe": {"num_experts": 4, "hidden_dim": 1024, "group_tokens": 512},
    },
    "a dense twin": {"preset": "gshard-tiny-dense"},
}  # fmt: skip
_DECODER = {"kind": "language", "model_dim": 256, "num_layers": 4, "ffn_dim": 1024, "vocab_size": 1000}
_GROUPED = {"kind": "grouped_query", "num_heads": 8, "num_kv_heads": 2, "head_dim": 32}
_LATENT = {"kind": "latent", "num_heads": 8, "query_rank": 96, "key_value_rank": 64, "head_dim": 32, "rope_dim": 16,
           "value_dim": 32}  # fmt: skip
_EXPERTS = {"router": "softmax_topk", "top_k": 2, "num_experts": 4, "hidden_dim": 512, "activation": "swiglu",
            "group_tokens": 512}  # fmt: skip
LANGUAGE: dict[str, dict[str, Any]] = {
    "grouped queries": {**_DECODER, "attention": _GROUPED, "ffn_activation": "gelu"},
    "normed heads, experts": {
        **_DECODER, "attention": {**_GROUPED, "query_key_norm": "head"}, "moe": _EXPERTS,
    },
    "clip, gate, biases": {
        **_DECODER, "attention": {**_GROUPED, "query_key_norm": "width", "clip": 8.0, "output_gate": True, "bias": True,
                                  "output_bias": True},
    },
    "sinks and windows": {**_DECODER, "attention": {**_GROUPED, "sinks": True, "window": 32}},
    "local attention, norms around it, narrow values": {
        **_DECODER, "attention": {**_GROUPED, "query_key_norm": "head", "value_dim": 16}, "norm_placement": "sandwich",
        "local_attention": {**_GROUPED, "num_kv_heads": 4, "window": 32, "value_dim": 16, "value_multiplier": 0.7},
        "ffn_activation": "geglu_tanh",
    },
    "chunks, layers without positions, gates on inputs": {
        **_DECODER,
        "attention": {**_GROUPED, "rope": {"fraction": 0.0}, "query_scaling": {"coefficient": 0.1, "tokens": 16}},
        "local_attention": {**_GROUPED, "query_key_norm": "unscaled", "norm_after_rope": True, "window": 32,
                            "window_kind": "chunk", "windowed_layers": [0, 1, 2],
                            "rope": {"pairing": "interleaved"}},
        "moe": {**_EXPERTS, "router": "sigmoid_topk", "shared_hidden_dim": 512, "bias_update_rate": 0.0,
                "renormalize_gates": False, "apply_gates_to": "inputs"},
    },
    "branches with norms, keys as values, capped logits": {
        **_DECODER, "attention": {**_GROUPED, "query_key_norm": "head", "value_norm": True, "keys_as_values": True},
        "local_attention": {**_GROUPED, "num_kv_heads": 4, "window": 32, "query_key_norm": "head", "value_norm": True},
        "norm_placement": "sandwich", "logits_cap": 30.0, "layer_scalar": True,
        "moe": {**_EXPERTS, "shared_hidden_dim": 256, "router_norm": True, "expert_scale": True, "branch_norms": True},
    },
    "latents, shared experts": {
        **_DECODER, "attention": _LATENT, "first_dense_layers": 1, "moe": {**_EXPERTS, "shared_hidden_dim": 256},
    },
    "selected tokens": {
        **_DECODER, "attention": {**_LATENT, "indexer": {"num_heads": 8, "head_dim": 32, "top_k": 32}},
    },
    "few selected tokens": {
        **_DECODER, "attention": {**_LATENT, "indexer": {"num_heads": 8, "head_dim": 32, "top_k": 4}},
    },
    "selected tokens, a trained indexer, shared selections": {
        **_DECODER, "attention": {**_LATENT, "indexer": {"num_heads": 8, "head_dim": 32, "top_k": 32,
                                                         "shared_layers": [1, 3], "loss_coefficient": 1.0}},
    },
    "latents of keys alone": {**_DECODER, "attention": {**_LATENT, "query_rank": None, "value_dim": 48}},
    "states": {
        **_DECODER, "attention": _GROUPED, "full_attention_every": 4,
        "linear_attention": {"num_key_heads": 4, "num_value_heads": 8, "key_dim": 32, "value_dim": 32},
    },
    "states, narrow feed-forward layers": {
        **_DECODER, "attention": _GROUPED, "full_attention_every": 4, "ffn_dim": 128,
        "linear_attention": {"num_key_heads": 8, "num_value_heads": 16, "key_dim": 32, "value_dim": 32,
                             "split_projections": True},
    },
}  # fmt: skip
_MAMBA2 = {"kind": "mamba2", "num_heads": 16, "head_dim": 32, "state_dim": 64, "num_groups": 2}
LANGUAGE |= {
    "short convolutions": {
        **_DECODER,
        "attention": _GROUPED,
        "linear_attention": {"kind": "short_convolution"},
        "attention_layers": [3],
    },
    "Mamba-2": {
        **_DECODER,
        "attention": _GROUPED,
        "linear_attention": _MAMBA2,
        "attention_layers": [3],
        "ffn_dim": 128,
    },
    "layers of one part, latent experts": {
        **_DECODER,
        "num_layers": 6,
        "attention": {**_GROUPED, "rope": {"fraction": 0.0}},
        "linear_attention": _MAMBA2,
        "attention_layers": [3],
        "feed_forward_layers": [1, 2, 5],
        "dense_layers": [2],
        "ffn_activation": "relu2",
        "moe": {**_EXPERTS, "activation": "relu2", "latent_dim": 64, "shared_hidden_dim": 256},
    },
}
_ADAPTED = ("grouped queries", "normed heads, experts", "latents, shared experts", "states")
LANGUAGE |= {
    f"{name}, adapters": {**LANGUAGE[name], "from": "/models/base", "adapter": {"rank": 16}} for name in _ADAPTED
}
LANGUAGE |= {
    f"{name}, adapters, base in {base}": {**LANGUAGE[f"{name}, adapters"], "adapter": {"rank": 16, "base": base}}
    for name in _ADAPTED
    for base in ("bfloat16", "int8", "nf4")
}
_KINDS: dict[str, dict[str, Any]] = {
    "DoRA": {"targets": ["*.attention.*", "output.weight"], "dora": True},
    "tables": {"targets": ["*.attention.*", "embedding.weight", "output.weight"]},
}
LANGUAGE |= {
    f"{name}, {kind}": {**LANGUAGE[name], "from": "/models/base", "adapter": {"rank": 16, **adapter}}
    for kind, adapter in _KINDS.items()
    for name in _ADAPTED[:2]
}
MODELS |= LANGUAGE
IN_EVERY_RUN = {
    ("the demo's", "float32", "none"), ("the demo's", "bfloat16", "full"),
    ("gated experts and shared ones", "float32", "selective"), ("gated experts and shared ones", "bfloat16", "none"),
    ("wider, deeper, with dropout", "float32", "full"), ("wider, deeper, with dropout", "bfloat16", "selective"),
    ("a dense twin", "bfloat16", "none"),
    *((name, "float32", "none") for name in LANGUAGE if "base in" not in name),
    ("latents, shared experts", "bfloat16", "full"),
    ("sinks and windows", "bfloat16", "selective"), ("states", "bfloat16", "none"),
    ("normed heads, experts, adapters, base in bfloat16", "bfloat16", "none"),
    ("latents, shared experts, adapters, base in int8", "bfloat16", "selective"),
    ("grouped queries, adapters, base in nf4", "bfloat16", "full"),
}  # fmt: skip
"""Each model, and each precision with each kind of recomputation; all with all are a grid."""
GRID = [
    pytest.param(*case, marks=() if case in IN_EVERY_RUN else pytest.mark.grid)
    for case in product(MODELS, DTYPES, RECOMPUTES)
]
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _as_on_a_cpu_without_narrow_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans assume CPUs that take the most memory for bfloat16, whichever this one is; fake tensors multiply
    nothing."""
    # Only this CPU's abilities are faked, not the measurement: otherwise the plan would be compared with a
    # different path through the layers on each machine.
    monkeypatch.setattr("moe.parallel.accelerator._cpu_multiplies", lambda dtype: dtype.itemsize >= 4)


class _NoHook:
    def remove(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_warnings_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Drop bitsandbytes's first warning: pytest keeps its traceback, whose frames keep tensors alive."""
    caplog.set_level(logging.ERROR, logger="bitsandbytes")


class PeakTracker(MemTracker):
    """Tracks the peak of all tensors, but not of each module: visiting every module at each operation takes as long as
    the passes."""

    def _update_peak_stats(self, _: Any) -> None:
        for device, snapshot in self._curr_mem_snap.items():
            if snapshot["Total"] > self._peak_mem.get(device, 0):
                self._peak_mem[device], self._peak_mem_snap[device] = snapshot["Total"], dict(snapshot)

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        """Forget a module's earlier call: the loss calls the output matrix once for each chunk, which torch's tracker
        takes for another step."""
        if not self._mod_tracker.is_bw:
            self.memory_tracking.pop(module, None)
        super()._pre_fw_hook(module, inputs)

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> Any:
        for parameter in module.parameters():
            if not parameter.requires_grad:  # it has no gradient to hook
                self._param_to_grad_hook_handles.setdefault(parameter, (_NoHook(), _NoHook()))
        return super()._track_module_params_and_buffers(module, install_grad_hooks)


class EvenRouting(TorchDispatchMode):
    """Results of operations that depend on values, which fake tensors lack: no choice is dropped, no two scores are
    equal, and all experts get the same number of rows."""

    def __init__(self, rows_each: int, num_experts: int) -> None:
        super().__init__()
        self._rows_each, self._num_experts = rows_each, num_experts
        self._totals: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        keywords = dict(kwargs or {})
        if func is aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is aten.bincount.default:
            return args[0].new_empty((args[2] if len(args) > 2 else keywords["minlength"],), dtype=torch.int64)
        if func is aten.index.Tensor and any(index is not None and index.dtype == torch.bool for index in args[1]):
            (mask,) = args[1]
            return args[0].new_empty((mask.numel(), *args[0].shape[mask.dim() :]))
        if func is aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:
                return False
            return self._rows_each * (self._num_experts if hasattr(args[0], "is_total") else 1)
        result = func(*args, **keywords)
        if func is aten.sum.default and args[0].dtype == torch.int64:
            result.is_total = True
        return result


def measure_peak(model: TranslationModelSpec | LanguageModelSpec, dtype: str, recompute: Recompute) -> int:
    """Peak bytes in the passes of a second micro-batch, without parameters and gradients."""
    moe = model.moe
    num_experts = moe.num_experts if moe else 1
    rows_each = ROWS * LENGTH * (moe.experts_per_token if moe else 0) // num_experts
    with FakeTensorMode(allow_non_fake_inputs=True):
        layout = replace(Layout.single(), recompute=recompute)
        network: Any = build_model(model, layout, dtype=getattr(torch, dtype))
        parameters, layers = local_parameters(network), MoELayers(network, layout)
        keep_buffers(parameters, layout)  # as an optimizer does
        tokens = torch.randint(5, 300, (ROWS, LENGTH))
        sequences = tokens.view(-1, SEQUENCE)
        documents = torch.zeros_like(sequences)
        rows_per_group = max(1, moe.group_tokens // 2 // LENGTH) if moe else 1
        tracker = PeakTracker()
        tracker.track_external(network)
        with EvenRouting(rows_each, num_experts), tracker:
            for micro_batch in range(2):
                if micro_batch:  # all gradient buffers exist from now on
                    discard_gradients(parameters)
                    tracker.reset_mod_stats()
                    tracker._peak_mem, tracker._peak_mem_snap = {}, {}
                with layers.routings() as routings:  # which live to the end of the pass
                    if model.kind == "language":
                        hidden_states = network.hidden_states(sequences, BatchContext(documents=documents))
                    else:
                        hidden_states = network.hidden_states(
                            tokens, tokens, BatchContext(rows_per_group=rows_per_group)
                        )
                if model.kind == "language":
                    batch = SequencesBatch(sequences, sequences, BatchContext(documents=documents))
                    loss, _ = network.smoothed_nll(hidden_states, batch, 0.1)
                else:
                    loss, _ = smoothed_nll(hidden_states, network.output_embedding, tokens, 0.1, 0)
                loss.backward()
                del hidden_states, loss, routings
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    by_kind = {str(kind).rpartition(".")[2]: amount for kind, amount in peak.items()}
    return by_kind["ACT"] + by_kind["TEMP"]


def job(model: dict[str, Any], dtype: str = "float32") -> JobSpec:
    is_language = model.get("kind") == "language"
    return JobSpec.parse(
        {
            "model": model,
            "data": {
                "corpus": "packages" if is_language else "catalogs",
                "max_tokens": SEQUENCE if is_language else LENGTH,
            },
            "train": {"num_steps": 1, "batch_tokens": ROWS * LENGTH * (1 if is_language else 2), "dtype": dtype},
        }
    )


def predict_peak(spec: JobSpec, recompute: Recompute) -> int:
    cluster = Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=1 << 40)
    candidate = Candidate(Degrees(), Options(micro_batch_groups=spec.num_groups, recompute=recompute))
    memory = MemoryModel(spec, cluster, OURS).estimate(candidate)
    weight_bytes = sum(stored_bytes(parameter, 4) for parameter in spec.model.parameters())
    cast_bytes = memory.parameters - weight_bytes  # MemTracker counts them as activations
    return memory.activations + memory.dispatch + memory.workspace + memory.logits + cast_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "recompute"), GRID)
def test_activations_are_predicted_within_a_tenth(name: str, dtype: str, recompute: Recompute) -> None:
    spec = job(MODELS[name], dtype)
    measurement, prediction = measure_peak(spec.model, dtype, recompute), predict_peak(spec, recompute)
    mib = f"{measurement / 2**20:.1f} MiB measured, {prediction / 2**20:.1f} predicted"
    print(f"{name}, {dtype}, recompute {recompute}: {mib}")
    assert prediction == pytest.approx(measurement, rel=0.10)
