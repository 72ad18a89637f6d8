"""Every class of experts in the installed transformers, and what our implementation does with it.

`python tests/support/census.py` writes the table in docs/integrations.md.
"""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import NamedTuple

import torch
import transformers
from hf_models import NAME

from sonicmoe.integrations.recognition import activation_of
from sonicmoe.integrations.transformers import register

DOCUMENT = Path(__file__).parents[2] / "docs" / "integrations.md"
BEGIN, END = "<!-- census:begin -->\n", "<!-- census:end -->\n"
TOKENS, K, EXPERTS = 24, 2, 4
TOLERANCE = 2e-6  # some compute parts in fp32, also in an fp64 model
# Files that name experts or routers and have none: a setting that no layer reads; a router that
# picks one of two paths for an image.
NOT_MOE = {"bamba", "granite_docling"}


class Expert(NamedTuple):
    """A class behind transformers' experts interface."""

    family: str
    name: str

    def __str__(self) -> str:
        return self.name


@cache
def sources() -> dict[str, str]:
    """The modeling files of all families, by module: "mixtral.modeling_mixtral"."""
    models = Path(transformers.__file__).parent / "models"
    paths = sorted(models.glob("*/modeling_*.py"))
    return {f"{p.parent.name}.{p.stem}": p.read_text() for p in paths}


def experts() -> list[Expert]:
    """The classes that are decorated with `use_experts_implementation`."""
    return [
        Expert(module, node.name)
        for module, source in sources().items()
        if "@use_experts_implementation" in source
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        and any("use_experts_implementation" in ast.unparse(d) for d in node.decorator_list)
    ]


def without_interface() -> list[str]:
    """Modules that seem to have experts, and none behind the interface."""
    words = re.compile(r"\b(num_(local_)?experts|n_routed_experts|moe_num_experts|\w+Router)\b")
    return [
        module
        for module, source in sources().items()
        if "@use_experts_implementation" not in source
        and words.search(source)
        and family(module) not in NOT_MOE
    ]


def family(module: str) -> str:
    return module.partition(".")[0]


def imported(module: str):
    return importlib.import_module(f"transformers.models.{module}")


class _Small:
    """A config with its own values, but small sizes."""

    def __init__(self, config) -> None:
        self.config = config

    def __getattr__(self, name: str):
        value = getattr(self.config, name)
        if "expert" in name and "per_tok" not in name and type(value) in (int, NoneType):
            return EXPERTS
        if "intermediate" in name and type(value) in (int, NoneType, list):
            return 8
        return 16 if re.search("hidden|latent", name) and type(value) is int else value


def build(expert: Expert):
    """A small random module of the class, in fp64, with the gate of its default config."""
    module = imported(expert.family)
    kind, errors = getattr(module, expert.name), []
    for config in _configs(module, kind):
        try:
            block = kind(_Small(config()))
        except (AttributeError, TypeError) as error:  # another part of the model's config
            errors.append(error)
            continue
        generator = torch.Generator().manual_seed(0)
        for parameter in block.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = values
        return block.double()
    raise LookupError(f"no config makes a {expert.name}: {errors}")


def _configs(module, kind) -> list[type]:
    found = [
        value
        for name, value in vars(module).items()
        if name.endswith("Config") and inspect.isclass(value) and name != "PreTrainedConfig"
    ]
    wanted = str(inspect.signature(kind.__init__).parameters["config"].annotation)
    return sorted(found, key=lambda c: (c.__name__ not in wanted, "Text" not in c.__name__))


def step(block, implementation: str) -> dict[str, torch.Tensor]:
    """The output and every gradient, where rows of Z reach beyond ±10, the limit of some gates."""
    generator = torch.Generator().manual_seed(1)
    hidden = block.down_proj.shape[2 if block.is_transposed else 1]
    x = 3 * torch.randn(TOKENS, hidden, generator=generator, dtype=torch.float64)
    scores = torch.rand(TOKENS, K, generator=generator, dtype=torch.float64)
    ids = torch.randn(TOKENS, EXPERTS, generator=generator).topk(K).indices
    dout = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    block.config._experts_implementation = implementation
    leaves = {"x": x.requires_grad_(), "scores": scores.requires_grad_()}
    leaves |= dict(block.named_parameters())
    out = block(x, ids, scores)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def differences(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each result, relative to its largest value."""
    assert got.keys() == want.keys()
    return {n: ((got[n] - want[n]).abs().max() / want[n].abs().max()).item() for n in want}


def gate(block) -> str | None:
    """Our activation for a module, and what follows the experts; None if it is refused."""
    try:
        name = f"`{activation_of(block).name}`"
    except ValueError as error:
        assert "Load this model with experts_implementation=" in str(error)
        return None
    return name + (", then a norm" if getattr(block, "has_post_expert_norm", False) else "")


# --- the table ------------------------------------------------------------------------------------
def table() -> str:
    by_gate: defaultdict[str | None, list[str]] = defaultdict(list)
    for expert in experts():
        block = build(expert)
        by_gate[gate(block)].append(family(expert.family))
        if gate(block):
            found = differences(step(block, NAME), step(block, "eager"))
            assert max(found.values()) < TOLERANCE, (expert, found)
    raising = by_gate.pop(None, [])
    refused = [family(module) for module in without_interface()]
    number = len(experts())
    lines = [
        f"transformers {version('transformers')}: {number} classes of experts in "
        f"{len({e.family for e in experts()})} families.",
        "",
        "| gate | families that agree with `eager` in output and every gradient |",
        "|---|---|",
    ]
    for found_gate, families in sorted(by_gate.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {found_gate} | {', '.join(dict.fromkeys(families))} |")
    lines += ["", f"Without transformers' experts interface, refused: {', '.join(refused)}."]
    if raising:
        lines += [f"Gates that we do not have, refused: {', '.join(raising)}."]
    return "\n".join(lines) + "\n"


def written() -> str:
    return DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    register()
    DOCUMENT.write_text(
        DOCUMENT.read_text().replace(BEGIN + written() + END, BEGIN + table() + END)
    )
