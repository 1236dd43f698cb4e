"""Constants of kernels on real GPUs. Generated: `python -m benchmarks.device_constants` fits them on what
was measured, and writes this file; docs/planner.md has their errors.

float32 (TF32 on tensor cores) and float64 were not measured: they have bfloat16's share of their own peak, and the
bytes of their numbers. Between nodes only H100 and H200 were measured: `hop_s` and `forward_bytes_per_s` of others are
H100's, `line_bytes_per_s` is H100's at the ratio of the adapters. Nobody measured DeepEP on A100.
"""

from moe.plan.cluster.kernels import (
    CollectiveCost,
    ExchangeCost,
    FusedAttention,
    GroupedExperts,
    Kernels,
    MatrixProducts,
)

MEASURED: dict[str, Kernels] = {
    "a100-80": Kernels(
        products={
            "bfloat16": MatrixProducts(
                flops_per_s=2.501e14, bytes_per_s=1.468e12, start_s=4.589e-6, depth_s=1.314e-6, fill=63.78,
            ),
            "float32": MatrixProducts(
                flops_per_s=1.251e14, bytes_per_s=1.468e12, item_bytes=4.0, output_bytes=4.0,
                start_s=4.589e-6, depth_s=1.314e-6, fill=63.78,
            ),
            "float64": MatrixProducts(
                flops_per_s=1.563e13, bytes_per_s=1.468e12, item_bytes=8.0, output_bytes=8.0,
                start_s=4.589e-6, depth_s=1.314e-6, fill=63.78,
            ),
        },
        experts={
            "bfloat16": GroupedExperts(
                flops_per_s=1.753e14, bytes_per_s=1.657e12, start_s=1e-5, row_s=3.976e-12,
            ),
            "float32": GroupedExperts(
                flops_per_s=8.766e13, bytes_per_s=1.657e12, item_bytes=4.0, start_s=1e-5, row_s=7.952e-12,
            ),
            "float64": GroupedExperts(
                flops_per_s=1.096e13, bytes_per_s=1.657e12, item_bytes=8.0, start_s=1e-5, row_s=1.59e-11,
            ),
        },
        attention={
            256: FusedAttention(
                flops_per_s=2.135e14, start_s=1.098e-5, chain_s=2.234e-8, query_s=5.044e-13, key_s=3.214e-12,
            ),
            320: FusedAttention(
                flops_per_s=1.68e14, start_s=1.375e-5, chain_s=2.778e-8, query_s=7.8e-13, key_s=7.801e-13,
            ),
        },
        ring=CollectiveCost(
            bytes_per_s=2.125e11, start_s=8.974e-6, step_s=9.336e-7, own_bytes_per_s=6.777e11,
            ramp_s=2.533e-5, knee_bytes=3.046e6,
        ),
        all_to_all=CollectiveCost(
            bytes_per_s=2.004e11, start_s=1.149e-5, step_s=3.803e-7, own_bytes_per_s=8.353e11,
            ramp_s=1.797e-5, knee_bytes=2.531e6,
        ),
    ),
    "h100": Kernels(
        products={
            "bfloat16": MatrixProducts(
                flops_per_s=8.397e14, bytes_per_s=3.333e12, start_s=2.34e-6, depth_s=1.67e-6, fill=102.2,
            ),
            "fp8": MatrixProducts(
                flops_per_s=1.443e15, bytes_per_s=2.797e12, item_bytes=1.0, start_s=5.542e-6,
                depth_s=5.659e-7, depth_power=1.0, fill=19.63, quantise_s=1.779e-12,
            ),
            "float32": MatrixProducts(
                flops_per_s=4.194e14, bytes_per_s=3.333e12, item_bytes=4.0, output_bytes=4.0, start_s=2.34e-6,
                depth_s=1.67e-6, fill=102.2,
            ),
            "float64": MatrixProducts(
                flops_per_s=5.688e13, bytes_per_s=3.333e12, item_bytes=8.0, output_bytes=8.0, start_s=2.34e-6,
                depth_s=1.67e-6, fill=102.2,
            ),
        },
        experts={
            "bfloat16": GroupedExperts(
                flops_per_s=9.89e14, bytes_per_s=3.245e12, start_s=3.19e-5, row_s=3.057e-12,
                token_s=1.139e-12,
            ),
            "fp8": GroupedExperts(
                flops_per_s=1.978e15, bytes_per_s=3.086e12, item_bytes=1.0, start_s=2.958e-5, row_s=3.596e-12,
                token_s=1.842e-12,
            ),
            "float32": GroupedExperts(
                flops_per_s=4.94e14, bytes_per_s=3.245e12, item_bytes=4.0, start_s=3.19e-5, row_s=6.115e-12,
                token_s=2.278e-12,
            ),
            "float64": GroupedExperts(
                flops_per_s=6.7e13, bytes_per_s=3.245e12, item_bytes=8.0, start_s=3.19e-5, row_s=1.223e-11,
                token_s=4.557e-12,
            ),
        },
        attention={
            128: FusedAttention(
                flops_per_s=5.313e14, start_s=1.241e-5, chain_s=2.949e-9, query_s=1.382e-12, key_s=2.723e-12,
                window_key_s=2.078e-12,
            ),
            256: FusedAttention(
                flops_per_s=6.65e14, start_s=1.334e-5, chain_s=1.182e-9, query_s=7.726e-13, key_s=1.413e-12,
                window_query_s=4.021e-13, window_key_s=1.587e-12,
            ),
            320: FusedAttention(
                flops_per_s=6.444e14, start_s=1.716e-5, chain_s=9.579e-9, query_s=5.343e-13, key_s=5.343e-13,
            ),
            384: FusedAttention(
                flops_per_s=7.943e14, start_s=1.331e-5, chain_s=5.167e-9, query_s=5.48e-13, key_s=4.363e-12,
            ),
            512: FusedAttention(
                flops_per_s=7.008e14, start_s=1.94e-5, chain_s=2.39e-9, query_s=5.082e-13, key_s=1.774e-12,
                window_query_s=6.515e-13, window_key_s=6.548e-13,
            ),
        },
        ring=CollectiveCost(
            bytes_per_s=3.653e11, start_s=4.871e-6, step_s=8.402e-7, own_bytes_per_s=7.25e11, ramp_s=1.424e-5,
            knee_bytes=4.707e6,
        ),
        all_to_all=CollectiveCost(
            bytes_per_s=3.041e11, start_s=6.515e-6, step_s=1.194e-7, own_bytes_per_s=1.972e12, ramp_s=5.19e-6,
            knee_bytes=3.544e5,
        ),
        exchange=ExchangeCost(
            start_s=3.782e-5, link_bytes_per_s=4.166e11, own_bytes_per_s=3.208e11, copy_s=1.73e-9,
            hop_s=4.771e-5, line_bytes_per_s=4.699e10, forward_bytes_per_s=1.207e11, most_nodes=4,
        ),
    ),
    "h200": Kernels(
        products={
            "bfloat16": MatrixProducts(
                flops_per_s=8.279e14, bytes_per_s=4.338e12, start_s=2.351e-6, depth_s=1.657e-6, fill=96.82,
            ),
            "fp8": MatrixProducts(
                flops_per_s=1.545e15, bytes_per_s=3.861e12, item_bytes=1.0, start_s=5.838e-6,
                depth_s=5.601e-7, depth_power=1.0, fill=148.7, quantise_s=1.464e-12,
            ),
            "float32": MatrixProducts(
                flops_per_s=4.135e14, bytes_per_s=4.338e12, item_bytes=4.0, output_bytes=4.0,
                start_s=2.351e-6, depth_s=1.657e-6, fill=96.82,
            ),
            "float64": MatrixProducts(
                flops_per_s=5.609e13, bytes_per_s=4.338e12, item_bytes=8.0, output_bytes=8.0,
                start_s=2.351e-6, depth_s=1.657e-6, fill=96.82,
            ),
        },
        experts={
            "bfloat16": GroupedExperts(
                flops_per_s=9.89e14, bytes_per_s=4.761e12, start_s=3.276e-5, row_s=2.424e-12,
                token_s=9.286e-13,
            ),
            "fp8": GroupedExperts(
                flops_per_s=1.978e15, bytes_per_s=4.399e12, item_bytes=1.0, start_s=3.058e-5, row_s=3.097e-12,
                token_s=1.574e-12,
            ),
            "float32": GroupedExperts(
                flops_per_s=4.94e14, bytes_per_s=4.761e12, item_bytes=4.0, start_s=3.276e-5, row_s=4.849e-12,
                token_s=1.857e-12,
            ),
            "float64": GroupedExperts(
                flops_per_s=6.7e13, bytes_per_s=4.761e12, item_bytes=8.0, start_s=3.276e-5, row_s=9.698e-12,
                token_s=3.714e-12,
            ),
        },
        attention={
            128: FusedAttention(
                flops_per_s=5.173e14, start_s=1.271e-5, chain_s=2.873e-9, query_s=1.332e-12, key_s=2.335e-12,
                window_key_s=2.129e-12,
            ),
            256: FusedAttention(
                flops_per_s=6.524e14, start_s=1.336e-5, chain_s=1.24e-9, query_s=7.416e-13, key_s=1.013e-12,
                window_query_s=3.993e-13, window_key_s=1.709e-12,
            ),
            320: FusedAttention(
                flops_per_s=6.384e14, start_s=1.707e-5, chain_s=9.212e-9, query_s=4.512e-13, key_s=4.511e-13,
            ),
            384: FusedAttention(
                flops_per_s=7.818e14, start_s=1.329e-5, chain_s=5.25e-9, query_s=5.534e-13, key_s=3.842e-12,
            ),
            512: FusedAttention(
                flops_per_s=6.681e14, start_s=1.937e-5, chain_s=1.98e-9, query_s=3.986e-13, key_s=1.447e-12,
                window_query_s=6.725e-13, window_key_s=6.755e-13,
            ),
        },
        ring=CollectiveCost(
            bytes_per_s=3.68e11, start_s=4.636e-6, step_s=8.823e-7, own_bytes_per_s=7.452e11, ramp_s=1.321e-5,
            knee_bytes=4.416e6,
        ),
        all_to_all=CollectiveCost(
            bytes_per_s=3.072e11, start_s=6.235e-6, step_s=2.252e-7, own_bytes_per_s=2.295e12,
            ramp_s=4.585e-6, knee_bytes=1.735e5,
        ),
        exchange=ExchangeCost(
            start_s=3.825e-5, link_bytes_per_s=4.092e11, own_bytes_per_s=3.421e11, copy_s=1.633e-9,
            hop_s=4.751e-5, line_bytes_per_s=4.699e10, forward_bytes_per_s=1.208e11, most_nodes=4,
        ),
    ),
    "b200": Kernels(
        products={
            "bfloat16": MatrixProducts(
                flops_per_s=1.638e15, bytes_per_s=6.263e12, start_s=1.716e-6, depth_s=1.635e-6, fill=7.359,
            ),
            "fp8": MatrixProducts(
                flops_per_s=3.015e15, bytes_per_s=6.09e12, item_bytes=1.0, start_s=5.991e-6, depth_s=5.581e-7,
                depth_power=1.0, fill=239.0, quantise_s=8.739e-13,
            ),
            "float32": MatrixProducts(
                flops_per_s=8.189e14, bytes_per_s=6.263e12, item_bytes=4.0, output_bytes=4.0,
                start_s=1.716e-6, depth_s=1.635e-6, fill=7.359,
            ),
            "float64": MatrixProducts(
                flops_per_s=2.693e13, bytes_per_s=6.263e12, item_bytes=8.0, output_bytes=8.0,
                start_s=1.716e-6, depth_s=1.635e-6, fill=7.359,
            ),
        },
        experts={
            "bfloat16": GroupedExperts(
                flops_per_s=2.243e15, bytes_per_s=7.62e12, start_s=2.542e-5, row_s=1.045e-12,
                token_s=1.256e-12,
            ),
            "fp8": GroupedExperts(
                flops_per_s=4.5e15, bytes_per_s=7.218e12, item_bytes=1.0, start_s=3.312e-5, row_s=2.031e-12,
                token_s=1.076e-12,
            ),
            "float32": GroupedExperts(
                flops_per_s=1.122e15, bytes_per_s=7.62e12, item_bytes=4.0, start_s=2.542e-5, row_s=2.09e-12,
                token_s=2.512e-12,
            ),
            "float64": GroupedExperts(
                flops_per_s=3.689e13, bytes_per_s=7.62e12, item_bytes=8.0, start_s=2.542e-5, row_s=4.179e-12,
                token_s=5.025e-12,
            ),
        },
        attention={
            128: FusedAttention(
                flops_per_s=8.139e14, start_s=7.882e-6, chain_s=6.558e-9, query_s=7.162e-13,
                window_query_s=4.198e-13,
            ),
            256: FusedAttention(
                flops_per_s=1.419e15, start_s=8.906e-6, chain_s=6.539e-9, query_s=5.344e-13, key_s=1.765e-14,
                window_query_s=2.458e-13,
            ),
            320: FusedAttention(
                flops_per_s=1.555e15, start_s=1.546e-5, chain_s=7.855e-9, query_s=3.687e-13, key_s=3.687e-13,
            ),
            512: FusedAttention(
                flops_per_s=1.465e15, start_s=9.807e-6, chain_s=4.408e-9, query_s=3.66e-13, key_s=5.28e-13,
            ),
        },
        ring=CollectiveCost(
            bytes_per_s=6.836e11, start_s=6.946e-6, step_s=1.336e-6, own_bytes_per_s=1.378e12,
            ramp_s=1.515e-5, knee_bytes=7.324e6,
        ),
        all_to_all=CollectiveCost(
            bytes_per_s=5.884e11, start_s=9.242e-6, step_s=1.832e-7, own_bytes_per_s=7.344e11,
            ramp_s=5.436e-6, knee_bytes=8.579e5,
        ),
        exchange=ExchangeCost(
            start_s=4.697e-5, link_bytes_per_s=9e11, own_bytes_per_s=2.546e11, copy_s=6.321e-9,
            hop_s=4.771e-5, line_bytes_per_s=4.699e10, forward_bytes_per_s=1.207e11,
        ),
    ),
    "gb200": Kernels(
        products={
            "bfloat16": MatrixProducts(
                flops_per_s=1.813e15, bytes_per_s=6.63e12, start_s=1.733e-6, depth_s=1.62e-6, fill=0.01,
            ),
            "fp8": MatrixProducts(
                flops_per_s=3.295e15, bytes_per_s=5.892e12, item_bytes=1.0, start_s=6.098e-6,
                depth_s=5.235e-7, depth_power=1.0, fill=220.4, quantise_s=8.43e-13,
            ),
            "float32": MatrixProducts(
                flops_per_s=9.066e14, bytes_per_s=6.63e12, item_bytes=4.0, output_bytes=4.0, start_s=1.733e-6,
                depth_s=1.62e-6, fill=0.01,
            ),
            "float64": MatrixProducts(
                flops_per_s=2.901e13, bytes_per_s=6.63e12, item_bytes=8.0, output_bytes=8.0, start_s=1.733e-6,
                depth_s=1.62e-6, fill=0.01,
            ),
        },
        experts={
            "bfloat16": GroupedExperts(
                flops_per_s=2.5e15, bytes_per_s=8e12, start_s=2.496e-5, row_s=1.017e-12, hidden_s=2.227e-13,
                token_s=1.19e-12,
            ),
            "fp8": GroupedExperts(
                flops_per_s=5e15, bytes_per_s=7.444e12, item_bytes=1.0, start_s=3.227e-5, row_s=1.965e-12,
                token_s=1.039e-12,
            ),
            "float32": GroupedExperts(
                flops_per_s=1.25e15, bytes_per_s=8e12, item_bytes=4.0, start_s=2.496e-5, row_s=2.034e-12,
                hidden_s=4.455e-13, token_s=2.379e-12,
            ),
            "float64": GroupedExperts(
                flops_per_s=4e13, bytes_per_s=8e12, item_bytes=8.0, start_s=2.496e-5, row_s=4.069e-12,
                hidden_s=8.909e-13, token_s=4.758e-12,
            ),
        },
        attention={
            128: FusedAttention(
                flops_per_s=9e14, start_s=1.055e-5, chain_s=7.154e-9, query_s=8.397e-13, key_s=1.574e-12,
                window_query_s=3.283e-13, window_key_s=5.646e-13,
            ),
            256: FusedAttention(
                flops_per_s=1.55e15, start_s=1.343e-5, chain_s=5.751e-9, query_s=4.565e-13, key_s=6.195e-13,
                window_query_s=2.709e-13, window_key_s=1.397e-12,
            ),
            320: FusedAttention(
                flops_per_s=1.685e15, start_s=1.527e-5, chain_s=8.169e-9, query_s=3.587e-13, key_s=3.587e-13,
            ),
            512: FusedAttention(
                flops_per_s=1.511e15, start_s=1.139e-5, chain_s=4.859e-9, query_s=2.767e-13, key_s=5.793e-13,
            ),
        },
        ring=CollectiveCost(
            bytes_per_s=6.805e11, start_s=8.038e-6, step_s=1.357e-6, own_bytes_per_s=1.457e12,
            ramp_s=1.445e-5, knee_bytes=7.748e6,
        ),
        all_to_all=CollectiveCost(
            bytes_per_s=6.116e11, start_s=9.555e-6, step_s=2.529e-7, own_bytes_per_s=8.132e11,
            ramp_s=5.986e-6, knee_bytes=1.1e5,
        ),
        exchange=ExchangeCost(
            start_s=3.576e-5, link_bytes_per_s=9e11, own_bytes_per_s=3.105e11, copy_s=1.197e-8,
            hop_s=4.771e-5, line_bytes_per_s=4.699e10, forward_bytes_per_s=1.207e11,
        ),
    ),
    "b300": Kernels(
        products={
            "bfloat16": MatrixProducts(
                flops_per_s=1.805e15, bytes_per_s=6.412e12, start_s=1.508e-6, depth_s=1.6e-6, fill=0.01,
            ),
            "fp8": MatrixProducts(
                flops_per_s=3.274e15, bytes_per_s=6.1e12, item_bytes=1.0, start_s=5.996e-6, depth_s=5.258e-7,
                depth_power=1.0, fill=279.1, quantise_s=9.001e-13,
            ),
            "float32": MatrixProducts(
                flops_per_s=9.024e14, bytes_per_s=6.412e12, item_bytes=4.0, output_bytes=4.0,
                start_s=1.508e-6, depth_s=1.6e-6, fill=0.01,
            ),
            "float64": MatrixProducts(
                flops_per_s=1.043e12, bytes_per_s=6.412e12, item_bytes=8.0, output_bytes=8.0,
                start_s=1.508e-6, depth_s=1.6e-6, fill=0.01,
            ),
        },
        experts={
            "bfloat16": GroupedExperts(
                flops_per_s=2.25e15, bytes_per_s=7.6e12, start_s=2.403e-5, row_s=9.099e-13, token_s=1.265e-12,
            ),
            "fp8": GroupedExperts(
                flops_per_s=4.5e15, bytes_per_s=7.125e12, item_bytes=1.0, start_s=3.153e-5, row_s=1.987e-12,
                token_s=1.064e-12,
            ),
            "float32": GroupedExperts(
                flops_per_s=1.125e15, bytes_per_s=7.6e12, item_bytes=4.0, start_s=2.403e-5, row_s=1.82e-12,
                token_s=2.529e-12,
            ),
            "float64": GroupedExperts(
                flops_per_s=1.3e12, bytes_per_s=7.6e12, item_bytes=8.0, start_s=2.403e-5, row_s=3.64e-12,
                token_s=5.058e-12,
            ),
        },
        attention={
            128: FusedAttention(
                flops_per_s=1.188e15, start_s=9.689e-6, chain_s=4.91e-9, query_s=8.408e-13, key_s=1.625e-12,
                window_query_s=3.251e-13, window_key_s=4.674e-13,
            ),
            256: FusedAttention(
                flops_per_s=1.768e15, start_s=1.212e-5, chain_s=3.965e-9, query_s=4.34e-13, key_s=6.707e-13,
                window_query_s=2.413e-13, window_key_s=1.327e-12,
            ),
            320: FusedAttention(
                flops_per_s=1.783e15, start_s=1.363e-5, chain_s=7.244e-9, query_s=3.231e-13, key_s=3.231e-13,
            ),
            512: FusedAttention(
                flops_per_s=1.631e15, start_s=1.029e-5, chain_s=4.267e-9, query_s=3.241e-13, key_s=5.737e-13,
            ),
        },
        ring=CollectiveCost(
            bytes_per_s=6.868e11, start_s=7.153e-6, step_s=1.329e-6, own_bytes_per_s=1.544e12,
            ramp_s=1.843e-5, knee_bytes=9.543e6,
        ),
        all_to_all=CollectiveCost(
            bytes_per_s=6e11, start_s=8.725e-6, step_s=3.026e-7, own_bytes_per_s=8.055e11, ramp_s=6.056e-6,
            knee_bytes=1.496e5,
        ),
        exchange=ExchangeCost(
            start_s=4.772e-5, link_bytes_per_s=9e11, own_bytes_per_s=2.632e11, copy_s=6.213e-9,
            hop_s=4.771e-5, line_bytes_per_s=9.397e10, forward_bytes_per_s=1.207e11,
        ),
    ),
    "gb300": Kernels(
        products={
            "bfloat16": MatrixProducts(
                flops_per_s=2.006e15, bytes_per_s=6.525e12, start_s=1.719e-6, depth_s=1.593e-6, fill=0.01,
            ),
            "fp8": MatrixProducts(
                flops_per_s=3.705e15, bytes_per_s=5.93e12, item_bytes=1.0, start_s=6.047e-6, depth_s=5.236e-7,
                depth_power=1.0, fill=232.5, quantise_s=8.129e-13,
            ),
            "float32": MatrixProducts(
                flops_per_s=1.003e15, bytes_per_s=6.525e12, item_bytes=4.0, output_bytes=4.0,
                start_s=1.719e-6, depth_s=1.593e-6, fill=0.01,
            ),
            "float64": MatrixProducts(
                flops_per_s=1.124e12, bytes_per_s=6.525e12, item_bytes=8.0, output_bytes=8.0,
                start_s=1.719e-6, depth_s=1.593e-6, fill=0.01,
            ),
        },
        experts={
            "bfloat16": GroupedExperts(
                flops_per_s=2.5e15, bytes_per_s=7.771e12, start_s=2.438e-5, row_s=9.42e-13, token_s=1.144e-12,
            ),
            "fp8": GroupedExperts(
                flops_per_s=5e15, bytes_per_s=7.294e12, item_bytes=1.0, start_s=3.17e-5, row_s=1.92e-12,
                token_s=1.039e-12,
            ),
            "float32": GroupedExperts(
                flops_per_s=1.25e15, bytes_per_s=7.771e12, item_bytes=4.0, start_s=2.438e-5, row_s=1.884e-12,
                token_s=2.288e-12,
            ),
            "float64": GroupedExperts(
                flops_per_s=1.4e12, bytes_per_s=7.771e12, item_bytes=8.0, start_s=2.438e-5, row_s=3.768e-12,
                token_s=4.576e-12,
            ),
        },
        attention={
            128: FusedAttention(
                flops_per_s=1.277e15, start_s=1.045e-5, chain_s=4.816e-9, query_s=8.35e-13, key_s=1.64e-12,
                window_query_s=2.9e-13, window_key_s=3.785e-13,
            ),
            256: FusedAttention(
                flops_per_s=1.96e15, start_s=1.275e-5, chain_s=4.296e-9, query_s=4.088e-13, key_s=6.597e-13,
                window_query_s=2.597e-13, window_key_s=1.241e-12,
            ),
            320: FusedAttention(
                flops_per_s=1.997e15, start_s=1.452e-5, chain_s=7.484e-9, query_s=3.191e-13, key_s=3.183e-13,
            ),
            512: FusedAttention(
                flops_per_s=1.859e15, start_s=1.018e-5, chain_s=5.583e-9, query_s=3.266e-13, key_s=5.625e-13,
            ),
        },
        ring=CollectiveCost(
            bytes_per_s=6.819e11, start_s=7.408e-6, step_s=1.373e-6, own_bytes_per_s=1.478e12, ramp_s=1.45e-5,
            knee_bytes=7.321e6,
        ),
        all_to_all=CollectiveCost(
            bytes_per_s=6.135e11, start_s=9.405e-6, step_s=2.305e-7, own_bytes_per_s=8.24e11, ramp_s=5.767e-6,
            knee_bytes=1.078e5,
        ),
        exchange=ExchangeCost(
            start_s=3.535e-5, link_bytes_per_s=9e11, own_bytes_per_s=3.188e11, copy_s=1.187e-8,
            hop_s=4.771e-5, line_bytes_per_s=9.397e10, forward_bytes_per_s=1.207e11,
        ),
    ),
}  # fmt: skip
