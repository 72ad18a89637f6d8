"""Errors of one checkout's experts on activations, gradients and weights of a trained model.

    git worktree add ../before COMMIT
    python benchmarks/captured_errors.py ../before/src captured.pt fp8 fp8+memory=fp8

captured.pt is written by `research/finetune.py`, which runs this. It prints a JSON line for each
variant, with what `errors` in `research/layer_errors.py` returns. A variant is a precision, and
+memory=POLICY; autocast is bf16.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit("usage: python benchmarks/captured_errors.py SRC CAPTURED VARIANT [VARIANT …]")
    source, captured, *variants = sys.argv[1:]
    sys.path.insert(0, source)
    import sonicmoe

    if not Path(sonicmoe.__file__).resolve().is_relative_to(Path(source).resolve()):
        sys.exit(f"SRC: expected a folder with the package sonicmoe, got {source}.")
    import torch
    from research.layer_errors import errors

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = torch.load(captured, weights_only=True)
    for variant in variants:
        print(json.dumps(errors(layers, variant, device)), flush=True)


if __name__ == "__main__":
    main()
