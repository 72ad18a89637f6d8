"""Writes docs/benchmarks.md, the table in README.md and the chart from the kept results.

python benchmarks/report.py
"""

import argparse
import json
import os
import sys
from pathlib import Path

from research import chart, document, kept, results

from sonicmoe.errors import bad_argument

ROOT = Path(__file__).resolve().parents[1]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / results.RESULTS, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks.md", metavar="FILE")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    records = results.read(args.results)
    charts = {}
    for (device, dtype), found in kept.by_device(records).items():
        path = chart_path(args.results, device, dtype)
        if chart.draw(path, device, dtype, found):
            charts[device, dtype] = path
    args.out.write_text(make_document(args.results, args.out))
    args.readme.write_text(with_summary(args.readme, records))
    print("\n".join(map(str, (args.out, args.readme, *charts.values()))))


def chart_path(folder: Path, device: str, dtype: str) -> Path:
    name = "layer.png" if dtype == "bfloat16" else f"layer-{dtype}.png"
    return folder / results.slug(device) / name


def make_document(folder: Path, out: Path) -> str:
    """The text of docs/benchmarks.md, with links to the charts that are there."""
    records = results.read(folder)
    paths = {key: chart_path(folder, *key) for key in kept.by_device(records)}
    links = {k: os.path.relpath(path, out.parent) for k, path in paths.items() if path.exists()}
    evidence = [json.loads(path.read_text()) for path in sorted(folder.glob("**/evidence.json"))]
    return document.document(records, evidence, links)


def with_summary(readme: Path, records: list[results.Record]) -> str:
    """The text of README.md with a new table between the two markers."""
    text = readme.read_text() if readme.exists() else ""
    if document.BEGIN not in text or document.END not in text:
        raise bad_argument(
            "--readme", f"a file with the lines {document.BEGIN} and {document.END}", str(readme),
            "Put the two lines where the table should be.",
        )  # fmt: skip
    before, rest = text.split(document.BEGIN, 1)
    after = rest.split(document.END, 1)[1]
    table = document.summary(records)
    return f"{before}{document.BEGIN}\n{table}\n{document.END}{after}"


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"report.py: {error}")
