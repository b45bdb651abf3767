"""A matrix whose averaged gradient is zero everywhere does not move: no update, no decay, no momentum, no variance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_muon import muon_update
from ds_muon.verify import UpdateCheck
from tests.unit.support.models import (
    Sometimes,
    ds_config,
    full_momentum,
    full_weights,
    start,
    train_step,
    variances,
)
from tests.unit.support.owners import owned
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import assert_equal, exact_gradients

# Four of a size in a row, of which two straddle at two ranks and at three.
SHAPES = [(8, 8), (30, 20), (30, 20), (16, 36), (30, 20), (7, 9), (2, 3), (6,)]
STEPS = 6


def idle(step: int) -> dict[int, str]:
    """Which matrices have no gradient in a step, and for what reason."""
    found = {1: "zeros", 2: "left out"} if step % 2 else {6: "zeros"}
    return found | ({3: "frozen", 5: "left out"} if step >= 3 else {})


def gradients_of(step: int, device: torch.device) -> list[Tensor | None]:
    gradients: list[Tensor | None] = list(exact_gradients(SHAPES, step, device))
    for index, why in idle(step).items():
        gradients[index] = None if why == "left out" else torch.zeros(SHAPES[index], device=device)
    return gradients


def train_with_pauses(config: dict[str, Any], groups: int, how: str) -> tuple[dict[str, Tensor], list[str]]:
    """All weights in the end, and what of matrices without a gradient has moved, or of others has not.

    ``how``: who owns the matrices, see ``owned``.
    """
    model = Sometimes(SHAPES)
    parameters = list(model.parameters())
    dealt: Any = parameters if groups == 1 else [{"params": parameters[first::groups]} for first in range(groups)]
    with owned(how):
        engine = start(model, config, model_parameters=dealt)
    wrong = []
    for step in range(STEPS):
        if step == 3:
            parameters[3].requires_grad_(False)
        before = states_of(engine)
        train_step(engine, gradients_of(step, engine.device))
        for key, states in states_of(engine).items():
            for name, tensor in states.items():
                stayed = torch.equal(tensor, before[key][name])
                if name != "p7" and stayed is not (int(name[1:]) in idle(step)):
                    wrong.append(f"step {step}: {key} of {name} {'stayed' if stayed else 'moved'}")
    weights = full_weights(engine)
    engine.destroy()
    return weights, wrong


def states_of(engine: Any) -> dict[str, dict[str, Tensor]]:
    states = {"weight": full_weights(engine), "momentum": full_momentum(engine)}
    if engine.optimizer.optimizer.row_variance(0) is not None:
        states["variance"] = {name: tensor.clone() for name, tensor in variances(engine).items()}
    return states


def by_muon_update(normuon: bool, momentum_dtype: torch.dtype, decay: float) -> dict[str, Tensor]:
    """The same by the function, one matrix after another."""
    device = torch.device(get_accelerator().current_device_name())
    weights = {name: p.detach().to(device) for name, p in Sometimes(SHAPES[:-1]).named_parameters()}
    for index, weight in enumerate(weights.values()):
        buffer = torch.zeros_like(weight, dtype=momentum_dtype)
        variance = torch.zeros(len(weight), device=device) if normuon else None
        for step in range(STEPS):
            gradient = gradients_of(step, device)[index]
            gradient = torch.zeros_like(weight) if gradient is None else gradient
            update = muon_update(gradient, buffer, row_variance=variance)
            if gradient.any():
                weight.mul_(1 - 0.02 * decay).sub_(update.mul_(0.02))
            else:
                assert not update.any()
    return {name: weight.cpu() for name, weight in weights.items()}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "stage", "groups", "how", "params"),
    [
        (1, 2, 1, "planned", {"weight_decay": 0.1}),
        (2, 1, 1, "planned", {"weight_decay": 0.1}),
        (3, 2, 2, "next", {"weight_decay": 0.1}),
        (2, 2, 2, "planned", {"nesterov": True, "verify_every": 1}),
        (3, 1, 1, "next", {"variant": "normuon", "weight_decay": 0.1}),
        (2, 2, 2, "planned", {"variant": "normuon", "nan_guard": "skip"}),
        (3, 2, 1, "planned", {"momentum_dtype": "bfloat16", "weight_decay": 0.1, "nan_guard": "skip"}),
    ],
)
def test_what_has_no_gradient_stays_and_all_else_moves_as_by_muon_update(
    world_size: int, stage: int, groups: int, how: str, params: dict[str, Any]
) -> None:
    rule = (
        params.get("variant") == "normuon",
        getattr(torch, params.get("momentum_dtype", "float32")),
        params.get("weight_decay", 0.0),
    )
    (expected,) = run_ranks(1, by_muon_update, *rule)
    for weights, wrong in run_ranks(world_size, train_with_pauses, ds_config(params, stage=stage), groups, how):
        assert wrong == []
        assert_equal(weights, expected, sorted(expected))


def check_with_pauses(config: dict[str, Any]) -> list[tuple[str, float]]:
    """Every record that is wrong; and of matrices without a gradient, that nothing was expected of them."""
    engine = start(Sometimes(SHAPES), config)
    check = UpdateCheck(engine)
    found = []
    for step in range(STEPS):
        train_step(engine, gradients_of(step, engine.device))
        for record in check.after_step():
            resting = record.half == "muon" and int(record.name[1:]) in idle(step)
            if not record.ok or (resting and record.against_fp64.error != 0):
                found.append((f"step {step}: {record.name}: {record.diagnosis}", record.relative_error))
    check.close()
    engine.destroy()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("variant", ["muon", "normuon"])
def test_the_check_expects_nothing_of_a_matrix_without_a_gradient(variant: str) -> None:
    assert run_ranks(2, check_with_pauses, ds_config({"variant": variant, "weight_decay": 0.1})) == [[], []]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 24, bias=False), nn.Linear(24, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).square().mean()


def train_then_freeze(config: dict[str, Any], dtype: torch.dtype) -> list[float]:
    """How far a weight has moved since it was frozen, 1, 10 and 20 steps later."""
    torch.manual_seed(0)
    engine = start(Net(), config)
    moved = []
    for step in range(23):
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(step)).to(engine.device, dtype)
        train_step(engine, x)
        if step == 2:
            engine.module.first.weight.requires_grad_(False)
            frozen = full_weights(engine)["first.weight"]
        if step in (3, 12, 22):
            moved.append(float((full_weights(engine)["first.weight"] - frozen).norm()))
    return moved


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_that_is_frozen_while_training_stays_where_it_is(dtype: str) -> None:
    config = ds_config({"weight_decay": 0.1}, dtype=dtype)
    assert run_ranks(2, train_then_freeze, config, getattr(torch, dtype)) == [[0.0] * 3] * 2


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (8, 8)])
def test_muon_update_of_no_gradient_is_zero_and_leaves_all_state(shape: tuple[int, int], nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    buffer, variance = torch.zeros(shape), torch.zeros(shape[0])
    rule: dict[str, Any] = {"row_variance": variance, "nesterov": nesterov}
    muon_update(torch.randn(shape, generator=generator), buffer, **rule)
    kept = buffer.clone(), variance.clone()
    update = muon_update(torch.zeros(shape), buffer, **rule)
    assert torch.equal(update, torch.zeros(shape))
    assert torch.equal(buffer, kept[0]) and torch.equal(variance, kept[1])
    least = torch.zeros(shape)
    least[-1, -1] = -1e-45
    assert muon_update(least, buffer, **rule).any() and not torch.equal(buffer, kept[0])
    least[-1, -1] = math.nan
    assert muon_update(least, buffer, **rule).isnan().any()
