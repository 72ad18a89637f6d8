"""What other packages meet: LoRA, transformers, PEFT, conversion."""

from mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "an adapter without its scale", "kernels/transpose.py",
        "tile.to(tl.float32) * scale", "tile.to(tl.float32)",
        "tests/integrations/test_lora.py -k budget", interpreted=True,
    ),
    Mutation(
        "other options of a registered name are ignored", "integrations/transformers.py",
        "    if _options_of(current) != _options_of(wanted):\n", "    if False:\n",
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
        "any(w.merged for w in wrappers)", "self.merged",
        "tests/integrations/test_peft.py -k merged_alone",
    ),
    Mutation(
        "PEFT: a merged outer wrapper is ignored", "integrations/peft.py",
        "any(w.merged for w in wrappers)", "any(w.merged for w in wrappers[1:])",
        "tests/integrations/test_peft.py -k merged_alone",
    ),
    Mutation(
        "converted sigmoid routers choose by logits in bf16", "integrations/convert.py",
        "f.selection_bias is not None,\n", "False,\n",
        "tests/integrations/test_convert.py -k logits_in_fp32",
    ),
]  # fmt: skip
