"""What a run of `ds-muon verify` came to, one outcome per planted fault: its exit code, to and from a JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ds_muon.files import write_text
from ds_muon.text import json_text
from ds_muon.verify.inject import found
from ds_muon.verify.record import VerifyResult

RIGHT, WRONG, COULD_NOT_RUN = 0, 1, 2


@dataclass(frozen=True)
class NotShown:
    """A fault, and why this config, model or world size cannot show it."""

    fault: str
    not_shown: str


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
    data = [{**_verdict(outcome), **vars(outcome)} for outcome in outcomes]
    write_text(path, json_text(data if as_list else data[0], indent=1) + "\n")


def load(path: Path) -> list[Outcome]:
    """What ``save`` wrote."""
    found = _FILE.validate_json(path.read_bytes())
    return found if isinstance(found, list) else [found]


_FILE: TypeAdapter[list[Outcome] | Outcome] = TypeAdapter(list[Outcome] | Outcome)


def _verdict(outcome: Outcome) -> dict[str, bool]:
    """For who reads the file; ``load`` passes over it."""
    if isinstance(outcome, NotShown):
        return {}
    return {"ok": outcome.ok} if outcome.fault is None else {"found": is_found(outcome), "ok": outcome.ok}
