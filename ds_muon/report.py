"""The report of `ds-muon verify --report`: where ZeRO cut the model, and how exact each update was.

One layout serves both files. ``_picture`` turns a result into boxes, lines, marks and words at fixed places;
``draw_updates`` paints them with matplotlib, ``html_page`` writes them as SVG. A colour is the name of a part that it
plays, so that the page can follow the reader's light or dark mode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from ds_muon.verify.outcome import is_found
from ds_muon.verify.record import Comparison, UpdateRecord, VerifyResult

_ROWS_IN_PNG = 60

# By part: light, dark. The ranks' colours are told apart with each common kind of colour blindness too; none is near
# the alarm colour. More than eight ranks start over: the strips name them.
_COLOURS = {
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
_PADDING = "padding"  # hatched, not a colour
_RANK_COLOURS = sum(name.startswith("rank") for name in _COLOURS)
_HALVES = {"muon": "Muon", "adamw": "AdamW"}
_TIMES = "\N{MULTIPLICATION SIGN}"


def write_report(result: VerifyResult, folder: Path) -> tuple[Path, Path]:
    """Write ``updates.png`` and ``index.html`` into ``folder``, which is made if need be; returns their paths.

    Raises:
        ImportError: matplotlib is missing. The page has been written by then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    picture, page = folder / "updates.png", folder / "index.html"
    page.write_text(html_page(result), encoding="utf-8")
    draw_updates(result, picture)
    return picture, page


