"""Processes that a test has started, and what they have started, by a mark in their environment."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

_MARK = "DS_MUON_TEST_MARK"


def marked(environment: Mapping[str, str], mark: str) -> dict[str, str]:
    return {**environment, _MARK: mark}


def processes_with(mark: str) -> list[int]:
    """Ids of those that run with the mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{_MARK}={mark}".encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether it holds before so many seconds are over."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds
