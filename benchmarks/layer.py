"""Times one layer beside other implementations, or measures the energy of its GEMMs.

python benchmarks/layer.py --case olmoe --peers grouped_mm --sonicmoe-path FOLDER
python benchmarks/layer.py --case olmoe --energy --label energy
"""

import argparse
import functools
import shlex
import sys
from collections.abc import Sequence

from research import layer, peers, published
from research.energy import Board

from sonicmoe.bench import cli, results
from sonicmoe.bench.run import bench_case
from sonicmoe.errors import bad_argument


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_selection(parser)
    cli.add_device(parser)
    cli.add_results(parser, default=results.RESULTS)
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
        "--energy", action="store_true", help="power and energy of each GEMM instead of times"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    names = peers.available() if args.peers is None else args.peers
    for name in names:
        if name not in peers.PEERS:
            known = ", ".join(peers.PEERS)
            raise bad_argument("--peers", f"names of {known}", name, "Leave it out.")
    options = cli.options_of(args, check=not args.no_verify, kernels=args.kernels)
    command = shlex.join(["python", "benchmarks/layer.py", *argv])
    origin = results.provenance(args.device, command, args.commit)
    if args.energy:
        cli.check_apart_from_times(args, "--energy", ("kernels", "peers", "sonicmoe_path"))
        Board(args.device)  # fails now rather than after the first case
        return cli.finish(cli.measure_cases(args, options, origin, layer.energy_case))
    if args.sonicmoe_path:
        published.find(args.sonicmoe_path)  # fails now rather than after the first case
    measure = functools.partial(bench_case, peers=layer.with_peers(names, args.sonicmoe_path))
    return cli.finish(cli.measure_cases(args, options, origin, measure))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"layer.py: {error}", file=sys.stderr)
        sys.exit(2)
