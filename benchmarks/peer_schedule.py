"""Balance and bytes of this project's placement beside those of the package `turbo-dllm`, for a grid of blocks B and ranks P.

    pip install --no-deps --target /tmp/peer turbo-dllm==0.1.6
    python benchmarks/peer_schedule.py --peer /tmp/peer --json benchmarks/results/peer_schedule.json --plot benchmarks/results/peer_schedule.png

The peer is a dependency of this benchmark alone; two of its functions are called: `build_block_schedule` (which rank computes which
noisy block) and `clean_shards_for_rank` (which rank holds which clean tokens). Nothing else of it runs here, and its kernels
and transfers are not measured. What the two rules imply is counted under one mask for both: block-causal, one view.

    area      visible (query, key) pairs of a rank; balance = largest / mean, 1 is perfect
    ring      rows a rank receives when every clean row travels past everybody: (P-1)/P of L in both
    needed    rows of other ranks that a rank's queries see: what a transport that moves only needed rows would bring
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.bdlm.parallel.plan import SequencePlan  # noqa: E402

BLOCK = 32


def of_peer(blocks: int, ranks: int) -> dict[str, float]:
    """Figures of the peer's rules."""
    from dllm_parallel.core.attention.cp_backend import clean_shards_for_rank
    from dllm_parallel.core.schedules.block import build_block_schedule

    length = blocks * BLOCK
    noisy = build_block_schedule(blocks, ranks, ranks).active_blocks_by_worker
    areas, needed = [], []
    for rank in range(ranks):
        mine = np.zeros(length, bool)
        for shard in clean_shards_for_rank(seq_len=length, context_parallel_size=ranks, rank=rank):
            mine[shard.start : shard.stop] = True
        tokens = np.flatnonzero(mine)
        # a noisy block sees the clean blocks before it and itself; a clean token its own block and those before
        areas.append(sum((block + 1) * BLOCK**2 for block in noisy[rank]) + int(((tokens // BLOCK + 1) * BLOCK).sum()))
        seen = max(max(noisy[rank], default=0) * BLOCK, (int(tokens.max()) // BLOCK + 1) * BLOCK if len(tokens) else 0)
        needed.append(seen - int(mine[:seen].sum()))
    return figures(areas, needed, length, ranks)


def of_ours(blocks: int, ranks: int) -> dict[str, float]:
    """Figures of the plan."""
    length = blocks * BLOCK
    programs = [SequencePlan.build(length, BLOCK, ranks, rank=rank).program() for rank in range(ranks)]
    needed = [sum(len(piece.rows) for piece in program.remote) for program in programs]
    return figures([program.area for program in programs], needed, length, ranks)


def figures(areas: list[int], needed: list[int], length: int, ranks: int) -> dict[str, float]:
    return {
        "area": sum(areas), "balance": max(areas) * len(areas) / sum(areas), "ring_rows": length * (ranks - 1) / ranks,
        "needed_rows_mean": sum(needed) / ranks, "needed_rows_most": max(needed),
    }


def plot(rows: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4.2))
    labels = [f"{row['blocks']}/{row['ranks']}" for row in rows]
    for side, color in (("peer", "tab:gray"), ("ours", "tab:green")):
        axes[0].plot(labels, [row[side]["balance"] for row in rows], "o-", color=color, label=side)
        share = [row[side]["needed_rows_mean"] / row[side]["ring_rows"] for row in rows]
        axes[1].plot(labels, share, "o-", color=color, label=side)
    axes[0].set(ylabel="largest area / mean (1: perfect)", xlabel="blocks/ranks")
    axes[1].set(ylabel="needed rows / rows of a ring (1: ceiling)", xlabel="blocks/ranks")
    for axis in axes:
        axis.tick_params(axis="x", rotation=70)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="folder the package was installed into (default: where Python finds it)")
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16, 20, 33, 64, 100, 256])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--plot", help="PNG file to draw the figures to")
    args = parser.parse_args()
    if args.peer:
        sys.path.append(args.peer)
    rows = []
    print(f"{'B':>4} {'P':>2} {'balance peer':>12} {'ours':>7} {'needed rows peer':>16} {'ours':>7} {'ring':>7}")
    for blocks in args.blocks:
        for ranks in args.ranks:
            try:
                peer = of_peer(blocks, ranks)
            except ModuleNotFoundError as error:
                print(f"the peer is not installed ({error}): pip install --no-deps --target DIR turbo-dllm==0.1.6, then --peer DIR", file=sys.stderr)
                return 1
            row = {"blocks": blocks, "ranks": ranks, "peer": peer, "ours": of_ours(blocks, ranks)}
            if row["peer"]["area"] != row["ours"]["area"]:
                raise AssertionError(f"B {blocks}, P {ranks}: the two do not compute the same mask: {row}")
            rows.append(row)
            peer, ours = row["peer"], row["ours"]
            print(
                f"{blocks:4} {ranks:2} {peer['balance']:12.4f} {ours['balance']:7.4f} {peer['needed_rows_mean']:16.1f} "
                f"{ours['needed_rows_mean']:7.1f} {ours['ring_rows']:7.1f}"
            )
    if args.json:
        Path(args.json).write_text(json.dumps({"peer": "turbo-dllm 0.1.6", "block_size": BLOCK, "rows": rows}, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
