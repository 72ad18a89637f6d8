"""Experts in FP8: scales, kept weights, what is kept for the backward pass."""

from mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "rows of an FP8 weight gradient in order", "kernels/hopper/fp8_wgrad.py",
        "    return (row & ~9) | ((row & 1) << 3) | ((row >> 3) & 1)", "    return row",
        "tests/kernels/test_machine_code_fp8.py -k order",
    ),
    Mutation(
        "another expert's rows in an FP8 weight gradient", "kernels/hopper/fp8_wgrad.py",
        "        return gl.where(row < end, row, -1)", "        return row",
        "tests/fp8/test_wgrad.py -k nan", gpu=True,
    ),
    Mutation(
        "the first row of an FP8 weight gradient's experts is not carried",
        "kernels/hopper/fp8_wgrad.py", "n, rows.end > rows.start, work.N", "n, True, work.N",
        "tests/kernels/test_machine_code_fp8.py -k weight_gradient",
    ),
    Mutation(
        "FP8 weights outlive the step of a fused optimizer", "layer/fp8_weights.py",
        "        store._step(changed)\n", "        pass\n",
        "tests/fp8/test_fp8_weights.py -k fused",
    ),
    Mutation(
        "an optimizer quantizes weights that are not its own", "layer/fp8_weights.py",
        "self._quantized_now(kept, w1, w2, changed, kept.backend)",
        "self._quantized_now(kept, w1, w2, (True, True), kept.backend)",
        "tests/fp8/test_fp8_weights.py -k other_parameters",
    ),
    Mutation(
        "autograd does not see that FP8 weights were quantized again", "layer/fp8_kept.py",
        "    torch.autograd.graph.increment_version(buffers)\n", "",
        "tests/fp8/test_kept_weights_cuda.py -k refreshed", gpu=True,
    ),
    Mutation(
        "renew of FP8 weights forgets W2", "layer/fp8_weights.py",
        "(kept.first.has_changed(), kept.second.has_changed())",
        "(kept.first.has_changed(), False)", "tests/fp8/test_fp8_weights.py -k renew",
    ),
    Mutation(
        "FP8 weights outlive a change of a DTensor", "distributed/module.py",
        "            options.fp8_weights.follow(self.c_fc.weight, self.c_proj.weight)\n",
        "            pass\n", "tests/distributed/test_expert_parallel.py -k kept_fp8_weights_that",
    ),
    Mutation(
        "threads read FP8 weights that another one is quantizing", "layer/fp8_weights.py",
        "= threading.Lock()", "= __import__(\"contextlib\").nullcontext()",
        "tests/fp8/test_kept_weights_threads.py",
    ),
    Mutation(
        "other weights are quantized into FP8 weights that are in use", "layer/fp8_kept.py",
        "        quantized = _empty(w, norms)\n",
        "        quantized = _empty(w, norms) if part is None else part.quantized\n",
        "tests/fp8/test_fp8_weights.py -k other_weights_leave",
    ),
    Mutation(
        "a compiled model takes the FP8 weights of others", "layer/fp8_kept.py",
        "self.owner is w and ", "", "tests/fp8/test_kept_weights_compiled.py -k with_other",
    ),
    Mutation(
        "stale FP8 weights of a graph raise no flag", "kernels/quantize.py",
        "    tl.store(flag, tl.load(generation), mask=is_stale > 0)\n", "",
        "tests/fp8/test_quantize.py -k changed", interpreted=True,
    ),
    Mutation(
        "flags that were raised before a refresh count after it", "layer/fp8_kept.py",
        "self.read[1] == self.number", "self.read[1]",
        "tests/fp8/test_fp8_weights.py -k without_a_refresh",
    ),
    Mutation(
        "FP8 weights outlive their storage", "layer/fp8_kept.py",
        "w.untyped_storage()._cdata == self.storage.cdata and _place(w) == self.place", "True",
        "tests/fp8/test_fp8_weights.py -k assigned",
    ),
    Mutation(
        "FP8 weights outlive a write through .data", "layer/fp8_weights.py",
        "        found = kept.compared(w1, w2)\n",
        "        found = kept.first.quantized, kept.second.quantized\n",
        "tests/fp8/test_fp8_weights.py -k refresh",
    ),
    Mutation(
        "changed FP8 weights are not compared with what is cached", "kernels/quantize.py",
        "tl.where(is_stale > 0, float(\"nan\"), s)", "s",
        "tests/fp8/test_quantize.py -k changed", interpreted=True,
    ),
    Mutation(
        "each call compares the same sample of kept FP8 weights", "kernels/quantize.py",
        "(first + 1) % STEP", "first",
        "tests/fp8/test_quantize.py -k changed", interpreted=True,
    ),
    Mutation(
        "FP8 weights outlive an all-gather of FSDP2", "layer/fp8_weights.py",
        "        if is_gathered_by_fsdp2(owner):\n", "        if False:\n",
        "tests/fp8/test_kept_weights_sharded.py -k fsdp2",
    ),
    Mutation(
        "FP8: the norm of W2 without the rounding of subnormals", "reference/quantize.py",
        " + 2.0**-10 * math.sqrt(value.shape[dim])", "",
        "tests/fp8/test_fp8_values.py -k subnormal",
    ),
    Mutation(
        "FP8: the kernel's norm of W2 without the rounding of subnormals", "kernels/quantize.py",
        " + COUNT**0.5 * 0.0009765625", "",
        "tests/fp8/test_quantize.py -k weights_of_special", interpreted=True,
    ),
    Mutation(
        "FP8: the scale of A'ᵀ without the rows' own maxima", "reference/fp8_scales.py",
        "    of_a = torch.minimum(of_a, largest(do_row * (E4M3_MAX * a_scale.amax(0))))\n", "",
        "tests/fp8/test_fp8_values.py -k own_maximum",
    ),
    Mutation(
        "FP8: gradients of fp32 weights are rounded", "reference/fp8.py",
        "dw.copy_(found if", "dw.copy_(found.bfloat16() if",
        "tests/fp8/test_fp8.py -k fp32_weights",
    ),
    Mutation(
        "FP8: one scale for all rows of dZ", "reference/fp8_scales.py",
        "    dz_scale = scale_to_max(do_norm * of_block.amax(0))\n",
        "    dz_scale = scale_to_max((do_norm * of_block).amax().expand_as(do_norm))\n",
        "tests/fp8/test_fp8.py -k worst",
    ),
    Mutation(
        "FP8: a bound of dZ that does not hold", "reference/fp8_scales.py",
        "SLACK = 1.15 ", "SLACK = 0.8 ", "tests/fp8/test_fp8_values.py -k attained",
    ),
    Mutation(
        "FP8: the norms of dO and W2 before they are rounded", "reference/quantize.py",
        " * (17 / 16) + ", " + ", "tests/fp8/test_fp8_values.py -k attained",
    ),
    Mutation(
        "FP8: the slope of a clamped SwiGLU without its offset", "reference/fp8_scales.py",
        "Slope(offset=abs(offset), ", "Slope(", "tests/fp8/test_fp8_values.py -k offset",
    ),
    Mutation(
        "FP8: a clamp bounds every slope", "reference/fp8_scales.py",
        "limit if bounded else math.inf", "limit", "tests/fp8/test_fp8_values.py -k clamp",
    ),
    Mutation(
        "FP8: the slope of soft caps as of the gate alone", "reference/fp8_scales.py",
        "factor = max(share, slope / LARGEST_SLOPE)", "factor = slope / LARGEST_SLOPE",
        "tests/fp8/test_fp8_values.py -k bounds_of_soft_caps",
    ),
    Mutation(
        "FP8: half the slope of ReLU²", "reference/fp8_scales.py",
        "Slope(factor=2.0)", "Slope()", "tests/fp8/test_fp8_values.py -k attained",
    ),
    Mutation(
        "FP8: the bound of A' without |score|", "reference/fp8_scales.py",
        "    do_row = do_scale[token] * s.abs()\n", "    do_row = do_scale[token] * s\n",
        "tests/fp8/test_fp8_values.py -k below_zero",
    ),
    Mutation(
        "FP8: the kernel's bound of A' without |score|", "kernels/fp8_scales.py",
        "magnitude_bits(s * do)", "(s * do).to(tl.int32, bitcast=True)",
        "tests/fp8/test_quantize.py -k test_scales", interpreted=True,
    ),
    Mutation(
        "FP8: the mean of a column of |Z|", "reference/fp8.py",
        "zmax_columns[e] = largest[r].amax(0)", "zmax_columns[e] = largest[r].mean(0)",
        "tests/fp8/test_fp8_values.py -k saturates",
    ),
    Mutation(
        "FP8: one scale for all columns of dZᵀ", "reference/fp8_scales.py",
        "scale_to_max(of_dz), scale_to_max(of_a)",
        "scale_to_max(of_dz.amax(1, True).expand_as(of_dz)), scale_to_max(of_a)",
        "tests/fp8/test_fp8_values.py -k exact_maxima",
    ),
    Mutation(
        "FP8: one scale for all columns of A'ᵀ", "reference/fp8_scales.py",
        "scale_to_max(of_dz), scale_to_max(of_a)",
        "scale_to_max(of_dz), scale_to_max(of_a.amax(1, True).expand_as(of_a))",
        "tests/fp8/test_fp8_values.py -k drown",
    ),
    Mutation(
        "FP8: a repaired expert stays NaN", "reference/quantize.py",
        " | is_repaired", "", "tests/fp8/test_fp8_weights.py -k repaired",
    ),
    Mutation(
        "FP8 on a GPU other than Hopper", "validation.py",
        "        check_fp8_experts(arch, ", "        str(", "tests/fp8/test_fp8.py -k hopper",
    ),
    Mutation(
        "FP8: the transposed operand of frozen weights", "ops/fp8.py",
        "return of_rows, needs.weight and not", "return of_rows, not",
        "tests/fp8/test_fp8.py -k not_needed",
    ),
    Mutation(
        "FP8: Z is stored though it is recomputed", "layer/memory.py",
        "        if self.recompute:\n            return None\n", "",
        "tests/test_peak.py -k fp8",
    ),
    Mutation(
        "FP8: one scale of Z for all blocks of a row", "reference/fp8.py",
        "power_of_two_scale(zmax, BLOCK_FLOOR)",
        "power_of_two_scale(zmax.amax(0).expand_as(zmax), BLOCK_FLOOR)",
        "tests/fp8/test_fp8_memory.py -k other_sizes",
    ),
    Mutation(
        "FP8: weights are kept though they are quantized again", "ops/fp8.py",
        "if how.recompute and w.w8_t is not None else", "if how.recompute else",
        "tests/fp8/test_fp8_memory.py -k to_the_byte",
    ),
    Mutation(
        "FP8: weight gradients in bf16 without the scores", "ops/fp8.py",
        "kept.z_scale, scores, p, *act", "kept.z_scale, None, p, *act",
        "tests/fp8/test_fp8_memory.py -k weight_gradients_in_bf16",
    ),
    Mutation(
        "FP8: a slice reads the first columns of the weights", "launch/fp8.py",
        "else w8[:, columns]", "else w8[:, :n]",
        "tests/kernels/test_machine_code_fp8.py -k slices",
    ),
    Mutation(
        "A' of the next slot", "kernels/bf16_operands.py",
        "tl.load(scores + slot, mask=used", "tl.load(scores + slot + 1, mask=used",
        "tests/fp8/test_quantize.py -k scored", interpreted=True,
    ),
]  # fmt: skip
