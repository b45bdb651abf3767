"""``ds-muon verify --determinism``: runs that must have the same bits have them, and a bit that is turned is found."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ds_muon.verify import command, determinism
from ds_muon.verify.rank import Task
from ds_muon.zero import MuonZeroOptimizer
from tests.unit.support.cases import first_of
from tests.unit.support.models import Block
from tests.unit.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def make(rank: int, world_size: int) -> tuple[nn.Module, list[Any]]:
    return Block(), []


def turning_a_bit(original: Any) -> Any:
    """Of ``MuonZeroOptimizer.commit``: with a guard, a bit of the first update is another, which reaches the weight."""

    def commit(zero: MuonZeroOptimizer, staged: Any, *args: Any) -> None:
        if zero.optimizer.config.nan_guard != "off" and torch.distributed.get_rank() == 0:
            staged[0].flat[:1].view(torch.int32).bitwise_xor_(1 << 22)
        original(zero, staged, *args)

    return commit


def runs(task: Task, once: bool, planted: bool) -> list[determinism.Run]:
    turn = (
        mock.patch.object(MuonZeroOptimizer, "commit", turning_a_bit(MuonZeroOptimizer.commit))
        if planted
        else nullcontext()
    )
    with turn:
        return determinism.runs(task, once=once)


@pytest.mark.parametrize("planted", first_of([True, False]))
def test_a_turned_bit_is_found_and_nothing_else(
    planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, but for the launch."""
    parser = argparse.ArgumentParser()
    command.add_options(parser)

    def by_workers(module: str, arguments: list[str], world_size: int, *_: object) -> list[determinism.Run]:
        options = parser.parse_args(arguments)
        task = command.check_options(options)
        found, *others = run_ranks(world_size, runs, task, options.determinism == "once", planted)
        assert all(other == found for other in others)
        return found

    monkeypatch.setattr(command, "run_ranks", by_workers)
    file = tmp_path / "digests.json"
    model = ["--model", f"{__name__}:make", "--steps", "2"]
    code = command.run(parser.parse_args([*model, "--determinism", "--json", str(file)]))
    heading, *rows, _, _, verdict = capsys.readouterr().out.splitlines()
    assert heading.startswith("2 ranks") and len(rows) == 7 and rows[-1].startswith("1 rank ")
    different = [row for row in rows if "the same bits" not in row]
    if planted:
        assert code == 1 and verdict.startswith("WRONG") and len(different) == 1
        assert different[0].startswith('nan_guard: "skip"') and "DIFFERENT" in different[0]
        assert "1 of 9 tensors, first square.weight" in different[0]
    else:
        assert code == 0 and verdict == "RIGHT: 7 runs with the bits of the first" and not different
    assert [run.name for run in determinism.load(file)][:2] == ["2 ranks", "the same again"]


def test_a_run_that_is_refused_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    first, refused = determinism.Run("2 ranks", {"a": "1"}, {"b": "2"}), determinism.Run("offload", refused="set less")
    rounded = determinism.Run("offload_optimizer", {"a": "1"}, {"b": "3"})
    assert determinism.exit_code([first, refused]) == 2 and determinism.exit_code([first, refused, rounded]) == 0
    assert determinism.exit_code([first, determinism.Run("again", {"a": "1"}, {"b": "3"})]) == 1
    determinism.present([first, refused], argparse.Namespace(json=None))
    assert "not run" in (said := capsys.readouterr().out) and "set less" in said
