"""In an engine: whoever owns a matrix, holder or not, the step does the same, bit for bit, and says whose it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ds_muon import zero_plan
from ds_muon.replay import read_capture
from ds_muon.verify import UpdateRecord
from ds_muon.verify.inject import FAULTS, found
from tests.unit.support.bad_steps import CASES, SHAPES, TINY, WHOLE, bad_second_step
from tests.unit.support.cases import first_of, full, some
from tests.unit.support.checked import SHOWN, check_gpt
from tests.unit.support.faulty import faulty_backend, sick
from tests.unit.support.models import ds_config, start_groups, train_step
from tests.unit.support.owners import owned
from tests.unit.support.ranks import DEVICE, run_ranks
from tests.unit.support.steps import exact_gradients

pytestmark = pytest.mark.ranks


def bad_second_step_owned(how: str, config: dict[str, Any], shape: tuple[int, int]) -> dict[str, Any]:
    with owned(how):
        return bad_second_step(config, shape)


@some([((2, WHOLE), 1), ((4, TINY), 2)], case=CASES, stage=[1, 2])
def test_the_guard_skips_and_names_the_matrix_wherever_it_was_owned(
    case: tuple[int, tuple[int, int]], stage: int
) -> None:
    world_size, shape = case
    config = ds_config({"nan_guard": "skip", "weight_decay": 0.1}, stage=stage)
    ranks = run_ranks(world_size, bad_second_step_owned, "next", config, shape)
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
    (matrix,) = [m for m in engine.optimizer.plan.units if m.name == f"p{index}"]
    torch.distributed.barrier()
    return {"skipped": engine.skipped_steps, "blend": blend.cpu(), "matrix": matrix}


@pytest.mark.parametrize("world_size", first_of([3, 2]))
def test_an_owner_that_holds_nothing_saves_the_whole_input_under_its_name(tmp_path: Path, world_size: int) -> None:
    env = {"DS_MUON_NAN_CAPTURE": "1", "DS_MUON_NAN_CAPTURE_DIR": str(tmp_path), "DS_MUON_NAN_CAPTURE_RAISE": "0"}
    ranks = run_ranks(world_size, captured_owned, "next", ds_config({"nan_guard": "skip"}), env)
    matrix = ranks[0]["matrix"]
    assert matrix.given_away and all(found_on_rank["skipped"] == 1 for found_on_rank in ranks)
    (path,) = tmp_path.iterdir()
    capture = read_capture(path)
    assert (capture.name, capture.rank) == (matrix.name, matrix.owner)
    assert (capture.input - ranks[0]["blend"]).norm() <= 1e-6 * ranks[0]["blend"].norm()


def check_gpt_owned(how: str, config: dict[str, Any], fault: str | None) -> list[UpdateRecord]:
    with owned(how):
        return check_gpt(config, fault, 1 if fault is None else FAULTS[fault].steps)


def test_the_check_finds_nothing_wrong_and_tells_the_owner() -> None:
    for records in run_ranks(2, check_gpt_owned, "next", ds_config({"weight_decay": 0.1}), None):
        muon = [record for record in records if record.half == "muon"]
        assert all(record.ok for record in records) and all(record.travels for record in muon)
        assert any(record.owner not in record.holders for record in muon)
        if DEVICE == "cpu":
            assert all(record.against_same_dtype.error == 0 for record in muon)


# Those that are made where a matrix travels. The others are made on a rank's own slices, whoever owns them.
TRAVELLING = ("slice", "orthogonalized-twice", "transposed", "padding")


@pytest.mark.parametrize("fault", [fault if fault in TRAVELLING else full(fault) for fault in SHOWN])
def test_every_planted_fault_is_found_whoever_owns_a_matrix(fault: str) -> None:
    config = ds_config({"weight_decay": 0.01, "adam_weight_decay": 0.1}, gradient_clipping=1.0)
    for records in run_ranks(2, check_gpt_owned, "next", config, fault):
        assert found(fault, records)


def nodes_by(numbers: list[str]) -> int:
    """What the engine makes of the launcher's number of ranks per node, which each rank reads in its environment."""
    usual = {name: "" for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")}
    with mock.patch.dict(os.environ, {**usual, "LOCAL_SIZE": numbers[torch.distributed.get_rank()]}):
        planned: list[Any] = []
        make = zero_plan.make_plan
        with mock.patch.object(zero_plan, "make_plan", lambda *args, **how: planned.append(how) or make(*args, **how)):
            start_groups(SHAPES, ds_config({}))
    return int(planned[0]["rates"].ranks_per_node)


@pytest.mark.parametrize(
    ("numbers", "known"), [(["1", "1"], 1), (["2", "2"], 2), (["1", "2"], 0), (["", ""], 0), (["2", ""], 0)]
)
def test_the_plan_knows_nodes_by_the_launcher_if_all_ranks_read_the_same(numbers: list[str], known: int) -> None:
    assert run_ranks(2, nodes_by, numbers) == [known, known]
