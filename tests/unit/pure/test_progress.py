"""What is said of long work: after some seconds, then less and less often, and of short work nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_muon import progress
from ds_muon.progress import Progress


def test_lines_come_after_five_seconds_and_then_at_twice_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    now = [100.0]
    monkeypatch.setattr(progress, "say", lines.append)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    work = Progress("has read", 50 * 10**9)
    for _ in range(50):
        now[0] += 0.9
        work.add(10**9)
    assert lines == [
        "has read 6.0 of 50.0 GB in 5 s",
        "has read 12.0 of 50.0 GB in 11 s",
        "has read 24.0 of 50.0 GB in 22 s",
        "has read 48.0 of 50.0 GB in 43 s",
    ]
