import triton
import triton.language as tl


@triton.jit
def power_of_two_scale(bound):
    bits = bound.to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 57), 254)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, scale, float("nan"))
