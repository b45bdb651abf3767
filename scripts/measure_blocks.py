"""What blocks cost on one GPU: per-head Muon, a mixture of experts, and a step over thousands of experts.

    scripts/measure_blocks.py {heads,moe,experts} [--rounds 15]

``heads``: a GPT of 24 layers of 1024, 16 heads: whole matrices beside one matrix a head, and AdamW. ``moe``: 8 layers
of 1024 with 16 experts of 2048, two a token. Engines take turns by whole iterations. ``experts``: one step of 48 stacks
of 64 experts of 1024 x 512, without a model around them. bf16, ZeRO-2, 4 x 1024 random tokens. Medians, in ms.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ds_muon  # noqa: F401
from ds_muon.sample.gpt import GPT, Attention, GPTConfig, rotary_angles

WIDTH, SEQUENCE, BATCH = 1024, 1024, 4


class Experts(nn.Module):
    """Two of ``number`` experts for every token, with a squared ReLU."""

    def __init__(self, number: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(0.02 * torch.randn(number, hidden, width))
        self.down = nn.Parameter(0.01 * torch.randn(number, width, hidden))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        weights, chosen = gate.topk(2, dim=-1)
        out = torch.zeros_like(x)
        for expert in range(len(self.up)):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.relu(x[token] @ self.up[expert].mT).square()
            out.index_add_(0, token, (hidden @ self.down[expert].mT) * weights[token, place, None])
        return out


class Layer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.attn, self.router = Attention(config), nn.Linear(WIDTH, 16, bias=False)
        self.experts = Experts(16, WIDTH, 2048)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), angles)
        h = self.mlp_norm(x).flatten(0, 1)
        out: Tensor = x + self.experts(h, self.router(h).softmax(-1)).view_as(x)
        return out


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = GPTConfig(n_layer=8, n_head=16, n_embd=WIDTH, block_size=SEQUENCE)
        self.embed, self.norm = nn.Embedding(256, WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)
        self.layers = nn.ModuleList(Layer(config) for _ in range(8))
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        angles, x = rotary_angles(tokens.shape[1], 64, tokens.device), self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Stacks(nn.Module):
    """Experts alone; the loss is a sum, so that gradients are there."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(0.02 * torch.randn(64, 1024, 512) for _ in range(48))

    def forward(self, *_: Tensor) -> Tensor:
        return torch.stack([stack.sum() for stack in self.experts]).sum()


def dsmuon(**params: Any) -> dict[str, Any]:
    return {"type": "DSMuon", "params": {"lr": 0.02, "adam_lr": 3e-4, "weight_decay": 0.1, **params}}


ADAMW = {"type": "AdamW", "params": {"lr": 3e-4}}
QKV, OUT = {"*.attn.[qkv].weight": {"split": 16}}, {"*.attn.o.weight": {"split": 16, "axis": "in"}}
SETUPS: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {
    "heads": (
        lambda: GPT(GPTConfig(n_layer=24, n_head=16, n_embd=WIDTH, block_size=SEQUENCE)),
        {
            "AdamW": ADAMW,
            "whole matrices": dsmuon(),
            "q, k, v by heads": dsmuon(muon_blocks=QKV),
            "q, k, v, o by heads": dsmuon(muon_blocks={**QKV, **OUT}),
        },
    ),
    "moe": (MixtureOfExperts, {"AdamW": ADAMW, "DSMuon": dsmuon(), "NorMuon": dsmuon(variant="normuon")}),
    "experts": (
        Stacks,
        {"DSMuon": dsmuon(muon_params=["experts.*"], muon_blocks={"experts.*": {"layout": "out_in"}})},
    ),
}


def start(model: nn.Module, optimizer: dict[str, Any]) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": optimizer,
        "zero_optimization": {"stage": 2, "reduce_scatter": False},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def iterate(engine: Any, generator: torch.Generator) -> tuple[float, float]:
    """Milliseconds of an iteration, and of the step in it, from an idle device to an idle device."""
    tokens = torch.randint(256, (BATCH, SEQUENCE + 1), generator=generator).to(engine.device)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
    torch.cuda.synchronize()
    stepped = time.perf_counter()
    engine.step()
    torch.cuda.synchronize()
    end = time.perf_counter()
    return 1e3 * (end - begin), 1e3 * (end - stepped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setup", choices=SETUPS)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29617")
    make, optimizers = SETUPS[options.setup]
    engines = {}
    for name, optimizer in optimizers.items():
        torch.manual_seed(0)
        engines[name] = start(make(), optimizer)
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for index in range(4 + options.rounds):
        for name in random.sample([*engines], len(engines)):
            found = iterate(engines[name], generator)
            if index >= 4:  # kernels are compiled, graphs captured
                times[name].append(found)
    for name, of_engine in times.items():
        iteration, step = (statistics.median(column) for column in zip(*of_engine, strict=True))
        print(f"{name:24}iteration {iteration:8.2f}   step {step:8.2f}", flush=True)


if __name__ == "__main__":
    main()
