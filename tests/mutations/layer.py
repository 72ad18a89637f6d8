"""The layer and its modules: gradients, memory, checkpoints."""

from mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "Z is recomputed without the bias", "layer/nodes.py",
        "Linear(w1, b1, None, lora_b1)", "Linear(w1, None, None, lora_b1)",
        "tests/features/test_features.py -k recompute",
    ),
    Mutation(
        "expert parallelism ignores adapters", "distributed/layer.py",
        "scores, weights, checked, slot", "scores, weights, checked._replace(lora1=None), slot",
        "tests/features/test_features.py -k LoRA",
    ),
    Mutation(
        "MoE ignores the adapters of PEFT", "moe.py",
        '_adapter("c_fc", self.c_fc),', "None,", "tests/features/test_features.py -k LoRA",
    ),
    Mutation(
        "dX without the router's share", "routing/nodes.py",
        "ops.router_gradient_into(dx, dlogits, weight)", "pass", "tests/test_published.py",
    ),
    Mutation(
        "main_grad is overwritten", "reference/grouped_gemm.py",
        "main_grad.add_(weight", "main_grad.copy_(weight", "tests/experts/test_main_grad.py",
    ),
    Mutation(
        "a checkpoint computes the output again", "layer/checkpoint.py",
        "return [] if packs_saved_tensors() else None", "return None",
        "tests/integrations/test_checkpointing.py",
    ),
    Mutation(
        "kernels read saved tensors by strides that a hook changed", "layer/nodes.py",
        "tensors = [t.contiguous() if d else t for", "tensors = [t for",
        "tests/experts/test_layouts.py -k hook_returns", interpreted=True,
    ),
    Mutation(
        "an expert that has all tokens is not split", "launch/spans.py",
        "rows * tiles > 2 * programs * longest", "rows * tiles > programs * longest",
        "tests/tuning/test_select.py -k long_enough",
    ),
    Mutation(
        "the gradient of the output is lost in a checkpoint", "layer/checkpoint.py",
        "        return dout, None\n", "        return None, None\n",
        "tests/integrations/test_checkpointing.py",
    ),
    Mutation(
        "the loss comes after the experts", "moe.py",
        "        return run(call), loss\n",
        "        out = run(call)\n"
        "        return out, self._aux_loss(logits, r, call.counts, backend)\n",
        "tests/integrations/test_checkpointing.py",
    ),
    Mutation(
        'memory="e4m3" below compute capability 8.9', "capability.py",
        "    if arch < 89:\n", "    if arch < 86:\n", "tests/tuning/test_select.py -k e4m3",
    ),
    Mutation(
        'memory="e4m3" on any GPU', "tuning/select.py",
        "    check_z_in_e4m3(target.arch)\n", "    pass\n", "tests/tuning/test_select.py -k e4m3",
    ),
    Mutation(
        "costs of FP8 on other GPUs than Hopper", "tools/cost.py",
        "            check_fp8_experts(self.arch)\n", "            pass\n",
        "tests/tools/test_commands.py -k cost",
    ),
    Mutation(
        "costs of layers that are refused", "tools/cost_report.py",
        "        MoE(p.E, ", "        (lambda *_, **__: None)(p.E, ",
        "tests/tools/test_commands.py -k cost",
    ),
    Mutation(
        "cost: rows of dX are read once, whatever the slices", "tools/cost.py",
        'slices * q["z"] + q["w1"]', 'q["z"] + q["w1"]',
        "tests/experts/test_memory_policies.py -k stages",
    ),
    Mutation(
        "cost: slices of dX share one reading of the map", "tools/cost.py",
        's["y"] + slices * s["index"], s["x"])', 's["y"] + s["index"], s["x"])',
        "tests/experts/test_memory_policies.py -k stages",
    ),
    Mutation(
        "cost: slices of Y share one reading of scores and map", "tools/cost.py",
        's["y"] + slices * (s["scores"] + s["index"])', 's["y"] + (s["scores"] + s["index"])',
        "tests/experts/test_memory_policies.py -k stages",
    ),
    Mutation(
        "cost: all of dX's rows exist at once", "tools/cost.py",
        "second = total + recomputed + rows_i, later + tokens_h + max(rows_h, dw1)",
        "second = total + recomputed + rows_i, later + tokens_h + "
        "max(p.R * p.H * itemsize, dw1)",
        "tests/experts/test_memory_policies.py -k peak",
    ),
]  # fmt: skip
