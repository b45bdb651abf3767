"""Charts of what a bench measured, and of what a plan predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ds_muon.files import writing
from ds_muon.plan_cost import StepCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK = "#768390"  # legible on white and on black
_COLOURS = ("#0072b2", "#56b4e9", "#999999", "#e69f00", "#ddcc77", "#882255", "#cc79a7", "#009e73")


def draw_bars(
    path: Path, title: str, axis: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]
) -> None:
    """Horizontal bars, one group below the other, shorter is better; what is None is left out. Writes ``path``.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    shown = {name: values for name, values in series.items() if any(value is not None for value in values)}
    figure = Figure(figsize=(9, 1 + 0.22 * len(groups) * (len(shown) + 1)), layout="constrained")
    axes = figure.add_subplot()
    height = 1 / (len(shown) + 1)
    for place, (name, values) in enumerate(shown.items()):
        ys = [group + place * height for group, value in enumerate(values) if value is not None]
        widths = [value for value in values if value is not None]
        bars = axes.barh(ys, widths, height, color=_COLOURS[place % len(_COLOURS)], label=name)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=7)
    axes.set_yticks([group + (len(shown) - 1) * height / 2 for group in range(len(groups))], list(groups))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.axvline(1, color="#656d76", linewidth=0.8)
    axes.set_xlabel(axis)
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    with writing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=150)


def draw_costs(path: Path, costs: Mapping[str, Sequence[StepCost]], tflops: float) -> None:
    """Estimated time of a step against the number of ranks, one colour per model. Writes ``path``.

    Beside it, Newton-Schulz alone: if every holder of a piece does it, and at the mean of the ranks.

    Args:
        costs: by model, at each world size.
        tflops: rate of the iteration.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib import rc_context

    ink = {name: _INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    kind = path.suffix[1:].lower()
    # The same numbers make the same file.
    with rc_context({**ink, "svg.fonttype": "none", "svg.hashsalt": "ds_muon"}), writing(path) as file:
        metadata = {"Date": None} if kind == "svg" else None
        _figure_of(costs, tflops).savefig(file, format=kind, dpi=150, transparent=True, metadata=metadata)


def _figure_of(costs: Mapping[str, Sequence[StepCost]], tflops: float) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    per_ms = 1e9 * tflops
    for place, (model, of_model) in enumerate(costs.items()):
        ranks, colour = [cost.world_size for cost in of_model], _COLOURS[place * 3 % len(_COLOURS)]
        ms = [1e3 * cost.seconds for cost in of_model]
        repeated = [cost.busiest_flops_repeated / per_ms for cost in of_model]
        mean = [cost.flops / cost.world_size / per_ms for cost in of_model]
        axes.plot(ranks, ms, "o-", color=colour, markersize=4)
        axes.plot(ranks, repeated, "--", color=colour, linewidth=1.2)
        axes.plot(ranks, mean, ":", color=colour, linewidth=1.2)
        axes.annotate(model, (ranks[-1], ms[-1]), xytext=(8, 0), textcoords="offset points", va="center", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_ylabel(f"ms of a step, estimated at {tflops:g} TFLOP/s")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    styles = [
        ("o", "-", "DSMuon, exchange included"),
        ("", "--", "Newton-Schulz of the busiest rank, if every holder of a matrix does it"),
        ("", ":", "Newton-Schulz, mean of the ranks"),
    ]
    lines = [Line2D([], [], color=_INK, marker=marker, markersize=4, linestyle=line) for marker, line, _ in styles]
    axes.legend(lines, [label for *_, label in styles], frameon=False, fontsize=9, loc="upper right")
    return figure
