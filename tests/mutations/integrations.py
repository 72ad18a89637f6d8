"""What other packages meet: LoRA, transformers, PEFT, conversion."""

from mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "of two builds in a process, the second refuses no model", "integrations/transformers.py",
        "    original = PreTrainedModel.get_correct_experts_implementation\n",
        "    original = PreTrainedModel.get_correct_experts_implementation\n"
        "    if hasattr(original, '__wrapped__'):\n        return\n",
        "tests/integrations/test_hub.py -k each_build_refuses",
    ),
    Mutation(
        "a graph writes over gradients that accumulate", "integrations/cuda_graphs.py",
        "                p.grad.data = p.grad.clone()", "                pass",
        "tests/integrations/test_cuda_graphs.py -k accumulate",
    ),
    Mutation(
        "a call between the passes of another", "integrations/cuda_graphs.py",
        "self.is_over or owner._turn != self.turn", "self.is_over",
        "tests/integrations/test_cuda_graphs.py -k before_the_backward",
    ),
    Mutation(
        "a graph with FP8 weights that were written since", "integrations/graph_state.py",
        "            store.renew()\n", "",
        "tests/integrations/test_cuda_graphs.py -k quantized_before",
    ),
    Mutation(
        "an adapter without its scale", "kernels/transpose.py",
        "tile.to(tl.float32) * scale", "tile.to(tl.float32)",
        "tests/integrations/test_lora.py -k budget", interpreted=True,
    ),
    Mutation(
        "other options of a registered name are ignored", "integrations/transformers.py",
        "    if options_of(current) != options_of(wanted):\n", "    if False:\n",
        "tests/integrations/test_transformers_register.py -k other_options",
    ),
    Mutation(
        "options of a name are overwritten", "integrations/transformers.py",
        "    if calls_ours(current):\n        _check_same_options(name, current, function)\n"
        "        return\n    if current is not None and not replace:\n",
        "    if current is not None and not calls_ours(current) and not replace:\n",
        "tests/integrations/test_transformers_register.py -k other_options",
    ),
    Mutation(
        "PEFT: a merged inner wrapper is ignored", "integrations/peft.py",
        "any(w.merged for w in _chain(wrapper))", "wrapper.merged",
        "tests/integrations/test_peft.py -k merged_alone",
    ),
    Mutation(
        "PEFT: a merged outer wrapper is ignored", "integrations/peft.py",
        "any(w.merged for w in _chain(wrapper))",
        "any(w.merged for w in list(_chain(wrapper))[1:])",
        "tests/integrations/test_peft.py -k merged_alone",
    ),
    Mutation(
        "converted sigmoid routers choose by logits in bf16", "integrations/convert/layers.py",
        "f.selection_bias is not None,\n", "False,\n",
        "tests/integrations/test_convert.py -k logits_in_fp32",
    ),
    Mutation(
        "experts of several dtypes become one tensor", "integrations/convert/layers.py",
        "    if len(found) > 1:\n", "    if False:\n",
        "tests/integrations/test_convert_checkpoints.py -k cannot_be_converted",
    ),
    Mutation(
        "the gates of a layer may differ from its ups in dtype", "integrations/convert/layers.py",
        '"experts", [*parts[0], *parts[1]]', '"experts", parts[0]',
        "tests/integrations/test_convert_checkpoints.py -k cannot_be_converted",
    ),
    Mutation(
        "0-d tensors of a checkpoint are not loaded", "integrations/convert/checkpoints.py",
        "        state[key].copy_(found.read(key)[key])\n",
        "        state[key][...] = found.read(key)[key] if state[key].dim() else state[key]\n",
        "tests/integrations/test_convert_checkpoints.py -k a_number",
    ),
    Mutation(
        "shards of the converter grow past their size", "integrations/convert/folders.py",
        "if shard and size + t.nbytes > most:", "if shard and size > most:",
        "tests/integrations/test_convert_checkpoints.py -k there_and_back",
    ),
    Mutation(
        "a whole checkpoint is converted before the first file is written",
        "integrations/convert/folders.py",
        "for shard in _shards(tensors, most):", "for shard in list(_shards(tensors, most)):",
        "tests/integrations/test_convert_checkpoints.py -k memory_does_not_grow",
    ),
    Mutation(
        "a checkpoint of another order of gate and up is loaded",
        "integrations/convert/checkpoints.py",
        "isinstance(module, MoE) and module.gate_up != gate_up", "False",
        "tests/integrations/test_convert_checkpoints.py -k does_not_fit",
    ),
    Mutation(
        "the steps of a resumed run are counted from zero", "integrations/trainer.py",
        "        self._watch.steps = state.global_step  # of a run that is resumed\n", "",
        "tests/integrations/test_trainer.py -k every_step",
    ),
    Mutation(
        "the load of another step is logged again", "integrations/trainer.py",
        "        self._logged = True\n        found", "        found",
        "tests/integrations/test_trainer.py -k in_the_log",
    ),
    Mutation(
        "the report takes PEFT's own forward pass for ours", "integrations/report.py",
        "if not adapter.uses_lora_experts(wrapper):", "if False:",
        "tests/integrations/test_report_transformers.py -k peft",
    ),
    Mutation(
        "the report forgets that a forward was replaced", "integrations/transformers.py",
        'forward = vars(module).get("forward")', "forward = None",
        "tests/integrations/test_report_transformers.py -k replaced",
    ),
]  # fmt: skip
