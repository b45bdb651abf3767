"""Train for as long as it is told, with all that goes wrong in a long run, beside a training to which nothing happens.

    deepspeed --num_accelerators 2 scripts/soak.py --steps 5000               # on CPU with DS_ACCELERATOR=cpu
    deepspeed --num_accelerators 1 scripts/soak.py --steps 20000 --minutes 4 --often 0.25 --accumulation 1
    deepspeed --num_accelerators 2 scripts/soak.py --minutes 600 --json soak.json --picture soak.svg

At seeded random: a gradient of one rank that is not finite, a spike of the gradient, an update that is not finite, with
its capture, an error on one rank in the middle of a step, an evaluation, a save, and a load of the last checkpoint, now
and then by a new engine. After what may have moved the momentum, the last checkpoint is loaded. All the while
``verify_every``, ``verify_bits`` and telemetry look on, over a learning rate that falls and gradients that accumulate.

A second engine makes the same steps with none of that. Loss must be the same in every step, also in those that a load
has made come again, and fp32 weights, momentum, variances and AdamW's moments whenever both have come equally far: to
the last bit. What the process holds must not grow: memory, memory of the device, open files, threads, CUDA graphs,
/dev/shm, Python's own blocks. Ends with a table of both, and code 1 where something differs or grows.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

import ds_muon.muon_group
from ds_muon.orthogonalize.backends import BACKENDS
from tests.unit.support.drills import PLACES, fail_at
from tests.unit.support.models import Block, start

VOCABULARY, BATCHES = 40, 64
# Steps between two saves; and of each kind of fault, how many of 1,000 steps it takes.
SAVE_EVERY = 25
FAULTS = {"gradient": 50, "spike": 30, "update": 4, "rank": 4, "load": 10, "new engine": 2, "evaluation": 20}
ROLLS_BACK = {"update", "rank", "load", "new engine"}
# Of what a rank keeps, how much the last quarter of a run may have more than the second one: a share, and beside it.
GROWTH = {
    **{"rss": (0.01, 4.0), "device": (0.0, 1.0), "reserved": (0.02, 32.0), "files": (0.0, 0.0), "threads": (0.0, 0.0)},
    # Graphs are kept by the addresses that they read, 64 at most.
    **{"graphs": (0.0, 64.0), "shm": (0.0, 0.0), "blocks": (0.01, 0.5)},
}
TITLES = {
    **{"rss": "memory, MiB", "device": "GPU memory, MiB", "reserved": "GPU reserved, MiB", "files": "open files"},
    **{"threads": "threads", "graphs": "CUDA graphs", "shm": "/dev/shm, MiB", "blocks": "Python's objects, k"},
}


@dataclass(frozen=True)
class Options:
    """Of a soak.

    Attributes:
        steps: calls of the engine's step, skipped ones included.
        seconds: after which it ends in any case.
        often: by what the number of faults and saves is multiplied.
        faults: see ``FAULTS``.
        samples: how many times a rank looks at what it holds, at least: it does each 100 steps.
    """

    steps: int
    seconds: float = float("inf")
    seed: int = 0
    often: float = 1.0
    faults: Mapping[str, int] = field(default_factory=lambda: FAULTS)
    width: int = 48
    batch: int = 4
    accumulation: int = 2
    stage: int = 2
    dtype: str = "float32"
    variant: str = "normuon"
    samples: int = 200


@dataclass(frozen=True)
class Sample:
    """What one rank holds after a step, once garbage has been collected."""

    step: int
    position: int
    rss: float
    device: float
    reserved: float
    files: int
    threads: int
    graphs: int
    shm: float
    blocks: float
    loss: float


@dataclass(frozen=True)
class Found:
    """By one rank.

    Attributes:
        steps, positions: calls of the step; and steps of the training to which nothing happens.
        counts: what has happened, by kind.
        compared: how many times all state was compared.
        seconds: in all.
    """

    steps: int
    positions: int
    counts: dict[str, int]
    compared: int
    seconds: float
    samples: list[Sample]


class Training:
    """An engine, and how many steps it has applied."""

    def __init__(self, options: Options, params: dict[str, Any]) -> None:
        self.position = 0
        self.skipped = 0
        torch.manual_seed(options.seed)
        model = Block(VOCABULARY, options.width)
        parameters = list(model.parameters())
        # Two param groups, with matrices for Muon and others in both.
        half = next(i for i, p in enumerate(parameters) if p is model.wide.weight)
        groups = [{"params": parameters[:half]}, {"params": parameters[half:]}]
        self.engine = start(model, config_of(options, params), model_parameters=groups)

    def accumulate(self, batches: list[tuple[Tensor, Tensor]], poison: tuple[int, float] | None = None) -> Tensor:
        """Forward and backward of the next step, all but ``engine.step`` of the last micro-batch. Returns the loss.

        Args:
            batches: all there are.
            poison: which parameter's first gradient is given this value besides.
        """
        engine = self.engine
        steps = engine.gradient_accumulation_steps()
        losses = []
        for micro in range(steps):
            loss = engine(*batches[(self.position * steps + micro) % len(batches)])
            losses.append(loss.detach())
            if poison is not None and micro == 0:
                index, value = poison
                loss = loss + value * list(engine.module.parameters())[index].view(-1)[0].float()
            engine.backward(loss)
            if micro < steps - 1:
                engine.step()
        return torch.stack(losses).mean()

    def state(self) -> list[Tensor]:
        """All that a step changes, of this rank."""
        zero = self.engine.optimizer
        state = [value for of in zero.optimizer.state.values() for value in of.values() if isinstance(value, Tensor)]
        return [*zero.single_partition_of_fp32_groups, *state, *self.engine.module.parameters()]


def config_of(options: Options, params: dict[str, Any]) -> dict[str, Any]:
    rates = {"lr": 0.01, "adam_lr": 1e-3, "weight_decay": 0.1, "variant": options.variant}
    schedule = {"total_num_steps": options.steps, "warmup_num_steps": 10, "warmup_max_lr": 0.01}
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulation,
        "optimizer": {"type": "DSMuon", "params": {**rates, **params}},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "zero_optimization": {"stage": options.stage, "reduce_scatter": False},
        "bf16": {"enabled": options.dtype == "bfloat16"},
        "steps_per_print": 10**9,
    }


class Soak:
    """Both trainings, and what happens to the first."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.dice = random.Random(options.seed)  # the same on every rank
        # Often enough that each is seen in a short run, too.
        check = max(2, round(50 / options.often))
        guard = {"nan_guard": "skip", "grad_norm_skip_threshold": 1e4}
        looks = {"verify_every": check, "verify_bits": True, "telemetry_every": check // 2}
        self.watched = {**guard, **looks}
        # What is there by now stays: to look through it again and again for garbage takes most of a second.
        importlib.import_module("torch._dynamo")
        gc.freeze()
        self.run = Training(options, self.watched)
        self.plain = Training(options, {})
        self.device = self.run.engine.device
        self.batches = batches_of(options, self.rank, self.device)
        self.losses = torch.full((options.steps + 1,), torch.nan, device=self.device)
        self.unlike = torch.zeros((), dtype=torch.int64, device=self.device)
        self.counts: Counter[str] = Counter()
        self.compared = 0
        folder = [tempfile.mkdtemp(prefix="ds-muon-soak-") if self.rank == 0 else ""]
        dist.broadcast_object_list(folder, device=self.device)
        self.folder = Path(folder[0])
        self.saved: str | None = None

    def go(self) -> Found:
        """Train to the end, and until both have come equally far."""
        options, start = self.options, time.monotonic()
        samples: list[Sample] = []
        # Of a run that is ended by the clock, too.
        every = min(100, max(1, options.steps // options.samples))
        save_every = max(2, round(SAVE_EVERY / options.often))
        kinds = [kind for kind, often in options.faults.items() for _ in range(often)]
        step = 0
        try:
            self.save()
            while step < options.steps or self.run.position < self.plain.position:
                step += 1
                fault = self.dice.choice(kinds) if self.dice.random() < options.often * len(kinds) / 1e3 else "none"
                self.step("none" if step > options.steps else fault)
                if step % save_every == 0:
                    self.save()
                if step % every == 0:
                    samples.append(self.sample(step))
                    late = torch.tensor(float(time.monotonic() - start > options.seconds), device=self.device)
                    dist.broadcast(late, 0)
                    if late.item():
                        options = Options(**{**vars(options), "steps": step})
            self.compare()
            assert self.compared > 1
            return Found(step, self.plain.position, dict(self.counts), self.compared, time.monotonic() - start, samples)
        finally:
            if self.rank == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
            self.run.engine.destroy()
            self.plain.engine.destroy()
            gc.unfreeze()

    def step(self, fault: str) -> None:
        """One step of the first training, or what a fault leaves of it; and of the second, if it is as far."""
        run, engine, dice = self.run, self.run.engine, self.dice
        self.counts[fault] += 1
        bad_rank = dice.randrange(self.ranks)
        value = dice.choice([torch.nan, torch.inf, -torch.inf]) if fault == "gradient" else 1e8
        # A spike is one of AdamW's half: the norm scale is always in it.
        index = dice.randrange(9) if fault == "gradient" else 6
        poisoned = fault in ("gradient", "spike") and self.rank == bad_rank
        behind = run.position < self.plain.position
        if fault == "evaluation":
            self.evaluate()
        if run.position == self.plain.position:
            self.losses[run.position] = self.plain.accumulate(self.batches)
            self.plain.engine.step()
            self.plain.position += 1
        loss = run.accumulate(self.batches, (index, value) if poisoned else None)
        self.unlike += loss != self.losses[run.position]
        if fault == "rank":
            place = dice.choice(sorted(PLACES))
            said = fail_at(place, engine, bad_rank, engine.step)
            assert "NoMemory: none for" in said or "stopped" in said, said
        else:
            with spoiled_updates(self.folder / "captures") if fault == "update" else nullcontext():
                engine.step()
            skips = fault in ("gradient", "spike", "update")
            run.skipped += skips
            run.position += not skips
            assert engine.skipped_steps == run.skipped, (fault, engine.skipped_steps, run.skipped)
        if fault in ROLLS_BACK:
            if fault == "new engine":
                engine.destroy()
                self.run = Training(self.options, self.watched)
            self.load()
        elif behind and run.position == self.plain.position:
            self.compare()  # what has been loaded has caught up

    def evaluate(self) -> None:
        self.run.engine.eval()
        with torch.no_grad():
            self.run.engine(*self.batches[0])
        self.run.engine.train()

    def save(self) -> None:
        """A checkpoint, and the one before is removed."""
        before, self.saved = self.saved, f"at{self.counts.total()}"
        state = {"position": self.run.position, "skipped": self.run.skipped}
        self.run.engine.save_checkpoint(str(self.folder), tag=self.saved, client_state=state)
        if before is not None and self.rank == 0:
            shutil.rmtree(self.folder / before)
        self.counts["save"] += 1

    def load(self) -> None:
        _, state = self.run.engine.load_checkpoint(str(self.folder))
        self.run.position, self.run.skipped = state["position"], state["skipped"]

    def sample(self, step: int) -> Sample:
        """Look at what this rank holds; compare."""
        self.compare()
        gc.collect()
        on_gpu = self.device.type == "cuda"
        here = Path("/proc/self")
        # Those of this process and its ranks: others use it as well.
        ours = (str(os.getpid()), os.environ["MASTER_PORT"])
        shm = sum(of.stat().st_size for of in Path("/dev/shm").iterdir() if any(mark in of.name for mark in ours))
        return Sample(
            step,
            self.run.position,
            resident() / 2**20,
            torch.cuda.memory_allocated() / 2**20 if on_gpu else 0.0,
            torch.cuda.memory_reserved() / 2**20 if on_gpu else 0.0,
            len(os.listdir(here / "fd")),
            len(os.listdir(here / "task")),
            len(BACKENDS["triton"]()._graphs._graphs) if on_gpu else 0,  # type: ignore[attr-defined]
            shm / 2**20,
            sys.getallocatedblocks() / 1e3,
            float(self.losses[max(0, self.run.position - 1)]),
        )

    def compare(self) -> None:
        """Losses of all steps until now; and all state, if both have come equally far."""
        assert self.unlike.item() == 0, f"rank {self.rank}: {self.unlike.item()} losses differ"
        check = self.run.engine.optimizer.training_check.last
        assert check is None or check.ok, check
        if self.run.position == self.plain.position:
            self.compared += 1
            for one, other in zip(self.run.state(), self.plain.state(), strict=True):
                assert torch.equal(one, other), f"rank {self.rank}: not the state of the training without faults"


def batches_of(options: Options, rank: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Tokens and what follows them by a rule, a quarter of it noise: something to learn, and a loss that stays."""
    generator = torch.Generator().manual_seed(1000 * options.seed + rank)
    shape = (BATCHES, options.batch, 16)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    noise = torch.randint(VOCABULARY, shape, generator=generator)
    follows = torch.where(torch.rand(shape, generator=generator) < 0.25, noise, (7 * tokens + 3) % VOCABULARY)
    return list(zip(tokens.to(device), follows.to(device), strict=True))


@contextmanager
def spoiled_updates(captures: Path) -> Iterator[None]:
    """Within this context Newton-Schulz returns a NaN in every batch, and a capture of it, which is then removed."""
    original = ds_muon.muon_group.orthogonalize_batch

    def spoiled(*args: Any) -> Tensor:
        outputs: Tensor = original(*args)
        outputs[0, 0, 0] = torch.nan
        return outputs

    switch = "DS_MUON_NAN_CAPTURE"
    environment = {switch: "1", f"{switch}_RAISE": "0", f"{switch}_DIR": str(captures)}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(ds_muon.muon_group, "orthogonalize_batch", spoiled),
    ):
        yield
    for path in captures.glob(f"rank{dist.get_rank()}_*.pt"):
        path.unlink()


# ---- what is said of it ---------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def left_by_all_reduces(number: int = 20_000) -> float:
    """MiB that so many collectives of torch alone leave in the process, to compare growth with. Collective."""
    ones = torch.ones(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    before = 0
    for done in range(number + number // 10):
        if done == number // 10:  # what is kept of the last few thousand is there by now
            before = resident()
        dist.all_reduce(ones)
    ones.item()
    return (resident() - before) / 2**20


def middle(samples: list[Sample], name: str, quarter: int) -> float:
    """Median of a quarter of the run, counted from 0."""
    end = samples[-1].step
    return statistics.median(getattr(s, name) for s in samples if quarter * end < 4 * s.step <= (quarter + 1) * end)


def rows_of(ranks: list[Found]) -> list[tuple[str, float, float, float, bool]]:
    """Of all that is watched, on the rank where it grows most: at first, then, growth, and whether that is too much."""
    rows = []
    for name, (share, beside) in GROWTH.items():
        pairs = [(middle(found.samples, name, 1), middle(found.samples, name, 3)) for found in ranks]
        first, last = max(pairs, key=lambda pair: pair[1] - pair[0])
        rows.append((name, first, last, last - first, last - first > share * first + beside))
    return rows


def table(rows: list[tuple[str, float, float, float, bool]]) -> str:
    lines = [f"{'':28}{'2nd quarter':>14}{'last quarter':>14}{'growth':>10}"]
    for name, first, last, growth, grows in rows:
        lines.append(f"{TITLES[name]:28}{first:14.1f}{last:14.1f}{growth:10.1f}{'  GROWS' * grows}")
    return "\n".join(lines)


def published(ranks: list[Found], device: str, arguments: str, left: float) -> dict[str, Any]:
    """A table for docs/measured, with the curves of rank 0."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    first, names = ranks[0], [of.name for of in fields(Sample)]
    happened = ", ".join(f"{count} x {kind}" for kind, count in sorted(first.counts.items()) if kind != "none")
    return {
        "device": f"{len(ranks)} x {device}",
        "commit": commit or "unknown",
        "recorded": commit or "unknown",
        "versions": {"deepspeed": version("deepspeed"), "torch": str(torch.__version__)},
        "commands": [f"deepspeed --num_accelerators {len(ranks)} scripts/soak.py {arguments}"],
        "notes": [
            f"{first.steps:,} steps in {first.seconds / 60:.0f} minutes, of which {first.positions:,} were new, with "
            f"{happened}. Every loss, and {first.compared} times all state, equal to the training without faults. "
            f"20,000 all-reduces of torch's, of one number, leave {left:.1f} MiB of memory by themselves.",
        ],
        "columns": [
            {"name": "the rank where it grows most"},
            *({"name": name, "format": ",.1f"} for name in ("second quarter", "last quarter", "growth")),
        ],
        "rows": [[TITLES[name], *(round(x, 1) for x in values)] for name, *values, _ in rows_of(ranks) if any(values)],
        "curves": {name: [round(getattr(s, name), 4) for s in first.samples] for name in names},
    }


def draw(samples: dict[str, list[float]], path: Path) -> None:
    """A panel for each thing watched, against the steps. Writes ``path``; legible on white and on black."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from scripts.render_measured import _INK

    titles = {"loss": "loss", **TITLES}
    shown = [name for name in titles if any(samples[name])]
    style = {"svg.fonttype": "none", "svg.hashsalt": "ds_muon", "font.family": "sans-serif", "font.size": 10}
    ink = {name: _INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    with rc_context({**style, **ink}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        for axes, name in zip(figure.subplots(2, -(-len(shown) // 2), squeeze=False).flat, shown, strict=False):
            axes.plot(samples["step"], samples[name], color="#0072b2", linewidth=1.2)
            axes.set_title(titles[name], fontsize=10, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.2)
            if name != "loss":
                axes.set_ylim(0, 1.3 * max(samples[name]))
        for axes in figure.axes[len(shown) :]:
            axes.set_visible(False)
        figure.supxlabel("steps", fontsize=10)
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10**6, help="end after so many (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after so many in any case")
    parser.add_argument("--often", type=float, default=1.0, help="times as many faults and saves (default: 1)")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step (default: 2)")
    parser.add_argument("--width", type=int, default=48, help="of the model (default: 48)")
    parser.add_argument("--variant", choices=("muon", "normuon"), default="normuon")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write table and curves there, as docs/measured has them")
    parser.add_argument("--picture", type=Path, help="draw the curves there (.svg or .png)")
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    args = parser.parse_args()
    import deepspeed

    deepspeed.init_distributed()
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    options = Options(
        steps=args.steps, seconds=60 * args.minutes, seed=args.seed, often=args.often, width=args.width,
        accumulation=args.accumulation, variant=args.variant, dtype="bfloat16" if on_gpu else "float32",
    )  # fmt: skip
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, Soak(options).go())
    left, code = left_by_all_reduces(), 0
    if dist.get_rank() == 0:
        rows, arguments = rows_of(ranks), " ".join(a for a in sys.argv[1:] if "local_rank" not in a)
        device = torch.cuda.get_device_name() if on_gpu else "CPU rank"
        found = published(ranks, device, arguments, left)
        print(f"\n{found['device']}: {found['notes'][0]}\n\n{table(rows)}", flush=True)
        code = int(any(grows for *_, grows in rows))
        if args.json is not None:
            args.json.write_text(json.dumps(found) + "\n")
        if args.picture is not None:
            draw(found["curves"], args.picture)
    dist.barrier()
    # See demo_train.py: ranks on CPU may abort while the interpreter shuts down.
    print(end="", flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
