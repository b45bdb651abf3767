"""Scripts that train to compare: what they read, and which runs they make in which order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture(autouse=True)
def _scripts_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])


def test_a_text_has_every_content_once_and_holds_out_a_twentieth(tmp_path: Path) -> None:
    from small_training import read_text

    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("another folder's")
    (tmp_path / "table.txt").write_text("no source")
    for number in range(60):
        for copy in range(2):
            (tmp_path / f"{copy}_{number}.py").write_text(f"[{number}]")
    train, held_out = (bytes(part.tolist()).decode() for part in read_text([tmp_path], {".py"}, 10_000))
    found = [text[1:-1].split("][") for text in (train, held_out)]
    assert [len(part) for part in found] == [57, 3]
    assert sorted(int(number) for part in found for number in part) == [*range(60)]
    assert sum(len(part) for part in read_text([tmp_path], {".py"}, 100)) <= 100


def test_equal_time_is_run_at_the_best_rate_once_all_rates_are_known() -> None:
    from measure_pays import OPTIMIZERS, Job, jobs, rates

    ms = dict(zip(OPTIMIZERS, (10.0, 11.0, 12.5, 20.0), strict=True))
    runs: dict[str, Any] = {}
    at_equal_tokens = jobs(runs, [*OPTIMIZERS])
    assert len(at_equal_tokens) == 14 and {job.share for job in at_equal_tokens} == {1.0}
    for job in at_equal_tokens:
        loss = 1.0 + (job.lr != rates(job.optimizer)[2])
        found = {"optimizer": job.optimizer, "lr": job.lr, "share": 1.0, "ms_per_step": ms[job.optimizer]}
        runs[job.name] = {**found, "held_out_loss": {"python": [[0, 5.0], [8, loss]]}}
    assert jobs(runs, [*OPTIMIZERS])[14:] == [
        Job(name, rates(name)[2], share=10.0 / ms[name]) for name in OPTIMIZERS if name != "AdamW"
    ]