# ---- what is drawn of each parameter --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """A parameter over all steps.

    Attributes:
        placed: its first record, for all that does not change from step to step.
        start: its first element in the flat buffer of its group.
        against_fp64: the worst over steps.
        same_dtype: the worst over steps.
        ok: whether every step was right.
        diagnosis: that of its first wrong step.
    """

    placed: UpdateRecord
    start: int
    against_fp64: Comparison
    same_dtype: Comparison
    ok: bool
    diagnosis: str | None

    @property
    def excess(self) -> float:
        return max(self.against_fp64.excess, self.same_dtype.excess)


def _rows(result: VerifyResult) -> list[_Row]:
    """One row per parameter, in flat order: records of one step are, within a group."""
    records: dict[str, list[UpdateRecord]] = {}
    for record in result.records:
        records.setdefault(record.name, []).append(record)
    rows: list[_Row] = []
    end: dict[int, int] = {}
    for steps in sorted(records.values(), key=lambda steps: steps[0].group):
        placed = steps[0]
        start = _start(placed, result.partition_sizes[placed.group], end.get(placed.group, 0))
        end[placed.group] = start + _elements(placed)
        rows.append(
            _Row(
                placed=placed,
                start=start,
                against_fp64=_worst(step.against_fp64 for step in steps),
                same_dtype=_worst(step.against_same_dtype for step in steps),
                ok=all(step.ok for step in steps),
                diagnosis=next((step.diagnosis for step in steps if step.diagnosis is not None), None),
            )
        )
    return rows


def _start(record: UpdateRecord, partition_size: int, end_of_previous: int) -> int:
    """First element of a parameter in its flat buffer.

    A boundary inside it tells exactly. Otherwise it follows the one before: of padding between the two, which
    ``parameter_alignment`` makes, the record shows only that which ends with the partition.
    """
    if not record.cuts:
        return end_of_previous
    rank, elements = record.cuts[0]
    return (rank + 1) * partition_size - elements if record.straddles else max(end_of_previous, rank * partition_size)


def _worst(comparisons: Iterable[Comparison]) -> Comparison:
    return max(comparisons, key=lambda comparison: comparison.excess)


def _elements(record: UpdateRecord) -> int:
    return sum(elements for _, elements in record.cuts)


def _selected(rows: Sequence[_Row], limit: int) -> list[_Row]:
    """All wrong and straddling rows, and the worst others up to ``limit`` in all; in flat order."""
    kept = {row.placed.name for row in rows if not row.ok or row.placed.straddles}
    others = sorted((row for row in rows if row.placed.name not in kept), key=lambda row: -row.excess)
    kept |= {row.placed.name for row in others[: max(0, limit - len(kept))]}
    return [row for row in rows if row.placed.name in kept]


# ---- shapes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    width: float
    height: float
    colour: str
    tip: str = ""  # shown by the page under the pointer


@dataclass(frozen=True)
class _Line:
    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    width: float = 1.0


@dataclass(frozen=True)
class _Mark:
    x: float
    y: float
    radius: float
    half: str  # a disc for Muon, a diamond for AdamW
    colour: str
    tip: str = ""


@dataclass(frozen=True)
class _Words:
    """``y`` is that of the baseline."""

    x: float
    y: float
    text: str
    colour: str = "ink"
    size: float = 11
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False
    mono: bool = False
    tip: str = ""


_Shape = _Box | _Line | _Mark | _Words


@dataclass(frozen=True)
class _Picture:
    """Shapes in the order in which they are painted, in pixels from the upper left corner."""

    height: float
    shapes: tuple[_Shape, ...]


# Columns of the picture, in pixels from the left.
_WIDTH = 1240.0
_LEFT, _RIGHT = 28.0, _WIDTH - 28.0
_SHAPE_END = 425.0
_BAR, _BAR_END = 441.0, 661.0
_OWNER = 672.0
_ZERO, _AXIS, _AXIS_END, _BEYOND = 806.0, 836.0, 1152.0, 1170.0
_NAME_CHARACTERS = 44

_ROW = 23.0
_DIAGNOSIS = 16.0
_DIAGNOSIS_CHARACTERS = 160


def _picture(result: VerifyResult, rows: Sequence[_Row], shown: Sequence[_Row], *, heading: bool) -> _Picture:
    """The strips of all ``rows``, and below them one line for each that is ``shown``."""
    shapes: list[_Shape] = []
    y = 8.0
    if heading:
        shapes += _heading(result, rows)
        y = 100.0
    for group in range(len(result.partition_sizes)):
        shapes += _strip(result, group, [row for row in rows if row.placed.group == group], y)
        y += _STRIP_PITCH
    axis = _LogAxis.over(shown)
    y += 26
    shapes += _key(y)
    y += 30
    washes, lines, bottom = _body(shown, axis, y)
    shapes += [*washes, *_column_titles(axis, y, bottom), *lines]
    y = bottom + 8
    if left_out := len(rows) - len(shown):
        text = f"{left_out} more, all right and each held by one rank, are not drawn; index.html shows them."
        shapes.append(_Words(_LEFT, y + 16, text, "muted"))
        y += 22
    return _Picture(y + 12, tuple(shapes))


def _heading(result: VerifyResult, rows: Sequence[_Row]) -> Iterator[_Shape]:
    word, sentence, colour = _verdict(result, rows)
    yield _Words(_LEFT, 40, f"{word}: {sentence}", colour, size=17, bold=True)
    yield _Words(_LEFT, 64, _shortened(" · ".join(_facts(result)), 160), "muted", size=12)


def _verdict(result: VerifyResult, rows: Sequence[_Row]) -> tuple[str, str, str]:
    """One word, one sentence, and their colour."""
    wrong = sum(not row.ok for row in rows)
    if not rows:
        return "NOTHING CHECKED", "no update was compared", "alarm"
    if wrong:
        sentence = f"{wrong} of {_count(len(rows), 'parameter')} wrong"
    else:
        sentence = f"all updates of {_count(len(rows), 'parameter')} within tolerance"
    if result.fault is not None:
        found = is_found(result)
        word = "FOUND" if found else "NOT NAMED" if wrong else "MISSED"
        return f"{word} the planted fault {result.fault}", sentence, "good" if found else "alarm"
    return ("WRONG", sentence, "alarm") if wrong else ("RIGHT", sentence, "good")


def _facts(result: VerifyResult) -> list[str]:
    skipped = f" ({result.skipped_steps} skipped by the engine)" if result.skipped_steps else ""
    return [
        result.optimizer,
        f"{_count(result.world_size, 'rank')} on {result.device}",
        result.precision,
        f"{_count(result.steps, 'step')} checked{skipped}",
    ]


# ---- strips: the flat buffer of each param group --------------------------------------------------------------------

_STRIP_PITCH = 78.0
_STRIP_HEIGHT = 22.0


def _strip(result: VerifyResult, group: int, rows: Sequence[_Row], y: float) -> Iterator[_Shape]:
    """The flat buffer of a group: its parameters over hatched padding, cut at multiples of the partition size."""
    size = result.partition_sizes[group]
    total = size * result.world_size
    used = sum(_elements(row.placed) for row in rows)
    yield _Words(_LEFT, y + 11, _group_title(group, rows[0] if rows else None), bold=True, size=12)
    padding = f", of them {total - used:,} padding" if total > used else ""
    text = (
        f"{_count(len(rows), 'parameter')} in a flat buffer of {result.world_size} {_TIMES} {size:,} elements{padding}"
    )
    yield _Words(_RIGHT, y + 11, text, "muted", anchor="end")
    if not total:
        return

    y += 24
    scale = (_RIGHT - _LEFT) / total
    yield _Box(_LEFT, y, _RIGHT - _LEFT, _STRIP_HEIGHT, _PADDING, "padding")
    previous_width = 0.0
    for row in rows:
        x, width = _LEFT + row.start * scale, _elements(row.placed) * scale
        yield from _pieces(row.placed, x, width, y, _STRIP_HEIGHT)
        if min(previous_width, width) >= 5:  # where there is room for it
            yield _Line(x, y, x, y + _STRIP_HEIGHT, "paper")
        if row.placed.straddles:
            yield _Line(x + 1, y - 4, x + width - 1, y - 4, "ink", 2)
        previous_width = width
    for rank in range(1, result.world_size):
        x = _LEFT + rank * size * scale
        yield _Line(x, y - 7, x, y + _STRIP_HEIGHT + 7, "ink", 1.5)
    yield from _rank_labels(result.world_size, y + _STRIP_HEIGHT + 15)


def _group_title(group: int, row: _Row | None) -> str:
    return f"param group {group}" if row is None else f"{_half(row.placed)}: param group {group}"


def _rank_labels(world_size: int, y: float) -> Iterator[_Shape]:
    """Below every partition its rank; below every second, fourth, ... where they are narrow."""
    width = (_RIGHT - _LEFT) / world_size
    every = 1
    while every * width < 26:
        every *= 2
    for rank in range(0, world_size, every):
        text = f"rank {rank}" if width >= 50 or rank == 0 else str(rank)
        yield _Words(_LEFT + (rank + 0.5) * width, y, text, "muted", size=10.5, anchor="middle")


def _pieces(record: UpdateRecord, x: float, width: float, y: float, height: float) -> Iterator[_Box]:
    """A parameter as a bar: one box per piece, as long as its share of the elements."""
    total = _elements(record)
    for rank, elements in record.cuts:
        share = elements / total if total else 0.0
        tip = f"{record.name}: {elements:,} elements on rank {rank}"
        yield _Box(x, y, share * width, height, _rank_colour(rank), tip)
        x += share * width


def _rank_colour(rank: int) -> str:
    return f"rank{rank % _RANK_COLOURS}"


# ---- rows: one line per parameter -----------------------------------------------------------------------------------

# Beyond these factors from the tolerances an error is drawn at the edge, or it would squeeze all others into a corner.
_BELOW, _ABOVE = 1e-8, 1e8
_MOST_TICKS = 8

# Radii of the marks, and half heights of the ticks: against fp64, and against the same dtype.
_LARGE, _SMALL = 4.2, 2.5
_LONG, _SHORT = 6.5, 3.5


@dataclass(frozen=True)
class _LogAxis:
    """A logarithmic axis from ``10**low`` to ``10**high``, with an edge for exact zeros and one for what is beyond."""

    low: int
    high: int

    @classmethod
    def over(cls, rows: Sequence[_Row]) -> _LogAxis:
        comparisons = [c for row in rows for c in (row.against_fp64, row.same_dtype)]
        tolerances = [c.tolerance for c in comparisons if 0 < c.tolerance < math.inf] or [1e-4]
        least, most = min(tolerances) * _BELOW, max(tolerances) * _ABOVE
        drawn = tolerances + [c.error for c in comparisons if least <= c.error <= most]
        low, high = (math.log10(bound(drawn)) for bound in (min, max))
        return cls(math.floor(low), max(math.ceil(high), math.floor(low) + 1))

    def x(self, value: float) -> float:
        if self.is_beyond(value):
            return _BEYOND
        if value == 0 or math.log10(value) < self.low:
            return _ZERO
        return _AXIS + (math.log10(value) - self.low) / (self.high - self.low) * (_AXIS_END - _AXIS)

    def is_beyond(self, value: float) -> bool:
        return not value <= 10.0**self.high  # a NaN is

    @property
    def ticks(self) -> range:
        return range(self.low, self.high + 1, math.ceil((self.high - self.low + 1) / _MOST_TICKS))


def _key(y: float) -> Iterator[_Shape]:
    """What the marks of the rows mean, flush right."""
    yield _Words(_LEFT, y, "Every parameter in flat order", bold=True, size=12)
    middle = y - 4
    x = _RIGHT - 574
    yield _Mark(x, middle, _LARGE, "muon", "ink")
    yield _Mark(x + 14, middle, _LARGE, "adamw", "ink")
    yield _Words(x + 24, y, "against fp64 (Muon, AdamW)", "muted")
    x += 206
    yield _Mark(x, middle, _SMALL, "muon", "muted")
    yield _Mark(x + 10, middle, _SMALL, "adamw", "muted")
    yield _Words(x + 18, y, "against the same dtype", "muted")
    x += 172
    yield _Line(x, middle - _LONG, x, middle + _LONG, "ink", 1.8)
    yield _Line(x + 6, middle - _SHORT, x + 6, middle + _SHORT, "muted", 1.8)
    yield _Words(x + 13, y, "tolerance", "muted")
    x += 94
    yield _Mark(x, middle, _LARGE, "muon", "alarm")
    yield _Words(_RIGHT, y, "out of tolerance", "alarm", anchor="end")


def _column_titles(axis: _LogAxis, y: float, bottom: float) -> Iterator[_Shape]:
    """Titles, and the grid of the axis, down to ``bottom``."""
    yield _Words(_LEFT, y, "parameter", "muted", size=10.5)
    yield _Words(_SHAPE_END, y, "shape", "muted", size=10.5, anchor="end")
    yield _Words(_BAR, y, "pieces, by holding rank", "muted", size=10.5)
    for decade in axis.ticks:
        x = axis.x(10.0**decade)
        yield _Line(x, y + 6, x, bottom, "faint")
        yield _Words(x, y, f"10{str(decade).translate(_SUPERSCRIPT)}", "muted", size=10.5, anchor="middle")
    yield _Line(_ZERO, y + 6, _ZERO, bottom, "faint")
    yield _Words(_ZERO, y, "0", "muted", size=10.5, anchor="middle")


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _body(rows: Sequence[_Row], axis: _LogAxis, y: float) -> tuple[list[_Shape], list[_Shape], float]:
    """What lies below the grid of the axis, what lies above it, and where both end."""
    washes: list[_Shape] = []
    shapes: list[_Shape] = []
    y += 6
    group = None
    for row in rows:
        if group != row.placed.group:
            group = row.placed.group
            shapes.append(_Line(_LEFT, y + 5, _RIGHT, y + 5, "faint"))
            shapes.append(_Words(_LEFT, y + 22, _group_title(group, row), "muted", size=10.5, bold=True))
            y += 28
        height = _ROW if row.ok else _ROW + _DIAGNOSIS
        if not row.ok:
            washes.append(_Box(_LEFT - 8, y + 1, _RIGHT - _LEFT + 16, height - 2, "wash"))
        shapes += _line(row, axis, y)
        y += height
    return washes, shapes, y


def _line(row: _Row, axis: _LogAxis, y: float) -> Iterator[_Shape]:
    record, baseline = row.placed, y + 15
    if not row.ok:
        text = _shortened(f"← {row.diagnosis or 'no diagnosis'}", _DIAGNOSIS_CHARACTERS)
        yield _Words(_LEFT, baseline + _DIAGNOSIS, text, "alarm", tip=row.diagnosis or "")
    name = _shortened(record.name, _NAME_CHARACTERS, keep_end=True)
    colour = "ink" if row.ok else "alarm"
    yield _Words(_LEFT, baseline, name, colour, bold=not row.ok, mono=True, tip=record.name)
    yield _Words(_SHAPE_END, baseline, _shape(record), "muted", size=10.5, anchor="end")
    yield from _pieces(record, _BAR, _BAR_END - _BAR, y + 6, 11)
    yield from _cuts(record, y)
    yield from _owner(record, baseline)
    yield from _errors(row, axis, y + _ROW / 2)


def _cuts(record: UpdateRecord, y: float) -> Iterator[_Line]:
    """A stroke through the bar of a parameter wherever ZeRO cuts it."""
    total, done = _elements(record), 0
    for _, elements in record.cuts[:-1]:
        done += elements
        x = _BAR + (done / total if total else 0.0) * (_BAR_END - _BAR)
        yield _Line(x, y + 3, x, y + 20, "ink", 1.5)


def _owner(record: UpdateRecord, baseline: float) -> Iterator[_Shape]:
    """Who orthogonalizes a straddling matrix; one that does not straddle is its holder's."""
    if not record.straddles:
        return
    if record.owner is None:
        text = "cut, elementwise" if record.half == "adamw" else "cut, owner not told"
        yield _Words(_OWNER, baseline, text, "muted", size=10.5)
        return
    yield _Mark(_OWNER + 4, baseline - 4, 4, "muon", _rank_colour(record.owner))
    yield _Words(_OWNER + 12, baseline, f"owner: rank {record.owner}", size=10.5)


