"""The report's picture, drawn by matplotlib: the flat buffers as ZeRO cut them, and the error of every update.

Lengths are points, y counts downwards. A colour is the name of the part that it plays, so that the page can follow the
reader's light or dark mode.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from ds_muon.files import writing
from ds_muon.text import count, number
from ds_muon.verify.record import Comparison, UpdateRecord, VerifyResult
from ds_muon.verify.report.rows import Row, facts_of, half_name, shape_text, verdict_of

# By part: light, dark. The ranks' colours are told apart with each common kind of colour blindness too; none is near
# the alarm colour. More than eight ranks start over: the strips name them.
COLOURS = {
    "paper": ("#ffffff", "#0f1318"),
    "ink": ("#1f2328", "#e6e8eb"),
    "muted": ("#656d76", "#9198a1"),
    "faint": ("#d8dee4", "#30363d"),
    "alarm": ("#cf222e", "#ff6b6b"),
    "wash": ("#fdf0ef", "#2c1619"),
    "good": ("#1a7f37", "#4ac26b"),
    "rank0": ("#0072b2", "#1f7fc4"),
    "rank1": ("#e69f00", "#eda21f"),
    "rank2": ("#882255", "#a83b74"),
    "rank3": ("#56b4e9", "#74c3f2"),
    "rank4": ("#009e73", "#10a57a"),
    "rank5": ("#ddcc77", "#e6da94"),
    "rank6": ("#332288", "#5647b5"),
    "rank7": ("#a8ddb5", "#bde9c9"),
}
_RANK_COLOURS = sum(name.startswith("rank") for name in COLOURS)
_LIGHT = {name: light for name, (light, _) in COLOURS.items()}

# Columns of the picture, from its left, and what lies below each other in it.
WIDTH, HEADING = 893.0, 70.0
_LEFT, _RIGHT = 20.0, WIDTH - 20.0
_SHAPE_END, _BAR, _BAR_END, _OWNER, _ERRORS, _ERRORS_END = 306.0, 317.5, 476.0, 484.0, 580.0, 842.0
_STRIP, _LEGEND, _TITLES, _GROUP, _ROW, _DIAGNOSIS, _FOOT = 55.0, 22.0, 22.0, 20.0, 16.5, 11.5, 20.0
_QUIET = {"color": _LIGHT["muted"], "fontsize": 7.5}
_TIMES = "\N{MULTIPLICATION SIGN}"
_NAME_CHARACTERS, _LINE_CHARACTERS = 44, 160

_DPI = 180
_MOST_PIXELS = 30_000  # of height; matplotlib refuses 2**16


@contextmanager
def style() -> Iterator[None]:
    """No style of the user's moves anything; text stays text; the same numbers make the same file."""
    import matplotlib.style

    ours = {"font.size": 7.9, "text.color": _LIGHT["ink"], "hatch.color": _LIGHT["muted"], "hatch.linewidth": 0.5}
    ours |= {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "ds_muon"}  # a name may hold a dollar
    with matplotlib.style.context(["default", ours]):
        yield


