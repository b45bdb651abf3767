"""``python -m ds_muon`` without a script, and launched scripts that resume at other numbers of processes."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.support.launched import ROOT, run

# Makes six steps, on the same samples at any number of ranks; saves after three, or goes on from there.
RESUMING = """
import hashlib, json, os
import deepspeed, torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import ds_muon

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 7))
engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
rank, ranks = engine.global_rank, engine.world_size

def state():
    found = hashlib.sha256()
    for name, p in engine.module.named_parameters():
        key = "momentum_buffer" if name.endswith("weight") else "exp_avg"
        for tensor in (safe_get_full_fp32_param(p), safe_get_full_optimizer_state(p, key)):
            found.update(tensor.cpu().numpy().tobytes())
    return found.hexdigest()

engine.load_checkpoint("saved")
half, losses = state(), []
for step in range(engine.global_steps, 6):
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))[rank::ranks].to(engine.device)
    loss = (engine(x) - x).square().mean()
    engine.backward(loss)
    engine.step()
    total = loss.detach() / ranks
    torch.distributed.all_reduce(total)
    losses.append(total.item())
    if step == 2:
        engine.save_checkpoint("saved")
        half = state()
if rank == 0:
    print(json.dumps([half, *losses[-3:]]), flush=True)
os._exit(0)
"""


@pytest.fixture
def resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs the script on so many processes: a hash of all state after three steps, and the losses of the next ones."""
    (tmp_path / "train.py").write_text(RESUMING)
    (tmp_path / "ds_config.json").write_text((ROOT / "ds_configs" / "zero2_fp32.json").read_text())
    monkeypatch.chdir(tmp_path)

    def launched(ranks: int, **environment: str) -> list[Any]:
        launcher = ["deepspeed.launcher.runner", "--num_accelerators", str(ranks), "--master_port", "PORT"]
        return run(sys.executable, "-m", *launcher, "train.py", **environment)

    return launched


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.ranks
def test_a_launched_run_resumes_at_another_number_of_processes(resuming: Callable[..., list[Any]]) -> None:
    (half, *losses), *resumed = (resuming(ranks) for ranks in (2, 1, 3))
    for found, *further in resumed:
        assert found == half and further == pytest.approx(losses, rel=1e-5)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_two_cpu_processes_saved_goes_on_on_one_gpu(resuming: Callable[..., list[Any]]) -> None:
    half, *losses = resuming(2)
    found, *further = resuming(1, DS_ACCELERATOR="cuda")
    # Newton-Schulz is in fp16 there.
    assert found == half and further == pytest.approx(losses, rel=0.05)


def test_without_a_script_it_says_how_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ds_muon"])
    with pytest.raises(SystemExit, match="usage: python -m ds_muon SCRIPT"):
        runpy.run_module("ds_muon", run_name="__main__")
