"""From launch to the end of the first steps, of AdamW and of DSMuon, on one device: with and without Triton's cache.

    python scripts/measure_startup.py --json docs/measured/startup.json

Each run is a process of its own, and optimizers take turns. Cold is a run that finds an empty cache of Triton's; warm
are those after it. "one thread" is DSMuon cold whose kernels are compiled one after another. AdamW is torch's, so that
nothing but Triton compiles. Seconds, medians:

    imports     the interpreter, torch, DeepSpeed and ds_muon
    engine      deepspeed.initialize; of that, the trial of the Triton kernels, and what is compiled for it
    first step  forward, backward and step, to an idle device; the second and third are shown because CUDA graphs are
                captured in the second, and the third is the first that is like all others
    in all      from the launch to the end of the first step
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from runpy import run_path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("imports", "engine", "trial", "first step", "second step", "third step", "in all")
OPTIMIZERS = {
    "AdamW": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
    "DSMuon": {"type": "DSMuon", "params": {"lr": 0.02, "adam_lr": 3e-4}},
}
ONE_THREAD = "DSMuon, one thread"


def train(name: str, launched: float, layers: int, width: int) -> dict[str, Any]:
    """Three steps. ``launched`` is of the clock that all processes of a machine share."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    if name != "AdamW":
        import ds_muon  # noqa: F401  registers DSMuon
    marks = [launched, time.monotonic()]
    in_trial = [0.0] if name == "AdamW" else watch_the_trial(one_thread=name == ONE_THREAD)
    torch.manual_seed(0)
    gpt = run_path(str(ROOT / "ds_muon" / "sample" / "gpt.py"))  # without the package around it
    model = gpt["GPT"](gpt["GPTConfig"](n_layer=layers, n_head=width // 64, n_embd=width, block_size=256))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": OPTIMIZERS[name.partition(",")[0]],
        "zero_optimization": {"stage": 2, "reduce_scatter": False},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    accelerator = get_accelerator()
    accelerator.synchronize()
    marks.append(time.monotonic())
    tokens = torch.randint(256, (2, 257)).to(engine.device)
    for _ in range(3):
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
        accelerator.synchronize()
        marks.append(time.monotonic())
    imports, built, *steps = (after - before for before, after in pairwise(marks))
    seconds = (imports, built, sum(in_trial), *steps, marks[3] - launched)
    device = torch.cuda.get_device_name() if engine.device.type == "cuda" else "CPU"
    return {"device": device, "torch": str(torch.__version__), **dict(zip(PHASES, seconds, strict=True))}


def watch_the_trial(*, one_thread: bool) -> list[float]:
    """The seconds that trials of the Triton kernels will have taken."""
    from ds_muon.orthogonalize import backends

    trial, seconds = backends._trial, list[float]()

    def timed(*args: Any) -> str | None:
        start = time.monotonic()
        try:
            return trial(*args)
        finally:
            seconds.append(time.monotonic() - start)

    backends._trial = timed  # type: ignore[assignment]
    if one_thread:
        from ds_muon.kernels import ahead

        ahead._threads = lambda: 1
    return seconds


def run(name: str, state: str, cache: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One process."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(options.port)
    sizes = ["--layers", str(options.layers), "--width", str(options.width)]
    command = [sys.executable, __file__, *sizes, "--train", name, "--launched", repr(time.monotonic())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name:20} {state:8}", *(f"{phase} {found[phase]:.2f}" for phase in PHASES), flush=True)
    return found


def measure(options: argparse.Namespace) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Runs, by optimizer and state of the cache."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def add(name: str, state: str, cache: Path) -> None:
        runs.setdefault((name, state), []).append(run(name, state, cache, options))

    with tempfile.TemporaryDirectory() as folder:
        run("AdamW", "first", Path(folder, "first"), options)  # brings the files into the system's cache
        for turn in range(options.cold):
            for name in (*OPTIMIZERS, ONE_THREAD)[: None if turn == 0 else -1]:
                shutil.rmtree(Path(folder, "cold"), ignore_errors=True)
                add(name, "cold", Path(folder, "cold"))
        for _ in range(options.warm):
            for name in OPTIMIZERS:
                add(name, "warm", Path(folder, "cold"))
    return runs


def published(runs: dict[tuple[str, str], list[dict[str, Any]]], arguments: str) -> dict[str, Any]:
    """A table for docs/measured."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    rows = [
        [name, state, *(round(statistics.median(found[phase] for found in of), 2) for phase in PHASES)]
        for (name, state), of in runs.items()
    ]
    in_all = {(name, state): row[-1] for name, state, *row in rows}
    over = {state: in_all["DSMuon", state] - in_all["AdamW", state] for state in ("cold", "warm")}
    first = next(iter(runs.values()))[0]
    return {
        "device": f"1 x {first['device']}",
        "commit": commit.strip() or "unknown",
        "recorded": commit.strip() or "unknown",
        "versions": {"deepspeed": version("deepspeed"), "torch": first["torch"]},
        "commands": [f"python scripts/measure_startup.py {arguments}".strip()],
        "notes": [
            f"Medians of {len(runs['AdamW', 'cold'])} cold and {len(runs['AdamW', 'warm'])} warm runs. DSMuon takes "
            f"{over['cold']:.1f} s longer than AdamW cold, and {over['warm']:.1f} s warm.",
        ],
        "columns": [{"name": "optimizer"}, {"name": "Triton's cache"}]
        + [{"name": phase if phase != "trial" else "its trial", "format": ".2f"} for phase in PHASES],
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", type=int, default=2, help="cold runs of each (default: 2)")
    parser.add_argument("--warm", type=int, default=3, help="warm runs of each (default: 3)")
    parser.add_argument("--layers", type=int, default=4, help="of the GPT (default: 4)")
    parser.add_argument("--width", type=int, default=1024, help="of the GPT, a multiple of 64 (default: 1024)")
    parser.add_argument("--port", type=int, default=29641)
    parser.add_argument("--json", type=Path, help="write the table there, as docs/measured has it")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--launched", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        found = train(options.train, options.launched, options.layers, options.width)
        print(json.dumps(found), flush=True)
        os._exit(0)  # see demo_train.py
    arguments = f"--cold {options.cold} --warm {options.warm} --layers {options.layers} --width {options.width}"
    found = published(measure(options), arguments)
    print(f"\n{found['notes'][0]}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
