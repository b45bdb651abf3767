"""The scripts that the README and docs/frameworks.md show, copied out of them with their configs, and run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.unit.support.frameworks import forget_accelerate
from tests.unit.support.models import PrescribedGradients, ds_config
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


def norms_through_accelerate(config: dict[str, Any]) -> list[dict[str, float | None]]:
    """Of four steps, the last one infinite: the gradients' norm by Accelerate, by the engine, and as it is."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim

    shapes = [(12, 8), (8, 12), (5,)]
    norms: list[dict[str, float | None]] = []
    try:
        with mock.patch.dict(os.environ):
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
            model = PrescribedGradients(shapes)
            engine, optimizer = accelerator.prepare(model, DummyOptim(model.parameters()))
            generator = torch.Generator().manual_seed(dist.get_rank())
            for factor in (1.0, 1.0, 1.0, float("inf")):
                gradients = [factor * torch.randn(shape, generator=generator) for shape in shapes]
                accelerator.backward(engine([g.to(engine.device) for g in gradients]))
                by_accelerate = accelerator.clip_grad_norm_(engine.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                whole = torch.cat([g.flatten() for g in gradients]).to(engine.device)
                dist.all_reduce(whole)
                norms.append(
                    {
                        "by Accelerate": float(by_accelerate),
                        "by the engine": engine.get_global_grad_norm().item() if factor == 1.0 else None,
                        "right": (whole / dist.get_world_size()).norm().item(),
                    }
                )
    finally:
        forget_accelerate()
    return norms


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


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["DSMuon", "AdamW"])
def test_accelerate_reports_the_norm_of_the_gradients_as_with_adamw(optimizer: str, dtype: str) -> None:
    pytest.importorskip("accelerate")
    config = ds_config(dtype=dtype, gradient_clipping=0.5)
    if optimizer == "AdamW":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    for norms in run_ranks(2, norms_through_accelerate, config):
        for norm in norms[:-1]:
            assert norm["by Accelerate"] == norm["by the engine"]
            assert norm["by the engine"] == pytest.approx(norm["right"], rel=1e-6 if dtype == "float32" else 1e-2)
        assert norms[-1]["by Accelerate"] == float("inf")
