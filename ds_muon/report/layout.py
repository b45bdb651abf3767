"""Where everything in the report's picture goes: a result turned into boxes, lines, marks and words at fixed places.

A colour is the name of a part that it plays, so that the page can follow the reader's light or dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ds_muon.verify.outcome import is_found
from ds_muon.verify.record import Comparison, UpdateRecord, VerifyResult

ROWS_IN_PNG = 60

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
PADDING = "padding"  # hatched, not a colour
_RANK_COLOURS = sum(name.startswith("rank") for name in COLOURS)
_HALVES = {"muon": "Muon", "adamw": "AdamW"}
_TIMES = "\N{MULTIPLICATION SIGN}"


# ---- what is drawn of each parameter --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
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


def rows_of(result: VerifyResult) -> list[Row]:
    """One row per parameter, in flat order: records of one step are, within a group."""
    records: dict[str, list[UpdateRecord]] = {}
    for record in result.records:
        records.setdefault(record.name, []).append(record)
    rows: list[Row] = []
    end: dict[int, int] = {}
    for steps in sorted(records.values(), key=lambda steps: steps[0].group):
        placed = steps[0]
        start = _start(placed, result.partition_sizes[placed.group], end.get(placed.group, 0))
        end[placed.group] = start + _elements(placed)
        rows.append(
            Row(
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


def selected_rows(rows: Sequence[Row], limit: int) -> list[Row]:
    """All wrong and straddling rows, and the worst others up to ``limit`` in all; in flat order."""
    kept = {row.placed.name for row in rows if not row.ok or row.placed.straddles}
    others = sorted((row for row in rows if row.placed.name not in kept), key=lambda row: -row.excess)
    kept |= {row.placed.name for row in others[: max(0, limit - len(kept))]}
    return [row for row in rows if row.placed.name in kept]


# ---- shapes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    colour: str
    tip: str = ""  # shown by the page under the pointer


@dataclass(frozen=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    width: float = 1.0


@dataclass(frozen=True)
class Mark:
    x: float
    y: float
    radius: float
    half: str  # a disc for Muon, a diamond for AdamW
    colour: str
    tip: str = ""

    @property
    def diamond(self) -> list[tuple[float, float]]:
        """The corners, so that it is as large to the eye as the disc."""
        r = 1.25 * self.radius
        return [(self.x, self.y - r), (self.x + r, self.y), (self.x, self.y + r), (self.x - r, self.y)]


@dataclass(frozen=True)
class Words:
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


Shape = Box | Line | Mark | Words


@dataclass(frozen=True)
class Picture:
    """Shapes in the order in which they are painted, in pixels from the upper left corner."""

    height: float
    shapes: tuple[Shape, ...]


# Columns of the picture, in pixels from the left.
WIDTH = 1240.0
LEFT, RIGHT = 28.0, WIDTH - 28.0
_SHAPE_END = 425.0
BAR, BAR_END = 441.0, 661.0
_OWNER = 672.0
_ZERO, _AXIS, _AXIS_END, _BEYOND = 806.0, 836.0, 1152.0, 1170.0
NAME_CHARACTERS = 44

_ROW = 23.0
_DIAGNOSIS = 16.0
_DIAGNOSIS_CHARACTERS = 160


def picture_of(result: VerifyResult, rows: Sequence[Row], shown: Sequence[Row], *, heading: bool) -> Picture:
    """The strips of all ``rows``, and below them one line for each that is ``shown``."""
    shapes: list[Shape] = []
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
        shapes.append(Words(LEFT, y + 16, text, "muted"))
        y += 22
    return Picture(y + 12, tuple(shapes))


def _heading(result: VerifyResult, rows: Sequence[Row]) -> Iterator[Shape]:
    word, sentence, colour = verdict_of(result, rows)
    yield Words(LEFT, 40, f"{word}: {sentence}", colour, size=17, bold=True)
    yield Words(LEFT, 64, _shortened(" · ".join(facts_of(result)), 160), "muted", size=12)


def verdict_of(result: VerifyResult, rows: Sequence[Row]) -> tuple[str, str, str]:
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


def facts_of(result: VerifyResult) -> list[str]:
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


def _strip(result: VerifyResult, group: int, rows: Sequence[Row], y: float) -> Iterator[Shape]:
    """The flat buffer of a group: its parameters over hatched padding, cut at multiples of the partition size."""
    size = result.partition_sizes[group]
    total = size * result.world_size
    used = sum(_elements(row.placed) for row in rows)
    yield Words(LEFT, y + 11, _group_title(group, rows[0] if rows else None), bold=True, size=12)
    padding = f", of them {total - used:,} padding" if total > used else ""
    text = (
        f"{_count(len(rows), 'parameter')} in a flat buffer of {result.world_size} {_TIMES} {size:,} elements{padding}"
    )
    yield Words(RIGHT, y + 11, text, "muted", anchor="end")
    if not total:
        return

    y += 24
    scale = (RIGHT - LEFT) / total
    yield Box(LEFT, y, RIGHT - LEFT, _STRIP_HEIGHT, PADDING, "padding")
    previous_width = 0.0
    for row in rows:
        x, width = LEFT + row.start * scale, _elements(row.placed) * scale
        yield from _pieces(row.placed, x, width, y, _STRIP_HEIGHT)
        if min(previous_width, width) >= 5:  # where there is room for it
            yield Line(x, y, x, y + _STRIP_HEIGHT, "paper")
        if row.placed.straddles:
            yield Line(x + 1, y - 4, x + width - 1, y - 4, "ink", 2)
        previous_width = width
    for rank in range(1, result.world_size):
        x = LEFT + rank * size * scale
        yield Line(x, y - 7, x, y + _STRIP_HEIGHT + 7, "ink", 1.5)
    yield from _rank_labels(result.world_size, y + _STRIP_HEIGHT + 15)


def _group_title(group: int, row: Row | None) -> str:
    return f"param group {group}" if row is None else f"{half_name(row.placed)}: param group {group}"


def _rank_labels(world_size: int, y: float) -> Iterator[Shape]:
    """Below every partition its rank; below every second, fourth, ... where they are narrow."""
    width = (RIGHT - LEFT) / world_size
    every = 1
    while every * width < 26:
        every *= 2
    for rank in range(0, world_size, every):
        text = f"rank {rank}" if width >= 50 or rank == 0 else str(rank)
        yield Words(LEFT + (rank + 0.5) * width, y, text, "muted", size=10.5, anchor="middle")


def _pieces(record: UpdateRecord, x: float, width: float, y: float, height: float) -> Iterator[Box]:
    """A parameter as a bar: one box per piece, as long as its share of the elements."""
    total = _elements(record)
    for rank, elements in record.cuts:
        share = elements / total if total else 0.0
        tip = f"{record.name}: {elements:,} elements on rank {rank}"
        yield Box(x, y, share * width, height, rank_colour(rank), tip)
        x += share * width


def rank_colour(rank: int) -> str:
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
    def over(cls, rows: Sequence[Row]) -> _LogAxis:
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


def _key(y: float) -> Iterator[Shape]:
    """What the marks of the rows mean, flush right."""
    yield Words(LEFT, y, "Every parameter in flat order", bold=True, size=12)
    middle = y - 4
    x = RIGHT - 574
    yield Mark(x, middle, _LARGE, "muon", "ink")
    yield Mark(x + 14, middle, _LARGE, "adamw", "ink")
    yield Words(x + 24, y, "against fp64 (Muon, AdamW)", "muted")
    x += 206
    yield Mark(x, middle, _SMALL, "muon", "muted")
    yield Mark(x + 10, middle, _SMALL, "adamw", "muted")
    yield Words(x + 18, y, "against the same dtype", "muted")
    x += 172
    yield Line(x, middle - _LONG, x, middle + _LONG, "ink", 1.8)
    yield Line(x + 6, middle - _SHORT, x + 6, middle + _SHORT, "muted", 1.8)
    yield Words(x + 13, y, "tolerance", "muted")
    x += 94
    yield Mark(x, middle, _LARGE, "muon", "alarm")
    yield Words(RIGHT, y, "out of tolerance", "alarm", anchor="end")


def _column_titles(axis: _LogAxis, y: float, bottom: float) -> Iterator[Shape]:
    """Titles, and the grid of the axis, down to ``bottom``."""
    yield Words(LEFT, y, "parameter", "muted", size=10.5)
    yield Words(_SHAPE_END, y, "shape", "muted", size=10.5, anchor="end")
    yield Words(BAR, y, "pieces, by holding rank", "muted", size=10.5)
    for decade in axis.ticks:
        x = axis.x(10.0**decade)
        yield Line(x, y + 6, x, bottom, "faint")
        yield Words(x, y, f"10{str(decade).translate(_SUPERSCRIPT)}", "muted", size=10.5, anchor="middle")
    yield Line(_ZERO, y + 6, _ZERO, bottom, "faint")
    yield Words(_ZERO, y, "0", "muted", size=10.5, anchor="middle")


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _body(rows: Sequence[Row], axis: _LogAxis, y: float) -> tuple[list[Shape], list[Shape], float]:
    """What lies below the grid of the axis, what lies above it, and where both end."""
    washes: list[Shape] = []
    shapes: list[Shape] = []
    y += 6
    group = None
    for row in rows:
        if group != row.placed.group:
            group = row.placed.group
            shapes.append(Line(LEFT, y + 5, RIGHT, y + 5, "faint"))
            shapes.append(Words(LEFT, y + 22, _group_title(group, row), "muted", size=10.5, bold=True))
            y += 28
        height = _ROW if row.ok else _ROW + _DIAGNOSIS
        if not row.ok:
            washes.append(Box(LEFT - 8, y + 1, RIGHT - LEFT + 16, height - 2, "wash"))
        shapes += _line(row, axis, y)
        y += height
    return washes, shapes, y


def _line(row: Row, axis: _LogAxis, y: float) -> Iterator[Shape]:
    record, baseline = row.placed, y + 15
    if not row.ok:
        text = _shortened(f"← {row.diagnosis or 'no diagnosis'}", _DIAGNOSIS_CHARACTERS)
        yield Words(LEFT, baseline + _DIAGNOSIS, text, "alarm", tip=row.diagnosis or "")
    name = _shortened(record.name, NAME_CHARACTERS, keep_end=True)
    colour = "ink" if row.ok else "alarm"
    yield Words(LEFT, baseline, name, colour, bold=not row.ok, mono=True, tip=record.name)
    yield Words(_SHAPE_END, baseline, shape_text(record), "muted", size=10.5, anchor="end")
    yield from _pieces(record, BAR, BAR_END - BAR, y + 6, 11)
    yield from _cuts(record, y)
    yield from _owner(record, baseline)
    yield from _errors(row, axis, y + _ROW / 2)


def _cuts(record: UpdateRecord, y: float) -> Iterator[Line]:
    """A stroke through the bar of a parameter wherever ZeRO cuts it."""
    total, done = _elements(record), 0
    for _, elements in record.cuts[:-1]:
        done += elements
        x = BAR + (done / total if total else 0.0) * (BAR_END - BAR)
        yield Line(x, y + 3, x, y + 20, "ink", 1.5)


def _owner(record: UpdateRecord, baseline: float) -> Iterator[Shape]:
    """Who orthogonalizes a matrix that travels; another one is its holder's."""
    if not record.straddles and not record.travels:
        return
    if record.owner is None:
        text = "cut, elementwise" if record.half == "adamw" else "cut, owner not told"
        yield Words(_OWNER, baseline, text, "muted", size=10.5)
        return
    yield Mark(_OWNER + 4, baseline - 4, 4, "muon", rank_colour(record.owner))
    yield Words(_OWNER + 12, baseline, f"owner: rank {record.owner}", size=10.5)


