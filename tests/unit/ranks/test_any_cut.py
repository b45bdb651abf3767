"""The same averaged gradients, the same weights, bit for bit, however ZeRO cuts them and whoever owns a matrix."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_muon import muon_group
from ds_muon.one_matrix import muon_update
from tests.unit.support.batches import cut_into
from tests.unit.support.cases import in_turns, pairwise
from tests.unit.support.models import PrescribedGradients, ds_config, full_weights, start_groups, train_step, variances
from tests.unit.support.owners import owned
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import SHAPES, assert_equal, exact_gradients, muon_names, train

pytestmark = pytest.mark.ranks

# Flat ones that cost little for their size, in front of which owners that hold nothing are planned if moving is free.
UNEVEN = [(5, 500), (5, 500), (24, 24), (2, 3), (20, 36), (16, 16), (5, 500), (2, 3), (16, 16), (11,)]
MODELS: dict[str, list[tuple[int, ...]]] = {"hard": SHAPES, "uneven": UNEVEN}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "round robin": {"round_robin_gradients": True},
    "aligned": {"parameter_alignment": True},
}

Trained = tuple[dict[str, Tensor], dict[str, Tensor], list[str]]


def train_owned(shapes: list[tuple[int, ...]], config: dict[str, Any], owner: str, groups: int) -> Trained:
    """Weights and variances after three steps, and the matrices of which the owner holds nothing."""
    with owned(owner):
        engine = start_groups(shapes, config, groups)
    for step in range(3):
        train_step(engine, exact_gradients(shapes, step, engine.device))
    normuon = config["optimizer"]["params"].get("variant") == "normuon"
    moved = [matrix.name for matrix in engine.optimizer.plan.units if matrix.given_away]
    found = full_weights(engine), variances(engine) if normuon else {}, moved
    engine.destroy()
    return found


def settings(variant: str, dtype: str, stage: int, layout: str) -> dict[str, Any]:
    # What travels does so in the dtype of the iteration.
    params = {"variant": variant, "weight_decay": 0.1, "ns_dtype": dtype}
    return ds_config(params, dtype=dtype, stage=stage, zero=LAYOUTS[layout], gradient_clipping=0.5)


@functools.cache
def on_one_rank(model: str, variant: str, dtype: str) -> Trained:
    return run_ranks(1, train_owned, MODELS[model], settings(variant, dtype, 2, "plain"), "planned", 1)[0]


@pairwise(
    of_all=3,
    world_size=[2, 3, 4],
    owner=["planned", "next", "balanced", "second next"],
    dtype=["float32", "bfloat16", "float16"],
    layout=[*LAYOUTS],
    model=[*MODELS],
    stage=[1, 2],
    groups=[1, 2],
    variant=["muon", "normuon"],
)
def test_weights_and_variances_are_those_of_one_rank(
    world_size: int, owner: str, dtype: str, layout: str, model: str, stage: int, groups: int, variant: str
) -> None:
    weights, moments, _ = on_one_rank(model, variant, dtype)
    config = settings(variant, dtype, stage, layout)
    for found, found_moments, moved in run_ranks(world_size, train_owned, MODELS[model], config, owner, groups):
        assert_equal(found, weights)
        assert_equal(found_moments, moments)
        assert sorted(found_moments) == (sorted(muon_names(MODELS[model])) if variant == "normuon" else [])
        if owner == "planned":
            assert not moved
        elif owner != "balanced":
            assert moved or (owner, world_size) == ("second next", 2)
        elif model == "uneven" and layout == "plain" and (world_size, groups) != (4, 2):  # those are even as planned
            assert moved


def test_adamw_weights_do_not_depend_on_the_world_size() -> None:
    # Cut in three, 40 elements end in the middle of a vector register.
    config = ds_config({"adam_lr": 3e-3})
    one, two, three = (run_ranks(world_size, train, [(16, 16), (40,)], config, 12)[0] for world_size in (1, 2, 3))
    assert_equal(one, two)
    assert_equal(one, three)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_length_of_a_tensor_changes_no_bit(dtype: str) -> None:
    """Operations on lists get pieces of tensors that are too long for them: gradients, and AdamW's, fused or not."""
    config = ds_config(dtype=dtype)
    expected = run_ranks(2, train, SHAPES, config, 3)[0]
    for weights, copied, stepped in run_ranks(2, train_with_long_tensors, config):
        assert_equal(weights, expected)
        # Updates are written by the same operation as gradients; a matrix in pieces of 8 is a gradient.
        assert 8 in copied and max(stepped) == 8


def train_with_long_tensors(config: dict[str, Any]) -> tuple[dict[str, Tensor], list[int], list[int]]:
    """The weights; of each call to ``_foreach_copy_`` the longest tensor; the lengths of all that AdamW stepped."""
    stepped: list[int] = []
    adamw = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW) -> None:
        stepped.extend(p.numel() for group in self.param_groups for p in group["params"])
        adamw(self)

    with (
        mock.patch("ds_muon.zero_base.LARGEST_IN_LIST", 8),
        mock.patch("ds_muon.adamw.LARGEST_IN_LIST", 8),
        mock.patch("torch.optim.AdamW.step", step),
        mock.patch("torch._foreach_copy_", wraps=torch._foreach_copy_) as copy,
    ):
        weights = train(SHAPES, config, 3)
    return weights, [max(piece.numel() for piece in call.args[1]) for call in copy.call_args_list], stepped


def apply_muon_update(shapes: list[tuple[int, ...]], lr: float, beta2: float | None) -> dict[str, Tensor]:
    """Three steps of the public function; ``beta2``: with a row variance."""
    device = torch.device(get_accelerator().current_device_name())
    model = PrescribedGradients(shapes).to(device)
    buffers = [torch.zeros(shape, device=device) for shape in shapes]
    rows = [None if beta2 is None else torch.zeros(shape[0], device=device) for shape in shapes]
    rule = {} if beta2 is None else {"beta2": beta2}
    for step in range(3):
        gradients = exact_gradients(shapes, step, device)
        for p, g, buffer, variance in zip(model.parameters(), gradients, buffers, rows, strict=True):
            p.data -= lr * muon_update(g, buffer, row_variance=variance, **rule)
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("params", [{"variant": "muon"}, {"variant": "normuon", "beta2": 0.8}], ids=str)
def test_the_engine_applies_exactly_what_muon_update_returns(params: dict[str, Any]) -> None:
    """The public function on whole matrices and the engine on pieces of them: the same bits."""
    shapes = SHAPES[:4]
    (expected,) = run_ranks(1, apply_muon_update, shapes, 0.02, params.get("beta2"))
    assert_equal(run_ranks(2, train, shapes, ds_config({"lr": 0.02, **params}), 3)[0], expected)


@in_turns(world_size=[1, 3], variant=["muon", "normuon"])
def test_weights_are_bit_equal_for_any_size_of_the_batches(world_size: int, variant: str) -> None:
    """Whole and straddling matrices of one shape run together, as on a GPU."""
    shapes = [(24, 40)] * 5 + [(40, 24)] * 3 + [(16, 16)] * 4 + [(7,)]
    config = ds_config({"variant": variant, "weight_decay": 0.1})
    alone = run_ranks(world_size, train_in_batches, shapes, config, 1)
    for size in (2, 100):
        for found, other in zip(run_ranks(world_size, train_in_batches, shapes, config, size), alone, strict=True):
            assert_equal(found, other)


def train_in_batches(shapes: list[tuple[int, ...]], config: dict[str, Any], size: int) -> dict[str, Tensor]:
    with mock.patch.object(muon_group, "batches", cut_into(size)):
        return train(shapes, config, 2)
