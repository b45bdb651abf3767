"""Train a small byte-level GPT on the Python standard library's sources; `scripts/demo` runs it for two optimizers.

    deepspeed --num_accelerators 2 scripts/demo_train.py --out demo_out \\
        --deepspeed_config ds_configs/demo_dsmuon.json ds_configs/demo_adamw.json
    python scripts/demo_train.py --report dsmuon adamw --out demo_out

All optimizers see the same windows of text in the same order, and as many steps: only the config differs. With DSMuon
the last updates are compared, matrix by matrix, with the fp64 single-process reference; exit code 1 if one is off, 2 if
what was found could not be written. The report reads what the runs wrote, and writes loss.png and log.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from small_training import decay, windows
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import ds_muon  # noqa: F401  registers DSMuon
from ds_muon.files import check_writable, keep, write_text, writing
from ds_muon.sample.gpt import GPT, GPTConfig
from ds_muon.verify import UpdateCheck, UpdateRecord

SEED = 0
CHECKED_STEPS = 3
# With fewer steps than this the last one is checked: on a CPU a check takes as long as ten steps.
ENOUGH_TO_CHECK_MORE = 100
EVALUATIONS = 10
EVALUATION_WINDOWS = 64  # over all ranks
COLOURS = {"DSMuon": "#0b6e4f", "NorMuon": "#3d5a98", "AdamW": "#c8553d"}


@dataclass(frozen=True)
class Scale:
    """What a kind of machine trains in less than a minute. An odd number of layers makes matrices straddle."""

    model: GPTConfig
    micro_batch: int
    steps: int
    full_steps: int
    bf16: bool


CPU = Scale(
    GPTConfig(n_layer=5, n_head=6, n_embd=192, block_size=128), micro_batch=8, steps=50, full_steps=400, bf16=False
)
GPU = Scale(
    GPTConfig(n_layer=9, n_head=8, n_embd=512, block_size=256), micro_batch=32, steps=375, full_steps=1500, bf16=True
)


def standard_library() -> tuple[Tensor, Tensor]:
    """The sources as bytes, for training and for validation (the last 5 % of the files by name); uint8, 1-D."""
    root = Path(sysconfig.get_paths()["stdlib"])
    others = {"site-packages", "dist-packages", "test", "tests"}
    files = [p for p in sorted(root.rglob("*.py")) if others.isdisjoint(p.relative_to(root).parts)]
    held_out = len(files) - len(files) // 20
    train, validation = (
        torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in part)), dtype=torch.uint8)
        for part in (files[:held_out], files[held_out:])
    )
    return train, validation


def mean_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float32, device=get_accelerator().current_device_name())
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


@torch.no_grad()
def validation_loss(engine: Any, text: Tensor, length: int) -> float:
    """Mean loss over windows spread evenly over the held-out text, each rank taking its share."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    starts = torch.linspace(0, len(text) - length - 1, EVALUATION_WINDOWS).long()[rank::world_size]
    engine.eval()
    losses = [engine(*windows(text, part, length)).item() for part in starts.split(16)]
    engine.train()
    return mean_over_ranks([statistics.fmean(losses)])[0]