def _errors(row: Row, axis: _LogAxis, y: float) -> Iterator[Shape]:
    """Both errors on one line, each with the tick of its tolerance; a line from the large mark shows how far it is."""
    fp64, same = row.against_fp64, row.same_dtype
    x, limit = axis.x(fp64.error), axis.x(fp64.tolerance)
    yield Line(x, y, limit, y, "faint" if fp64.ok else "alarm", 1.5)
    yield Line(limit, y - _LONG, limit, y + _LONG, "ink", 1.8)
    yield Mark(x, y, _LARGE, row.placed.half, "ink" if fp64.ok else "alarm", _tip(row, "fp64", fp64))

    x, limit = axis.x(same.error), axis.x(same.tolerance)
    yield Line(limit, y - _SHORT, limit, y + _SHORT, "muted", 1.8)
    yield Mark(x, y, _SMALL + 1.2, row.placed.half, "paper")  # the two may coincide
    yield Mark(x, y, _SMALL, row.placed.half, "muted" if same.ok else "alarm", _tip(row, "the same dtype", same))

    beyond = dict.fromkeys(number_text(c.error) for c in (fp64, same) if axis.is_beyond(c.error))
    if beyond:
        yield Words(_BEYOND + 8, y + 3.5, ", ".join(beyond), "alarm", size=9)


def _tip(row: Row, reference: str, comparison: Comparison) -> str:
    error, tolerance = number_text(comparison.error), number_text(comparison.tolerance)
    return f"{row.placed.name} against {reference}: {error}, tolerance {tolerance}"


# ---- words ----------------------------------------------------------------------------------------------------------


def number_text(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def half_name(record: UpdateRecord) -> str:
    return _HALVES.get(record.half, record.half)


def shape_text(record: UpdateRecord) -> str:
    return f" {_TIMES} ".join(map(str, record.shape)) or "scalar"


def _shortened(text: str, length: int, *, keep_end: bool = False) -> str:
    """Of a parameter's name the end tells most."""
    if len(text) <= length:
        return text
    return f"…{text[1 - length :]}" if keep_end else f"{text[: length - 1]}…"
