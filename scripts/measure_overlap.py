"""What it gains that slices of matrices travel between ranks while other matrices are orthogonalized.

    deepspeed --num_accelerators 2 scripts/measure_overlap.py                 # 24 layers, 2048 wide: 1.2B parameters
    deepspeed --num_accelerators 2 scripts/measure_overlap.py --width 1024    # 303M
    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 scripts/measure_overlap.py --layers 3 --width 128 --rounds 5

A GPT in three Muon param groups, each of an odd number of matrices of a shape, so that on two ranks one of each
straddles. One engine, whose steps take turns in three ways: every transfer is waited for at once; transfers overlap
with work of their own group; and as DSMuon does, of all groups. Printed are medians of ``engine.step()``, of the
slowest rank, from an idle device to an idle device. On a CPU it only shows that it runs.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_muon import muon_group, zero
from ds_muon.exchange import Exchange
from ds_muon.sample.gpt import GPT, GPTConfig

WARMUP = 3
WAYS = ("each transfer waited for", "overlap within a group", "overlap of all groups")


def build(layers: int, width: int, tokens: int) -> Any:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers, max(1, width // 64), width, block_size=tokens))
    apart = ("blocks.0.attn.o.weight", "blocks.0.mlp.up.weight")
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(3)]
    for name, p in model.named_parameters():
        groups[2 if name in apart else 0 if ".attn." in name else 1 if ".mlp." in name else 2]["params"].append(p)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "DSMuon", "params": {"lr": 0.02, "adam_lr": 3e-4}},
        "zero_optimization": {"stage": 2, "reduce_scatter": False},
        "bf16": {"enabled": get_accelerator().device_name() != "cpu"},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    return engine


def one_by_one(updates: Sequence[Iterator[None]]) -> None:
    for of_group in updates:
        muon_group.in_turns([of_group])


@contextmanager
def in_the_way_of(way: str) -> Iterator[None]:
    def waiting(start: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            transfer = start(*args)
            transfer.wait()
            return transfer

        return run if way == WAYS[0] else start

    with (
        patch.object(Exchange, "gather", waiting(Exchange.gather)),
        patch.object(Exchange, "scatter", waiting(Exchange.scatter)),
        patch.object(zero, "in_turns", muon_group.in_turns if way == WAYS[2] else one_by_one),
    ):
        yield


def step_ms(engine: Any, tokens: torch.Tensor) -> float:
    """Of the slowest rank."""
    engine.backward(engine(tokens, tokens))
    get_accelerator().synchronize()
    dist.barrier()
    start = time.perf_counter()
    engine.step()
    get_accelerator().synchronize()
    ms = torch.tensor(1e3 * (time.perf_counter() - start), device=engine.device)
    dist.all_reduce(ms, op=dist.ReduceOp.MAX)
    return ms.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=2048, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="per rank and step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="(default: %(default)s)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", 0)))
    deepspeed.init_distributed()
    engine = build(options.layers, options.width, options.tokens)
    tokens = torch.randint(0, 256, (1, options.tokens), device=engine.device)
    order, times = random.Random(0), {way: list[float]() for way in WAYS}
    for _ in range(WARMUP + options.rounds):
        for way in order.sample(WAYS, len(WAYS)):
            with in_the_way_of(way):
                times[way].append(step_ms(engine, tokens))
    if dist.get_rank() == 0:
        moved = 4e-6 * engine.optimizer.plan.moved_elements()
        print(f"{dist.get_world_size()} ranks; {moved:.1f} MB of U travel in a step")
        for way, ms in times.items():
            print(f"{way:26}{statistics.median(ms[WARMUP:]):.2f} ms")
    engine.destroy()


if __name__ == "__main__":
    main()
