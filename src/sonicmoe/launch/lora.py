"""Launches of the grouped GEMMs with a LoRA adapter."""

from dataclasses import replace

from ..gradients import DownGradients
from ..kernels.transpose import transpose_kernel
from ..shapes import ceil_div
from ..tuning import RowConfig, Target, row_config
from ..tuning.select import default_row_config
from . import grouped_gemm, memory
from .grouped_gemm import Lora
from .launcher import launch


def _config(kernel: str, itemsize: int, k: int, n: int, gated: bool, target: Target) -> RowConfig:
    """The layer's configuration for Hopper kernels, else one whose epilogue does not spill."""
    config = row_config(kernel, itemsize, k, n, gated, target)
    if config.hopper:
        return config
    config = default_row_config(kernel, itemsize, k, n, target._replace(gluon=False))
    # With a gate two slices spill up to 18 registers in the clamped activation.
    return replace(config, slices=4 if gated else 2) if kernel == "dz" else config


def lora_up(x, w1, b1, u, factor, p, activation, gate_up):
    n, hidden = w1.shape[1:]
    config = _config(
        "up", x.element_size(), hidden, n, activation.is_gated, grouped_gemm.target_of(x)
    )
    lora = Lora(u, factor)
    return grouped_gemm.up(x, w1, b1, p, activation, gate_up, "keep", config, lora)[:2]


def lora_gemm(a, w, bias, u, factor, p, kernel):
    n, k = w.shape[1:]
    config = _config(kernel, a.element_size(), k, n, True, grouped_gemm.target_of(a))
    return grouped_gemm.down(a, w, bias, None, p, config, Lora(u, factor), kernel)


def lora_down_backward(dout, z, w2, b2, u, factor, scores, p, activation, gate_up):
    hidden, intermediate = w2.shape[1:]
    gated, target = activation.is_gated, grouped_gemm.target_of(z)
    config = _config("dz", z.element_size(), hidden, intermediate, gated, target)
    needs = DownGradients(dz=True, dw2=True, db2=False, dscores=True)
    return grouped_gemm.dz_gemm(
        dout, z, None, w2, b2, scores, p, activation, gate_up, needs, config, Lora(u, factor)
    )


def scaled_transpose(t, scale, dtype):
    rows, columns = t.shape
    out = memory.empty((columns, rows), dtype, t.device)
    if t.numel():
        grid, sizes = (ceil_div(rows, 64), ceil_div(columns, 64)), {"BLOCK_P": 64, "BLOCK_Q": 64}
        launch(transpose_kernel, grid, t, out, scale, rows, columns, **sizes, num_warps=4)
    return out
