"""Errors of applied updates by dtype, method, stage, straddling or whole; and DeepSpeed's own Muon beside DSMuon.

    deepspeed --num_accelerators 2 scripts/measure_updates.py                            # GPUs
    TORCHDYNAMO_DISABLE=1 DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 scripts/measure_updates.py --n-embd 96

Trains the byte-level GPT of `ds-muon verify` (three layers) for a few steps per row, and prints the largest error of
each kind over all Muon matrices and steps, as Markdown.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

import ds_muon  # noqa: F401  registers DSMuon
from ds_muon.sample.gpt import GPT, GPTConfig
from ds_muon.verify import UpdateCheck, UpdateRecord
from ds_muon.verify.subject import built_in_batches

DTYPES = {
    "float32": {},
    "bfloat16": {"bf16": {"enabled": True}},
    "float16": {"fp16": {"enabled": True, "loss_scale": 128}},
}


def config_of(optimizer: str, params: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "optimizer": {"type": optimizer, "params": {"lr": 0.02, "adam_lr": 3e-4, "weight_decay": 0.1, **params}},
        **top,
    }


def measure(config: dict[str, Any], model: GPTConfig, steps: int) -> list[UpdateRecord]:
    """The records of all Muon matrices."""
    torch.manual_seed(0)
    network = GPT(model)
    engine, *_ = deepspeed.initialize(model=network, model_parameters=network.parameters(), config=config)
    check = UpdateCheck(engine)
    batches = built_in_batches(8, dist.get_rank(), dist.get_world_size(), 0)
    records = []
    for _ in range(steps):
        tokens, targets = next(batches)
        engine.backward(engine(tokens.to(engine.device), targets.to(engine.device)))
        engine.step()
        records += check.after_step()
    check.close()
    engine.destroy()
    return [record for record in records if record.half == "muon"]


def largest(records: Sequence[UpdateRecord]) -> str:
    if not records:
        return "-"
    worst = max(records, key=lambda record: record.relative_error)
    return f"{worst.relative_error:.1e} ({worst.tolerance:.1e})"


def row(name: str, records: Sequence[UpdateRecord]) -> str:
    whole, cut = ([r for r in records if r.straddles == straddles] for straddles in (False, True))
    same = max(record.against_same_dtype.error for record in records)
    least = min(record.cosine for record in records)
    wrong = [record for record in records if not record.ok]
    verdict = "right" if not wrong else f"WRONG: {wrong[0].diagnosis}"
    return f"| {name} | {largest(whole)} | {largest(cut)} | {same:.1e} | {least:.6f} | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-embd", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    args = parser.parse_args()
    deepspeed.init_distributed()
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True  # torch's CPU kernels have fp16; DeepSpeed asks for fast hardware
    model = GPTConfig(n_layer=3, n_head=4, n_embd=args.n_embd, block_size=64)

    rows: list[tuple[str, dict[str, Any]]] = []
    for stage in (1, 2):
        zero = {"stage": stage, "reduce_scatter": False}
        for dtype, section in DTYPES.items():
            for method in ("gram", "standard"):
                params = {"ns_dtype": dtype, "ns_method": method}
                name = f"DSMuon, stage {stage}, {dtype}, {method}"
                rows.append((name, config_of("DSMuon", params, zero_optimization=zero, **section)))
    zero = {"stage": 2, "reduce_scatter": False}
    for dtype in ("float32", "bfloat16"):
        for optimizer in ("Muon", "DSMuon"):
            for clipping in (0.0, None):
                config = config_of(optimizer, {}, zero_optimization=zero, **DTYPES[dtype])
                if clipping is None:
                    del config["gradient_clipping"]
                name = f"{optimizer} as it comes, stage 2, {dtype}, clipping {'absent' if clipping is None else 'off'}"
                rows.append((name, config))

    header = "| | whole: error (tolerance) | straddling: error (tolerance) | same dtype | least cosine | verdict |"
    if dist.get_rank() == 0:
        print(f"\n{dist.get_world_size()} ranks on {device_name()}, n_embd {args.n_embd}\n\n{header}\n|{' --- |' * 6}")
    for name, config in rows:
        records = measure(config, model, args.steps)
        if dist.get_rank() == 0:
            print(row(name, records), flush=True)
    dist.barrier()


def device_name() -> str:
    return torch.cuda.get_device_name() if get_accelerator().device_name() == "cuda" else "the CPU"


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # CPU ranks of DeepSpeed, with any optimizer, now and then abort while the interpreter shuts down
