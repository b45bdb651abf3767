"""Tensors of several matrices: each moves as ``muon_update`` moves it alone, wherever it lies and whoever owns it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_muon import muon_update
from ds_muon.verify import UpdateCheck, UpdateRecord
from ds_muon.verify.inject import found, plant
from tests.unit.support.cases import full, pairwise
from tests.unit.support.models import (
    PrescribedGradients,
    ds_config,
    full_momentum,
    full_weights,
    start,
    train_step,
)
from tests.unit.support.owners import owned
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import assert_equal, exact_gradients

pytestmark = pytest.mark.ranks

SHAPES = [(36, 20), (40, 18), (24, 30), (4, 12, 10), (3, 10, 16), (32, 12), (14, 22), (6,)]
RULES: dict[str, Any] = {
    "p0": {"split": 3},
    "p1": {"split": [6, 2, 10], "axis": "in"},
    "p2": {"split": 3, "layout": "in_out"},
    "p3": {"split": 2},
    "p4": {"split": 2, "layout": "in_out", "interleaved": True},
    "p5": {"split": 4, "interleaved": True},
}
# The same, as torch cuts: views of a tensor.
CUT: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "p0": lambda t: t.chunk(3),
    "p1": lambda t: t.split([6, 2, 10], dim=1),
    "p2": lambda t: t.chunk(3, dim=1),
    "p3": lambda t: [half for expert in t for half in expert.chunk(2)],
    "p4": lambda t: [expert[:, first::2] for expert in t for first in range(2)],
    "p5": lambda t: [t[first::4] for first in range(4)],
    "p6": lambda t: [t],
}
IN_OUT = ("p2", "p4")
PARAMS = {"muon_params": ["p3", "p4"], "muon_blocks": RULES}
STEPS = 4


def idle(step: int) -> dict[str, Sequence[int]]:
    """Which blocks of which tensors have no gradient in a step."""
    return {"p0": [1], "p1": [0, 2], "p2": [2], "p3": [1, 4, 5], "p4": [3], "p5": [0], "p6": []} if step % 2 else {}


def gradients_of(step: int, device: torch.device) -> list[Tensor]:
    gradients = exact_gradients(SHAPES, step, device)
    for name, blocks in idle(step).items():
        for block in blocks:
            CUT[name](gradients[int(name[1:])])[block].zero_()
    return gradients


def train(config: dict[str, Any], groups: int, how: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """All weights and momentum in the end, and how many units straddle."""
    model = PrescribedGradients(SHAPES)
    parameters = list(model.parameters())
    dealt: Any = parameters if groups == 1 else [{"params": parameters[first::groups]} for first in range(groups)]
    with owned(how):
        engine = start(model, config, model_parameters=dealt)
    for step in range(STEPS):
        train_step(engine, gradients_of(step, engine.device))
    straddling = sum(len(group.straddlers) for group in engine.optimizer.plan.groups)
    found = full_weights(engine), full_momentum(engine), straddling
    engine.destroy()
    return found


def block_by_block(normuon: bool, momentum_dtype: str, decay: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same by ``muon_update``, one block after another."""
    device = torch.device(get_accelerator().current_device_name())
    weights = {name: p.detach().to(device) for name, p in PrescribedGradients(SHAPES[:-1]).named_parameters()}
    momenta = {name: torch.zeros_like(w, dtype=getattr(torch, momentum_dtype)) for name, w in weights.items()}
    for index, (name, whole) in enumerate(weights.items()):
        layout = "in_out" if name in IN_OUT else "out_in"
        for number, (weight, momentum) in enumerate(zip(CUT[name](whole), CUT[name](momenta[name]), strict=True)):
            buffer = torch.zeros(weight.shape, dtype=momentum.dtype, device=device)
            outputs = weight.shape[1] if layout == "in_out" else weight.shape[0]
            variance = torch.zeros(outputs, device=device) if normuon else None
            for step in range(STEPS):
                gradient = CUT[name](gradients_of(step, device)[index])[number]
                update = muon_update(gradient, buffer, row_variance=variance, layout=layout)
                if gradient.any():
                    weight.mul_(1 - 0.02 * decay).sub_(update.mul_(0.02))
            momentum.copy_(buffer)
    return {name: w.cpu() for name, w in weights.items()}, {name: m.cpu() for name, m in momenta.items()}


@functools.cache
def expected(normuon: bool, momentum_dtype: str, decay: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return run_ranks(1, block_by_block, normuon, momentum_dtype, decay)[0]


@pairwise(
    of_all=3,
    world_size=[1, 2, 3, 4],
    owner=["planned", "next", "balanced"],
    variant=["muon", "normuon"],
    momentum_dtype=["float32", "bfloat16"],
    stage=[1, 2],
    groups=[1, 2],
    guard=["off", "skip"],
    decay=[0.0, 0.1],
    layout=["plain", "round_robin_gradients", "parameter_alignment"],
)
def test_every_block_moves_as_by_muon_update_alone(
    world_size: int,
    owner: str,
    variant: str,
    momentum_dtype: str,
    stage: int,
    groups: int,
    guard: str,
    decay: float,
    layout: str,
) -> None:
    params = {**PARAMS, "variant": variant, "momentum_dtype": momentum_dtype, "nan_guard": guard, "weight_decay": decay}
    config = ds_config(params, stage=stage, zero={} if layout == "plain" else {layout: True})
    weights, momenta = expected(variant == "normuon", momentum_dtype, decay)
    for trained, moved, straddling in run_ranks(world_size, train, config, groups, owner):
        assert_equal(trained, weights, sorted(weights))
        assert_equal(moved, momenta, sorted(momenta))
        assert straddling or world_size == 1


def check(config: dict[str, Any], fault: str | None = None) -> list[UpdateRecord]:
    """Two steps: in the second some blocks have no gradient."""
    engine = start(PrescribedGradients(SHAPES), config)
    records = []
    with nullcontext() if fault is None else plant(fault, engine):
        check = UpdateCheck(engine)
        for step in range(2):
            train_step(engine, gradients_of(step, engine.device))
            records += check.after_step()
        check.close()
    engine.destroy()
    return records


@pytest.mark.parametrize(("world_size", "variant"), [(2, "muon"), full(3, "normuon")])
def test_the_check_looks_at_every_block(world_size: int, variant: str) -> None:
    config = ds_config({**PARAMS, "variant": variant, "ns_dtype": "float32", "weight_decay": 0.1})
    for records in run_ranks(world_size, check, config):
        assert all(record.ok for record in records), next(record for record in records if not record.ok)
        muon = [record for record in records if record.half == "muon"]
        assert max(record.relative_error for record in muon if record.step == 1) <= 1e-5
        blocks = {name: len(cut(torch.zeros(SHAPES[int(name[1:])]))) for name, cut in CUT.items()}
        assert len({record.name for record in muon}) == sum(blocks.values())
        assert {"p6", "p0[2]", "p1[1]", "p3[3,1]", "p4[2,0]"} <= {record.name for record in muon}


@pytest.mark.parametrize("fault", ["unsplit", full("idle-moves")])
def test_a_wrong_split_and_faults_of_single_blocks_are_found(fault: str) -> None:
    for records in run_ranks(2, check, ds_config({**PARAMS, "ns_dtype": "float32"}), fault):
        assert found(fault, records), {r.diagnosis for r in records}
        wrong = {record.name for record in records if not record.ok}
        assert any("[" in name for name in wrong) and (fault != "unsplit" or "p6" not in wrong)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(6, 14, (3, 2)), nn.Linear(10, 12)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True)]).sum()


def train_convolution(config: dict[str, Any]) -> dict[str, Tensor]:
    engine = start(Convolution(), config)
    for step in range(3):
        train_step(engine, exact_gradients([p.shape for p in engine.module.parameters()], step, engine.device))
    found = full_weights(engine)
    engine.destroy()
    return found


def test_a_convolution_moves_as_the_matrix_of_its_kernels() -> None:
    config = ds_config({"muon_params": ["conv.weight"], "muon_blocks": {"conv.weight": {"split": 2}}})
    (one,) = run_ranks(1, train_convolution, config)
    two, _ = run_ranks(2, train_convolution, config)
    assert_equal(two, one)
    (moved,) = run_ranks(1, convolution_by_muon_update)
    assert torch.equal(one["conv.weight"], moved)


def convolution_by_muon_update() -> Tensor:
    model, device = Convolution(), torch.device(get_accelerator().current_device_name())
    weight = model.conv.weight.detach().to(device)
    halves = [(half.reshape(7, 36), torch.zeros(7, 36, device=device)) for half in weight.chunk(2)]
    for step in range(3):
        gradient = exact_gradients([p.shape for p in model.parameters()], step, device)[0]
        for (half, buffer), of_half in zip(halves, gradient.chunk(2), strict=True):
            half.sub_(muon_update(of_half.reshape(7, 36), buffer).mul_(0.02))
    return weight.cpu()