def figure_of(result: VerifyResult, rows: Sequence[Row], shown: Sequence[Row]) -> Any:
    """A matplotlib Figure: the heading, the strips of all ``rows``, and a line for each one that is ``shown``."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    groups = range(len(result.partition_sizes))
    tops, end = _tops(shown)
    top = HEADING + _STRIP * len(groups) + _LEGEND
    height = top + _TITLES + end + _FOOT
    with style():
        figure = Figure((WIDTH / 72, height / 72), facecolor=_LIGHT["paper"])

        def panel(first: float, last: float, left: float = 0, right: float = WIDTH) -> Any:
            """Bare axes over this part of the picture; y counts from ``first``."""
            box = (left / WIDTH, 1 - last / height, (right - left) / WIDTH, (last - first) / height)
            axes = figure.add_axes(box, frameon=False, xticks=(), yticks=(), autoscale_on=False)
            axes.set(xlim=(left, right), ylim=(last - first, 0))
            return axes

        page = panel(0, height)
        word, sentence, colour = verdict_of(result, rows)
        page.text(_LEFT, 29, f"{word}: {sentence}", color=_LIGHT[colour], fontsize=12.2, fontweight="bold")
        page.text(_LEFT, 46, shortened(" · ".join(facts_of(result).values())), color=_LIGHT["muted"], fontsize=8.6)
        for group in groups:
            first = HEADING + _STRIP * group
            in_group = [row for row in rows if row.placed.group == group]
            _draw_strip(panel(first, first + _STRIP, _LEFT, _RIGHT), result, group, in_group)
        _draw_legend(page, top)
        _draw_rows(panel(top + _TITLES, height), shown, tops)
        _draw_errors(panel(top + _TITLES, top + _TITLES + end, _ERRORS, _ERRORS_END), shown, tops)
        cover = panel(top + _TITLES, height)  # above all that stands in a row
        for row, y in zip(shown, tops, strict=True):
            _tell(cover, (_LEFT, y), _RIGHT - _LEFT, _ROW, _tip(row))
        if left_out := len(rows) - len(shown):
            text = f"{left_out} more, all right and each held by one rank, are not drawn; index.html shows them."
            page.text(_LEFT, height - 7, text, color=_LIGHT["muted"])
    return figure


def write_png(figure: Any, path: Path) -> None:
    with style(), writing(path) as file:
        figure.savefig(file, format="png", dpi=min(_DPI, _MOST_PIXELS / figure.get_figheight()))


def svg_of(figure: Any) -> str:
    """The picture as an SVG file, with what ``_tell`` has hidden in ids as titles."""
    text = StringIO()
    with style():
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return re.sub(r"""<g id=(["'])tell: (.*?)\1>""", r"<g><title>\2</title>", text.getvalue(), flags=re.S)


def rank_colour(rank: int) -> str:
    return f"rank{rank % _RANK_COLOURS}"


def _box(axes: Any, corner: tuple[float, float], width: float, height: float, colour: str, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return axes.add_artist(Rectangle(corner, width, height, facecolor=_LIGHT[colour], linewidth=0, **style))


def _tell(axes: Any, corner: tuple[float, float], width: float, height: float, text: str) -> None:
    """An invisible box, under which the page shows a text when the pointer is there."""
    _box(axes, corner, width, height, "paper", alpha=0).set_gid(f"tell: {text}")


# ---- strips: the flat buffer of each param group --------------------------------------------------------------------


def _draw_strip(axes: Any, result: VerifyResult, group: int, rows: Sequence[Row]) -> None:
    """The flat buffer of a group: its parameters over hatched padding, cut at multiples of the partition size."""
    size, ranks = result.partition_sizes[group], result.world_size
    total = size * ranks
    axes.set_xlim(0, max(total, 1))
    unused = total - sum(row.elements for row in rows)
    text = f"{count(len(rows), 'parameter')} in a flat buffer of {ranks} {_TIMES} {size:,} elements"
    text += f", of them {unused:,} padding" if unused else ""
    axes.text(0, 8, _group_title(group, rows[:1]), fontsize=8.6, fontweight="bold")
    axes.text(total, 8, text, color=_LIGHT["muted"], ha="right")
    if not total:
        return
    point = total / (_RIGHT - _LEFT)  # as elements
    top, thick = 17.0, 15.8
    _box(axes, (0, top), total, thick, "faint", hatch="////")
    for start, end, colour in _runs(rows):
        _box(axes, (start, top), end - start, thick, colour)
    apart = [row.start for before, row in pairwise(rows) if min(before.elements, row.elements) >= 3.6 * point]
    axes.vlines(apart, top, top + thick, colors=_LIGHT["paper"], linewidths=0.7)
    cut = [row for row in rows if row.placed.straddles]
    starts, ends = [row.start + point for row in cut], [row.start + row.elements - point for row in cut]
    axes.hlines([top - 3] * len(cut), starts, ends, colors=_LIGHT["ink"], linewidths=1.4)
    axes.vlines(range(size, total, size), top - 5, top + thick + 5, colors=_LIGHT["ink"], linewidths=1.1)
    every = 1
    while every * size < 19 * point:  # labels of narrow partitions would run into each other
        every *= 2
    for rank in range(0, ranks, every):
        text = f"rank {rank}" if rank == 0 or size >= 36 * point else str(rank)
        axes.text((rank + 0.5) * size, top + thick + 11, text, ha="center", **_QUIET)
    for row in rows:
        _tell(axes, (row.start, top), row.elements, thick, f"{row.placed.name}: {_held(row)}")


def _runs(rows: Sequence[Row]) -> list[tuple[int, int, str]]:
    """(start, end, colour) of what lies side by side on one rank: boxes that touch would show a line between them."""
    runs: list[tuple[int, int, str]] = []
    for row in rows:
        for rank, first, elements in row.placed.pieces:
            start, colour = row.start + first, rank_colour(rank)
            if runs and runs[-1][1:] == (start, colour):
                start = runs.pop()[0]
            runs.append((start, row.start + first + elements, colour))
    return runs


def _group_title(group: int, rows: Sequence[Row]) -> str:
    return f"{half_name(rows[0].placed)}: param group {group}" if rows else f"param group {group}"


def _held(row: Row) -> str:
    return ", ".join(f"{elements:,} elements on rank {rank}" for rank, _, elements in row.placed.pieces)


# ---- rows: one line per parameter -----------------------------------------------------------------------------------


def _tops(shown: Sequence[Row]) -> tuple[list[float], float]:
    """Where the line of each row begins, below the titles of the columns, and where the last one ends."""
    tops, y, group = [], 2.0, None
    for row in shown:
        if group != row.placed.group:
            group = row.placed.group
            y += _GROUP
        tops.append(y)
        y += _ROW if row.ok else _ROW + _DIAGNOSIS
    return tops, y


def _draw_legend(page: Any, y: float) -> None:
    """What the marks of the rows mean, flush right."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D

    def marks(colour: str, *kinds: tuple[str, float]) -> tuple[Any, ...]:
        style: dict[str, Any] = {"linestyle": "none", "color": _LIGHT[colour]}
        return tuple(Line2D([], [], marker=marker, markersize=size, **style) for marker, size in kinds)

    entries = {
        "against fp64 (Muon, AdamW)": marks("ink", ("o", 6), ("D", 5)),
        "against the same dtype": marks("muted", ("o", 3.6), ("D", 3)),
        "tolerance": (*marks("ink", ("|", 9)), *marks("muted", ("|", 5))),
        "out of tolerance": marks("alarm", ("o", 6)),
    }
    page.text(_LEFT, y, "Every parameter in flat order", fontsize=8.6, fontweight="bold")
    page.legend(
        list(entries.values()), list(entries), handler_map={tuple: HandlerTuple(ndivide=None, pad=0.8)},
        loc="center right", bbox_to_anchor=(_RIGHT, y - 3), bbox_transform=page.transData, ncols=len(entries),
        frameon=False, fontsize=7.9, labelcolor=[_LIGHT[part] for part in ("muted", "muted", "muted", "alarm")],
        handlelength=2, handletextpad=0.6, columnspacing=1.6, borderpad=0, borderaxespad=0,
    )  # fmt: skip


def _draw_rows(axes: Any, shown: Sequence[Row], tops: Sequence[float]) -> None:
    """All but the errors: name, shape and pieces; who orthogonalizes what travels; the diagnosis of what is wrong."""
    for x, title, side in (
        (_LEFT, "parameter", "left"),
        (_SHAPE_END, "shape", "right"),
        (_BAR, "pieces, by holding rank", "left"),
    ):
        axes.text(x, 0, title, ha=side, **_QUIET)
    group = None
    for row, top in zip(shown, tops, strict=True):
        record, baseline = row.placed, top + 11
        if group != record.group:
            group = record.group
            axes.hlines(top - _GROUP + 4, _LEFT, _RIGHT, colors=_LIGHT["faint"], linewidths=0.7)
            axes.text(_LEFT, top - 4, _group_title(group, [row]), fontweight="bold", **_QUIET)
        if not row.ok:
            _box(axes, (_LEFT - 6, top + 0.7), _RIGHT - _LEFT + 12, _ROW + _DIAGNOSIS - 1.4, "wash")
            diagnosis = shortened(f"\N{LEFTWARDS ARROW} {row.diagnosis or 'no diagnosis'}")
            axes.text(_LEFT, baseline + _DIAGNOSIS, diagnosis, color=_LIGHT["alarm"])
        colour, weight = ("ink", "normal") if row.ok else ("alarm", "bold")
        name = shortened(record.name, _NAME_CHARACTERS, keep_end=True)
        axes.text(_LEFT, baseline, name, fontfamily="DejaVu Sans Mono", fontweight=weight, color=_LIGHT[colour])
        axes.text(_SHAPE_END, baseline, shape_text(record), ha="right", **_QUIET)
        scale = (_BAR_END - _BAR) / max(row.elements, 1)
        for rank, first, elements in row.placed.pieces:
            _box(axes, (_BAR + scale * first, top + 4.3), scale * elements, 7.9, rank_colour(rank))
        if cuts := [_BAR + scale * first for _, first, _ in row.placed.pieces[1:]]:
            axes.vlines(cuts, top + 2.2, top + 14.4, colors=_LIGHT["ink"], linewidths=1.1)
        _draw_owner(axes, record, baseline)


def _draw_owner(axes: Any, record: UpdateRecord, y: float) -> None:
    """Who orthogonalizes a matrix that travels; another one is its holder's."""
    if record.owner is not None and record.travels:
        axes.scatter(_OWNER + 3, y - 2.8, s=33, color=_LIGHT[rank_colour(record.owner)], linewidths=0)
        axes.text(_OWNER + 9, y, f"owner: rank {record.owner}", fontsize=7.5)
    elif record.straddles:
        text = "cut, elementwise" if record.half == "adamw" else "cut, owner not told"
        axes.text(_OWNER, y, text, **_QUIET)


# ---- errors ---------------------------------------------------------------------------------------------------------

# Beyond these factors from the tolerances an error is drawn at the edge, or it would squeeze all others into a corner.
_BELOW, _ABOVE = 1e-8, 1e8
_MOST_TICKS = 8


@dataclass(frozen=True)
class _LogAxis:
    """Places from ``10**low`` to ``10**high`` in decades, with one for exact zeros and one for what is beyond."""

    low: int
    high: int

    @classmethod
    def over(cls, rows: Sequence[Row]) -> _LogAxis:
        comparisons = [c for row in rows for c in (row.against_fp64, row.same_dtype)]
        tolerances = [c.tolerance for c in comparisons if 0 < c.tolerance < math.inf] or [1e-4]
        least, most = min(tolerances) * _BELOW, max(tolerances) * _ABOVE
        drawn = tolerances + [c.error for c in comparisons if least <= c.error <= most]
        low, high = (math.log10(bound(drawn)) for bound in (min, max))
        return cls(math.floor(low), max(math.ceil(high), math.floor(low) + 1))

    @property
    def zero(self) -> float:
        return self.low - 0.09 * (self.high - self.low)

    @property
    def beyond(self) -> float:
        return self.high + 0.06 * (self.high - self.low)

    def place(self, value: float) -> float:
        if self.is_beyond(value):
            return self.beyond
        return self.zero if value == 0 or math.log10(value) < self.low else math.log10(value)

    def is_beyond(self, value: float) -> bool:
        return not value <= 10.0**self.high  # a NaN is

    def ticks(self) -> dict[float, str]:
        every = math.ceil((self.high - self.low + 1) / _MOST_TICKS)
        powers = range(self.low, self.high + 1, every)
        return {self.zero: "0", **{power: f"10{str(power).translate(_SUPERSCRIPT)}" for power in powers}}


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


# Of each comparison: colour, half height of the tolerance's tick, area of the marks, and of the paper around them.
_DRAWN = {"against_fp64": ("ink", 4.7, 36, 0), "same_dtype": ("muted", 2.5, 20, 0.9)}


def _draw_errors(axes: Any, shown: Sequence[Row], tops: Sequence[float]) -> None:
    """Both errors of a row on one line, each with the tick of its tolerance; a line shows how far the large one is."""
    scale, ys = _LogAxis.over(shown), [top + _ROW / 2 for top in tops]
    axes.set_xlim(scale.zero, scale.beyond)
    for place, label in scale.ticks().items():
        axes.vlines(place, 4, axes.get_ylim()[0], colors=_LIGHT["faint"], linewidths=0.7, clip_on=False)
        axes.text(place, 0, label, ha="center", **_QUIET)
    for name, (colour, tall, area, halo) in _DRAWN.items():
        made: list[Comparison] = [getattr(row, name) for row in shown]
        errors, limits = [scale.place(c.error) for c in made], [scale.place(c.tolerance) for c in made]
        if name == "against_fp64":
            lines = [_LIGHT["faint" if c.ok else "alarm"] for c in made]
            axes.hlines(ys, errors, limits, colors=lines, linewidths=1.1, clip_on=False)
        ends = [y - tall for y in ys], [y + tall for y in ys]
        axes.vlines(limits, *ends, colors=_LIGHT[colour], linewidths=1.3, clip_on=False)
        for marker in _MARKERS:
            marks = [
                (x, y, _LIGHT[colour if comparison.ok else "alarm"])
                for x, y, comparison, row in zip(errors, ys, made, shown, strict=True)
                if _marker(row.placed) == marker
            ]
            xs, at, colours = zip(*marks, strict=True) if marks else ((), (), ())
            style = {"marker": marker, "edgecolors": _LIGHT["paper"], "linewidths": halo, "clip_on": False, "zorder": 3}
            axes.scatter(xs, at, area * _MARKERS[marker], colours, **style)
    for row, y in zip(shown, ys, strict=True):
        if beyond := [c.error for c in (row.against_fp64, row.same_dtype) if scale.is_beyond(c.error)]:
            offset = {"xytext": (6, -2.4), "textcoords": "offset points"}
            axes.annotate(number(beyond[0]), (scale.beyond, y), color=_LIGHT["alarm"], fontsize=6.5, **offset)


# A disc for Muon, a diamond for AdamW, and its area beside the disc's: as large to the eye.
_MARKERS = {"o": 1.0, "D": 0.8}


def _marker(record: UpdateRecord) -> str:
    return "o" if record.half == "muon" else "D"


# ---- words ----------------------------------------------------------------------------------------------------------


def _tip(row: Row) -> str:
    """All of a row in words."""
    errors = (("fp64", row.against_fp64), ("the same dtype", row.same_dtype))
    against = (f"against {name}: {number(c.error)}, tolerance {number(c.tolerance)}" for name, c in errors)
    return "; ".join((f"{row.placed.name}: {_held(row)}", *against, *([row.diagnosis] if row.diagnosis else [])))


def shortened(text: str, length: int = _LINE_CHARACTERS, *, keep_end: bool = False) -> str:
    """Of a parameter's name the end tells most."""
    if len(text) <= length:
        return text
    return f"…{text[1 - length :]}" if keep_end else f"{text[: length - 1]}…"
