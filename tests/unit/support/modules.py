"""Models to route: modules and parameters under any names, and a small GPT."""

from __future__ import annotations

import copy
from collections import OrderedDict

import torch
from torch import nn

from ds_muon.routing import route

VOCAB, WIDTH = 97, 8


class Holder(nn.Module):
    """Modules and parameters under given dotted names, in the given order."""

    def __init__(self, **children: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def nested(path: str, leaf: nn.Module) -> nn.Module:
    """A module that holds ``leaf`` under the dotted ``path``."""
    for name in reversed(path.split(".")):
        leaf = nn.Sequential(OrderedDict({name: leaf}))
    return leaf


def raw(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape))


def linear(rows: int = WIDTH, cols: int = WIDTH, bias: bool = False) -> nn.Linear:
    return nn.Linear(cols, rows, bias=bias)


class GPT(nn.Module):
    def __init__(self, tied: bool = False, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.lm_head = linear(VOCAB)
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(16, WIDTH)
        block = {"attn": linear(3 * WIDTH, bias=True), "mlp": linear(4 * WIDTH), "ln": nn.LayerNorm(WIDTH)}
        self.h = nn.ModuleList([Holder(**copy.deepcopy(block)) for _ in range(2)])
        if not head_first:
            self.lm_head = linear(VOCAB)
        if tied:
            self.lm_head.weight = self.wte.weight


def decisions(model: nn.Module, **patterns: list[str]) -> dict[str, tuple[str, str]]:
    return {r.name: (r.half, r.reason) for r in route(model, **patterns).routes}


def decision(module: nn.Module | nn.Parameter, path: str = "thing", vocab: int | None = VOCAB) -> tuple[str, str]:
    """How the weight of one module is routed in a model with a body and, unless None, a vocabulary."""
    model = Holder(body=linear())
    if vocab:
        model.wte = nn.Embedding(vocab, WIDTH)
    if isinstance(module, nn.Parameter):
        owner, _, name = path.rpartition(".")
        holder = Holder(**{name: module})
        model.m = nested(owner, holder) if owner else holder
        return decisions(model)["m." + path]
    model.m = nested(path, module)
    return decisions(model)[f"m.{path}.weight"]
