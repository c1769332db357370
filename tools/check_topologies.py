"""Train the toy model on every topology and print how far loss and gradient norm are from one process.

    python tools/check_topologies.py --iterations 20

    python tools/check_topologies.py --experts   # the toy model with experts; router losses are compared too

    python tools/check_topologies.py --noise     # corrupted ids of every rank against one process, 0 and 4 data workers

Exit code 1 if a topology differs by more than --tolerance (relative; --noise: in any bit) or fails.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from megatron.bdlm.testing.topologies import (
    EXPERT_TOPOLOGIES,
    ONE_PROCESS,
    TOPOLOGIES,
    TOY_EXPERTS,
    agreement,
    recorded_noise,
    reference_run,
    topology_run,
)
from megatron.bdlm.testing.training_run import RunFailure


def check_noise(only: str, workers: list[int]) -> int:
    """Print a line for each topology; returns how many differ or fail."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = {index: copies[0] for index, copies in recorded_noise(ONE_PROCESS, 0, folder).items()}
        print(f"one process: {len(alone)} samples of {next(iter(alone.values())).size} noisy ids", flush=True)
        print(f"{'topology':42} {'workers':>7} {'samples':>7} {'draws':>6}", flush=True)
        for topology in TOPOLOGIES:
            for count in workers if only in topology.name else ():
                try:
                    recorded = recorded_noise(topology, count, folder)
                except RunFailure as failure:
                    failed += 1
                    print(f"{topology.name:42} {count:7} FAILED: {_reason(failure)}", flush=True)
                    continue
                draws = [(index, copy) for index, copies in recorded.items() for copy in copies]
                good = recorded.keys() == alone.keys() and all(np.array_equal(copy, alone[index]) for index, copy in draws)
                failed += not good
                verdict = "identical" if good else "DIFFERS"
                print(f"{topology.name:42} {count:7} {len(recorded):7} {len(draws):6} {verdict}", flush=True)
    return failed


def _reason(failure: RunFailure) -> str:
    errors = [line for line in str(failure).splitlines() if "Error: " in line]
    return errors[0] if errors else str(failure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20, help="steps of each run (default 20)")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference (default 1e-5)")
    parser.add_argument("--experts", action="store_true", help="layouts of the toy model with experts")
    parser.add_argument("--noise", action="store_true", help="compare corrupted ids instead of training")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 4], help="data workers for --noise (default 0 4)")
    parser.add_argument("--only", default="", help="run the topologies whose name contains this")
    parser.add_argument("--script", default="pretrain_bdlm.py", help="entry script (default pretrain_bdlm.py)")
    parser.add_argument("flags", nargs="*", help="further flags for every run, behind --")
    args = parser.parse_args()

    if args.noise:
        return 1 if check_noise(args.only, args.workers) else 0
    failed = 0
    flags = tuple([*TOY_EXPERTS, *args.flags] if args.experts else args.flags)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = reference_run(folder, args.iterations, args.script, flags)
        losses = reference.scalars["lm loss"]
        print(f"one process, {args.iterations} steps: loss {losses[1]:.6f} -> {losses[args.iterations]:.6f}", flush=True)
        print(f"{'topology':50} {'steps':>5} {'loss':>9} {'grad norm':>9}", flush=True)
        for topology in EXPERT_TOPOLOGIES if args.experts else TOPOLOGIES:
            if args.only not in topology.name:
                continue
            try:
                result = agreement(topology_run(topology, folder, args.iterations, args.script, flags), reference)
            except RunFailure as failure:
                failed += 1
                print(f"{topology.name:50} FAILED: {_reason(failure)}", flush=True)
                continue
            good = max(result.loss, result.gradient_norm) <= args.tolerance
            failed += not good
            print(
                f"{topology.name:50} {result.steps:5} {result.loss:9.1e} {result.gradient_norm:9.1e}{'' if good else '  DIFFERS'}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
