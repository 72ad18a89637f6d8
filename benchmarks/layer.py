"""Times one layer beside other implementations, or measures the energy of its GEMMs.

python benchmarks/layer.py --case olmoe --peers grouped_mm --sonicmoe-path FOLDER
python benchmarks/layer.py --case olmoe --instead energy --label energy
"""

import argparse
import functools
import shlex
import sys
from collections.abc import Sequence

from research import arguments, layer, peers, published, results
from research.arguments import check_apart_from_times, finish, measure_cases
from research.bench import bench_case
from research.energy import Board

from sonicmoe.errors import bad_argument
from sonicmoe.tools.commands import add_device, add_selection


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_selection(parser)
    add_device(parser)
    arguments.add_results(parser)
    parser.add_argument(
        "--peers",
        nargs="*",
        metavar="NAME",
        help="grouped_mm, scattermoe; default: all that can be imported",
    )
    parser.add_argument(
        "--sonicmoe-path",
        metavar="FOLDER",
        help=f"the published sonic-moe, run in its own process. To build it: {published.BUILD}",
    )
    parser.add_argument(
        "--instead",
        choices=("energy", *layer.FIGURES),
        help="power and energy of each GEMM, host time of a small layer, the first call with empty"
        " caches, or a training step checkpointed, frozen, compiled and so on; not times",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    names = peers.available() if args.peers is None else args.peers
    for name in names:
        if name not in peers.PEERS:
            known = ", ".join(peers.PEERS)
            raise bad_argument("--peers", f"names of {known}", name, "Leave it out.")
    options = arguments.options(args)
    command = shlex.join(["python", "benchmarks/layer.py", *argv])
    origin = results.provenance(args.device, command, args.commit)
    if args.instead:
        check_apart_from_times(args, "--instead", ("kernels", "peers", "sonicmoe_path"))
        if args.instead == "energy":
            Board(args.device)  # fails now rather than after the first case
            return finish(measure_cases(args, options, origin, layer.energy_case))
        measure = functools.partial(layer.figures_case, args.instead)
        return finish(measure_cases(args, options, origin, measure))
    if args.sonicmoe_path:
        published.find(args.sonicmoe_path)  # fails now rather than after the first case
    measure = functools.partial(bench_case, peers=layer.with_peers(names, args.sonicmoe_path))
    return finish(measure_cases(args, options, origin, measure))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"layer.py: {error}", file=sys.stderr)
        sys.exit(2)
