"""Runs that save and load: what a checkpoint restores, whatever the layout, and models of every kind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ds_muon.cli import main
from ds_muon.optimizer import ORIGIN
from tests.unit.support.models import (
    ds_config,
    full_weights,
    start,
    start_groups,
    train_step,
    variances,
)
from tests.unit.support.steps import exact_gradients, state_of


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right


# Straddlers, an odd size, which alignment follows by a gap, and so little for AdamW that some ranks hold nothing of it.
SHAPES = [(24, 24), (15, 31), (16, 40), (3, 4, 7), (2, 3), (3, 20), (11,), (5, 1)]
# Rows, columns and parts that take turns; p3 is a stack, each of its matrices of two.
BLOCKS: dict[str, Any] = {
    "p0": {"split": 3},
    "p1": {"split": [16, 15], "axis": "in"},
    "p2": {"split": 4, "interleaved": True},
    "p3": {"split": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "round robin": {"round_robin_gradients": True},
    "aligned": {"parameter_alignment": True},
}
SCHEDULER = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_max_lr": 0.02}}
STEPS = 2
# Which parameters go to Muon, and to AdamW.
MUONS, ADAMWS = [f"p{i}" for i in range(6)], ["p6", "p7"]
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def converted(command: str, source: str | Path, out: str | Path) -> str:
    """The folder where ``ds-muon`` has written what it made of the checkpoint."""
    assert main([command, str(source), str(out)]) == 0
    return str(out)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def settings(variant: str, dtype: str, momentum_dtype: str, stage: int, layout: str) -> dict[str, Any]:
    rule, _, blocks = variant.partition(", ")
    params = {"variant": rule, "weight_decay": 0.1, "momentum_dtype": momentum_dtype, "muon_params": ["p3"]}
    params |= {"muon_blocks": BLOCKS} if blocks else {}
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}} if dtype == "float16" else {}
    return ds_config(params, dtype=dtype, stage=stage, zero=LAYOUTS[layout], scheduler=SCHEDULER, **fp16)


def by_name(engine: Any) -> dict[str, Any]:
    """Everything that a checkpoint restores, by parameter, whatever the layout: the same on every rank."""
    zero = engine.optimizer
    found: dict[str, Any] = {"rates": {}, "step": {}, "variance": {}}
    for i, flat in enumerate(zero.single_partition_of_fp32_groups):
        group, state = zero.optimizer.param_groups[i], zero.optimizer.state[flat]
        tensors = {"weight": flat.detach(), **{key: t for key, t in state.items() if t.shape == flat.shape}}
        for key, tensor in tensors.items():
            here = tensor.to(engine.device)
            cuts = [torch.empty_like(here) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(cuts, here)
            joined = torch.cat(cuts).cpu()
            for p, offset in zip(zero.round_robin_bit16_groups[i], zero.round_robin_bit16_offsets[i], strict=True):
                values = joined[offset : offset + p.numel()].view(p.shape).clone()
                found.setdefault(key, {})[zero.param_names[p]] = values
        for p in zero.bit16_groups[i]:
            name = zero.param_names[p]
            found["rates"][name] = {k: group[k] for k in group if k not in ("params", "name", "user_group")}
            found["step"][name] = state["step"].clone().cpu() if "step" in state else None
    if zero.optimizer.config.variant == "normuon":
        found["variance"] = {name: variance.clone() for name, variance in variances(engine).items()}
    found["model"] = {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()}
    found["scale"] = zero.loss_scale
    found["scheduler"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler else None
    found["counters"] = [engine.global_steps, engine.skipped_steps]
    return found


def run(config: dict[str, Any], groups: int, folder: str, *, load: bool) -> list[Any]:
    """What a run is when it has saved, or loaded; what it is two steps later; and what is said when it loads."""
    engine = start_groups(SHAPES, config, groups)
    first = 9 if load else 0
    for step in range(first, first + (1 if load else STEPS)):
        train_step(engine, exact_gradients(SHAPES, step, engine.device))
    lines: list[str] = []
    origins = [[group[key] for key in ORIGIN] for group in engine.optimizer.param_groups]
    if load:
        with mock.patch("ds_muon.checkpoints.check.say", lines.append):
            engine.load_checkpoint(folder)
    else:
        engine.save_checkpoint(folder)
    assert [[group[key] for key in ORIGIN] for group in engine.optimizer.param_groups] == origins
    found = [by_name(engine)]
    for step in range(STEPS, 2 * STEPS):
        train_step(engine, exact_gradients(SHAPES, step, engine.device))
    found += [by_name(engine), lines]
    engine.destroy()
    return found


# Dtype of the model, variant, dtypes of the momentum and stages, then and now.
KINDS = [
    ("float32", "normuon, blocks", ("float32", "float32"), (1, 2)),
    ("bfloat16", "normuon", ("bfloat16", "bfloat16"), (2, 1)),
    ("float16", "muon", ("float32", "float32"), (2, 1)),
    ("bfloat16", "muon", ("float32", "bfloat16"), (2, 2)),
    ("float32", "muon", ("bfloat16", "float32"), (1, 1)),
]


def load_by_other_blocks(folder: str, variant: str, blocks: dict[str, Any]) -> dict[str, Any] | str:
    """What the run is when it has loaded, or why it has not."""
    config = settings(variant, "float32", "float32", 2, "plain")
    config["optimizer"]["params"]["muon_blocks"] = blocks
    engine = start_groups(SHAPES, config, 1)
    train_step(engine, exact_gradients(SHAPES, 9, engine.device))
    before = by_name(engine)
    try:
        engine.load_checkpoint(folder)
    except ValueError as error:
        assert_same(by_name(engine), before)
        return str(error)
    finally:
        engine.destroy()
    return by_name(engine)


COLUMNS, IN_TURNS = {k: BLOCKS[k] for k in ("p0", "p2", "p3")}, {**BLOCKS, "p2": {"split": 4}}


class Kinds(nn.Module):
    """A tied, a frozen and an empty parameter beside usual ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.frozen, self.square = nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.square(torch.relu(self.frozen(self.embedding(tokens))))
        return self.head(h).square().mean() + self.empty.sum()


