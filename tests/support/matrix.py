"""Cases of the layer on a GPU: every activation × dtype × bias × gate/up layout × weight storage,
every routing, shapes at the edges. Nearly every case compiles kernels of its own."""

import torch
from helpers import ROUTINGS, Case, matrix

from sonicmoe import ActivationType

# H and I multiples of 8 but of no tile; more than one tile a GEMM in every direction, and more
# tiles than an H200 has multiprocessors; dropped slots.
LAYOUTS = matrix("8000,264,136,100,3", routing="dropped")
ROUTED = [
    Case(f"400,256,128,8,{8 if routing == 'all_experts' else 2}", routing=routing)
    for routing in ROUTINGS
]
SHAPES = [
    "0,64,64,4,2",  # no token
    "1,64,64,4,2",  # one token
    "37,64,64,4,2",  # fewer tokens than a tile
    "128,128,128,1,1",  # one expert, whole tiles
    "129,128,128,1,1",  # one row more
    "50,8,8,3,3",  # the smallest H and I, smaller than every tile; K = E
    "200,264,136,5,2",  # multiples of 8, of no tile
    "60,72,2056,3,2",  # I longer than many tiles, H short
    "60,2056,72,3,2",  # H longer than many tiles, I short
    "300,64,64,512,10",  # most experts with few rows, some with none
    "97,96,64,130,6",  # E past a power of two
    "2000,128,64,4,1",  # K = 1
]
EDGES = [
    Case(shape, dtype, bias=True) for shape in SHAPES for dtype in (torch.bfloat16, torch.float32)
]
# Experts long enough that their weight gradients are split: up to 24000 rows, spans of 1024.
LONG = [
    Case("12000,264,136,6,2", dtype, routing=routing, transposed=transposed)
    for routing in ("one_expert", "zipf", "empty_experts")
    for dtype in (torch.bfloat16, torch.float32)
    for transposed in (False, True)
]
# Several tiles in every direction, the last of them half empty, for each epilogue.
WIDE = [
    Case("1500,520,328,7,2", torch.bfloat16, activation, bias, gate_up, transposed)
    for activation, gate_up in (
        (ActivationType.SWIGLU, "interleaved"),
        (ActivationType.SWIGLU, "concatenated"),
        (ActivationType.RELU_SQ, "interleaved"),
    )
    for bias in (False, True)
    for transposed in (False, True)
]
NARROW = [
    Case("300,64,64,5,2", activation=activation, bias=True)
    for activation in (ActivationType.GELU, ActivationType.RELU_SQ)
]
CASES = [*LAYOUTS, *ROUTED, *EDGES, *LONG, *WIDE, *NARROW]
