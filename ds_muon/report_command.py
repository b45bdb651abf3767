"""``ds-muon report``: a run on one page."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_muon.extras import how_to_install
from ds_muon.files import keep, write_text
from ds_muon.options import writable
from ds_muon.run_log import NoRun, RunLog, read_log
from ds_muon.say import tell
from ds_muon.text import count
from ds_muon.verify.outcome import COULD_NOT_RUN, load
from ds_muon.verify.record import VerifyResult
from ds_muon.verify.report.page import inline, rendered
from ds_muon.verify.report.picture import COLOURS, HEADING, WIDTH, figure_of, shortened, style, svg_of
from ds_muon.verify.report.rows import rows_of, verdict_of, with_printable_names

_HALF = "(muon|adamw)"
_RATES, _SKIPPED, _BALANCE = "Learning rate", "Steps skipped so far", "Newton-Schulz of the busiest rank, over the mean"
_CHECKS, _U_NORM = "Largest error of a check, over its tolerance", "Norm of what Newton-Schulz gets"
PANELS = {
    "Loss": r"(?:.*_)?loss",
    _RATES: rf"(?:DSMuon_lr_{_HALF}|(?:.*_)?(?:lr|learning_rate))",
    "Norm of the gradients": rf"(?:DSMuon_grad_norm_{_HALF}|grad_norm)",
    "Size of the updates, before the rate": rf"DSMuon_update_rms_{_HALF}",
    "Size of the weights": rf"DSMuon_weight_rms_{_HALF}",
    _U_NORM: r"DSMuon_u_norm_(.*)",
    "Stable rank of what Newton-Schulz gets": r"DSMuon_stable_rank_(.*)",
    "Distance of its result from orthogonal": r"DSMuon_off_orthogonal_(.*)",
    _SKIPPED: r"DSMuon_skipped_(.*)",
    _CHECKS: r"DSMuon_(verify)_excess",
    "In a step, ms": r"DSMuon_(.*)_ms",
    _BALANCE: r"DSMuon_(balance)",
    "Loss scale": r"(?:.*_)?loss_scale",
}
"""Title of a panel, and the names of what is in it; a group is what to call it there."""

# Where values of several sizes are told apart.
_LOGARITHMIC = {_RATES, "Norm of the gradients", _U_NORM, "Loss scale"}
# What the axis of others begins with, and reaches at least.
_REACH = {_SKIPPED: (0.0, 1.0), _BALANCE: (1.0, 1.1), _CHECKS: (0.0, 1.1)}
_LIGHT = {name: light for name, (light, _) in COLOURS.items()}
_LINES = 8
_NAME_CHARACTERS = 34
# In points: of a panel, its margins, and what is above and below its lines.
_HEIGHT, _TOP, _LEGEND, _BELOW, _GAP = 190.0, 22.0, 11.0, 22.0, 44.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``ds-muon report``."""
    parser.description = "Show a run on one HTML page: loss, rates, norms, spectra, skipped steps, partitions."
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN",
        help="the folder of DeepSpeed's csv_monitor; the folder or trainer_state.json of Hugging Face Trainer; or what "
        "ds-muon verify --json wrote, for the partitions and the errors",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=writable, default="report.html", metavar="FILE", help="the page to write (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page. Returns the exit code."""
    for package in ("matplotlib", "jinja2"):
        if find_spec(package) is None:
            tell(f"ds-muon report: it needs {package}: {how_to_install('plot')}", to=sys.stderr)
            return COULD_NOT_RUN
    try:
        parts = [_part(path) for path in options.runs]
    except NoRun as error:
        tell(f"ds-muon report: {error}", to=sys.stderr)
        return COULD_NOT_RUN
    logs = [part for part in parts if isinstance(part, RunLog)]
    checks = [part for part in parts if isinstance(part, VerifyResult)]
    written = keep("report", options.out, lambda: write_text(options.out, page(logs, checks)))
    return 0 if written else COULD_NOT_RUN


def page(logs: Sequence[RunLog], checks: Sequence[VerifyResult]) -> str:
    """The page of these logs, and of these results of ``ds-muon verify``."""
    runs = []
    for log in logs:
        panels = panels_of(log)
        picture = inline(svg_of(draw(log, panels)), "The curves of a run") if panels else ""
        runs.append((log, sentence_of(log), picture, [(name, *_summary(log.series[name])) for name in log.series]))
    maps = []
    for check in checks:
        rows = rows_of(check)
        picture = inline(svg_of(figure_of(check, rows, rows)), "Partitions, and the error of every update", HEADING - 8)
        maps.append((verdict_of(check, rows), picture))
    return rendered("run.html.j2", runs=runs, maps=maps)


def panels_of(log: RunLog) -> dict[str, dict[str, Mapping[float, float]]]:
    """What of a log is drawn: by the title of its panel, and by what to call it there."""
    found: dict[str, dict[str, Mapping[float, float]]] = {}
    for title, pattern in PANELS.items():
        for name, values in log.series.items():
            if match := re.fullmatch(pattern, name):
                called = next((group for group in match.groups() if group), name)
                found.setdefault(title, {})[called] = values
    if of_halves := {name: found[_RATES][name] for name in found.get(_RATES, ()) if name in ("muon", "adamw")}:
        found[_RATES] = of_halves  # what DeepSpeed and Trainer log as well is the rate of the first group
    # Muon before AdamW, as everywhere.
    return {title: dict(sorted(series.items(), key=lambda each: each[0] != "muon")) for title, series in found.items()}