CONFIG = ds_config(dtype="bfloat16", scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}})


def save_layers(folder: str) -> None:
    engine = start(Layers(), CONFIG)
    for step in range(2):
        train_step(engine, torch.ones(4, 16, device=engine.device, dtype=torch.bfloat16))
        engine.save_checkpoint(folder, tag=f"step{step + 1}")
    engine.destroy()


def shard(folder: Path, rank: int) -> Path:
    return folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def weights(folder: Path) -> Path:
    return folder / "mp_rank_00_model_states.pt"


def say_no_save(folder: Path) -> None:
    """The weights of an early version."""
    contents = torch.load(weights(folder), weights_only=False)
    del contents["ds_muon_save"]
    torch.save(contents, weights(folder))


def forget(folder: Path) -> None:
    """The checkpoint of an early version."""
    say_no_save(folder)
    for rank in range(3):
        contents = torch.load(shard(folder, rank), weights_only=False)
        del contents["optimizer_state_dict"]["ds_muon_shard"]
        torch.save(contents, shard(folder, rank))


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


class Layers(nn.Module):
    """Three linear layers, of which some parameters are frozen."""

    def __init__(self, frozen: Sequence[str] = (), *, last: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 24)
        if last:
            self.c = nn.Linear(24, 8)
        for name, p in self.named_parameters():
            p.requires_grad_(name not in frozen)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.relu(layer(x))
        return x.square().mean()


def everything(engine: Any) -> dict[str, Any]:
    """What a checkpoint would change."""
    return {
        "model": {name: p.detach().clone() for name, p in engine.module.named_parameters()},
        "weights": full_weights(engine),
        "state": deepcopy(state_of(engine)),
        "counters": [
            engine.global_steps,
            engine.skipped_steps,
            engine.global_samples,
            engine.lr_scheduler.state_dict(),
        ],
        "rates": [group["lr"] for group in engine.optimizer.param_groups],
    }
