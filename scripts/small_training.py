"""What scripts share that train small GPTs to compare optimizers: text that every machine has, and a run on one device.

Not a script: ``measure_pays.py``, ``measure_rates.py`` and ``demo_train.py`` import it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Larger files are tables that a program wrote.
LARGEST_FILE = 400_000
HELD_OUT = 20  # of so many files, one is not trained on


def package_folders() -> list[Path]:
    """The standard library, and every folder of installed packages."""
    folders = [Path(sysconfig.get_paths()["stdlib"]), *(Path(entry) for entry in sys.path if "-packages" in entry)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def read_text(folders: Iterable[Path], suffixes: set[str], at_most: int) -> tuple[Tensor, Tensor]:
    """Bytes of the files below some folders, to train on and held out (a twentieth of the files); uint8, on the CPU.

    A content that several packages have counts once. Files come in the order of their hashes, so that ``at_most`` bytes
    and the held-out files are of all packages alike.
    """
    contents: dict[bytes, bytes] = {}
    for folder in folders:
        for path in _files(folder, suffixes):
            content = path.read_bytes()
            contents[hashlib.sha256(content).digest()] = content
    train, held_out = bytearray(), bytearray()
    for index, (_, content) in enumerate(sorted(contents.items())):
        if len(train) + len(held_out) + len(content) > at_most:
            break
        (train if index % HELD_OUT else held_out).extend(content)
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def _files(folder: Path, suffixes: set[str]) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.endswith("-packages")]  # they are folders of their own
        for name in names:
            path = Path(here, name)
            if path.suffix in suffixes and path.is_file() and 0 < path.stat().st_size <= LARGEST_FILE:
                yield path


def windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (B, T), int64, of the windows that begin at ``starts`` (B); all where the text is."""
    rows = text[starts.to(text.device)[:, None] + torch.arange(length + 1, device=text.device)].long()
    return rows[:, :-1], rows[:, 1:]


def decay(step: int, steps: int) -> float:
    """Linear warmup over the first 5 %, then a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))


def be_the_only_rank(port: int) -> None:
    """Tell DeepSpeed that this process is all there is."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)


@dataclass
class Run:
    """Losses in nats per byte, each with its step: of training, a mean since the one before; held out, by text."""

    train_loss: list[tuple[int, float]]
    held_out_loss: dict[str, list[tuple[int, float]]]
    ms_per_step: float


def engine_config(optimizer: Mapping[str, Any], micro_batch: int, *, clip: float = 1.0, bf16: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": clip,
        "optimizer": dict(optimizer),
        "zero_optimization": {"stage": 2, "reduce_scatter": False},
        "bf16": {"enabled": bf16},
        "steps_per_print": 10**9,
    }


def train(
    model: nn.Module,
    config: Mapping[str, Any],
    text: Tensor,
    held_out: Mapping[str, Tensor],
    *,
    length: int,
    steps: int,
    seed: int,
    evaluations: int,
    evaluated_windows: int,
) -> Run:
    """Train ``model`` in place on windows of ``text`` drawn by ``seed``, under ``decay``; texts lie on its device.

    Evaluated before the first step, and ``evaluations`` times after.
    """
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=dict(config),
        # LambdaLR multiplies each group's own rate, so Muon's and AdamW's keep their ratio.
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: decay(step, steps)),
    )
    micro_batch = config["train_micro_batch_size_per_gpu"]
    sampler = torch.Generator().manual_seed(seed)
    run = Run([], {name: [(0, loss_on(engine, part, length, evaluated_windows))] for name, part in held_out.items()}, 0)
    milliseconds: list[float] = []
    span = max(1, steps // evaluations)
    done = 0
    while done < steps:
        losses: list[Tensor] = []
        start = time.perf_counter()
        for _ in range(min(span, steps - done)):
            loss = engine(*windows(text, torch.randint(len(text) - length, (micro_batch,), generator=sampler), length))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean().item()  # waits for the device, so that the time is whole
        milliseconds.append(1e3 * (time.perf_counter() - start) / len(losses))
        done += len(losses)
        run.train_loss.append((done, mean))
        for name, part in held_out.items():
            run.held_out_loss[name].append((done, loss_on(engine, part, length, evaluated_windows)))
    # The first span compiles kernels; a median does not see it.
    run.ms_per_step = statistics.median(milliseconds)
    engine.destroy()
    return run


@torch.no_grad()
def loss_on(engine: Any, text: Tensor, length: int, count: int) -> float:
    """Mean loss over ``count`` windows spread evenly over the text, in batches as in training."""
    starts = torch.linspace(0, len(text) - length - 1, count).long()
    engine.eval()
    losses = [engine(*windows(text, part, length)) for part in starts.split(engine.train_micro_batch_size_per_gpu())]
    engine.train()
    return torch.stack(losses).float().mean().item()


def measure_or_publish(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], None],
    publish: Callable[[dict[str, Any], str], None],
) -> None:
    """Run a script that measures into ``--results``, or with ``--publish`` makes the docs' tables from them."""
    parser.add_argument("--results", type=Path, required=True, help="JSON of all runs")
    parser.add_argument("--quick", action="store_true", help="a toy, to see that it works, also on a CPU")
    parser.add_argument("--publish", action="store_true", help="write what the docs show from the results")
    parser.add_argument("--commit", default="unknown", help="that the results are of, for --publish")
    options = parser.parse_args()
    if options.publish:
        publish(json.loads(options.results.read_text()), options.commit)
    else:
        measure(options)