def train(args: argparse.Namespace, config_file: str, texts: tuple[Tensor, Tensor]) -> int:
    """Train on the first of the texts, write `args.out`/<optimizer>.json, and return the exit code."""
    on_gpu = get_accelerator().device_name() == "cuda"
    scale = GPU if on_gpu else CPU
    steps = args.steps or (scale.full_steps if args.full else scale.steps)
    length = scale.model.block_size
    config = json.loads(Path(config_file).read_text())
    config["train_micro_batch_size_per_gpu"] = scale.micro_batch
    if scale.bf16:
        # Summed in fp32, gradients are as exact as on the CPU, and so is the check of the updates.
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        config["communication_data_type"] = "fp32"

    optimizer = config["optimizer"]["type"]
    checked_steps = CHECKED_STEPS if steps >= ENOUGH_TO_CHECK_MORE else 1
    first_checked = steps - checked_steps if optimizer == "DSMuon" else steps
    if config["optimizer"]["params"].get("variant") == "normuon":
        optimizer = "NorMuon"
    log_file = args.out / f"{optimizer.lower()}.json"
    if os.environ.get("RANK", "0") == "0":
        try:
            check_writable(log_file)
        except OSError as error:
            sys.exit(f"--out: {log_file} cannot be written: {error.strerror}")

    torch.manual_seed(SEED)
    model = GPT(scale.model)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config,
        # LambdaLR multiplies each group's own rate, so Muon's and AdamW's keep their ratio. It does not go to zero: the
        # last updates are checked, and one that is small beside its weight drowns in the weight's rounding.
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: decay(step, steps)),
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text, held_out = (part.to(engine.device) for part in texts)
    sampler = torch.Generator().manual_seed(SEED * world_size + rank)

    losses: list[float] = []
    milliseconds: list[float] = []
    validation: list[tuple[int, float]] = []
    check: UpdateCheck | None = None
    records: list[UpdateRecord] = []
    tokens = scale.micro_batch * length * world_size
    bar = tqdm(
        total=steps,
        desc=optimizer.ljust(7),
        unit="step",
        disable=rank != 0,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 20,
    )
    for step in range(steps):
        if step == first_checked:
            check = UpdateCheck(engine)  # from here on it listens to the gradients
        start = time.perf_counter()
        starts = torch.randint(len(text) - length, (scale.micro_batch,), generator=sampler)
        loss = engine(*windows(text, starts, length))
        engine.backward(loss)
        engine.step()
        if check is not None:
            records += check.after_step()
        losses.append(loss.item())  # waits for the device, so the time below is the whole step's
        if check is None:
            milliseconds.append(1e3 * (time.perf_counter() - start))
        if (step + 1) % max(1, steps // EVALUATIONS) == 0 or step + 1 == steps:
            validation.append((step + 1, validation_loss(engine, held_out, length)))
        speed = tokens / statistics.median(milliseconds[-50:]) * 1e3
        bar.set_postfix_str(
            f"loss {statistics.fmean(losses[-20:]):.3f}, lr {engine.get_lr()[0]:.1e}, {speed:,.0f} tokens/s",
            refresh=False,
        )
        bar.update()
    bar.close()

    losses = mean_over_ranks(losses)
    milliseconds_per_step = statistics.median(milliseconds)
    log = {
        "optimizer": optimizer,
        "config": config,
        "model": asdict(scale.model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "world_size": world_size,
        "seed": SEED,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "tokens_per_step": tokens,
        "ms_per_step": milliseconds_per_step,
        "tokens_per_second": tokens / milliseconds_per_step * 1e3,
        "train_loss": losses,
        "validation_loss": validation,
        "check": check_summary(records),
    }
    kept = True
    if rank == 0:
        kept = keep("numbers", log_file, lambda: write_text(log_file, json.dumps(log, indent=1)))
        if log["check"] is not None and not log["check"]["ok"]:
            print(f"updates out of tolerance: {log['check']}", file=sys.stderr)
    dist.barrier()
    engine.destroy()
    if log["check"] is not None and not log["check"]["ok"]:
        return 1
    return 0 if kept else 2


def check_summary(records: list[UpdateRecord]) -> dict[str, Any] | None:
    """What the checked updates of each half came to; None where none was checked."""
    if not records:
        return None
    summary: dict[str, Any] = {
        "ok": all(r.ok for r in records),
        "failed": sorted({r.name for r in records if not r.ok}),
    }
    for half in sorted({r.half for r in records}):
        part = [r for r in records if r.half == half]
        worst = max(part, key=lambda r: r.relative_error)
        summary[half] = {
            "parameters": len({r.name for r in part}),
            "straddling": sorted({r.name for r in part if r.straddles}),
            "updates": len(part),
            "largest_relative_error": worst.relative_error,
            "on": worst.name,
            "tolerance": worst.tolerance,
            "largest_same_dtype_error": max(r.against_same_dtype.error for r in part),
        }
    return summary


def smooth(values: list[float]) -> list[float]:
    """Mean of each value and those before it, a fortieth of all in number."""
    span = max(1, len(values) // 40)
    return [statistics.fmean(values[max(0, i + 1 - span) : i + 1]) for i in range(len(values))]


def draw(logs: list[dict[str, Any]], path: Path) -> None:
    """Training loss as lines, validation loss as marks, one colour per optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(9, 5.5))
    for log in logs:
        colour = COLOURS[log["optimizer"]]
        train_loss = smooth(log["train_loss"])
        final = log["validation_loss"][-1][1]
        axes.plot(
            range(1, len(train_loss) + 1),
            train_loss,
            color=colour,
            linewidth=1.8,
            label=f"{log['optimizer']}, training",
        )
        axes.plot(
            *zip(*log["validation_loss"], strict=True),
            "o",
            color=colour,
            markersize=7,
            markerfacecolor="white",
            markeredgewidth=1.8,
            label=f"{log['optimizer']}, held out (last: {final:.3f})",
        )
    log = logs[0]
    axes.set_xlabel(f"step ({log['tokens_per_step']:,} tokens each)")
    axes.set_ylabel("loss (nats per byte)")
    # The first steps fall from ln 256; the picture is of what comes after.
    drawn = [point for line in axes.lines for point in zip(*line.get_data(), strict=True)]
    later = [value for step, value in drawn if step > len(log["train_loss"]) / 20]
    axes.set_ylim(min(later) - 0.1, max(later) + 0.1)
    axes.set_title(
        f"{log['parameters'] / 1e6:.1f}M-parameter GPT, ZeRO-{log['config']['zero_optimization']['stage']}, "
        f"{log['world_size']} ranks on {log['device']}",
        fontsize=13,
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    with writing(path) as file:
        figure.savefig(file, format="png", dpi=150)


def report(out: Path, names: list[str]) -> int:
    """Merge the logs of some runs, draw them, and print what came out."""
    logs = [json.loads((out / f"{name}.json").read_text()) for name in names]
    merged = {log["optimizer"].lower(): log for log in logs}

    steps = len(logs[0]["train_loss"])
    print(
        f"\n{steps} steps of {logs[0]['tokens_per_step']:,} tokens, {logs[0]['parameters'] / 1e6:.1f}M parameters, ",
        end="",
    )
    print(f"{logs[0]['world_size']} ranks on {logs[0]['device']}; losses in nats per byte\n")
    print(f"{'':8}{'training':>10}{'held out':>10}{'tokens/s':>12}{'ms/step':>10}")
    for log in logs:
        train_loss = smooth(log["train_loss"])[-1]
        print(f"{log['optimizer']:8}{train_loss:10.3f}{log['validation_loss'][-1][1]:10.3f}", end="")
        print(f"{log['tokens_per_second']:12,.0f}{log['ms_per_step']:10.1f}")

    checks = {log["optimizer"]: log["check"] for log in logs if log["check"] is not None}
    for optimizer, check in checks.items():
        checked = check["muon"]["updates"] // check["muon"]["parameters"]
        last = "the last update" if checked == 1 else f"the last {checked} updates"
        print(f"\n{optimizer}: {last} of every weight against the fp64 single-process reference:")
        for half, name in (("muon", "Muon"), ("adamw", "AdamW")):
            if part := check.get(half):
                print(
                    f"  {name}: {part['parameters']} parameters, {len(part['straddling'])} of them cut across ranks,",
                    end=" ",
                )
                print(f"largest relative error {part['largest_relative_error']:.1e}", end=" ")
                print(f"(tolerance {part['tolerance']:.1e}) on {part['on']},", end=" ")
                print(f"{part['largest_same_dtype_error']:.1e} beside the same dtype")
        print("  all within tolerance" if check["ok"] else f"  OUT OF TOLERANCE: {', '.join(check['failed'])}")
    print(flush=True)
    kept = [
        keep("picture", out / "loss.png", lambda: draw(logs, out / "loss.png")),
        keep("numbers", out / "log.json", lambda: write_text(out / "log.json", json.dumps(merged, indent=1))),
    ]
    if not all(check["ok"] for check in checks.values()):
        return 1
    return 0 if all(kept) else 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for logs and picture")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: less than a minute's worth)")
    parser.add_argument("--full", action="store_true", help="train for longer: two minutes' worth of steps or more")
    parser.add_argument("--report", nargs="+", metavar="RUN", help="merge and draw what runs left in --out")
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    parser.add_argument("--deepspeed_config", nargs="+", help="ds_config.json of each run, one after another")
    args = parser.parse_args()
    if args.report:
        return report(args.out, args.report)
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config is missing")
    if args.steps is not None and args.steps <= CHECKED_STEPS:
        parser.error(f"--steps is {args.steps}: it must be more than the {CHECKED_STEPS} checked at the end")
    texts = standard_library()
    for config_file in args.deepspeed_config:
        if code := train(args, config_file, texts):
            return code
        gc.collect()  # an engine is full of cycles
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The work is done and written. CPU ranks of DeepSpeed, with any optimizer, now and then abort while the interpreter
    # shuts down ("terminate called without an active exception"), which would make a good run look failed.
    os._exit(code)
