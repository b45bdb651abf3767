"""An unchanged training script, and how tests run it in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from ds_muon.ranks import held_port

ROOT = Path(__file__).parents[3]

# An ordinary DeepSpeed script: it knows nothing of ds_muon.
SCRIPT = """
import argparse, json, os, sys
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
if "mpi4py.MPI" in sys.modules:
    sys.modules["mpi4py.MPI"].Finalize()  # an exit without it is an abort to mpirun
os._exit(0)  # CPU ranks of DeepSpeed, with any optimizer, now and then abort while the interpreter shuts down
"""
ARGUMENTS = ["train.py", "--deepspeed_config", "ds_config.json", "--word", "hello"]


def write_script(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("VALUE = 7")
    (folder / "ds_config.json").write_text((ROOT / "ds_configs" / "zero2_fp32.json").read_text())


def found_on(ranks: int) -> list[Any]:
    """What the script prints when it is right."""
    return ["MuonZeroOptimizer", "hello", 7, "__main__", ranks]


def run(*command: str, **environment: str) -> list[Any]:
    """What the script prints. PORT in the command is the port that the environment names, and nobody else has."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    with held_port() as port:
        done = subprocess.run(
            [str(port) if word == "PORT" else word for word in command],
            env={**os.environ, "MASTER_PORT": str(port), **ours},
            capture_output=True,
            text=True,
            timeout=180,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith('["'))
    found = json.loads(line)
    assert isinstance(found, list)
    return found
