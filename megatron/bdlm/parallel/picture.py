"""A plan to look at: who holds what, who needs what from whom, what each rank computes; as text and as a picture.

Takes the plans of all ranks of one sample. The picture shows the mask of `[xt; x0]` as the very rectangles
that are computed, in the colour of the computing rank: strong where the keys are its own, pale where
they come from a peer. Only pale areas cost traffic.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron.bdlm.parallel.plan import SequencePlan

STRIP = 64  # characters of the strip that shows who holds the clean stream
LARGEST_PICTURE = 60_000  # rectangles; a longer sample looks the same and takes minutes to draw


class PictureError(ValueError):
    """A plan too large to draw; the message names the limit."""


def describe(plans: Sequence[SequencePlan], window: int | None = None) -> str:
    """The plan as text: a strip of owners, then a line a rank."""
    plan, programs = plans[0], [each.program(window) for each in plans]
    mean_area = sum(program.area for program in programs) / len(plans)
    owners = "all ranks (replicated)" if plan.strategy == "bp" else _strip(plans)
    columns = "rank, noisy, clean, padding, runs, area, of mean, local, rectangles, batches, needs rows of"
    table = [columns.split(", ")]
    for each, program in zip(plans, programs):
        pieces = (program.local, *program.remote)
        needs = "  ".join(f"{piece.source}: {len(piece.rows)}" for piece in program.remote) or "nobody"
        table.append([str(cell) for cell in (
            each.rank, each.noisy_rows, each.holdings().clean.count, each.s_local - each.used_rows,
            len(each.holdings().clean.starts), program.area, f"{program.area / mean_area:.4f}",
            f"{program.local.area / max(program.area, 1):.0%}", program.rectangles,
            sum(len(piece.batches) for piece in pieces), needs,
        )])
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths)) + "  " + row[-1] for row in table]
    direct = sum(len(rows) for program in programs for rows in program.sends.values())
    ring = sum(len(rows) for rows in programs[0].shared) * (len(plans) - 1)
    return "\n".join([
        _title(plan, window), "", f"clean stream, by rank   {owners}", "", *lines, "",
        f"heaviest over mean attention area: {max(program.area for program in programs) / mean_area:.4f}",
        f"rows whose keys and values travel in forward: direct {direct}, ring or allgather {ring} "
        f"({direct / plan.seq_length:.2f} and {ring / plan.seq_length:.2f} per token)",
    ])


def draw(plans: Sequence[SequencePlan], path: Path, window: int | None = None) -> None:
    """Write the picture as PNG.

    Raises:
        PictureError: more than `LARGEST_PICTURE` rectangles.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    programs = [each.program(window) for each in plans]
    count = sum(program.rectangles for program in programs)
    if count > LARGEST_PICTURE:
        raise PictureError(
            f"{count} rectangles: a picture shows at most {LARGEST_PICTURE}. Draw a shorter --seq-length, or a larger "
            "--bdlm-block-size"
        )
    colours = [matplotlib.colormaps["tab20" if len(plans) > 10 else "tab10"](i % 20) for i in range(len(plans))]
    figure = plt.figure(figsize=(13, 7.6), constrained_layout=True)
    grid = figure.add_gridspec(2, 2, width_ratios=[1.45, 1], height_ratios=[1.15, 1])
    _draw_mask(figure.add_subplot(grid[:, 0]), plans, programs, colours)
    _draw_needs(figure.add_subplot(grid[0, 1]), programs)
    _draw_areas(figure.add_subplot(grid[1, 1]), programs, colours)
    figure.suptitle(_title(plans[0], window))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---- text -------------------------------------------------------------------------------------


def _title(plan: SequencePlan, window: int | None) -> str:
    parts = [
        plan.strategy, f"L={plan.seq_length}", f"S={plan.block_size}", f"B={len(plan.block_starts)}",
        f"P={plan.context_parallel_size}", f"K={plan.block_parallel_size}", f"V={plan.views}", plan.clean_attention,
    ]
    return "  ".join(parts + ([] if window is None else [f"W={window}"]))


