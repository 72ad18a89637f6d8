"""Break each promise on purpose and see a test fail: `python tests/mutations [--gpu]`.

A mutation changes one place in a copy of the source; the tests named with it must then fail.
Without `--gpu` those that need none. What survives is printed and makes the exit status 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[0] = str(TESTS)  # instead of this folder, where `packed.py` and others would be modules

from mutations import AREAS, Mutation  # noqa: E402

ROOT = TESTS.parent


def verdict(mutation: Mutation) -> str:
    """What the first failing test said, or nothing if all passed."""
    with tempfile.TemporaryDirectory() as folder:
        sources = [Path(folder) / name for name in ("src", "trainer/src")]
        for source in sources:
            shutil.copytree(ROOT / source.relative_to(folder), source)
        file = Path(folder) / mutation.package / mutation.file
        text = file.read_text()
        if mutation.old not in text:
            raise SystemExit(f"{mutation.broken}: {mutation.file} has no {mutation.old!r}")
        file.write_text(text.replace(mutation.old, mutation.new, 1))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))}
        if mutation.interpreted:
            environment["TRITON_INTERPRET"] = "1"
        tests, *choice = mutation.tests.split(" -k ")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", "addopts=", tests]
        command += ["-p", "no:cacheprovider", *(["-k", choice[0]] if choice else [])]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode > 1:  # neither passed nor failed nor crashed: not run at all
            raise SystemExit(f"{mutation.broken}:\n{done.stdout}{done.stderr}")
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return "" if done.returncode == 0 else (failed or ["crashed"])[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="those that need a GPU instead")
    parser.add_argument("--area", choices=AREAS, action="append", help="may be given repeatedly")
    parser.add_argument("--only", default="", metavar="TEXT", help="in what is broken")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    areas = [AREAS[name] for name in args.area or AREAS]
    chosen = [m for area in areas for m in area if m.gpu == args.gpu and args.only in m.broken]
    if not chosen:
        parser.error("no mutation matches")
    alive = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutation, failed in zip(chosen, pool.map(verdict, chosen), strict=True):
            alive += not failed
            print(f"{'caught  ' if failed else 'SURVIVES'} {mutation.broken}: {failed}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
