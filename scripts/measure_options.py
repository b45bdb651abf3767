"""What options of DSMuon cost: whole iterations of one GPT, engines that differ in `optimizer.params` taking turns.

    deepspeed --num_accelerators 2 scripts/measure_options.py '{"nan_guard": "skip"}' '{"variant": "normuon"}'

The first engine has no options, and the others are compared with it: medians over many rounds, in each of which every
engine makes one iteration (forward, backward, step), in another order each time. By default a 303M-parameter GPT, bf16,
ZeRO-2, micro-batches of 2 x 256 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

import ds_muon  # noqa: F401  registers DSMuon
from ds_muon.sample.gpt import GPT, GPTConfig

WARMUP = 5


def build(model: GPTConfig, batch: int, params: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    module = GPT(model)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "DSMuon", "params": {"lr": 0.02, "adam_lr": 3e-4, **params}},
        "zero_optimization": {"stage": 2, "reduce_scatter": False, "overlap_comm": True},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    return engine


def iteration(engine: Any, tokens: torch.Tensor) -> tuple[float, int]:
    """Milliseconds, and the bytes that it needed at its peak beside what was there before."""
    accelerator = get_accelerator()
    accelerator.synchronize()
    accelerator.reset_peak_memory_stats()
    before, start = accelerator.memory_allocated(), time.perf_counter()
    engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
    engine.step()
    accelerator.synchronize()
    return 1e3 * (time.perf_counter() - start), accelerator.max_memory_allocated() - before


def options_of(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f'{text}: not a JSON object; write \'{{"nan_guard": "skip"}}\'') from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("params", nargs="+", type=options_of, help="keys of optimizer.params, as JSON, per engine")
    parser.add_argument("--layers", type=int, default=24, help="of the GPT (default: 24)")
    parser.add_argument("--width", type=int, default=1024, help="of the GPT, a multiple of 64 (default: 1024)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank (default: 2)")
    parser.add_argument("--rounds", type=int, default=150, help="iterations of each engine (default: 150)")
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    args = parser.parse_args()

    deepspeed.init_distributed()
    model = GPTConfig(n_layer=args.layers, n_head=args.width // 64, n_embd=args.width, block_size=256)
    options = [{}, *args.params]
    engines = [build(model, args.batch, params) for params in options]
    device, order = engines[0].device, random.Random(0)
    data = torch.Generator().manual_seed(dist.get_rank())
    results: list[list[tuple[float, int]]] = [[] for _ in engines]
    for _ in range(WARMUP + args.rounds):
        tokens = torch.randint(256, (args.batch, 257), generator=data).to(device)
        for index in order.sample(range(len(engines)), len(engines)):
            results[index].append(iteration(engines[index], tokens))

    times = [[ms for ms, _ in result[WARMUP:]] for result in results]
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in engines[0].module.parameters())
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        print(
            f"\n{dist.get_world_size()} x {name}, {parameters / 1e6:.1f}M parameters, medians of {args.rounds} rounds"
        )
        print(f"{'optimizer.params':50}{'ms':>8}{'ratio':>8}{'ratio per round':>17}{'added MiB':>11}")
        for params, result, ms in zip(options, results, times, strict=True):
            ratio = statistics.median(ms) / statistics.median(times[0])
            per_round = statistics.median(mine / first for mine, first in zip(ms, times[0], strict=True))
            # What the iteration adds at its peak; a CPU does not tell.
            peak = f"{max(peak for _, peak in result[WARMUP:]) / 2**20:.0f}" if torch.cuda.is_available() else "-"
            print(f"{json.dumps(params):50}{statistics.median(ms):8.2f}{ratio:8.4f}{per_round:17.4f}{peak:>11}")
    dist.barrier()
    # See demo_train.py: ranks on CPU may abort while the interpreter shuts down.
    print(end="", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
