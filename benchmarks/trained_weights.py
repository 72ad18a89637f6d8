"""Crops experts of a training run for `sonicmoe verify --values trained` and the tests.

sonicmoe train --preset small --steps 5000 --name crop
python benchmarks/trained_weights.py runs/crop
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch

from sonicmoe.errors import bad_argument
from sonicmoe.tools import trained_weights
from sonicmoe.tools.trained_weights import Expert
from sonicmoe_trainer import checkpoint
from sonicmoe_trainer.run import load_config

LARGEST = 16  # neurons and channels that are kept in any case
MOST_BYTES = 300_000


def crop(
    weights: dict[str, torch.Tensor], layers: int, experts: int, neurons: int, channels: int
) -> list[Expert]:
    """`experts` experts, one each of layers at equal distances.

    Of a layer the expert whose largest row exceeds its median row most; of that the neurons and
    channels with the largest norms, and of the others some at equal distances in order of size.
    """
    places = torch.linspace(0, layers - 1, min(experts, layers)).round().int().tolist()
    return [_crop_layer(weights, layer, neurons, channels) for layer in places]


def _crop_layer(weights: dict[str, torch.Tensor], layer: int, neurons: int, channels: int):
    prefix = f"blocks.{layer}."
    norm = weights[f"{prefix}moe_norm.weight"].float()
    w1 = weights[f"{prefix}moe.c_fc.weight"].float()  # (E, 2I, H): gate rows, then up rows
    w2 = weights[f"{prefix}moe.c_proj.weight"].float()
    excess = torch.stack([_excess(w.norm(dim=2)).amax(1) for w in (w1, w2)]).amax(0)
    expert = int(excess.argmax())
    (gate, up), down = w1[expert].chunk(2), w2[expert]
    parts = (gate.norm(dim=1), up.norm(dim=1), down.norm(dim=0))
    neuron = _chosen(torch.stack([_excess(part) for part in parts]).amax(0), neurons)
    into = _chosen(w1[expert].norm(dim=0), channels)
    out = _chosen(down.norm(dim=1), channels)
    rows = torch.stack([gate[neuron], up[neuron]], 1).flatten(0, 1)
    return Expert(layer, expert, norm[into], rows[:, into], down[out][:, neuron])


def _excess(norms: torch.Tensor) -> torch.Tensor:
    """Each norm relative to the median of the last dimension."""
    return norms / norms.median(-1, keepdim=True).values


def _chosen(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """At most `count` places, largest first."""
    order = sizes.argsort(descending=True)
    if len(order) <= count:
        return order
    largest, others = order[:LARGEST], order[LARGEST:]
    return torch.cat([largest, others[trained_weights.spread(len(others), count - LARGEST)]])


def write(path: Path, experts: list[Expert], source: dict) -> None:
    """`source` says where the weights come from."""
    about = [
        {"layer": e.layer, "expert": e.expert, "w1": list(e.w1.shape), "w2": list(e.w2.shape)}
        for e in experts
    ]
    head = json.dumps({"source": source, "experts": about}).encode()
    flat = torch.cat([t.to(torch.bfloat16).flatten() for e in experts for t in (e.x, e.w1, e.w2)])
    path.write_bytes(head + b"\n" + bytes(flat.view(torch.uint8).tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.split("\n", 2)[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", type=Path, help="folder of a run of `sonicmoe train`")
    parser.add_argument("--experts", type=int, default=3, help="default: %(default)s")
    for name, most in (("neurons", 96), ("channels", 168)):
        parser.add_argument(
            f"--{name}", type=int, default=most, help="at most; default: %(default)s"
        )
    package = "default: the file of the package"
    parser.add_argument("--output", type=Path, default=trained_weights.FILE, help=package)
    args = parser.parse_args()
    for name, least in (("experts", 1), ("neurons", LARGEST), ("channels", LARGEST)):
        if getattr(args, name) < least:
            raise bad_argument(f"--{name}", f"at least {least}", getattr(args, name), "Keep more.")
    config = load_config(args.run)
    state = checkpoint.load_latest(args.run / "checkpoints")
    sizes = (config.model.num_layers, args.experts, args.neurons, args.channels)
    found = crop(state["model"], *sizes)
    size = sum(2 * t.numel() for expert in found for t in expert[2:])
    if size > MOST_BYTES:
        remedy = "Lower --experts, --neurons or --channels."
        raise bad_argument("--output", f"at most {MOST_BYTES} bytes", size, remedy)
    train = ["sonicmoe", "train", "--preset", config.preset, "--steps", str(config.steps)]
    if config.data != ("local",):
        train += ["--data", *(Path(name).name for name in config.data)]
    source = {
        "train": shlex.join(train),
        "command": shlex.join(["python", *sys.argv]),
        "step": int(state["step"]),
    }
    write(args.output, found, source)
    for expert in found:
        print(f"layer {expert.layer}, expert {expert.expert}: largest norm over the median one:")
        for name, weight in (("W1", expert.w1), ("W2", expert.w2)):
            rows, columns = (_excess(weight.norm(dim=dim)).max() for dim in (1, 0))
            print(f"  {name} rows {rows:.2f}, columns {columns:.2f}")
    print(f"{args.output}: {args.output.stat().st_size} bytes")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