def _errors(row: _Row, axis: _LogAxis, y: float) -> Iterator[_Shape]:
    """Both errors on one line, each with the tick of its tolerance; a line from the large mark shows how far it is."""
    fp64, same = row.against_fp64, row.same_dtype
    x, limit = axis.x(fp64.error), axis.x(fp64.tolerance)
    yield _Line(x, y, limit, y, "faint" if fp64.ok else "alarm", 1.5)
    yield _Line(limit, y - _LONG, limit, y + _LONG, "ink", 1.8)
    yield _Mark(x, y, _LARGE, row.placed.half, "ink" if fp64.ok else "alarm", _tip(row, "fp64", fp64))

    x, limit = axis.x(same.error), axis.x(same.tolerance)
    yield _Line(limit, y - _SHORT, limit, y + _SHORT, "muted", 1.8)
    yield _Mark(x, y, _SMALL + 1.2, row.placed.half, "paper")  # the two may coincide
    yield _Mark(x, y, _SMALL, row.placed.half, "muted" if same.ok else "alarm", _tip(row, "the same dtype", same))

    beyond = dict.fromkeys(_number(c.error) for c in (fp64, same) if axis.is_beyond(c.error))
    if beyond:
        yield _Words(_BEYOND + 8, y + 3.5, ", ".join(beyond), "alarm", size=9)


