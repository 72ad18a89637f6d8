"""GEMMs, their tiles and the combine."""

from mutations.mutation import Mutation

_LAYER = "tests/experts/test_gradients.py"

MUTATIONS = [
    Mutation(
        "activation: a soft cap whose slope is that of one side", "kernels/activation.py",
        "        return value, 1.0 - t * t\n", "        return value, 1.0 - t\n",
        "tests/kernels/test_activations.py -k soft_caps", interpreted=True,
    ),
    Mutation(
        "activation: a soft cap that cancels next to zero", "kernels/activation.py",
        "tl.where(tl.abs(x) < CAP / 128, x, far)", "far",
        "tests/kernels/test_activations.py -k soft_caps", interpreted=True,
    ),
    Mutation(
        "activation: the smaller of σ(±v) as a difference from 1", "kernels/activation.py",
        "smaller = e * larger", "smaller = 1.0 - larger",
        "tests/kernels/test_activations.py -k far_below_zero", interpreted=True,
    ),
    Mutation(
        "main_grad is overwritten by the kernel", "kernels/triton/wgrad.py",
        "            acc += tl.load(ptr, mask=inside, other=0.0)\n", "            pass\n",
        f"{_LAYER} -k buffer", interpreted=True,
    ),
    Mutation(
        "another expert's rows in a weight gradient", "kernels/triton/wgrad.py",
        "    ok = rows < end\n    if TMA:\n", "    ok = rows < end + BLOCK_K\n    if TMA:\n",
        f"{_LAYER} -k zipf", interpreted=True,
    ),
    Mutation(
        "the last span of a long expert is left out", "kernels/spans.py",
        "for j in tl.range(0, spans):", "for j in tl.range(0, spans - 1):",
        f"{_LAYER} -k long", interpreted=True,
    ),
    Mutation(
        "the rows past the last whole band are left out", "kernels/tile_order.py",
        "tl.where(band == bands - 1, tl.maximum(m_tiles - first, 1), HIGH)", "HIGH",
        "tests/kernels/test_tile_order.py", interpreted=True,
    ),
    Mutation(
        "gathered rows at 32 bits", "kernels/hopper/ring.py",
        "upper.to(gl.int64) * K", "upper * K",
        "tests/experts/test_large.py -k more_elements", gpu=True,
    ),
    Mutation(
        "combined rows at 32 bits", "kernels/combine.py",
        "y + row.to(tl.int64) * H + h", "y + row * H + h",
        "tests/experts/test_large.py -k more_elements", gpu=True,
    ),
    Mutation(
        "another expert's rows in a weight gradient on Hopper", "kernels/hopper/wgrad.py",
        "            ok = k + r < rows.end\n", "            ok = k + r < rows.end + BLOCK_K\n",
        "tests/experts/test_promises.py -k nan", gpu=True,
    ),
    Mutation(
        "main_grad of the wrong columns", "kernels/hopper/wgrad.py",
        "                column = n0 + i * QUARTER\n                if self.out_fp32",
        "                column = n0\n                if self.out_fp32",
        "tests/experts/test_gradients.py -k buffer", gpu=True,
    ),
]  # fmt: skip
