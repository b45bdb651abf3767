"""What a run of `ds-muon verify` came to, one outcome per planted fault: its exit code, to and from a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_muon.files import write_text
from ds_muon.verify.inject import found
from ds_muon.verify.record import VerifyResult

RIGHT, WRONG, COULD_NOT_RUN = 0, 1, 2


@dataclass(frozen=True)
class NotShown:
    """A fault that this config, model or world size cannot show, and why."""

    fault: str
    reason: str


Outcome = VerifyResult | NotShown


def is_found(result: VerifyResult) -> bool:
    """Whether the planted fault was found and rightly named."""
    return result.fault is not None and found(result.fault, result.records)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 if every update is right or, with faults planted, each one shown was found; 2 if none could be shown."""
    results = [outcome for outcome in outcomes if isinstance(outcome, VerifyResult)]
    if not results:
        return COULD_NOT_RUN
    return RIGHT if all(result.ok if result.fault is None else is_found(result) for result in results) else WRONG


def save(outcomes: Sequence[Outcome], path: Path, *, as_list: bool) -> None:
    """Write them as a JSON list, or the only one as an object; see ``files.writing``."""
    data = [_to_json(outcome) for outcome in outcomes]
    write_text(path, json.dumps(data if as_list else data[0], indent=1) + "\n")


def load(path: Path) -> list[Outcome]:
    """What ``save`` wrote."""
    data = json.loads(path.read_text())
    return [_from_json(entry) for entry in (data if isinstance(data, list) else [data])]


def _to_json(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, NotShown):
        return {"fault": outcome.fault, "not_shown": outcome.reason}
    data = outcome.to_json()
    return data if outcome.fault is None else {"found": is_found(outcome), **data}


def _from_json(data: Mapping[str, Any]) -> Outcome:
    if "not_shown" in data:
        return NotShown(data["fault"], data["not_shown"])
    return VerifyResult.from_json(data)
