"""The subcommands train, compare, generate and export of `sonicmoe`."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from sonicmoe.plugins import bad_argument

from .presets import PRESETS

_RUNS = Path("runs")
# Flags for the settings that change most; the others use --set key=value.
_FLAGS = (
    ("steps", int, "optimizer steps"),
    ("batch", int, "sequences per step"),
    ("micro-batch", int, "most sequences at a time on one device"),
    ("learning-rate", float, "peak learning rate"),
    ("seed", int, "seed of weights and batches"),
    ("init-from", str, "run whose weights, tokenizer and settings to start with"),
    ("device", str, "auto, cpu or cuda"),
    ("precision", str, "fp32, autocast, bf16, fp8 or bf16_fp8"),
    ("expert-parallel", int, "ranks that share the experts"),
)
_SHORT = {"learning-rate": ("--lr",)}


def register(subparsers: Any) -> None:
    """Add the subcommands; each sets `run` to a function of the parsed arguments."""
    for name, about, add_arguments, run in (
        ("train", "train a Mixture-of-Experts language model", _train_arguments, _train),
        ("compare", "train once per router, backend and seed", _compare_arguments, _compare),
        ("generate", "continue a text with a trained model", _generate_arguments, _generate),
        ("export", "write a trained model as a Hugging Face folder", _export_arguments, _export),
    ):
        description = f"{about[0].upper()}{about[1:]}. More: the trainer's README."
        parser = subparsers.add_parser(name, help=about, description=description)
        add_arguments(parser)
        parser.set_defaults(run=run)


# --- train ----------------------------------------------------------------------------------------
def _configuration_arguments(parser: argparse.ArgumentParser) -> None:
    texts = "text files, folders or a Hugging Face dataset; default: text on this machine"
    presets = f"{', '.join(PRESETS)}; default: small with a GPU, else demo"
    parser.add_argument("--preset", help=presets)
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    parser.add_argument("--data", nargs="+", metavar="PATH", help=texts)
    for name, kind, help_text in _FLAGS:
        flags = [f"--{name}", *_SHORT.get(name, ())]
        parser.add_argument(*flags, type=kind, help=help_text)
    either = argparse.BooleanOptionalAction
    parser.add_argument("--compile", action=either, default=None, help="torch.compile")
    others = "any other setting, repeatable; an unknown key lists all of them"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=others)
    parser.add_argument("--runs", type=Path, help="where runs are kept; default: runs")
    parser.add_argument("--name", help="folder below --runs; default: the preset")
    parser.add_argument("--cache", type=Path, help="where tokenized text is kept")


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Settings from the file, --set and plain flags; later sources win."""
    from .config import parse_assignments, read_toml

    values: dict[str, Any] = read_toml(args.config) if args.config else {}
    values |= parse_assignments(args.set)
    for name in (*(flag for flag, _, _ in _FLAGS), "data", "compile"):
        key = name.replace("-", "_")
        if getattr(args, key) is not None:
            values[key] = getattr(args, key)
    return values


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    _configuration_arguments(parser)
    parser.add_argument("--resume", type=Path, metavar="RUN", help="folder of the run to continue")
    router = "router of every layer, a name for MoE(router=…)"
    parser.add_argument("--router", help=router)
    parser.add_argument("--backend", help="auto, sonicmoe, torch, grouped_mm or scattermoe")


def _train(args: argparse.Namespace) -> int:
    from . import run, summary

    overrides = _overrides(args)
    for key in ("router", "backend"):
        if getattr(args, key) is not None:
            overrides[key] = getattr(args, key)
    if args.resume:
        _refuse_with_resume(args)
        folder, config = args.resume, run.continued(args.resume, overrides)
        cache = args.cache or run.cache_of(folder)
    else:
        preset = overrides.pop("preset", None)
        config = run.configure(args.preset or preset, overrides)
        folder = _folder(args, config.preset)
        cache = args.cache or run.default_cache()
    numbers = run.train(config, folder, cache, bool(args.resume), numbered=not args.resume)
    folder = Path(numbers["folder"])
    if numbers["rank"] > 0:
        return 0 if numbers["finished"] else 130
    if not numbers["finished"]:
        saved = f"and saved. Continue: sonicmoe train --resume {shlex.quote(str(folder))}"
        print(f"Stopped after step {numbers['steps']} {saved if config.keep else '(keep=0).'}")
        return 130
    if not numbers["trained"]:
        print(f"The run in {folder} has all its {numbers['steps']} steps. To go on: --steps N.")
        return 0
    reached, sentence = summary.verdict(numbers)
    notes = filter(None, (summary.overfitting(numbers), sentence))
    print("", summary.text(numbers), *notes, sep="\n")
    print(f"Finished: all {numbers['steps']} steps are done.")
    kept = ("loss.png", "log.jsonl", "summary.md", "checkpoints", "tensorboard", "wandb")
    there = ", ".join(name for name in kept if (folder / name).exists())
    print(f"Kept in {folder}: {there}.")
    print(f"Next: sonicmoe generate {folder}")
    return 0 if reached else 1


def _folder(args: argparse.Namespace, name: str) -> Path:
    """Folder of a new run: --runs and --name, or their defaults."""
    name = name if args.name is None else args.name
    if name != Path(name).name or name in ("", ".."):
        raise bad_argument("--name", "the name of one folder", repr(name), "Set --runs as well.")
    return (args.runs or _RUNS) / name


def _refuse_with_resume(args: argparse.Namespace) -> None:
    for flag in ("preset", "name", "runs"):
        if getattr(args, flag) is not None:
            expected = "no value with --resume, which names the folder of the run"
            remedy = f"Omit --{flag}, or start a new run without --resume."
            raise bad_argument(f"--{flag}", expected, getattr(args, flag), remedy)


# --- compare --------------------------------------------------------------------------------------
def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    _configuration_arguments(parser)
    routers, backends = "softmax_over_topk,topk_over_softmax", "auto"
    parser.add_argument("--routers", default=routers, help="for MoE(router=…), comma-separated")
    known = "of auto, sonicmoe, torch, grouped_mm, scattermoe, comma-separated"
    parser.add_argument("--backends", default=backends, help=known)
    parser.add_argument("--seeds", help="integers, comma-separated; default: the seed")


def _compare(args: argparse.Namespace) -> int:
    from . import compare, run

    overrides = _overrides(args)
    config = run.configure(args.preset or overrides.pop("preset", None), overrides)
    variants = compare.variants(config, args.routers, args.backends, args.seeds)
    folder = _folder(args, f"compare-{config.preset}")
    print(compare.compare(variants, folder, args.cache or run.default_cache()))
    return 0


# --- generate, export -----------------------------------------------------------------------------
def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--prompt", default="The ", help="text to continue")
    parser.add_argument("--tokens", type=int, default=100, help="how many to generate")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token")
    share = "probability mass to sample from"
    parser.add_argument("--top-p", type=float, default=0.95, help=share)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")


def _generate(args: argparse.Namespace) -> int:
    from . import generate

    options = {name: getattr(args, name) for name in ("temperature", "top_p", "seed", "device")}
    print(generate.from_run(args.run_folder, args.prompt, args.tokens, **options))
    return 0


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("output", type=Path, help="folder to write")


def _export(args: argparse.Namespace) -> int:
    from . import export

    export.export(args.run_folder, args.output)
    load = f"transformers.AutoModelForCausalLM.from_pretrained({str(args.output)!r})"
    print(f"Written to {args.output}. Load it: {load}")
    return 0