def _tip(row: _Row, reference: str, comparison: Comparison) -> str:
    error, tolerance = _number(comparison.error), _number(comparison.tolerance)
    return f"{row.placed.name} against {reference}: {error}, tolerance {tolerance}"


# ---- words ----------------------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _half(record: UpdateRecord) -> str:
    return _HALVES.get(record.half, record.half)


def _shape(record: UpdateRecord) -> str:
    return f" {_TIMES} ".join(map(str, record.shape)) or "scalar"


def _shortened(text: str, length: int, *, keep_end: bool = False) -> str:
    """Of a parameter's name the end tells most."""
    if len(text) <= length:
        return text
    return f"…{text[1 - length :]}" if keep_end else f"{text[: length - 1]}…"


# ---- the picture by matplotlib --------------------------------------------------------------------------------------

_DPI = 180
_MOST_PIXELS = 30_000  # of height; matplotlib refuses 2**16


def draw_updates(result: VerifyResult, path: Path) -> None:
    """Write the picture as a PNG file; of many parameters, those that ``_selected`` names.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'ds-muon[plot]'") from error

    rows = _rows(result)
    picture = _picture(result, rows, _selected(rows, _ROWS_IN_PNG), heading=True)
    # A style of the user's must not move anything. A Figure without pyplot draws by Agg and leaves no global state.
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(_WIDTH / 100, picture.height / 100), facecolor=_light("paper"))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(picture.height, 0))
        axes.set_axis_off()
        for order, shape in enumerate(picture.shapes):
            _paint(axes, shape, order)
        figure.savefig(path, format="png", dpi=min(_DPI, 100 * _MOST_PIXELS / picture.height))


def _light(colour: str) -> str:
    return _COLOURS[colour][0]


def _paint(axes: Any, shape: _Shape, order: int) -> None:
    """Paint a shape over those of lower ``order``, on axes whose unit is a pixel, a hundredth of an inch."""
    from matplotlib.patches import Circle, Polygon, Rectangle

    points = 72 / 100
    if isinstance(shape, _Words):
        axes.text(
            shape.x,
            shape.y,
            shape.text,
            color=_light(shape.colour),
            fontsize=shape.size * points,
            fontweight="bold" if shape.bold else "normal",
            fontfamily="DejaVu Sans Mono" if shape.mono else "DejaVu Sans",
            horizontalalignment={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
            verticalalignment="baseline",
            zorder=order,
            parse_math=False,  # a name may hold a dollar
        )
    elif isinstance(shape, _Line):
        style = {"color": _light(shape.colour), "linewidth": shape.width * points, "solid_capstyle": "butt"}
        axes.plot((shape.x1, shape.x2), (shape.y1, shape.y2), zorder=order, **style)
    elif isinstance(shape, _Mark):
        colour: dict[str, Any] = {"facecolor": _light(shape.colour), "edgecolor": "none", "zorder": order}
        if shape.half == "muon":
            axes.add_patch(Circle((shape.x, shape.y), shape.radius, **colour))
        else:
            axes.add_patch(Polygon(_diamond(shape), **colour))
    else:
        fill: dict[str, Any] = {"facecolor": _light("faint" if shape.colour == _PADDING else shape.colour)}
        if shape.colour == _PADDING:
            fill |= {"hatch": "////", "edgecolor": _light("muted")}
        # Antialiased, boxes side by side would let through a hairline of what is below.
        patch = Rectangle((shape.x, shape.y), shape.width, shape.height, linewidth=0, antialiased=False, **fill)
        axes.add_patch(patch).set_zorder(order)


def _diamond(mark: _Mark) -> list[tuple[float, float]]:
    r = 1.25 * mark.radius  # as large to the eye as the disc
    return [(mark.x, mark.y - r), (mark.x + r, mark.y), (mark.x, mark.y + r), (mark.x - r, mark.y)]


# ---- the picture as SVG ---------------------------------------------------------------------------------------------


def _svg(picture: _Picture) -> str:
    hatch = (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" class="faint"/><rect width="1.2" height="6" class="muted"/></pattern></defs>'
    )
    size = f'viewBox="0 0 {_WIDTH:g} {picture.height:g}" width="{_WIDTH:g}" height="{picture.height:g}"'
    label = "Flat buffers cut into partitions, and the error of every parameter's update"
    shapes = "\n".join(map(_element, picture.shapes))
    return f'<svg {size} role="img" aria-label="{escape(label)}">\n{hatch}\n{shapes}\n</svg>'


def _element(shape: _Shape) -> str:
    if isinstance(shape, _Line):
        ends = f'x1="{shape.x1:.2f}" y1="{shape.y1:.2f}" x2="{shape.x2:.2f}" y2="{shape.y2:.2f}"'
        return f'<line {ends} stroke-width="{shape.width:g}" class="{shape.colour}"/>'
    title = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
    if isinstance(shape, _Words):
        classes = " ".join([shape.colour, *(["bold"] if shape.bold else []), *(["mono"] if shape.mono else [])])
        place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" text-anchor="{shape.anchor}"'
        return f'<text {place} class="{classes}">{escape(shape.text)}{title}</text>'
    if isinstance(shape, _Mark):
        if shape.half == "muon":
            place = f'cx="{shape.x:.2f}" cy="{shape.y:.2f}" r="{shape.radius:g}"'
            return f'<circle {place} class="{shape.colour}">{title}</circle>'
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in _diamond(shape))
        return f'<polygon points="{points}" class="{shape.colour}">{title}</polygon>'
    place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
    return f'<rect {place} class="{shape.colour}">{title}</rect>'


# ---- the page -------------------------------------------------------------------------------------------------------

_CSS = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.75rem 4rem; max-width: 82rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; letter-spacing: -.01em; }
h2 { margin: 3rem 0 .4rem; font-size: 1.1rem; }
p { margin: .3rem 0; max-width: 52rem; }
.note { color: var(--muted); }
.alarm-text { color: var(--alarm); } .good-text { color: var(--good); }
.scroll { overflow-x: auto; margin: 1rem 0; }
svg { display: block; font-family: inherit; }
.mono, code, pre, td.name { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
svg .bold { font-weight: 600; }
rect { shape-rendering: crispEdges; }
.padding { fill: url(#hatch); }
table { border-collapse: collapse; width: 100%; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th { padding: .35rem .45rem; border-bottom: 1.5px solid var(--muted); color: var(--muted); font-weight: 500;
  text-align: left; vertical-align: bottom; }
td { padding: .3rem .45rem; border-top: 1px solid var(--faint); vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { padding-left: .5rem; }
th.number, td.number { text-align: right; }
td.name { font-size: 12px; }
td small { color: var(--muted); font-size: inherit; }
tr.wrong td { background: var(--wash); }
tr.wrong td.name, td .off, td.diagnosis { color: var(--alarm); }
tr.wrong td.name, td .off { font-weight: 600; }
td.diagnosis { border-top: 0; padding-top: 0; white-space: normal; }
.swatch { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .35em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.5rem; margin: 1rem 0; }
dt { color: var(--muted); } dd { margin: 0; }
details { margin: .8rem 0; } summary { cursor: pointer; }
pre { padding: 1rem; border: 1px solid var(--faint); border-radius: 6px; font-size: 12.5px; overflow-x: auto; }
"""


