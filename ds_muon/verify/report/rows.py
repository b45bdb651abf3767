"""What the report says of a result, apart from how it looks: one row per parameter, the verdict, the facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ds_muon.say import printable
from ds_muon.text import count
from ds_muon.verify.outcome import is_found
from ds_muon.verify.record import Comparison, UpdateRecord, VerifyResult


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
    def elements(self) -> int:
        return sum(elements for _, elements in self.placed.cuts)

    @property
    def excess(self) -> float:
        return max(self.against_fp64.excess, self.same_dtype.excess)


def with_printable_names(result: VerifyResult) -> VerifyResult:
    """The same with names that can be shown."""
    return replace(result, records=tuple(replace(record, name=printable(record.name)) for record in result.records))


def rows_of(result: VerifyResult) -> list[Row]:
    """One row per parameter, in flat order: records of one step are, within a group."""
    records: dict[str, list[UpdateRecord]] = {}
    for record in result.records:
        records.setdefault(record.name, []).append(record)
    rows: list[Row] = []
    end: dict[int, int] = {}
    for steps in sorted(records.values(), key=lambda steps: steps[0].group):
        placed = steps[0]
        row = Row(
            placed=placed,
            start=_start(placed, result.partition_sizes[placed.group], end.get(placed.group, 0)),
            against_fp64=_worst(step.against_fp64 for step in steps),
            same_dtype=_worst(step.against_same_dtype for step in steps),
            ok=all(step.ok for step in steps),
            diagnosis=next((step.diagnosis for step in steps if step.diagnosis is not None), None),
        )
        end[placed.group] = row.start + row.elements
        rows.append(row)
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


def selected_rows(rows: Sequence[Row], limit: int) -> list[Row]:
    """All wrong and straddling rows, and the worst others up to ``limit`` in all; in flat order."""
    kept = {row.placed.name for row in rows if not row.ok or row.placed.straddles}
    others = sorted((row for row in rows if row.placed.name not in kept), key=lambda row: -row.excess)
    kept |= {row.placed.name for row in others[: max(0, limit - len(kept))]}
    return [row for row in rows if row.placed.name in kept]


def verdict_of(result: VerifyResult, rows: Sequence[Row]) -> tuple[str, str, str]:
    """One word, one sentence, and their colour."""
    wrong = sum(not row.ok for row in rows)
    if not rows:
        return "NOTHING CHECKED", "no update was compared", "alarm"
    if wrong:
        sentence = f"{wrong} of {count(len(rows), 'parameter')} wrong"
    else:
        sentence = f"all updates of {count(len(rows), 'parameter')} within tolerance"
    if result.fault is not None:
        found = is_found(result)
        word = "FOUND" if found else "NOT NAMED" if wrong else "MISSED"
        return f"{word} the planted fault {result.fault}", sentence, "good" if found else "alarm"
    return ("WRONG", sentence, "alarm") if wrong else ("RIGHT", sentence, "good")


def facts_of(result: VerifyResult) -> dict[str, str]:
    """What was run, each under its name."""
    skipped = f" ({result.skipped_steps} skipped by the engine)" if result.skipped_steps else ""
    return {
        "optimizer": result.optimizer,
        "ranks": f"{count(result.world_size, 'rank')} on {result.device}",
        "precision": result.precision,
        "steps": f"{count(result.steps, 'step')} checked{skipped}",
    }


def half_name(record: UpdateRecord) -> str:
    return {"muon": "Muon", "adamw": "AdamW"}.get(record.half, record.half)


def shape_text(record: UpdateRecord) -> str:
    return " \N{MULTIPLICATION SIGN} ".join(map(str, record.shape)) or "scalar"
