"""``python -m ds_muon SCRIPT`` and ``deepspeed --module ds_muon SCRIPT`` run an unchanged script."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]

# An ordinary DeepSpeed script: it knows nothing of ds_muon.
SCRIPT = """
import argparse, json, os
import deepspeed, torch
import beside

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--word")
args = parser.parse_args()
engine, *_ = deepspeed.initialize(args=args, model=torch.nn.Linear(8, 8))
engine.backward(engine(torch.ones(1, 8, device=engine.device)).sum())
engine.step()
if engine.global_rank == 0:
    found = [type(engine.optimizer).__name__, args.word, beside.VALUE, __name__, engine.world_size]
    print(json.dumps(found), flush=True)
os._exit(0)  # CPU ranks of DeepSpeed, with any optimizer, now and then abort while the interpreter shuts down
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 7")
    (tmp_path / "ds_config.json").write_text((ROOT / "ds_configs" / "zero2_fp32.json").read_text())
    return tmp_path / "train.py"


def run(*command: str, **environment: str) -> list[Any]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith('["'))
    found = json.loads(line)
    assert isinstance(found, list)
    return found


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.ranks
def test_the_deepspeed_launcher_runs_an_unchanged_script(script: Path) -> None:
    launcher = ["deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", free_port()]
    arguments = ["--deepspeed_config", str(script.parent / "ds_config.json"), "--word", "hello"]
    found = run(*launcher, "--module", "ds_muon", str(script), *arguments)
    assert found == ["MuonZeroOptimizer", "hello", 7, "__main__", 2]


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
        launcher = ["deepspeed.launcher.runner", "--num_accelerators", str(ranks), "--master_port", free_port()]
        return run(*launcher, "train.py", **environment)

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


@pytest.mark.full
@pytest.mark.slow
def test_plain_python_runs_an_unchanged_script(script: Path) -> None:
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    arguments = ["--deepspeed_config", str(script.parent / "ds_config.json"), "--word", "hello"]
    found = run("ds_muon", str(script), *arguments, **one_rank, MASTER_PORT=free_port())
    assert found == ["MuonZeroOptimizer", "hello", 7, "__main__", 1]


def test_without_a_script_it_says_how_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ds_muon"])
    with pytest.raises(SystemExit, match="usage: python -m ds_muon SCRIPT"):
        runpy.run_module("ds_muon", run_name="__main__")
