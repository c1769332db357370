"""Runs' curves out of their TensorBoard files or JSON logs: drawn to one PNG, and compared in numbers.

Reads every event file below a folder (a resumed run leaves several; their points are merged by iteration, the later
file wins), or one file of --bdlm-json-log (a later line wins), and draws what it finds: loss, NELBO of training and
validation, masked cross entropy, tokens per second,
NELBO by noise level. Metrics that a run does not have leave their panel out and are named.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Sequence

from megatron.bdlm.training.json_log import FIELDS, read_lines

VALIDATION = " validation"
BUCKET = "nelbo t "
_NOT_CURVES = (" vs samples", " ppl")


class PlotError(ValueError):
    """A folder that cannot be drawn; the message says why."""


@dataclass(frozen=True)
class Run:
    """Scalars of one run."""

    name: str
    scalars: dict[str, list[tuple[int, float]]]
    """Tag -> (iteration, value), ascending."""


@dataclass(frozen=True)
class Panel:
    """One set of axes: the tags that belong on it, in training and, dashed, in validation."""

    title: str
    unit: str
    tags: tuple[str, ...]
    logarithmic: bool = False
    by_noise_level: bool = False


PANELS = (
    Panel("Loss", "nats per supervised token", ("lm loss",)),
    Panel("NELBO", "nats per token", ("nelbo",)),
    Panel("Masked cross entropy (unweighted)", "nats per masked token", ("masked cross entropy",)),
    Panel("Throughput per rank", "per second", ("clean tokens/s", "processed rows/s"), logarithmic=True),
    Panel("NELBO by noise level t", "nats per token", (BUCKET,), by_noise_level=True),
    Panel("Gradient norm", "", ("grad-norm", "grad norm"), logarithmic=True),
)


def read_run(folder: str | Path, name: Optional[str] = None) -> Run:
    """Every scalar of the event files below `folder`, or of the JSON log `folder`.

    Raises:
        PlotError: no such folder or file, no event file, or no scalar in them.
    """
    if Path(folder).is_file():
        return _read_json_log(Path(folder), name)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = Path(folder)
    if not folder.is_dir():
        raise PlotError(f"{folder}: no such folder. A run writes its events to --tensorboard-dir")
    # oldest first, so that a resumed run's points win over those it repeats
    files = sorted(folder.rglob("*tfevents*"), key=lambda f: (f.stat().st_mtime, f.name))
    if not files:
        raise PlotError(f"{folder}: no TensorBoard event file (*tfevents*) in it. A run writes them to --tensorboard-dir")
    merged: dict[str, dict[int, float]] = {}
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            merged.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    if not merged:
        raise PlotError(f"{folder}: its {len(files)} event file(s) hold no scalar; did the run reach its first log interval?")
    return Run(name or folder.name, {tag: sorted(points.items()) for tag, points in sorted(merged.items())})


def _read_json_log(path: Path, name: Optional[str]) -> Run:
    """Scalars of a --bdlm-json-log; null (a value that was not finite) is NaN. The test set is no curve."""
    try:
        lines = [line for line in read_lines(path) if line["kind"] in ("train", "validation")]
    except ValueError as error:
        raise PlotError(str(error)) from None
    merged: dict[str, dict[int, float]] = {}
    for line in lines:
        for tag in line.keys() - set(FIELDS):
            merged.setdefault(tag, {})[line["iteration"]] = math.nan if line[tag] is None else line[tag]
    if not merged:
        raise PlotError(f"{path}: it holds no logged iteration; did the run reach its first log interval?")
    return Run(name or path.stem, {tag: sorted(points.items()) for tag, points in sorted(merged.items())})


def compare(runs: Sequence[Run]) -> str:
    """Values of several runs side by side, each metric at the last iteration that all of its runs have, against the first run.

    A metric that only one run has is left out.
    """
    lines = [["metric", "iteration", *(run.name for run in runs), *(f"{run.name} - {runs[0].name}" for run in runs[1:])]]
    for tag in sorted({tag for run in runs for tag in run.scalars}):
        having = [dict(run.scalars[tag]) for run in runs if tag in run.scalars]
        common = set.intersection(*map(set, having))
        if len(having) < 2 or tag.endswith(_NOT_CURVES) or not common:
            continue
        at = max(common)
        values = [dict(run.scalars[tag])[at] if tag in run.scalars else None for run in runs]
        differences = ["-" if None in (value, values[0]) else f"{value - values[0]:+.4g}" for value in values[1:]]
        lines.append([tag, str(at), *("-" if value is None else f"{value:.6g}" for value in values), *differences])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def last_value(run: Run, tag: str) -> float:
    """The newest value of a metric.

    Raises:
        PlotError: the run has no such metric.
    """
    if tag not in run.scalars:
        raise PlotError(f"{run.name}: no metric {tag!r}; there are {', '.join(run.scalars)}")
    return run.scalars[tag][-1][1]


def tags_of(run: Run, panel: Panel) -> list[str]:
    """The run's tags that belong on a panel: names are compared without case, and hyphens count as spaces."""

    def plain(tag: str) -> str:
        return tag.lower().replace("-", " ").replace("_", " ").strip()

    wanted = [plain(tag) for tag in panel.tags]
    found = []
    for tag in run.scalars:
        if tag.endswith(_NOT_CURVES):
            continue
        base = plain(tag.removesuffix(VALIDATION))
        if panel.by_noise_level:
            matches = any(base.startswith(w + " ") for w in wanted) and not tag.endswith(VALIDATION)
        else:
            matches = base in wanted
        if matches:
            found.append(tag)
    return found


