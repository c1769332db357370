"""Memory, FLOPs and bytes a rank for training a drafter: context lengths by layouts. A model, not a measurement.

    plan_dflash.py                                       # a published shape at 512K and 1M
    plan_dflash.py --drafter FOLDER --contexts 524288 1048576 --layouts 8x1 8x8
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.bdlm.drafter.format import DrafterError, read_config  # noqa: E402
from megatron.bdlm.planner.drafts import GIB, PUBLISHED, DraftShape, draft_cost  # noqa: E402


def shape_of(folder: Path) -> DraftShape:
    """Sizes of the drafter in a published folder."""
    config = read_config(folder)
    return DraftShape(
        config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
        config.head_dim, len(config.target_layer_ids), config.vocab_size, config.block_size, config.widest_window(),
    )


def rows(shape: DraftShape, contexts: list[int], layouts: list[tuple[int, int]], anchors: int) -> list[list[str]]:
    """A line for every context length and layout, as text."""
    lines = []
    for context in contexts:
        for cp, bp in layouts:
            cost = draft_cost(shape, context, anchors, cp, bp)
            parts = [f"{cost.memory[name] / GIB:.1f}" for name in ("features", "context", "keys", "transit", "drafts", "logits", "weights")]
            work = [f"{cost.draft_flops / 1e12:.0f}", f"{cost.context_flops / 1e12:.0f}", f"{cost.sent_bytes / GIB:.1f}"]
            lines.append([str(context), f"{cp}", f"{bp}", *parts, f"{cost.memory_total / GIB:.1f}", *work])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, help="published drafter folder (default: D = 5120, 5 layers, 5 features, B = 8)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[524288, 1048576], help="context tokens (default %(default)s)")
    parser.add_argument("--layouts", nargs="+", default=["1x1", "2x2", "8x1", "8x2", "8x8"], help="CPxBP (default %(default)s)")
    parser.add_argument("--anchors", type=int, default=2048, help="anchors of a sample (default %(default)s)")
    parser.add_argument("--window", type=int, help="a window on every draft layer")
    args = parser.parse_args()
    shape = shape_of(args.drafter) if args.drafter else PUBLISHED
    if args.window is not None:
        shape = replace(shape, window=args.window)
    layouts = [tuple(map(int, layout.split("x"))) for layout in args.layouts]
    for cp, bp in layouts:
        if bp < 1 or cp % bp:
            raise DrafterError(f"--layouts {cp}x{bp}: BP must divide CP. A legal value: {cp}x{cp}")
    names = "context CP BP features ctx keys transit drafts logits weights total(GiB) draft(TF) ctx(TF) sent(GiB)".split()
    for line in [names, *rows(shape, args.contexts, layouts, args.anchors)]:
        print(" ".join(f"{value:>10}" for value in line))


if __name__ == "__main__":
    try:
        main()
    except (DrafterError, OSError) as error:
        sys.exit(f"error: {error}")
