"""The scripts that the README and docs/frameworks.md show, copied out of them with their configs, and run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
from pathlib import Path
from unittest import mock

import pytest

from tests.unit.support.frameworks import accelerate_anew
from tests.unit.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]


def copy_files(page: Path, folder: Path) -> None:
    """Write every code block that follows a line beginning with "`NAME`:" to NAME in ``folder``."""
    shown = re.findall(
        r"^`([\w.]+)`:[^`]*(?:`[^`]+`[^`]*)*?^```\w+\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    assert shown
    for name, text in shown:
        (folder / name).write_text(text)


def run_script(folder: Path, name: str) -> tuple[str, int]:
    """Run a script in its folder, as on the command line.

    Returns:
        What it printed, and how many steps a DSMuon engine made.
    """
    from ds_muon.zero import MuonZeroOptimizer

    printed = io.StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (
            accelerate_anew(),
            mock.patch.object(MuonZeroOptimizer, "step", autospec=True, side_effect=MuonZeroOptimizer.step) as step,
            contextlib.redirect_stdout(printed),
        ):
            runpy.run_path(name, run_name="__main__")
    finally:
        os.chdir(before)
    return printed.getvalue(), step.call_count


def falls(losses: list[float]) -> bool:
    return losses[-1] < losses[0] - 0.2


def test_the_script_for_deepspeed_learns(tmp_path: Path) -> None:
    copy_files(ROOT / "README.md", tmp_path)
    for printed, steps in run_ranks(2, run_script, tmp_path, "train.py"):
        losses = [float(loss) for loss in re.findall(r"step \d+: loss (\d+\.\d+)", printed)]
        assert steps == len(losses) == 20 and falls(losses)


def test_the_script_for_trainer_learns(tmp_path: Path) -> None:
    copy_files(ROOT / "README.md", tmp_path)
    (_, steps), _ = run_ranks(2, run_script, tmp_path, "train_hf.py")
    (state,) = (json.loads(path.read_text()) for path in (tmp_path / "out").glob("checkpoint-*/trainer_state.json"))
    assert steps == state["max_steps"] == 20 and state["epoch"] == 20 * 8 * 2 / 256, "each rank has its own data"
    assert falls([entry["loss"] for entry in state["log_history"] if "loss" in entry])


def test_the_script_for_accelerate_learns(tmp_path: Path) -> None:
    copy_files(ROOT / "README.md", tmp_path)
    copy_files(ROOT / "docs" / "frameworks.md", tmp_path)
    ((printed, steps),) = run_ranks(1, run_script, tmp_path, "train_accelerate.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert steps == len(losses) == 20 and falls(losses)
