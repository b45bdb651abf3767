"""CPU offload of the optimizer: the run without it, bit for bit, with each matrix orthogonalized once.

On CPU ranks the accelerator is the CPU as well, and all copies between the two are made.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from ds_muon import muon_group
from ds_muon.orthogonalize import NewtonSchulz
from ds_muon.skipped import NonFiniteUpdate
from tests.unit.ranks.test_any_size import by_name
from tests.unit.ranks.test_without_gradient import Sometimes
from tests.unit.support.around_engine import away, is_bound
from tests.unit.support.cases import in_turns, pairwise
from tests.unit.support.checked import assert_right, check_block
from tests.unit.support.faulty import faulty_backend, sick
from tests.unit.support.models import PrescribedGradients, ds_config, start, start_groups, train_step, variances
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import exact_gradients

pytestmark = pytest.mark.ranks

ON_HOST = {"offload_optimizer": {"device": "cpu"}}

# Straddlers at two ranks and at three; tensors of several matrices, side by side and in strips; no element at all; and
# for AdamW so little that some ranks hold nothing.
SHAPES = [(36, 20), (40, 18), (4, 12, 10), (24, 24), (24, 24), (24, 24), (0, 4), (7, 13), (2, 3), (11,), (40, 1)]
BLOCKS = {
    "muon_params": ["p2"],
    "muon_blocks": {"p0": {"split": 3}, "p1": {"split": [6, 2, 10], "axis": "in"}, "p2": {"split": 2}},
}
STEPS = 3
# How many micro-batches make a step, and how the engine knows.
ACCUMULATION: dict[str, tuple[int, dict[str, Any]]] = {
    "none": (1, {}),
    "twice": (2, {"gradient_accumulation_steps": 2}),
    "thrice in fp32": (3, {"gradient_accumulation_steps": 3, "data_types": {"grad_accum_dtype": "fp32"}}),
    "by the script": (2, {"managed_gradient_accumulation": False}),
    "by the script in fp32": (2, {"managed_gradient_accumulation": False, "data_types": {"grad_accum_dtype": "fp32"}}),
}


def left_out(step: int, micro_batch: int) -> tuple[int, ...]:
    """The parameters without a gradient: of one micro-batch, of the first or the last, or of a whole step."""
    return {0: (3,), 1: (9, 4), 2: (0,)}.get(step, ()) + ((5, 10) if (step, micro_batch) == (1, 1) else ())


def train(config: dict[str, Any], groups: int, micro_batches: int, steps: int = STEPS) -> tuple[dict[str, Any], int]:
    """What the run is in the end, by parameter, and how many matrices this rank has orthogonalized."""
    model = Sometimes(SHAPES)
    parameters = list(model.parameters())
    dealt: Any = parameters if groups == 1 else [{"params": parameters[first::groups]} for first in range(groups)]
    engine = start(model, config, model_parameters=dealt)
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    runs = 0

    def counted(matrices: Sequence[Tensor], settings: NewtonSchulz) -> Tensor:
        nonlocal runs
        runs += len(matrices)
        partitions = engine.optimizer.single_partition_of_fp32_groups
        if engine.optimizer.cpu_offload:
            homes = {flat.grad.untyped_storage().data_ptr() for flat in partitions}
            assert not homes & {matrix.untyped_storage().data_ptr() for matrix in matrices}, "has not been copied"
        return original(matrices, settings)

    original = muon_group.orthogonalize_batch
    with mock.patch.object(muon_group, "orthogonalize_batch", counted):
        for step in range(steps):
            for micro_batch in range(micro_batches):
                gradients: list[Tensor | None] = [torch.randn(shape, generator=generator) for shape in SHAPES]
                for index in left_out(step, micro_batch):
                    gradients[index] = None
                engine.backward(engine([None if g is None else g.to(engine.device) for g in gradients]))
                if micro_batch == micro_batches - 1 or "gradient_accumulation_steps" in config:
                    engine.step()
    matrices = len(engine.optimizer.plan.matrices)
    found = by_name(engine)
    found["norm"] = float(engine.get_global_grad_norm())
    engine.destroy()
    return found, runs if torch.distributed.get_rank() else runs - steps * matrices


def settings(
    dtype: str, stage: int, variant: str, momentum_dtype: str, guard: str, accumulation: str, zero: dict[str, Any]
) -> dict[str, Any]:
    params = {"variant": variant, "nan_guard": guard, "momentum_dtype": momentum_dtype, "weight_decay": 0.1, **BLOCKS}
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}} if dtype == "float16" else {}
    how = ACCUMULATION[accumulation][1]
    return ds_config(params, dtype=dtype, stage=stage, zero=zero, gradient_clipping=0.5, **fp16, **how)


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Of nested containers of tensors, bit for bit."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, Tensor):
        assert torch.equal(left, right), where
    else:
        assert left == right, where


@pairwise(
    of_all=2,
    world_size=[1, 2, 3],
    stage=[1, 2, "2, overlapping"],
    dtype=["float32", "bfloat16", "float16"],
    rule=[("muon", "float32"), ("normuon", "float32"), ("muon", "bfloat16")],
    guard=["off", "skip"],
    accumulation=[*ACCUMULATION],
    lies=[(1, True, {}), (2, False, {"round_robin_gradients": True}), (2, True, {"parameter_alignment": True})],
)
def test_a_run_with_offload_is_the_run_without_and_orthogonalizes_each_matrix_once(
    world_size: int,
    stage: int | str,
    dtype: str,
    rule: tuple[str, str],
    guard: str,
    accumulation: str,
    lies: tuple[int, bool, dict[str, bool]],
) -> None:
    groups, pinned, zero = lies
    zero = zero | {"overlap_comm": stage == "2, overlapping"}
    micro_batches, _ = ACCUMULATION[accumulation]
    without, offloaded = (
        run_ranks(
            world_size,
            train,
            settings(dtype, 1 if stage == 1 else 2, *rule, guard, accumulation, {**zero, **offload}),
            groups,
            micro_batches,
        )
        for offload in ({}, {"offload_optimizer": {"device": "cpu", "pin_memory": pinned}})
    )
    for (expected, _), (found, _) in zip(without, offloaded, strict=True):
        assert_same(found, expected)
    assert sum(runs for _, runs in without) == sum(runs for _, runs in offloaded) == 0
