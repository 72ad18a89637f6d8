"""How kernels are launched, compiled and configured; what waits."""

from mutations.mutation import Mutation

_SYNC = (
    "    gated, target = activation.is_gated, target_of(x)\n",
    "    int(p.expert_start[-1])\n    gated, target = activation.is_gated, target_of(x)\n",
)
_LAYER = "tests/experts/test_gradients.py"

MUTATIONS = [
    Mutation(
        "the host reads a value", "launch/grouped_gemm.py", *_SYNC, "tests/test_no_waiting.py",
    ),
    Mutation(
        "gradients of fp32 weights are rounded", "launch/grouped_gemm.py",
        "torch.float32 if fp32 else w.dtype", "w.dtype",
        f"{_LAYER} -k fp32_weights", interpreted=True,
    ),
    Mutation(
        "a long batch waits for its permutation and sums to be compiled", "layer/meta.py",
        "BATCHES = (8, 2048)\n", "BATCHES = (8,)\n", "tests/test_warmup.py",
    ),
    Mutation(
        "a short batch waits for its permutation to be compiled", "layer/meta.py",
        "BATCHES = (8, 2048)\n", "BATCHES = (2048,)\n", "tests/test_warmup.py",
    ),
    Mutation(
        "launchers loaded side by side", "launch/triton_locks.py",
        "        with loading:\n", "        if True:\n", "tests/test_warmup.py",
    ),
    Mutation(
        "a kernel is launched with another dtype than it was compiled for", "launch/launcher.py",
        'kinds.append(a.dtype if address & 15 == 0 else (a.dtype, "unaligned"))',
        "kinds.append(address & 15 == 0)", "tests/test_launch.py",
    ),
    Mutation(
        "a copy of a strided buffer is written to", "ops/layout.py",
        "    elif not t.is_contiguous() or (", "    elif (",
        "tests/experts/test_layouts.py -k written_to",
    ),
    Mutation(
        "the host waits", "launch/grouped_gemm.py", *_SYNC,
        "tests/experts/test_streams_and_graphs.py -k never_wait", gpu=True,
    ),
    Mutation(
        "the host waits in a graph", "launch/grouped_gemm.py", *_SYNC,
        "tests/experts/test_streams_and_graphs.py -k cuda_graph", gpu=True,
    ),
    Mutation(
        "a tuned table may hold values of other types", "tuning/table.py",
        "if type(value) is not kind:", "if False:", "tests/tuning/test_table.py",
    ),
]  # fmt: skip
