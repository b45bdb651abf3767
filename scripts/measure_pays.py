"""Does Muon pay? One GPT, one text, one GPU: held-out loss with several optimizers, at equal tokens and at equal time.

    python scripts/measure_pays.py --results pays.json                       # 25 minutes on one H200
    python scripts/measure_pays.py --results pays.json --stop-after 8        # goes on where the file ends, 8 minutes
    python scripts/measure_pays.py --results pays.json --publish             # docs/pays.svg, docs/measured/pays.json
    DS_ACCELERATOR=cpu python scripts/measure_pays.py --quick --results pays.json

The text is Python: the sources of the standard library and of the installed packages, as bytes. Every optimizer sees
the same windows in the same order, under the same schedule (`decay`), at several rates: that is equal tokens. Then each
one but the fastest trains again at its best rate, for as many steps as take the time of the fastest, with the whole
schedule in them: that is equal time. How many steps a run has follows from the minutes that all of them may take, and
from the speed of AdamW at the start.

Muon's AdamW half has AdamW's first rate. DeepSpeed's Muon has gradient_clipping 0, since it clips its updates; the
others have 1.0.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from small_training import Run, be_the_only_rank, engine_config, measure_or_publish, package_folders, read_text, train

from ds_muon.files import write_text

ROOT = Path(__file__).resolve().parents[1]
SEED = 0
# In the order in which they are tried: on until the best is none of the outer ones.
ADAMW_RATES, MUON_RATES = (1.2e-3, 6e-4, 2.4e-3, 3e-4, 1.5e-4), (0.02, 0.01, 0.04)
HALVES = {"adam_lr": ADAMW_RATES[0], "weight_decay": 0.1, "momentum": 0.95}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}},
    "DSMuon": {"type": "DSMuon", "params": HALVES},
    "NorMuon": {"type": "DSMuon", "params": {**HALVES, "variant": "normuon"}},
    "DeepSpeed's Muon": {"type": "Muon", "params": HALVES},
}
COLOURS = {"DSMuon": "#0072b2", "NorMuon": "#009e73", "AdamW": "#8c959f", "DeepSpeed's Muon": "#e69f00"}
_INK = "#768390"  # legible on white and on black

LEAST_BYTES, MOST_BYTES = 80_000_000, 240_000_000
# What a run takes beside its steps, in seconds, and how much slower than AdamW the others may be on average.
OVERHEAD, SLOWER = 12.0, 1.25


@dataclass(frozen=True)
class Scale:
    """A model of ``layers`` and ``width`` in heads of ``head``, windows of ``length`` bytes, and what is evaluated."""

    layers: int
    width: int
    head: int
    length: int
    micro_batch: int
    evaluations: int
    evaluated_windows: int


# 125.7 million parameters.
GPU = Scale(layers=13, width=896, head=64, length=1024, micro_batch=32, evaluations=20, evaluated_windows=256)
QUICK = Scale(layers=2, width=64, head=32, length=64, micro_batch=4, evaluations=4, evaluated_windows=8)


@dataclass(frozen=True)
class Job:
    """One run: ``share`` of the common number of steps."""

    optimizer: str
    lr: float
    share: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.optimizer}, {self.lr:g}" + ("" if self.share == 1.0 else ", equal time")


def rates(optimizer: str) -> tuple[float, ...]:
    return ADAMW_RATES if optimizer == "AdamW" else MUON_RATES


def last_loss(run: dict[str, Any]) -> float:
    loss: float = run["held_out_loss"]["python"][-1][1]
    return loss


def best(optimizer: str, runs: dict[str, Any]) -> str | None:
    """Name of the run at equal tokens with the lowest held-out loss at the end; None until all rates have run."""
    names = [Job(optimizer, lr).name for lr in rates(optimizer)]
    return min(names, key=lambda name: last_loss(runs[name])) if runs.keys() >= set(names) else None


def jobs(runs: dict[str, Any], chosen: list[str]) -> list[Job]:
    """All that can be said now: runs at equal tokens, and once those are done, those at equal time."""
    # A rate of each first, so that a file that is cut short compares something.
    turns = zip_longest(*([Job(name, lr) for lr in rates(name)] for name in chosen))
    found = [job for turn in turns for job in turn if job is not None]
    fastest = {name: runs[run]["ms_per_step"] for name in OPTIMIZERS if (run := best(name, runs)) is not None}
    if fastest.keys() == OPTIMIZERS.keys():
        least = min(fastest.values())
        for name in chosen:
            if fastest[name] > least:
                found.append(Job(name, runs[best(name, runs)]["lr"], share=least / fastest[name]))
    return found


class Bench:
    """The text and the model of a scale, on the device."""

    def __init__(self, scale: Scale, *, compiled: bool) -> None:
        import torch
        from deepspeed.accelerator import get_accelerator

        self.scale, self.compiled = scale, compiled
        self.device = torch.device(get_accelerator().current_device_name())
        quick = scale == QUICK
        self.text, self.held_out = read_text(package_folders()[:1] if quick else package_folders(), {".py"}, MOST_BYTES)
        if not quick and len(self.text) < LEAST_BYTES:
            sys.exit(f"{len(self.text):,} bytes of Python are installed here: install packages up to {LEAST_BYTES:,}")
        self.facts = {
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "train_bytes": len(self.text),
            "held_out_bytes": len(self.held_out),
        }
        self.text, self.held_out = self.text.to(self.device), self.held_out.to(self.device)

    def run(self, job: Job, steps: int, *, evaluations: int | None = None) -> Run:
        import gc

        import torch

        import ds_muon  # noqa: F401  registers DSMuon
        from ds_muon.sample.gpt import GPT, GPTConfig

        scale = self.scale
        torch.manual_seed(SEED)
        with self.device:
            model = GPT(GPTConfig(scale.layers, scale.width // scale.head, scale.width, scale.length))
        self.facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        if self.compiled:
            torch._dynamo.reset()
            for block in model.blocks:
                block.compile()
        optimizer = OPTIMIZERS[job.optimizer]
        params = {**optimizer["params"], "lr": job.lr}
        if optimizer["type"] == "AdamW" and self.device.type == "cuda":
            params["fused"] = True
        if optimizer["type"] == "Muon":
            params["muon_lr"] = job.lr
        config = engine_config(
            {**optimizer, "params": params},
            scale.micro_batch,
            clip=0.0 if optimizer["type"] == "Muon" else 1.0,
            bf16=self.device.type == "cuda",
        )
        found = train(
            model, config, self.text, {"python": self.held_out}, length=scale.length, steps=steps, seed=SEED,
            evaluations=evaluations or scale.evaluations, evaluated_windows=scale.evaluated_windows,
        )  # fmt: skip
        del model
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found


def measure(options: argparse.Namespace) -> None:
    """Run what the results file lacks, and write it after every run."""
    began = time.monotonic()
    results: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {"runs": {}}
    be_the_only_rank(options.port)
    bench = Bench(QUICK if options.quick else GPU, compiled=not (options.quick or options.no_compile))
    if "steps" not in results:
        ms = bench.run(Job("AdamW", ADAMW_RATES[1]), 60 if not options.quick else 4, evaluations=4).ms_per_step
        count = sum(len(rates(name)) for name in OPTIMIZERS) + 3
        seconds = 60 * options.minutes / count - OVERHEAD
        steps = options.steps or max(8, int(1e3 * seconds / ms / SLOWER))
        results |= {"steps": steps, "scale": asdict(bench.scale), "seed": SEED}
        say(began, f"AdamW takes {ms:.1f} ms a step: {steps} steps a run")
    runs = results["runs"]
    longest = 0.0
    while True:
        left = [job for job in jobs(runs, options.only) if job.name not in runs]
        if not left:
            break
        job, start = left[0], time.monotonic()
        if options.stop_after and start - began + 1.15 * longest > 60 * options.stop_after:
            say(began, f"{len(left)} runs are left: call again")
            return
        steps = max(4, round(job.share * results["steps"]))
        run = bench.run(job, steps)
        longest = max(longest, time.monotonic() - start)
        runs[job.name] = {**asdict(job), "steps": steps, **asdict(run)}
        results |= {"facts": bench.facts}
        write_text(options.results, json.dumps(results))
        say(began, f"{job.name}: {last_loss(runs[job.name]):.4f} after {steps} steps of {run.ms_per_step:.1f} ms")
    say(began, "all runs are done")


def say(began: float, what: str) -> None:
    print(f"{time.monotonic() - began:6.0f} s  {what}", flush=True)


# ---- what is published ----------------------------------------------------------------------------------------------


def at_equal_time(optimizer: str, runs: dict[str, Any]) -> dict[str, Any]:
    """Of the fastest it is the run at equal tokens."""
    chosen: dict[str, Any] = runs[best(optimizer, runs)]
    of_best = [run for run in runs.values() if (run["optimizer"], run["lr"]) == (optimizer, chosen["lr"])]
    return min(of_best, key=lambda run: run["share"])


def publish(results: dict[str, Any], commit: str) -> None:
    """Write the table and the picture of the docs."""
    from importlib.metadata import version

    runs, scale, facts = results["runs"], Scale(**results["scale"]), results["facts"]
    tokens = scale.micro_batch * scale.length
    rows = []
    for name in OPTIMIZERS:
        losses = [last_loss(runs[Job(name, lr).name]) for lr in rates(name)]
        run, timed = runs[best(name, runs)], at_equal_time(name, runs)
        tried = ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in sorted(zip(rates(name), losses, strict=True)))
        rows.append([f"`{name}`", tried, run["lr"], min(losses), run["ms_per_step"], timed["steps"], last_loss(timed)])
    measured = {
        "device": f"1 x {facts['device']}",
        "commit": commit,
        "recorded": commit,
        "versions": {"torch": facts["torch"], "deepspeed": version("deepspeed")},
        "commands": ["python scripts/measure_pays.py --results pays.json"],
        "notes": [
            f"A byte-level GPT of {facts['parameters'] / 1e6:.1f} million parameters, bf16, ZeRO-2; at equal tokens "
            f"{results['steps']:,} steps of {tokens:,} bytes, from {facts['train_bytes'] / 1e6:.0f} MB of Python. Nats "
            f"per byte over {scale.evaluated_windows} held-out windows; one seed.",
        ],
        "columns": [
            {"name": "optimizer"},
            {"name": "held-out loss by rate"},
            {"name": "best rate", "format": "g"},
            {"name": "its loss, equal tokens", "format": ".4f"},
            {"name": "ms per step", "format": ".1f"},
            {"name": "steps in equal time", "format": ",d"},
            {"name": "loss, equal time", "format": ".4f"},
        ],
        "rows": rows,
    }
    write_text(ROOT / "docs" / "measured" / "pays.json", json.dumps(measured, indent=2) + "\n")
    draw(results, ROOT / "docs" / "pays.svg")


def draw(results: dict[str, Any], path: Path) -> None:
    """Held-out loss against tokens, every rate with the best one bold, and against time. Writes ``path``."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    runs, scale = results["runs"], Scale(**results["scale"])
    tokens = scale.micro_batch * scale.length
    style = {"svg.fonttype": "none", "svg.hashsalt": "ds_muon", "font.family": "sans-serif", "font.size": 10}
    ink = {name: _INK for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    with rc_context({**style, **ink}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        by_tokens, by_time = figure.subplots(1, 2, sharey=True)
        ends = []
        for name in OPTIMIZERS:
            chosen = best(name, runs)
            for run in (runs[Job(name, lr).name] for lr in rates(name)):
                bold = run is runs[chosen]
                x, y = zip(*run["held_out_loss"]["python"][2:], strict=True)
                look = {"linewidth": 2.0} if bold else {"linewidth": 0.8, "alpha": 0.5}
                label = name if bold else None
                by_tokens.plot([step * tokens / 1e6 for step in x], y, color=COLOURS[name], label=label, **look)
                ends.append(y[-1])
            run = at_equal_time(name, runs)
            x, y = zip(*run["held_out_loss"]["python"][2:], strict=True)
            by_time.plot([step * run["ms_per_step"] / 1e3 for step in x], y, color=COLOURS[name], linewidth=2.0)
        by_tokens.set_xlabel("million bytes")
        by_time.set_xlabel("seconds of training")
        by_tokens.set_title("held-out loss, nats per byte; several rates each", fontsize=10, loc="left")
        by_time.set_title("the best rate, a schedule that fits the time", fontsize=10, loc="left")
        least = min(ends)
        by_tokens.set_ylim(least - 0.02, least + 0.5)
        for axes in (by_tokens, by_time):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.2)
        figure.legend(*by_tokens.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS], help="train with these only")
    parser.add_argument("--minutes", type=float, default=23.0, help="for all runs together")
    parser.add_argument("--steps", type=int, help="of a run, in place of what fits the minutes")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="begin no run that would end later")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--port", type=int, default=29611)
    measure_or_publish(parser, measure, publish)


if __name__ == "__main__":
    main()
