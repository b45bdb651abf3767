"""Which rate to fine-tune with: a small GPT learns Python, then C++, whole or by LoRA, with AdamW and with DSMuon.

    python scripts/measure_rates.py --results rates.json              # four minutes on one H200
    python scripts/measure_rates.py --results rates.json --publish    # docs/measured/rates.json
    DS_ACCELERATOR=cpu python scripts/measure_rates.py --quick --results rates.json

Two models learn the standard library's sources from scratch, one with AdamW and one with DSMuon. Each is then
fine-tuned on the C++ headers that torch brings, at four rates and with three seeds, which draw the windows and LoRA's
start. DSMuon has "match_rms_adamw", so that its rates are AdamW's. Held-out loss of C++ says what was learned, that of
Python what was forgotten. The runs are small, and go side by side in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from small_training import be_the_only_rank, engine_config, measure_or_publish, package_folders, read_text, train
from torch import Tensor, nn

from ds_muon.files import write_text
from ds_muon.ranks import held_port
from ds_muon.sample.gpt import GPT, GPTConfig

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1, 2)
LORA_RANK = 8
RATES = {"whole": (3e-4, 1e-3, 3e-3, 1e-2), "LoRA": (1e-3, 3e-3, 1e-2, 3e-2)}
SCRATCH_RATE = 3e-3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": 0.0, "torch_adam": True}},
    "DSMuon": {"type": "DSMuon", "params": {"adjust_lr_fn": "match_rms_adamw"}},
}


@dataclass(frozen=True)
class Scale:
    """The model, bytes of each text, and the steps of learning and of fine-tuning."""

    model: GPTConfig
    micro_batch: int
    text_bytes: int
    scratch_steps: int
    steps: int
    evaluated_windows: int


GPU = Scale(GPTConfig(4, 4, 256, 256), 32, 40_000_000, scratch_steps=1500, steps=150, evaluated_windows=256)
QUICK = Scale(GPTConfig(2, 2, 64, 64), 8, 1_000_000, scratch_steps=12, steps=6, evaluated_windows=16)


@dataclass(frozen=True)
class Job:
    """One run from what ``learned_with`` has learned; from scratch where that is empty."""

    optimizer: str
    lr: float
    learned_with: str = ""
    trained: str = "whole"
    seed: int = 0


class LoRA(nn.Module):
    """A frozen linear layer with an adapter beside it, named as PEFT names it; its scale is 2."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, LORA_RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(LORA_RANK, layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        out: Tensor = self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))
        return out


def add_adapters(model: GPT) -> None:
    """Freeze all, and put an adapter beside every matrix of the blocks."""
    model.requires_grad_(False)
    for block in model.blocks:
        for layers in (block.attn, block.mlp):
            for name, layer in list(layers.named_children()):
                setattr(layers, name, LoRA(layer))


def jobs() -> list[Job]:
    """All fine-tuning."""
    return [
        Job(optimizer, lr, learned_with, trained, seed)
        for trained in RATES
        for learned_with, optimizer, lr, seed in product(OPTIMIZERS, OPTIMIZERS, RATES[trained], SEEDS)
    ]


# ---- a process that makes runs --------------------------------------------------------------------------------------

_scale: Scale
_folder: Path
_held = ExitStack()


def prepare(scale: Scale, folder: str) -> None:
    """Begin a process."""
    global _scale, _folder
    _scale, _folder = scale, Path(folder)
    torch.set_num_threads(1)
    be_the_only_rank(_held.enter_context(held_port()))


def learned(optimizer: str) -> Path:
    return _folder / f"{optimizer}.pt"


def run(job: Job) -> dict[str, Any]:
    """Held-out losses before and after."""
    from deepspeed.accelerator import get_accelerator

    import ds_muon  # noqa: F401  registers DSMuon

    device = torch.device(get_accelerator().current_device_name())
    texts = {name: part.to(device) for name, part in torch.load(_folder / "texts.pt").items()}
    torch.manual_seed(job.seed)
    model = GPT(_scale.model)
    if job.learned_with:
        model.load_state_dict(torch.load(learned(job.learned_with)))
    if job.trained == "LoRA":
        add_adapters(model)
    optimizer = OPTIMIZERS[job.optimizer]
    params = {**optimizer["params"], "lr": job.lr}
    if optimizer["type"] == "AdamW" and device.type == "cuda":
        params["fused"] = True
    config = engine_config({**optimizer, "params": params}, _scale.micro_batch, bf16=device.type == "cuda")
    found = train(
        model, config, texts["C++" if job.learned_with else "Python"],
        {name: texts[f"{name}, held out"] for name in ("Python", "C++")},
        length=_scale.model.block_size, steps=_scale.steps if job.learned_with else _scale.scratch_steps,
        seed=job.seed, evaluations=1, evaluated_windows=_scale.evaluated_windows,
    )  # fmt: skip
    if not job.learned_with:
        torch.save({name: weight.float().cpu() for name, weight in model.state_dict().items()}, learned(job.optimizer))
    return {**asdict(job), **{name: [loss for _, loss in losses] for name, losses in found.held_out_loss.items()}}


