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

from tests.unit.support.ranks import run_ranks

ROOT = Path(__file__).parents[3]


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
            mock.patch.dict(os.environ),
            mock.patch.object(MuonZeroOptimizer, "step", autospec=True, side_effect=MuonZeroOptimizer.step) as step,
            contextlib.redirect_stdout(printed),
        ):
            runpy.run_path(name, run_name="__main__")
    finally:
        os.chdir(before)
        forget_accelerate()
    return printed.getvalue(), step.call_count


def forget_accelerate() -> None:
    """Ranks live on from test to test, and Accelerate keeps what it is asked once for the process."""
    import sys

    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def falls(losses: list[float]) -> bool:
    return losses[-1] < losses[0] - 0.2


@pytest.mark.ranks
def test_the_script_for_deepspeed_learns(tmp_path: Path) -> None:
    copy_files(ROOT / "README.md", tmp_path)
    for printed, steps in run_ranks(2, run_script, tmp_path, "train.py"):
        losses = [float(loss) for loss in re.findall(r"step \d+: loss (\d+\.\d+)", printed)]
        assert steps == len(losses) == 20 and falls(losses)


@pytest.mark.ranks
def test_the_script_for_trainer_learns(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    copy_files(ROOT / "README.md", tmp_path)
    ((_, steps),) = run_ranks(1, run_script, tmp_path, "train_hf.py")
    (state,) = (json.loads(path.read_text()) for path in (tmp_path / "out").glob("checkpoint-*/trainer_state.json"))
    assert steps == state["max_steps"] == 20
    assert falls([entry["loss"] for entry in state["log_history"] if "loss" in entry])


@pytest.mark.ranks
def test_the_script_for_accelerate_learns(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    copy_files(ROOT / "README.md", tmp_path)
    copy_files(ROOT / "docs" / "frameworks.md", tmp_path)
    ((printed, steps),) = run_ranks(1, run_script, tmp_path, "train_accelerate.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert steps == len(losses) == 20 and falls(losses)
