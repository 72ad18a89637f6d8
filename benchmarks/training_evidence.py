"""Trains models to answer five questions, and keeps the tables, the pictures and every curve.

python benchmarks/training_evidence.py --parts rounding --seconds-per-run 12
"""

import argparse
import functools
import shlex
import sys
from pathlib import Path

import torch
from research import finetune, training, training_report
from research.results import RESULTS, device_name, provenance, slug

from sonicmoe_trainer.compare import names
from sonicmoe_trainer.config import parse_assignments
from sonicmoe_trainer.run import default_cache

PARTS = "rounding,throughput,agreement,precision"  # by default
ALL_PARTS = f"{PARTS},finetune"
# Not part of the command that is kept: they do not change what is measured.
PRIVATE = {
    "output": "folder of what is kept (default: benchmarks/results/<device>/training)",
    "runs": "folder of the runs' logs (default: runs/evidence)",
    "cache": "folder of tokenised text",
    "commit": "what is measured, where there is no git to ask",
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=training.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--parts", default=PARTS, help=f"some of {ALL_PARTS}; default: {PARTS}")
    parser.add_argument("--rows-per-expert", default="512,256,128", help="T·K/E, with commas")
    parser.add_argument(
        "--routers", default=",".join(training.ROUTERS), help="held against the first of them"
    )
    parser.add_argument("--seeds", default="0,1", help="of each router or precision")
    parser.add_argument(
        "--precisions", default="autocast,fp8,fp8+memory=fp8", metavar="VARIANTS",
        help="compared with the first of them: precisions of `sonicmoe train`, with commas; "
        "+KEY=VALUE changes another setting, as in fp8+memory=fp8, which keeps Z in FP8; "
        "default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--precision-steps", default="400", metavar="STEPS",
        help="lengths of the runs in `precision`, with commas; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--seconds-per-run", type=float, default=12, help="of the slowest router in `rounding`"
    )
    parser.add_argument("--steps", type=int, help="of each run in `rounding`, instead of seconds")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs of `rounding`, `precision` and `finetune` side by side on the one device",
    )
    _finetune_arguments(parser)
    parser.add_argument(
        "--backends", default="sonicmoe,grouped_mm,scattermoe", help="of throughput"
    )
    parser.add_argument(
        "--agreement", default="sonicmoe,grouped_mm,torch", help="backends, held against the last"
    )
    parser.add_argument("--agreement-steps", type=int, default=100)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction,
        help="torch.compile; default: in `throughput` only, since it takes longer than a short run",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="any setting of a training, for every part",
    )  # fmt: skip
    parser.add_argument(
        "--redraw",
        metavar="FOLDER",
        help="train nothing; tables and pictures of what is kept there",
    )
    for name, help_text in PRIVATE.items():
        parser.add_argument(f"--{name}", help=help_text)
    return parser.parse_args()


def _finetune_arguments(parser: argparse.ArgumentParser) -> None:
    plan = finetune.Plan(())
    group = parser.add_argument_group("finetune", "compares --precisions with the first of them")
    group.add_argument(
        "--finetune-data", default="local", metavar="PATHS",
        help="other text than --set data=…, with commas; default: the source on this machine",
    )  # fmt: skip
    for name, what in (("base", "of the model"), ("recover", "after the outliers"), ("tune", "")):
        steps = getattr(plan, f"{name}_steps")
        help_text = f"{what} (default: {steps})".strip()
        group.add_argument(f"--{name}-steps", type=int, default=steps, help=help_text)
    group.add_argument(
        "--outlier-factor", type=float, default=plan.factor,
        help="of a row of W1 and one of W2 in every expert; default: %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--errors-of", action="append", default=[], metavar="LABEL=SRC",
        help="measure the layers' errors with another checkout too; repeatable",
    )  # fmt: skip


def main() -> int:
    args = parse_args()
    if args.redraw:
        print(training_report.report(Path(args.redraw)))
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    output = Path(args.output or RESULTS / slug(device_name(device)) / "training")
    place = training.Place(
        Path(args.runs or "runs/evidence"), Path(args.cache or default_cache())
    )  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    changes = parse_assignments(args.set)
    if args.compile is not None:
        changes["compile"] = str(args.compile)
    base, large = (c.override(changes) for c in (training.BASE, training.THROUGHPUT))
    parts = names("--parts", args.parts)
    if set(parts) - set(ALL_PARTS.split(",")):
        sys.exit(f"--parts: expected some of {ALL_PARTS}, got {args.parts!r}.")

    jobs = []
    if "agreement" in parts:
        short = base.override({"steps": args.agreement_steps})
        jobs.append(lambda: training.agreement(short, names("--agreement", args.agreement), place))
    if "rounding" in parts:
        rounding = functools.partial(
            training.rounding, base, place=place, routers=names("--routers", args.routers),
            seeds=names("--seeds", args.seeds), seconds=args.seconds_per_run, steps=args.steps,
            jobs=args.jobs,
        )  # fmt: skip
        for rows in map(int, names("--rows-per-expert", args.rows_per_expert)):
            jobs.append(functools.partial(rounding, rows))
    if "precision" in parts:
        jobs.append(
            functools.partial(
                training.precision, base, place, jobs=args.jobs,
                variants=names("--precisions", args.precisions),
                seeds=names("--seeds", args.seeds),
                lengths=names("--precision-steps", args.precision_steps),
            )
        )  # fmt: skip
    if "finetune" in parts:
        plan = finetune.Plan(
            tuple(names("--finetune-data", args.finetune_data)), args.base_steps,
            args.recover_steps, args.tune_steps, args.outlier_factor,
        )  # fmt: skip
        sources = {label: Path(s) for label, s in parse_assignments(args.errors_of).items()}
        jobs.append(
            functools.partial(
                finetune.finetune, base, place, plan, sources=sources, jobs=args.jobs,
                variants=names("--precisions", args.precisions),
                seeds=names("--seeds", args.seeds),
            )
        )  # fmt: skip
    if "throughput" in parts:
        jobs.append(lambda: training.throughput(large, names("--backends", args.backends), place))
    origin = provenance(device, _command(), args.commit)
    records: list = []
    for job in jobs:
        for record in job():
            records.append(record)
            training.keep(records, output, origin)  # what is done is kept, whatever follows
        text = training_report.report(output)
    print(f"\n{text}\n\nKept in {output}.")
    failed = [
        r for r in records if r.get("failed", training.NOT_INSTALLED) != training.NOT_INSTALLED
    ]
    for r in failed:
        print(f"FAILED {r['experiment']}, {r['run']}: {r['failed']}", file=sys.stderr)
    return 1 if failed else 0


def _command() -> str:
    """This command without what is private to a machine."""
    kept, given = [], iter(sys.argv[1:])
    for word in given:
        name, sign, _ = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in PRIVATE:
            if not sign:
                next(given, None)
            continue
        kept.append(word)
    return shlex.join(["python", "benchmarks/training_evidence.py", *kept])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"training_evidence.py: {error}")
