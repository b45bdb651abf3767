"""The numbers that a run has left: in the folder of DeepSpeed's CSV monitor, or in the log of Hugging Face Trainer."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_muon.say import printable

TRAINER_STATE = "trainer_state.json"


class NoRun(ValueError):
    """Nothing that could be shown, and why."""


@dataclass(frozen=True)
class RunLog:
    """What was logged.

    Attributes:
        name: of the file or folder.
        along: what is counted: ``"samples"`` or ``"steps"``.
        series: by name, each value by its sample or step, in order. Names have ``_`` for every ``/``, as files have.
    """

    name: str
    along: str
    series: dict[str, dict[float, float]]


def read_log(path: Path) -> RunLog:
    """The log in a folder, or of a file.

    Raises:
        NoRun: it holds no numbers, or cannot be read.
    """
    name = printable(str(path))
    try:
        state = _trainer_state(path) if path.is_dir() else path
        if state is None:
            files = sorted(path.glob("*.csv"))
            if not files:
                raise NoRun(f"{name}: neither the folder of a csv_monitor nor one of Trainer, with {TRAINER_STATE}")
            log = RunLog(name, "samples", {printable(file.stem): _of_csv(file) for file in files})
        else:
            log = RunLog(name, "steps", _of_trainer(state, name))
    except OSError as error:
        raise NoRun(f"{name}: {error.strerror}") from None
    log = RunLog(log.name, log.along, {key: values for key, values in log.series.items() if values})
    if not log.series:
        raise NoRun(f"{name}: there is no number in it")
    return log


def _trainer_state(folder: Path) -> Path | None:
    """Trainer's log in a folder, or else in its checkpoint of the most steps."""
    if (whole := folder / TRAINER_STATE).is_file():
        return whole
    found = [path for path in folder.glob(f"checkpoint-*/{TRAINER_STATE}") if path.is_file()]
    return max(found, key=lambda path: _number(path.parent.name.rpartition("-")[2]) or 0, default=None)


def _of_trainer(path: Path, name: str) -> dict[str, dict[float, float]]:
    try:
        history = json.loads(path.read_bytes())["log_history"]
        entries = [(entry["step"], entry) for entry in history]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise NoRun(f"{name}: neither Trainer's {TRAINER_STATE} nor what ds-muon verify --json wrote") from None
    series: dict[str, dict[float, float]] = {}
    for step, entry in entries:
        for key, value in entry.items():
            at, y = _number(step), _number(value)
            if key != "step" and at is not None and y is not None:
                series.setdefault(printable(str(key)).replace("/", "_"), {})[at] = y
    return {key: _in_order(values) for key, values in series.items()}


def _of_csv(file: Path) -> dict[float, float]:
    # A run that is resumed writes another heading, and one that was killed half a line.
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        pairs = ((_number(row[0]), _number(row[1])) for row in _rows(lines) if len(row) == 2)
        return _in_order({x: y for x, y in pairs if x is not None and y is not None})


def _rows(lines: Any) -> Iterator[list[str]]:
    try:
        yield from csv.reader(line.replace("\0", "") for line in lines)
    except csv.Error:  # a field that never ends is no number
        return


def _in_order(values: dict[float, float]) -> dict[float, float]:
    return dict(sorted(values.items()))


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
