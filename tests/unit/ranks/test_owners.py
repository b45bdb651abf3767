"""In an engine: whoever owns a matrix, holder or not, the step does the same, bit for bit, and says whose it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_muon.replay import read_capture
from ds_muon.verify import UpdateRecord
from ds_muon.verify.inject import found
from tests.unit.support.bad_steps import CASES, SHAPES, WHOLE, bad_second_step
from tests.unit.support.checked import SHOWN, check_gpt
from tests.unit.support.faulty import faulty_backend, sick
from tests.unit.support.models import ds_config, full_weights, start_groups, train_step, variances
from tests.unit.support.owners import owned
from tests.unit.support.ranks import DEVICE, run_ranks
from tests.unit.support.steps import assert_equal, exact_gradients

pytestmark = pytest.mark.ranks

# Flat ones that cost little for their size: the work of their holders is little, too.
UNEVEN = [(5, 500), (5, 500), (24, 24), (2, 3), (20, 36), (16, 16), (5, 500), (2, 3), (16, 16), (11,)]


def train_owned(
    config: dict[str, Any], how: str, groups: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Weights and variances after three steps, and the matrices of which the owner holds nothing."""
    with owned(how):
        engine = start_groups(UNEVEN, config, groups)
    for step in range(3):
        train_step(engine, exact_gradients(UNEVEN, step, engine.device))
    normuon = config["optimizer"]["params"].get("variant") == "normuon"
    moved = [matrix.name for matrix in engine.optimizer.plan.matrices if matrix.moved]
    found = full_weights(engine), variances(engine) if normuon else {}, moved
    engine.destroy()
    return found


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("variant", ["muon", "normuon"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_and_variances_are_bit_equal_for_any_owner(
    world_size: int, stage: int, variant: str, groups: int
) -> None:
    config = ds_config({"variant": variant, "weight_decay": 0.1}, stage=stage)
    planned = run_ranks(world_size, train_owned, config, "planned", groups)
    assert not any(moved for _, _, moved in planned)
    for how in ("balanced", "next", "second next"):
        ranks = run_ranks(world_size, train_owned, config, how, groups)
        assert all(moved for _, _, moved in ranks) or (how, world_size) == ("second next", 2)
        for (weights, moments, _), (other, other_moments, _) in zip(ranks, planned, strict=True):
            assert_equal(weights, other)
            assert_equal(moments, other_moments)


@pytest.mark.parametrize("variant", ["muon", "normuon"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_travels_in_half_precision_arrives_bit_for_bit(dtype: str, variant: str) -> None:
    config = ds_config({"variant": variant, "ns_dtype": dtype}, dtype=dtype)
    planned, turned = (run_ranks(3, train_owned, config, how, 1) for how in ("planned", "next"))
    for (weights, moments, _), (other, other_moments, _) in zip(turned, planned, strict=True):
        assert_equal(weights, other)
        assert_equal(moments, other_moments)


def bad_second_step_owned(how: str, config: dict[str, Any], shape: tuple[int, int]) -> dict[str, Any]:
    with owned(how):
        return bad_second_step(config, shape)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("world_size", "shape"), CASES)
def test_the_guard_skips_and_names_the_matrix_wherever_it_was_owned(
    world_size: int, shape: tuple[int, int], stage: int
) -> None:
    config = ds_config({"nan_guard": "skip", "weight_decay": 0.1}, stage=stage)
    ranks = run_ranks(world_size, bad_second_step_owned, "next", config, shape, timeout=60.0)
    for found_on_rank in ranks:
        assert found_on_rank["weights stayed"] and found_on_rank["model stayed"] and found_on_rank["skipped"] == 1
        assert found_on_rank["moved"] == {"momentum_buffer"}
    (warning,) = ranks[0]["warnings"]
    assert f"p{SHAPES.index(shape)} ({shape[0]} x {shape[1]})" in warning and "faulty backend" in warning


def captured_owned(how: str, config: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """One step in which the matrix of shape WHOLE comes out with a NaN."""
    with owned(how):
        engine = start_groups(SHAPES, config)
    gradients = exact_gradients(SHAPES, 0, engine.device)
    with faulty_backend(engine), sick(WHOLE), mock.patch.dict(os.environ, env):
        train_step(engine, gradients)
    index = SHAPES.index(WHOLE)
    torch.distributed.all_reduce(gradients[index])
    # Nesterov's blend, from zero momentum: (1 - m) G + m (1 - m) G.
    blend = gradients[index] / torch.distributed.get_world_size() * (0.05 + 0.95 * 0.05)
    (matrix,) = [m for m in engine.optimizer.plan.matrices if m.name == f"p{index}"]
    torch.distributed.barrier()
    return {"skipped": engine.skipped_steps, "blend": blend.cpu(), "matrix": matrix}


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_owner_that_holds_nothing_saves_the_whole_input_under_its_name(tmp_path: Path, world_size: int) -> None:
    env = {"DS_MUON_NAN_CAPTURE": "1", "DS_MUON_NAN_CAPTURE_DIR": str(tmp_path), "DS_MUON_NAN_CAPTURE_RAISE": "0"}
    ranks = run_ranks(world_size, captured_owned, "next", ds_config({"nan_guard": "skip"}), env)
    matrix = ranks[0]["matrix"]
    assert matrix.moved and all(found_on_rank["skipped"] == 1 for found_on_rank in ranks)
    (path,) = tmp_path.iterdir()
    capture = read_capture(path)
    assert (capture.name, capture.rank) == (matrix.name, matrix.owner)
    assert (capture.input - ranks[0]["blend"]).norm() <= 1e-6 * ranks[0]["blend"].norm()


def check_gpt_owned(how: str, config: dict[str, Any], fault: str | None) -> list[UpdateRecord]:
    with owned(how):
        return check_gpt(config, fault)


def test_the_check_finds_nothing_wrong_and_tells_the_owner() -> None:
    for records in run_ranks(2, check_gpt_owned, "next", ds_config({"weight_decay": 0.1}), None):
        muon = [record for record in records if record.half == "muon"]
        assert all(record.ok for record in records) and all(record.travels for record in muon)
        assert any(record.owner not in record.holders for record in muon)
        if DEVICE == "cpu":
            assert all(record.against_same_dtype.error == 0 for record in muon)


@pytest.mark.parametrize("fault", SHOWN)
def test_every_planted_fault_is_found_whoever_owns_a_matrix(fault: str) -> None:
    config = ds_config({"weight_decay": 0.01, "adam_weight_decay": 0.1}, gradient_clipping=1.0)
    for records in run_ranks(2, check_gpt_owned, "next", config, fault):
        assert found(fault, records)
