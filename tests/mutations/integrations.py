"""What other packages meet: LoRA, transformers, PEFT, conversion."""

from mutations.mutation import Mutation

MUTATIONS = [
    Mutation(
        "an adapter without its scale", "kernels/transpose.py",
        "tile.to(tl.float32) * scale", "tile.to(tl.float32)",
        "tests/interpreted/test_interpreted_lora.py -k ranks", interpreted=True,
    ),
]  # fmt: skip
