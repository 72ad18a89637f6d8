"""Packed weights: nibbles, scales, parts."""

from mutations.mutation import Mutation

INTERPRETED = "tests/packed/test_packed_interpreted.py"
PARAMETER = "tests/packed/test_packed_parameter.py"
LOADING = "tests/integrations/test_packed_loading.py"
QUANTIZERS, PACKED_PARAMETER = "integrations/quantizers.py", "integrations/packed_parameter.py"
MUTATIONS = [
    Mutation(
        "the low nibble of NF4 is the even weight", "kernels/packed.py",
        "(4 * (I ^ 1))", "(4 * I)", f"{INTERPRETED} -k decoders", interpreted=True,
    ),
    Mutation(
        "plain PyTorch: the low nibble of NF4 is the even weight", "reference/weights.py",
        "(high, low) if", "(low, high) if", "tests/packed/test_packed.py -k dequantize",
    ),
    Mutation(
        "the high nibble of MXFP4 is the even weight", "kernels/packed.py",
        "(_shifted(word, 28 - 4 * I) & -0x80000000) | (_shifted(word, 22 - 4 * I) & 0x1C00000)",
        "(_shifted(word, 28 - 4 * (I ^ 1)) & -0x80000000)"
        " | (_shifted(word, 22 - 4 * (I ^ 1)) & 0x1C00000)",
        f"{INTERPRETED} -k decoders", interpreted=True,
    ),
    Mutation(
        "MXFP4 with scales that are off by one", "kernels/packed.py",
        "_as_float((low + 126) << 23)", "_as_float((low + 127) << 23)",
        f"{INTERPRETED} -k decoders", interpreted=True,
    ),
    Mutation(
        "plain PyTorch: MXFP4 with scales that are off by one", "reference/weights.py",
        "(scale.double() - 127)", "(scale.double() - 128)",
        "tests/packed/test_packed.py -k dequantize",
    ),
    Mutation(
        "the largest scales of MXFP4 overflow", "kernels/packed.py",
        "low = tl.minimum(scale, 128)", "low = scale",
        f"{INTERPRETED} -k every_value", interpreted=True,
    ),
    Mutation(
        "an absmax of NF4 for 32 weights", "kernels/packed.py",
        "block = (expert * (P * Q // 8) + word) // 8",
        "block = (expert * (P * Q // 8) + word) // 4",
        f"{INTERPRETED} -k decoders", interpreted=True,
    ),
    Mutation(
        "NaN of FP8 weights becomes a number", "kernels/packed.py",
        "        if WITH_NAN:\n", "        if not WITH_NAN:\n",
        f"{INTERPRETED} -k every_value", interpreted=True,
    ),
    Mutation(
        "in e4m3 a weight is not rounded to bf16 first", "kernels/packed.py",
        '    if FORMAT == "mxfp4":  # all', '    if FORMAT != "":  # all',
        f"{INTERPRETED} -k decoders", interpreted=True,
    ),
    Mutation(
        "a part of the experts takes the first tiles", "kernels/packed.py",
        "(skipped + index)[:, None]", "index[:, None]",
        f"{INTERPRETED} -k tiles", interpreted=True,
    ),
    Mutation(
        "a part of the experts takes the first biases", "launch/weights.py",
        "return part._replace(bias=part.of(bias),", "return part._replace(bias=bias,",
        f"{INTERPRETED} -k experts", interpreted=True,
    ),
    Mutation(
        "a part of a packed weight outlives its GEMM", "launch/grouped_gemm.py",
        "        del part, w, args\n    if not", "        pass\n    if not",
        f"{INTERPRETED} -k one_part", interpreted=True,
    ),
    Mutation(
        "MXFP4 whose exponents span 15 counts as exact", "packed.py",
        "_MXFP4_SPAN = 14", "_MXFP4_SPAN = 15", "tests/packed/test_packed_experts.py -k wide",
    ),
    Mutation(
        "`.mT` keeps the scales for FP8", "packed.py",
        "transposed=not self.transposed)  # type: ignore[type-var]",
        "transposed=not self.transposed)._with(self.fp8)", f"{PARAMETER} -k transpose",
    ),
    Mutation(
        "`.mT` of NF4 keeps the scales for FP8", "packed.py",
        "shape=(experts, k, n), transposed=not self.transposed)",
        "shape=(experts, k, n), transposed=not self.transposed)._with(self.fp8)",
        f"{PARAMETER} -k transpose",
    ),
    Mutation(
        "`.to` drops the scales for FP8", "packed.py",
        "return moved if scales is None else", "return moved if True else",
        f"{PARAMETER} -k transpose",
    ),
    Mutation(
        "scales for FP8 outlive a change of the weight", "packed.py",
        "return scales if versions == self._versions() else None", "return scales",
        f"{PARAMETER} -k go_when",
    ),
    Mutation(
        "a copy into a packed weight is not counted", PACKED_PARAMETER,
        "    torch.autograd.graph.increment_version(into.values())", "    pass",
        f"{PARAMETER} -k go_when",
    ),
    Mutation(
        "scales for FP8 are copied with their count of changes", "packed.py",
        'if name != "_fp8"}', 'if name != ""}', f"{PARAMETER} -k go_when",
    ),
    Mutation(
        "the norms of the first part of a weight for all parts", "reference/weights.py",
        "torch.cat(w_norms)", "torch.cat(w_norms[:1] * len(w_norms))",
        "tests/packed/test_packed_experts.py -k in_parts",
    ),
    Mutation(
        "views of a packed parameter can be written", PACKED_PARAMETER,
        "if function.is_view else out", "if False else out", f"{PARAMETER} -k writes",
    ),
    Mutation(
        "FP8 lets gate and up share a block of scales", "integrations/packed_formats.py",
        "if sizes.parts > 1 and rows % 128:", "if False:", f"{LOADING} -k share_a_block",
    ),
    Mutation(
        "the offset of nested NF4 is that of the first slice", QUANTIZERS,
        "state.offset = state.absmax.mean()", "state.offset = slices[0][1].absmax[:1].mean()",
        f"{LOADING} -k in_4bit",
    ),
    Mutation(
        "other block sizes of bitsandbytes are accepted", PACKED_PARAMETER,
        "if state.blocksize != 64 or", "if", "tests/integrations/test_packed_peft.py -k blocks",
    ),
    Mutation(
        "saved NF4 experts are random without our implementation", QUANTIZERS,
        'if not ours and (taken or not entry(in_file, "load_in_4bit")):', "if not ours:",
        f"{LOADING} -k recognised",
    ),
    Mutation(
        "plain transformers takes saved NF4 experts for missing", "integrations/packed_formats.py",
        '{"": packed.codes,', '{"_codes": packed.codes,', f"{LOADING} -k plain_transformers",
    ),
    Mutation(
        "`dequantize_experts` unties", PACKED_PARAMETER,
        "if place not in made:", "if True:", f"{PARAMETER} -k tied",
    ),
]  # fmt: skip