def measure(options: argparse.Namespace) -> None:
    began = time.monotonic()
    scale = QUICK if options.quick else GPU
    packages = package_folders()
    headers = [folder / "torch" / "include" for folder in packages]
    with tempfile.TemporaryDirectory() as folder:
        texts: dict[str, Tensor] = {}
        for name, folders, suffixes in (("Python", packages[:1], {".py"}), ("C++", headers, {".h", ".hpp", ".cuh"})):
            texts[name], texts[f"{name}, held out"] = read_text(folders, suffixes, scale.text_bytes)
        torch.save(texts, Path(folder) / "texts.pt")
        arguments = {"initializer": prepare, "initargs": (scale, folder), "mp_context": get_context("spawn")}
        with ProcessPoolExecutor(options.workers, **arguments) as pool:
            scratch = list(pool.map(run, [Job(name, SCRATCH_RATE) for name in OPTIMIZERS]))
            for found in scratch:
                say(began, f"{found['optimizer']} from scratch: Python {found['Python'][-1]:.4f}")
            runs = []
            for found in pool.map(run, jobs()):
                runs.append(found)
                say(
                    began,
                    f"{found['learned_with']} -> {found['optimizer']}, {found['trained']}, {found['lr']:g}, seed "
                    f"{found['seed']}: C++ {found['C++'][-1]:.4f}, Python {found['Python'][-1]:.4f}",
                )
    facts = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in GPT(scale.model).parameters()),
        "bytes": {name: len(text) for name, text in texts.items()},
        "steps": [scale.scratch_steps, scale.steps],
        "bytes_per_step": scale.micro_batch * scale.model.block_size,
    }
    write_text(options.results, json.dumps({"facts": facts, "scratch": scratch, "runs": runs}, indent=1))


def say(began: float, what: str) -> None:
    print(f"{time.monotonic() - began:6.0f} s  {what}", flush=True)


# ---- what is published ----------------------------------------------------------------------------------------------


def publish(results: dict[str, Any], commit: str) -> None:
    """Write the table of the docs."""
    from importlib.metadata import version

    facts, scratch = results["facts"], {run["optimizer"]: run for run in results["scratch"]}
    rows = []
    for trained, learned_with, optimizer in product(RATES, OPTIMIZERS, OPTIMIZERS):
        row: list[Any] = [trained, learned_with, f"`{optimizer}`"]
        kept = {}
        for lr in RATES[trained]:
            wanted = asdict(Job(optimizer, lr, learned_with, trained))
            runs = [run for run in results["runs"] if all(run[k] == v for k, v in wanted.items() if k != "seed")]
            losses = [run["C++"][-1] for run in runs]
            mean = statistics.fmean(losses)
            row.append(f"{lr:g}: {mean:.3f} ± {statistics.stdev(losses):.3f}")
            kept[mean] = statistics.fmean(run["Python"][-1] for run in runs) - scratch[learned_with]["Python"][-1]
        rows.append([*row, min(kept), kept[min(kept)]])
    starts = {run["learned_with"]: run["C++"][0] for run in results["runs"]}
    measured = {
        "device": f"1 x {facts['device']}",
        "commit": commit,
        "recorded": commit,
        "versions": {"torch": facts["torch"], "deepspeed": version("deepspeed")},
        "commands": ["python scripts/measure_rates.py --results rates.json"],
        "notes": [
            f"A byte-level GPT of {facts['parameters'] / 1e6:.1f} million parameters; {facts['steps'][0]:,} steps of "
            f"Python, then {facts['steps'][1]:,} of C++, of {facts['bytes_per_step']:,} bytes each. Held-out loss in "
            "nats per byte, mean and standard deviation of three seeds. Before fine-tuning C++ stands at "
            + " and ".join(f"{loss:.3f} ({name})" for name, loss in starts.items())
            + f". LoRA of rank {LORA_RANK}, scale 2, beside every matrix of the blocks. No weight decay.",
        ],
        "columns": [
            *({"name": name} for name in ("trained", "learned with", "fine-tuned with")),
            *({"name": f"C++, {place} rate"} for place in ("lowest", "low", "high", "highest")),
            {"name": "C++, best", "format": ".3f"},
            {"name": "Python lost by it", "format": "+.3f"},
        ],
        "rows": rows,
    }
    write_text(ROOT / "docs" / "measured" / "rates.json", json.dumps(measured, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=12, help="processes at a time")
    measure_or_publish(parser, measure, publish)


if __name__ == "__main__":
    main()
