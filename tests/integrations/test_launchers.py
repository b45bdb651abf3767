"""Every launcher runs an unchanged script, which finds itself on so many ranks of a DSMuon engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.unit.support.launched import ARGUMENTS, found_on, run, write_script

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

PYTHON = (sys.executable, "-m")
LAUNCHERS = {
    "deepspeed": (*PYTHON, "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", "PORT", "--module"),
    "torchrun": (*PYTHON, "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "PORT", "-m"),
    "accelerate": (
        *(*PYTHON, "accelerate.commands.launch", "--use_deepspeed", "--num_machines", "1", "--num_processes", "2"),
        *("--main_process_port", "PORT", "-m"),
    ),
    "mpirun": ("mpirun", *["--allow-run-as-root"] * (os.geteuid() == 0), "--oversubscribe", "-np", "2", *PYTHON),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_runs_an_unchanged_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    if launcher == "mpirun":
        pytest.importorskip("mpi4py", reason="needs mpi4py: pip install '.[mpi]'")
    write_script(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run(*LAUNCHERS[launcher], "ds_muon", *ARGUMENTS) == found_on(2)


def test_plain_python_runs_an_unchanged_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_script(tmp_path)
    monkeypatch.chdir(tmp_path)
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    assert run(*PYTHON, "ds_muon", *ARGUMENTS, **one_rank) == found_on(1)