def html_page(result: VerifyResult) -> str:
    """One HTML page that needs nothing else: no script, no other file."""
    rows = _rows(result)
    word, sentence, colour = _verdict(result, rows)
    picture = _svg(_picture(result, rows, rows, heading=False))
    versions = {name: str(version) for name, version in result.versions.items()}
    config = json.dumps(result.config, indent=2, default=str)
    facts = dict(zip(("optimizer", "ranks", "precision", "steps"), _facts(result), strict=True))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(f"{word} · {result.optimizer} · ds-muon verify")}</title>
<style>{_colour_css()}{_CSS}</style>
</head>
<body>
<header>
<h1 class="{colour}-text">{escape(word)}</h1>
<p>{escape(sentence)}</p>
{_definitions(facts | versions)}
</header>
<section>
<h2>Where ZeRO cut the model, and how exact the updates were</h2>
<p class="note">Each strip is the flat buffer of a param group, cut into one partition per rank. A stroke above it marks
a parameter that lies across a boundary. The errors below are those of the worst step: relative, on a logarithmic axis,
each to be left of the tick of its tolerance. What is wrong is red, with its diagnosis below.</p>
<div class="scroll">
{picture}
</div>
</section>
<section>
<h2>Every parameter in its worst step, worst first</h2>
<p class="note">Errors are relative, each beside its tolerance.</p>
<div class="scroll">
{_table(result)}
</div>
</section>
<section>
<h2>DeepSpeed config</h2>
<details>
<summary>Show</summary>
<pre>{escape(config)}</pre>
</details>
</section>
</body>
</html>
"""


def _colour_css() -> str:
    """Variables for both modes, and for each colour a class that fills shapes and strokes lines with it."""
    light, dark = ("".join(f" --{name}: {shades[mode]};" for name, shades in _COLOURS.items()) for mode in range(2))
    classes = "\n".join(
        f"svg .{name} {{ fill: var(--{name}); }} line.{name} {{ stroke: var(--{name}); }} "
        f".swatch.{name} {{ background: var(--{name}); }}"
        for name in _COLOURS
    )
    return f"\n:root {{{light} }}\n@media (prefers-color-scheme: dark) {{ :root {{{dark} }} }}\n{classes}"


def _definitions(entries: Mapping[str, str]) -> str:
    lines = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries.items())
    return f"<dl>\n{lines}\n</dl>"


# Titles of the table, and whether their cells are numbers.
_COLUMNS = (
    ("parameter", False),
    ("shape", False),
    ("half", False),
    ("holders", False),
    ("owner", False),
    ("straddles", False),
    ("step", True),
    ("against fp64", True),
    ("cosine", True),
    ("same dtype", True),
    ("gradient", True),
    ("state", True),
    ("stale ranks", False),
)


def _table(result: VerifyResult) -> str:
    titles = "".join(f'<th scope="col"{_class(number)}>{title}</th>' for title, number in _COLUMNS)
    body = "\n".join(_table_rows(record) for record in result.worst())
    return f"<table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _table_rows(record: UpdateRecord) -> str:
    """A row of the table and, if it is wrong, one more for the diagnosis."""
    name, *others = _cells(record)
    cells = "".join(f"<td{_class(number)}>{cell}</td>" for cell, (_, number) in zip(others, _COLUMNS[1:], strict=True))
    row = f'<td class="name">{name}</td>{cells}'
    if record.ok:
        return f"<tr>{row}</tr>"
    diagnosis = escape(f"← {record.diagnosis or 'no diagnosis'}")
    return (
        f'<tr class="wrong">{row}</tr>\n'
        f'<tr class="wrong"><td class="diagnosis" colspan="{len(_COLUMNS)}">{diagnosis}</td></tr>'
    )


def _class(number: bool) -> str:
    return ' class="number"' if number else ""


def _cells(record: UpdateRecord) -> list[str]:
    """HTML of every column of the table."""
    return [
        escape(record.name),
        _shape(record),
        escape(_half(record)),
        "<br>".join(
            f'<span class="swatch {_rank_colour(rank)}"></span>rank {rank} <small>{elements:,}</small>'
            for rank, elements in record.cuts
        ),
        "-" if record.owner is None else str(record.owner),
        "yes" if record.straddles else "no",
        str(record.step),
        _compared(record.against_fp64),
        f"{record.cosine:.6f}",
        _compared(record.against_same_dtype),
        _compared(record.gradient),
        _compared(record.state),
        ", ".join(map(str, record.stale_ranks)) or "-",
    ]


def _compared(comparison: Comparison | None) -> str:
    if comparison is None:
        return "-"
    error = _number(comparison.error)
    error = error if comparison.ok else f'<span class="off">{error}</span>'
    return f"{error} <small>/ {_number(comparison.tolerance)}</small>"
