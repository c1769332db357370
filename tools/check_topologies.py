"""Train the toy model on every topology and print how far loss and gradient norm are from one process.

    python tools/check_topologies.py --iterations 20

Exit code 1 if a topology differs by more than --tolerance (relative) or fails.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from megatron.bdlm.testing.topologies import TOPOLOGIES, agreement, reference_run, topology_run
from megatron.bdlm.testing.training_run import RunFailure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20, help="steps of each run (default 20)")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference (default 1e-5)")
    parser.add_argument("--only", help="run the topologies whose name contains this")
    parser.add_argument("--script", default="pretrain_bdlm.py", help="entry script (default pretrain_bdlm.py)")
    parser.add_argument("flags", nargs="*", help="further flags for every run, behind --")
    args = parser.parse_args()

    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = reference_run(folder, args.iterations, args.script, tuple(args.flags))
        losses = reference.scalars["lm loss"]
        print(f"one process, {args.iterations} steps: loss {losses[1]:.6f} -> {losses[args.iterations]:.6f}", flush=True)
        print(f"{'topology':42} {'steps':>5} {'loss':>9} {'grad norm':>9}", flush=True)
        for topology in TOPOLOGIES:
            if args.only and args.only not in topology.name:
                continue
            try:
                result = agreement(topology_run(topology, folder, args.iterations, args.script, tuple(args.flags)), reference)
            except RunFailure as failure:
                failed += 1
                errors = [line for line in str(failure).splitlines() if "Error: " in line]
                print(f"{topology.name:42} FAILED: {errors[0] if errors else failure}", flush=True)
                continue
            good = max(result.loss, result.gradient_norm) <= args.tolerance
            failed += not good
            print(
                f"{topology.name:42} {result.steps:5} {result.loss:9.1e} {result.gradient_norm:9.1e}{'' if good else '  DIFFERS'}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
