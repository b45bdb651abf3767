"""Time and memory of loading a checkpoint at another world size: DSMuon's, and DeepSpeed's universal way with AdamW.

    scripts/measure_loading.py [--layers 24] [--width 1024] [--pairs 2:1 1:2] [--direct] [--folder /tmp/loading]

Saves a model of ``layers`` blocks of 12 width^2 elements, and loads it at another number of ranks, on CPU. With
``--direct`` DSMuon's ordinary checkpoints only. Prints seconds, and the most memory that a rank, or the conversion,
holds of its own while it runs: above what it had before, pages of files apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Blocks(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.layers = nn.ModuleList(nn.Linear(*shape) for _ in range(layers) for shape in shapes)

    def forward(self) -> torch.Tensor:
        return torch.stack([layer.weight.sum() + layer.bias.sum() for layer in self.layers]).sum()


def own_memory(pid: int | str = "self") -> int:
    """Bytes that a process holds, pages of files apart."""
    fields = Path(f"/proc/{pid}/status").read_text().split("RssAnon:")
    return int(fields[1].split()[0]) * 1024 if len(fields) > 1 else 0


class Watch:
    """Within this context the largest own memory of processes is looked for, every 5 ms."""

    def __init__(self, pids: Any) -> None:
        self._pids, self._done, self.most = pids, threading.Event(), 0

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        self._start = time.monotonic()
        return self

    def __exit__(self, *_: Any) -> None:
        self.seconds = time.monotonic() - self._start
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.005):
            found = 0
            for pid in self._pids():
                with suppress(OSError):  # it has ended
                    found += own_memory(pid)
            self.most = max(self.most, found)


def descendants(pid: int) -> list[int]:
    """A process and those that it has started."""
    found = [pid]
    for parent in found:
        with suppress(OSError):  # it has ended
            found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return found


def work(options: argparse.Namespace) -> None:
    """One rank: save, or load and print."""
    import deepspeed
    import torch.distributed as dist

    import ds_muon  # noqa: F401

    params = {"lr": 1e-3, **({"torch_adam": True} if options.optimizer == "AdamW" else {"adam_lr": 1e-3})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": options.optimizer, "params": params},
        "zero_optimization": {"stage": 2, "reduce_scatter": False},
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": options.universal},
    }
    with torch.device("meta"):
        model = Blocks(options.layers, options.width)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    noise = torch.randn(4 * options.width**2) * 0.02  # of the largest: drawing all of them would take the longest
    for p in model.parameters():
        p.data.copy_(noise[: p.numel()].view_as(p))
    engine, *_ = deepspeed.initialize(model=model, config=config)
    if options.work == "save":
        if options.optimizer == "AdamW":  # which has no state before a step
            engine.backward(engine())
            engine.step()
        engine.save_checkpoint(options.folder)
        return
    before = own_memory()
    dist.barrier()
    with Watch(lambda: ["self"]) as watch:
        engine.load_checkpoint(options.folder)
        dist.barrier()
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps([watch.seconds, (watch.most - before) / 1e9]), flush=True)


def ranks(number: int, options: argparse.Namespace, *more: str) -> list[float]:
    sizes = ["--layers", str(options.layers), "--width", str(options.width)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    done = subprocess.run([*command, __file__, *sizes, *more], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-6000:])
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return list(json.loads(found[0][6:])) if found else []


def convert(command: list[str]) -> tuple[float, float]:
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process,
        Watch(lambda: descendants(process.pid)) as watch,
    ):
        _, errors = process.communicate()
    if process.returncode:
        sys.exit(errors[-6000:])
    return watch.seconds, watch.most / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--pairs", nargs="+", default=["2:1", "1:2"], metavar="SAVED:LOADED")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--folder", default="/tmp/loading")
    parser.add_argument("--work", choices=("save", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--optimizer", help=argparse.SUPPRESS)
    parser.add_argument("--universal", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    number = sum(p.numel() for p in _meta(options).parameters())
    print(f"{number / 1e9:.2f}B parameters, bf16, stage 2, CPU; seconds and GB of a rank's own memory")
    for then, now in (map(int, pair.split(":")) for pair in options.pairs):
        folder = Path(options.folder)
        for optimizer in ("DSMuon",) if options.direct else ("DSMuon", "AdamW"):
            shutil.rmtree(folder, ignore_errors=True)
            ordinary, universal = str(folder / "run"), str(folder / "universal")
            of = ["--optimizer", optimizer]
            ranks(then, options, "--work", "save", "--folder", ordinary, *of)
            (tag,) = (path.name for path in Path(ordinary).iterdir() if path.is_dir())
            if optimizer == "DSMuon":
                direct = ranks(now, options, "--work", "load", "--folder", ordinary, *of)
                row("DSMuon, direct", then, now, direct)
                if options.direct:
                    continue
                command = [sys.executable, "-c", "from ds_muon.cli import main; main()", "to-universal"]
                command += [ordinary, universal]
            else:
                command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
                command += ["--input_folder", f"{ordinary}/{tag}", "--output_folder", f"{universal}/{tag}"]
                Path(universal).mkdir(parents=True)
            converted = convert(command)
            row(f"{optimizer}, conversion", then, now, converted)
            loaded = ranks(now, options, "--work", "load", "--folder", universal, "--universal", *of)
            row(f"{optimizer}, load_universal", then, now, loaded)
        shutil.rmtree(folder, ignore_errors=True)


def _meta(options: argparse.Namespace) -> Blocks:
    with torch.device("meta"):
        return Blocks(options.layers, options.width)


def row(what: str, then: int, now: int, found: Any) -> None:
    print(f"{then} -> {now}  {what:24}{found[0]:8.1f} s{found[1]:8.2f} GB", flush=True)


if __name__ == "__main__":
    main()
