"""The cost model of a case as text: FLOPs, memory, and the roofline time of every step."""

from typing import Any

from ..layer.memory import KEEP, MemoryPolicy
from ..moe import MoE
from . import cost
from .cases import Case
from .cost import Gpu, Stage
from .tables import table

MIB = 2**20


def cost_report(
    case: Case,
    gpu: Gpu,
    itemsize: int,
    tile_m: int,
    policy: MemoryPolicy = KEEP,
    precision: str | None = None,
) -> str:
    """The report; raises a ValueError if the layer cannot run the case on this GPU."""
    p = case.problem
    _check(case, gpu, policy, precision)
    kept = cost.kept_bytes(p, itemsize, tile_m, case.router, policy, precision)
    peak = cost.peak_bytes(p, itemsize, tile_m, case.router, policy, precision)
    forward = cost.forward_stages(p, itemsize, memory=policy, precision=precision)
    backward = cost.backward_stages(p, itemsize, memory=policy, precision=precision)
    rates = f"on one {gpu.name} ({gpu.source})"
    if precision is not None:
        rates += f", {precision} without the quantization of X, dO and the weights"
    even = [p.R // p.E + (e < p.R % p.E) for e in range(p.E)]
    memory = kept | {
        "kept for backward": sum(kept.values()),
        "x (the caller's)": cost.caller_bytes(p, itemsize),
        "peak forward": peak.forward,
        "peak backward": peak.backward,
    }
    weights = cost.weight_bytes(p, itemsize)
    return "\n".join(
        [
            f"\n{case.name}: T={p.T} H={p.H} I={p.I} E={p.E} K={p.K}, {case.activation.value}",
            f"GEMMs: {cost.forward_flops(p) / 1e12:.2f} TFLOP forward, "
            f"{cost.backward_flops(p) / 1e12:.2f} backward",
            f"padding: {cost.padding_share(even, tile_m):.1%} of the rows with even experts "
            f"and tiles of {tile_m} rows",
            "",
            table(
                ("memory", "bytes", "MiB"),
                [[name, size, f"{size / MIB:.2f}"] for name, size in memory.items()],
            ),
            "",
            table(
                ("W1 and W2", "bytes", "MiB"),
                [[name, size, f"{size / MIB:.2f}"] for name, size in weights.items()],
            ),
            "",
            table(
                ("step", "GFLOP", "MB moved", "roofline ms", "bound by"),
                _rows("forward", forward, gpu, itemsize)
                + _rows("backward", backward, gpu, itemsize),
            ),
            rates,
        ]
    )


def _check(case: Case, gpu: Gpu, policy: MemoryPolicy, precision: str | None) -> None:
    """Build the layer on the meta device, which takes no memory, so that its own checks run."""
    p = case.problem
    options: dict[str, Any] = {"router": case.router, "precision": precision, "memory": policy}
    try:
        gpu.check(policy, precision)
        MoE(p.E, p.K, p.H, p.I, case.activation, case.bias, **options, device="meta")
    except ValueError as error:
        raise ValueError(f"{case.name}: {error}") from None


def _rows(name: str, stages: list[Stage], gpu: Gpu, itemsize: int) -> list[list[str]]:
    rows = [
        [
            stage.name,
            f"{stage.flops / 1e9:.1f}",
            f"{stage.traffic / 1e6:.1f}",
            f"{1e3 * gpu.seconds(stage, itemsize):.4f}",
            gpu.bound(stage, itemsize),
        ]
        for stage in stages
    ]
    flops, traffic = sum(s.flops for s in stages), sum(s.traffic for s in stages)
    roofline = sum(gpu.seconds(stage, itemsize) for stage in stages)
    return [
        *rows,
        [name, f"{flops / 1e9:.1f}", f"{traffic / 1e6:.1f}", f"{1e3 * roofline:.4f}", ""],
    ]
