"""What `ds-muon verify` prints, as pure functions of what it found."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ds_muon.say import printable
from ds_muon.text import columns, count, number
from ds_muon.verify.inject import FAULTS
from ds_muon.verify.outcome import NotShown, Outcome, is_found
from ds_muon.verify.record import Comparison, UpdateRecord, VerifyResult

# What each comparison of a record is an error of.
_OF = {"against_fp64": "update", "against_same_dtype": "update", "gradient": "gradient", "state": "state"}
_NAMED_IN_VERDICT = 3
LEGEND = (
    "(ranks hold, owner orthogonalizes; error, cosine: of the update beside fp64; same dtype: beside the same rule in "
    "the run's dtype; gradient, state: of what it is made from; step: the worst)"
)


def heading(outcomes: Sequence[Outcome], config_file: str | None, model: str | None) -> str:
    """What was run: versions, ranks, config, model, dtypes."""
    result = next((outcome for outcome in outcomes if isinstance(outcome, VerifyResult)), None)
    if result is None:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    config = config_file or f"built in (--config names another): {json.dumps(result.config)}"
    return "\n".join(
        (
            f"{versions}; {_ranks(result)}",
            f"config: {config}",
            f"model: {model or 'a byte-level GPT on the standard library (--model names another)'}",
            f"{result.optimizer}: {result.precision}",
        )
    )


def parameter_table(result: VerifyResult, rows: int = 25) -> str:
    """One line per parameter, in its worst step, worst first; all wrong ones, and right ones up to ``rows``.

    Below a wrong one stands the diagnosis, which is that of its first wrong step.
    """
    worst = result.worst()
    shown = [record for i, record in enumerate(worst) if i < rows or not record.ok]
    header = ["parameter", "shape", "half", "ranks", "owner", "step", "error", "tolerance", "cosine"]
    header += ["same dtype", "tolerance", "gradient", "state"]
    lines = columns([header, *map(_cells, shown)], "< < <" + 10 * " >")
    text = lines[:1]
    for record, line in zip(shown, lines[1:], strict=True):
        text.append(line)
        if not record.ok:
            text.append(f"    <- {record.diagnosis}")
    if len(shown) < len(worst):
        text.append(f"... and {len(worst) - len(shown)} more, all right")
    return "\n".join([*text, LEGEND])


def verdict(result: VerifyResult) -> str:
    """One line: RIGHT with the largest error, or WRONG with what is."""
    worst = result.worst()
    skipped = f"; {count(result.skipped_steps, 'step')} skipped by the engine" if result.skipped_steps else ""
    if result.ok:
        # AdamW's errors are mostly the rounding of weights that are large beside their update.
        muon = [record for record in result.records if record.half == "muon"]
        largest = max(muon, key=lambda record: record.relative_error)
        same_dtype = max(record.against_same_dtype.error for record in muon)
        straddling = sum(record.straddles and record.half == "muon" for record in worst)
        return (
            f"RIGHT: {count(result.steps, 'step')} of {count(len(worst), 'parameter')} on {_ranks(result)}; "
            f"largest error of a Muon update {_of(largest.against_fp64)} on {printable(largest.name)} in step "
            f"{largest.step}, {number(same_dtype)} beside the same dtype; "
            f"{count(straddling, 'matrix', 'matrices')} straddle{'s' if straddling == 1 else ''}{skipped}"
        )
    wrong: dict[str, list[str]] = {}
    for record in worst:
        if not record.ok:
            wrong.setdefault(str(record.diagnosis).partition(":")[0], []).append(printable(record.name))
    most_first = sorted(wrong.items(), key=lambda item: -len(item[1]))
    faults = "; ".join(f"{fault} ({_names(names)})" for fault, names in most_first)
    of_all = f"{sum(map(len, wrong.values()))} of {count(len(worst), 'parameter')}"
    return f"WRONG: {of_all} on {_ranks(result)}: {faults}{skipped}"


def fault_verdict(result: VerifyResult) -> str:
    """One line: whether the planted fault was found, with the size of its error and the diagnosis."""
    assert result.fault is not None
    record = _evidence(result)
    title = f"{result.fault} ({FAULTS[result.fault].summary})"
    if record.ok:
        largest = f"{_of(record.against_fp64)} on {printable(record.name)}"
        return f"MISSED: {title}: no error is out of tolerance; largest {largest}"
    of, error, tolerance, times = _sizes(record)
    size = f"error of the {of} {error}, {times} times the tolerance {tolerance}, " if error else ""
    word = "FOUND" if is_found(result) else "NOT NAMED"
    return f"{word}: {title}: {size}on {printable(record.name)}; diagnosis: {record.diagnosis}"


def fault_table(outcomes: Sequence[Outcome]) -> str:
    """One line per fault: error, tolerance, how many times that is, whether it was found, and as what."""
    rows = [["fault", "error of", "error", "tolerance", "times", "found", "diagnosis"]]
    for outcome in outcomes:
        if isinstance(outcome, NotShown):
            rows.append([outcome.fault, "", "", "", "", "-", f"not shown here: {outcome.not_shown}"])
            continue
        record = _evidence(outcome)
        diagnosis = f"{record.diagnosis or 'none'} [{printable(record.name)}]"
        rows.append([outcome.fault or "", *_sizes(record), "yes" if is_found(outcome) else "NO", diagnosis])
    return "\n".join(columns(rows, "< < > > > > <"))


def faults_verdict(outcomes: Sequence[Outcome]) -> str:
    """One line for all faults."""
    results = [outcome for outcome in outcomes if isinstance(outcome, VerifyResult)]
    left = len(outcomes) - len(results)
    rest = f"; {left} cannot be shown with this config, model and world size" if left else ""
    if not results:
        return "NOT SHOWN: none of the faults can be shown with this config, model and world size"
    missed = [result.fault or "" for result in results if not is_found(result)]
    if missed:
        return f"MISSED: {len(missed)} of {count(len(results), 'planted fault')}: {', '.join(missed)}{rest}"
    return f"FOUND: {len(results)} of {count(len(results), 'planted fault')}, each with the right diagnosis{rest}"


# ---- of one record --------------------------------------------------------------------------------------------------


def _cells(record: UpdateRecord) -> list[str]:
    optional = ("-" if c is None else number(c.error) for c in (record.gradient, record.state))
    return [
        printable(record.name),
        "x".join(map(str, record.shape)) or "scalar",
        record.half,
        ",".join(map(str, record.holders)),
        "-" if record.owner is None else str(record.owner),
        str(record.step),
        number(record.against_fp64.error),
        number(record.against_fp64.tolerance),
        f"{record.cosine:.6f}",
        number(record.against_same_dtype.error),
        number(record.against_same_dtype.tolerance),
        *optional,
    ]


def _evidence(result: VerifyResult) -> UpdateRecord:
    """The record that shows a planted fault best: one that names it, else a wrong one, else the nearest to wrong."""
    assert result.fault is not None
    name = FAULTS[result.fault].diagnosis

    def weight(record: UpdateRecord) -> tuple[bool, bool, bool, float]:
        named = not record.ok and (record.diagnosis or "").startswith(name)
        return named, not record.ok, record.half == "muon", record.excess

    return max(result.records, key=weight)


def _sizes(record: UpdateRecord) -> list[str]:
    """What is wrong by how much: the update or, where that is within tolerance, what is not. And tolerance and times.

    A model that does not see its weights has no size.
    """
    if record.stale_ranks:
        return ["model", "", "", ""]
    name, worst = max(record.comparisons.items(), key=lambda item: item[1].excess)
    if not record.against_fp64.ok or worst.ok:
        name, worst = "against_fp64", record.against_fp64
    times = f"{worst.excess:,.0f}" if worst.excess >= 10 else f"{worst.excess:.2g}"
    return [_OF[name], number(worst.error), number(worst.tolerance), times]


# ---- words ----------------------------------------------------------------------------------------------------------


def _of(comparison: Comparison) -> str:
    return f"{number(comparison.error)} (tolerance {number(comparison.tolerance)})"


def _ranks(result: VerifyResult) -> str:
    return f"{count(result.world_size, 'rank')} ({result.device})"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_IN_VERDICT} more" if len(names) > _NAMED_IN_VERDICT else ""
    return ", ".join(names[:_NAMED_IN_VERDICT]) + more