def _strip(plans: Sequence[SequencePlan]) -> str:
    """One character per stretch of the clean stream: the rank that holds its first token."""
    length = plans[0].seq_length
    tokens = np.unique(np.arange(min(STRIP, length)) * length // min(STRIP, length))
    marks = np.full(len(tokens), "?")
    for plan in plans:
        marks[plan.holdings().clean.holds(tokens)] = np.base_repr(plan.rank % 36, 36).lower()
    return "".join(marks)


# ---- picture ----------------------------------------------------------------------------------


def _draw_mask(axes, plans, programs, colours) -> None:
    """The rectangles of all ranks in global rows and keys."""
    from matplotlib.collections import PolyCollection

    for plan, program, colour in zip(plans, programs, colours):
        for piece in (program.local, *program.remote):
            key_rows = plans[piece.source].rows.numpy()[piece.rows]
            polygons = [
                corners for batch in piece.batches for corners in _polygons(batch, plan.rows.numpy(), key_rows)
            ]
            strong = piece.source == plan.rank
            axes.add_collection(PolyCollection(
                polygons, facecolors=[(*colour[:3], 0.95 if strong else 0.38)], edgecolors="white", linewidths=0.35
            ))
    plan = plans[0]
    length, rows = plan.seq_length, (plan.views + 1) * plan.seq_length
    names = [f"$x_t$ view {v + 1}" if plan.views > 1 else "$x_t$ (noisy)" for v in range(plan.views)]
    names.append("$x_0$ (clean)")
    documents = np.flatnonzero(np.diff(plan.block_documents)) + 1
    for stream in range(plan.views + 1):
        for edge in plan.block_starts[documents] + stream * length:
            axes.axhline(edge, color="0.75", linewidth=0.5, zorder=0)
            axes.axvline(edge, color="0.75", linewidth=0.5, zorder=0)
        axes.axhline(stream * length, color="black", linewidth=0.8)
        axes.axvline(stream * length, color="black", linewidth=0.8)
        _draw_owners(axes, plans, colours, stream, rows)
    middles = (np.arange(plan.views + 1) + 0.5) * length
    axes.set_xticks(middles, names)
    axes.set_yticks(middles, names, rotation=90, va="center")
    axes.set(xlim=(-0.035 * rows, rows), ylim=(rows, -0.035 * rows), xlabel="keys", ylabel="queries", aspect="equal")
    axes.tick_params(length=0)
    axes.set_title("who computes what: strong = own keys, pale = keys of a peer", fontsize=10)


def _draw_owners(axes, plans, colours, stream: int, rows: int) -> None:
    """Bars along both axes in the colour of the rank that holds the rows (under bp clean rows are on all)."""
    from matplotlib.patches import Rectangle

    width = 0.025 * rows
    for plan, colour in zip(plans, colours):
        share = plan.holdings()
        replicated = plan.strategy == "bp" and stream == plan.views and len(plans) > 1
        for start, stop in (share.clean if stream == plan.views else share.noisy).pairs:
            first, size = start + stream * plan.seq_length, stop - start
            face = "0.6" if replicated else colour
            axes.add_patch(Rectangle((first, -1.2 * width), size, width, facecolor=face))
            axes.add_patch(Rectangle((-1.2 * width, first), width, size, facecolor=face))


def _polygons(batch, query_rows: np.ndarray, key_rows: np.ndarray) -> Iterator[list[tuple[int, int]]]:
    """Corners (key, query) of a batch's rectangles where they lie in the global mask; triangles on diagonals."""
    for query, key in zip(batch.query_starts.tolist(), batch.key_starts.tolist()):
        queries, keys = query_rows[query:query + batch.queries], key_rows[key:key + batch.keys]
        if batch.kind == "full":
            corners = [(*row_run, *key_run) for row_run in _runs(queries) for key_run in _runs(keys)]
        else:
            # a square over several runs: cut both sides alike, so that only like parts meet on the diagonal
            cuts = np.flatnonzero((np.diff(queries) != 1) | (np.diff(keys) != 1)) + 1
            parts = list(zip(np.split(queries, cuts), np.split(keys, cuts)))
            for rows, columns in parts:
                (top, bottom), (left, right) = _runs(rows)[0], _runs(columns)[0]
                yield [(left, top), (right, bottom), (left, bottom) if batch.kind == "causal" else (right, top)]
            pairs = [(i, j) for i in range(len(parts)) for j in range(len(parts)) if i != j]
            seen = [(i, j) for i, j in pairs if (j < i) == (batch.kind == "causal")]
            corners = [(*_runs(parts[i][0])[0], *_runs(parts[j][1])[0]) for i, j in seen]
        for top, bottom, left, right in corners:
            yield [(left, top), (right, top), (right, bottom), (left, bottom)]


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Consecutive stretches of ascending numbers as half-open pairs."""
    stops = np.flatnonzero(np.append(np.diff(values) != 1, True))
    starts = np.concatenate(([0], stops[:-1] + 1))
    return list(zip(values[starts].tolist(), (values[stops] + 1).tolist()))


def _draw_needs(axes, programs) -> None:
    """Rows that each rank needs from each other."""
    size = len(programs)
    needs = np.zeros((size, size), np.int64)
    for rank, program in enumerate(programs):
        for piece in program.remote:
            needs[rank, piece.source] = len(piece.rows)
    axes.imshow(needs, cmap="Greys", vmax=max(needs.max() * 1.6, 1))
    if size <= 16:
        for rank, source in np.ndindex(size, size):
            text = str(needs[rank, source]) if rank != source else "–"
            axes.text(source, rank, text, ha="center", va="center", fontsize=9 if size <= 8 else 6)
    axes.set_xticks(range(size))
    axes.set_yticks(range(size))
    axes.set(xlabel="from rank", ylabel="rank")
    axes.set_title(f"rows whose keys and values travel in forward, direct: {needs.sum()}", fontsize=10)


def _draw_areas(axes, programs, colours) -> None:
    """Attention area of each rank over the mean, own keys and peers' keys."""
    ranks, areas = np.arange(len(programs)), np.array([program.area for program in programs])
    local = np.array([program.local.area for program in programs]) / areas.mean()
    axes.bar(ranks, local, color=colours)
    axes.bar(ranks, areas / areas.mean() - local, bottom=local, color=[(*colour[:3], 0.38) for colour in colours])
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(ranks)
    axes.set(xlabel="rank", ylabel="attention area over the mean")
    axes.set_title(f"heaviest over mean: {areas.max() / areas.mean():.4f}", fontsize=10)