def draw(runs: Sequence[Run], output: str | Path, unigram_entropy: Optional[float] = None, title: Optional[str] = None) -> list[str]:
    """Draw the panels that any run has data for.

    Args:
        output: PNG file to write; its folder is made.
        unigram_entropy: nats per token, drawn as a horizontal line on the NELBO panel.

    Returns:
        One line for each panel: what was drawn on it, or that no run has it.

    Raises:
        PlotError: no run has any of the metrics.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = [(panel, [(run, tag) for run in runs for tag in tags_of(run, panel)]) for panel in PANELS]
    report = [
        f"{panel.title}: " + (", ".join(dict.fromkeys(tag for _, tag in curves)) or "not in this run") for panel, curves in found
    ]
    shown = [(panel, curves) for panel, curves in found if curves]
    if not shown:
        tags = sorted({tag for run in runs for tag in run.scalars})
        raise PlotError(f"none of the metrics to draw is in these runs; their tags: {', '.join(tags)}")
    columns = 2 if len(shown) > 1 else 1
    rows = math.ceil(len(shown) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(7 * columns, 3.8 * rows), squeeze=False, layout="constrained")
    for axis, (panel, curves) in zip(axes.flat, shown):
        _draw_panel(axis, panel, curves, several=len(runs) > 1)
        if panel.tags == ("nelbo",) and unigram_entropy is not None:
            axis.axhline(unigram_entropy, color="black", linewidth=1, linestyle=":", label=f"unigram entropy {unigram_entropy:.3f}")
            axis.legend(fontsize=8)
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    figure.suptitle(title or ", ".join(run.name for run in runs))
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)
    return report


def _draw_panel(axis, panel: Panel, curves: list[tuple[Run, str]], several: bool) -> None:
    """Curves of one panel; noise levels run from light to dark."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(run.name for run, _ in curves))
    for place, (run, tag) in enumerate(curves):
        style: dict = {"linestyle": "--", "marker": "o", "markersize": 3} if tag.endswith(VALIDATION) else {}
        if panel.by_noise_level:
            levels = [t for r, t in curves if r is run]
            style |= {"color": plt.get_cmap("viridis")(1 - levels.index(tag) / max(len(levels) - 1, 1))}
            style |= {"linestyle": ("-", "--", ":", "-.")[names.index(run.name) % 4], "linewidth": 1}
        elif several:
            style |= {"color": f"C{names.index(run.name) % 10}", "alpha": 1.0 if tag.endswith(VALIDATION) else 0.7}
        label = tag.removeprefix("nelbo ") if panel.by_noise_level else tag
        points = [(x, y) for x, y in run.scalars[tag] if math.isfinite(y)]
        axis.plot(*(zip(*points) if points else ([], [])), label=f"{run.name}: {label}" if several else label, **style)
    if panel.logarithmic and any(y > 0 for run, tag in curves for _, y in run.scalars[tag]):
        axis.set_yscale("log")
    axis.set(title=panel.title, xlabel="iteration", ylabel=panel.unit)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, ncols=2 if len(curves) > 6 else 1)