def sentence_of(log: RunLog) -> str:
    """What to know first."""
    last = max(max(values) for values in log.series.values())
    said = [f"{last:,.0f} {log.along}"]
    panels = panels_of(log)
    for name, values in panels.get("Loss", {}).items():
        said.append(f"{name} {list(values.values())[-1]:.4g}")
    skipped = {name: list(values.values())[-1] for name, values in panels.get(_SKIPPED, {}).items()}
    said += [f"{number:,.0f} skipped for {name.replace('_', ' ')}" for name, number in skipped.items() if number]
    for values in panels.get(_CHECKS, {}).values():
        if wrong := sum(not value <= 1 for value in values.values()):
            said.append(f"WRONG: {count(wrong, 'check')} of an update beyond tolerance")
    return "; ".join(said)


def _summary(values: Mapping[float, float]) -> tuple[int, str, str, str, str]:
    """How many, and first, last, least and most."""
    numbers = list(values.values())
    finite = [number for number in numbers if math.isfinite(number)] or [math.nan]
    first, last, least, most = (f"{n:.4g}" for n in (numbers[0], numbers[-1], min(finite), max(finite)))
    return len(numbers), first, last, least, most


def draw(log: RunLog, panels: Mapping[str, Mapping[str, Mapping[float, float]]]) -> Any:
    """A matplotlib Figure with two panels in a row."""
    from matplotlib.figure import Figure

    rows = -(-len(panels) // 2)
    height = rows * _HEIGHT
    width = (WIDTH - 3 * _GAP) / 2
    with style():
        figure = Figure((WIDTH / 72, height / 72), facecolor=_LIGHT["paper"])
        for place, (title, series) in enumerate(panels.items()):
            left, top = _GAP + place % 2 * (width + _GAP), place // 2 * _HEIGHT
            legend = _LEGEND * -(-min(len(series), _LINES) // 2)
            lines = _HEIGHT - _TOP - legend - _BELOW
            box = (left / WIDTH, 1 - (top + _TOP + legend + lines) / height, width / WIDTH, lines / height)
            axes = figure.add_axes(box)
            axes.set_title(title, loc="left", fontsize=8.6, fontweight="bold", pad=legend + 5)
            _draw_lines(axes, series, title in _LOGARITHMIC)
            if title in _REACH:
                bottom, top_least = _REACH[title]
                most = max(axes.get_ylim()[1], top_least)
                axes.set_ylim(bottom - 0.02 * (most - bottom), most)
            if title == _CHECKS:
                axes.axhline(1, color=_LIGHT["alarm"], linewidth=0.9)
            axes.set_xlabel(log.along, loc="right", color=_LIGHT["muted"], fontsize=7, labelpad=1)
    return figure


def _draw_lines(axes: Any, series: Mapping[str, Mapping[float, float]], logarithmic: bool) -> None:
    shown = {name: {x: y for x, y in values.items() if math.isfinite(y) and math.isfinite(x)}
             for name, values in list(series.items())[:_LINES]}  # fmt: skip
    positive = [y for values in shown.values() for y in values.values() if y > 0]
    logarithmic = logarithmic and bool(positive)
    for place, (name, kept) in enumerate(shown.items()):
        left_out = {"not finite": len(series[name]) - len(kept)}
        if logarithmic:
            left_out["at 0"] = sum(y <= 0 for y in kept.values())
        notes = ", ".join(f"{number} {what}" for what, number in left_out.items() if number)
        label = shortened(name, _NAME_CHARACTERS, keep_end=True) + (f" (not shown: {notes})" if notes else "")
        marker = "o" if len(kept) < 30 else None
        axes.plot([*kept], [*kept.values()], color=_LIGHT[f"rank{place}"], linewidth=1.2, label=label, marker=marker,
                  markersize=2.2)  # fmt: skip
    if logarithmic:
        from matplotlib.ticker import AutoLocator, LogLocator

        axes.set_yscale("log", nonpositive="mask")  # a gap
        # Two numbers at least to read off: decades of 100, 1-2-5 of a factor of 5, and of less, ticks of a linear axis.
        bottom, top = axes.get_ylim()
        decades = LogLocator(subs=(1, 2, 5) if top < 100 * bottom else (1,))
        axes.yaxis.set_major_locator(AutoLocator() if top < 5 * bottom else decades)
        axes.yaxis.set_minor_formatter("")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:.7g}")  # as fp32 has, and no factor apart from its numbers, in the legend
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=7, borderpad=0,
                borderaxespad=0.2, handlelength=1.2, labelspacing=0.2, labelcolor=_LIGHT["muted"])  # fmt: skip
    axes.set_facecolor(_LIGHT["paper"])
    axes.grid(axis="y", color=_LIGHT["faint"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_LIGHT["muted"], labelsize=7, length=0, which="both")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_LIGHT["faint"])


def _part(path: Path) -> RunLog | VerifyResult:
    """What a file or a folder holds."""
    if os.path.isfile(path):  # pathlib's raises for a name that is too long
        try:
            (found,) = load(path)
        except (ValueError, OSError):
            return read_log(path)
        if isinstance(found, VerifyResult):
            return with_printable_names(found)
    return read_log(path)
