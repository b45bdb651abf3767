"""Every applied change against the fp64 reference: worlds, stages, methods, precisions, layouts."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from ds_muon.verify import UpdateRecord
from tests.unit.support.cases import in_turns
from tests.unit.support.checked import assert_right, check_block, check_prescribed
from tests.unit.support.models import PrescribedGradients, ds_config, sequence_parallel, start
from tests.unit.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

# What is cut where: the hard cases and a vector for AdamW.
STRADDLING = {
    "all_four_hold_a_piece": (4, [(48, 48), (5,)]),
    "one_element_of_the_second": (2, [(63, 63), (63, 63), (7,)]),
    "three_ranks_one_matrix": (3, [(32, 32), (4,)]),
    "ranks_with_padding_only": (4, [(2, 3), (3,)]),
    "one_rank": (1, [(48, 32), (32, 48), (5,)]),
    "many_shapes": (4, [(16, 16), (64, 16), (16, 64), (7, 13), (13, 7), (3, 2), (33,)]),
}


@in_turns(case=[*STRADDLING], stage=[1, 2], method=["gram", "standard"])
def test_every_change_is_the_reference_within_1e5(case: str, stage: int, method: str) -> None:
    world_size, shapes = STRADDLING[case]
    # A large rate, so that the rounding of the fp32 weights does not hide the error of the change.
    config = ds_config({"lr": 1.0, "adam_lr": 0.5, "ns_method": method, "ns_dtype": "float32"}, stage=stage)
    ranks = run_ranks(world_size, check_prescribed, shapes, config, 2)
    assert_right(ranks[0], 1e-5)
    assert all(ranks[0] == other for other in ranks[1:])


def test_a_destroyed_engine_keeps_no_workspace() -> None:
    assert run_ranks(1, destroy, ds_config()) == [["released"]]


def destroy(config: dict[str, Any]) -> list[str]:
    released: list[str] = []
    engine = start(PrescribedGradients([(8, 8)]), config)
    with patch("ds_muon.zero.release", lambda: released.append("released")):
        engine.destroy()
    return released


SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"gradient_clipping": 0.01},
    "clipping by the norm of all": {"gradient_clipping": 0.01, "params": {"clip_norm_scope": "all"}},
    "overlap": {"zero": {"overlap_comm": True}},
    "no overlap": {"zero": {"overlap_comm": False, "contiguous_gradients": False}},
    "tiny buckets": {"zero": {"reduce_bucket_size": 500, "allgather_bucket_size": 500}},
    "round robin": {"zero": {"round_robin_gradients": True}},
    "parameter alignment": {"zero": {"parameter_alignment": True}},
    "round robin and alignment": {"zero": {"round_robin_gradients": True, "parameter_alignment": True}},
    "weight decay": {"params": {"weight_decay": 0.1, "adam_weight_decay": 0.01}},
    "plain momentum": {"params": {"nesterov": False, "momentum": 0.8}},
    "no momentum": {"params": {"momentum": 0.0}},
    "rms of adamw": {"params": {"adjust_lr_fn": "match_rms_adamw"}},
    "no scale": {"params": {"adjust_lr_fn": "none"}},
    "polar express": {"params": {"ns_coefficients": "polar_express", "ns_steps": 8}},
    "minimax": {"params": {"ns_coefficients": "minimax"}},
    "cubic5": {"params": {"ns_coefficients": "cubic5"}},
    "ten steps": {"params": {"ns_coefficients": "deepseekv4"}},
    "you": {"params": {"ns_coefficients": "you"}},
    "own triples": {"params": {"ns_coefficients": [[2.0, -1.5, 0.5], [1.875, -1.25, 0.375]], "ns_steps": 4}},
    "predivide": {"prescale_gradients": True},
    "unmanaged accumulation": {"managed_gradient_accumulation": False},
}


@in_turns(setup=[*SETUPS], stage=[1, 2])
def test_a_network_trains_right_in_fp32(setup: str, stage: int) -> None:
    world_size = 3 if "round robin" in setup or "alignment" in setup else 2
    settings = dict(SETUPS[setup])
    params = {"lr": 0.5, "adam_lr": 0.05, "ns_dtype": "float32", **settings.pop("params", {})}
    ranks = run_ranks(world_size, check_block, ds_config(params, stage=stage, **settings), 3)
    assert_right(ranks[0])
    assert any(record.straddles for record in ranks[0][0] if record.half == "muon")


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "bf16, fp32 accumulation": {"dtype": "bfloat16", "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16, fp32 sums": {
        "dtype": "bfloat16",
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    },
    "fp16": {"dtype": "float16"},
    "fp16, fp32 accumulation": {"dtype": "float16", "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16, dynamic scale": {"dtype": "float16", "fp16": {"enabled": True, "initial_scale_power": 6}},
    "bf16 autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


@in_turns(precision=[*PRECISIONS], stage=[1, 2])
def test_a_network_trains_right_in_half_precision(precision: str, stage: int) -> None:
    config = ds_config({"ns_dtype": "float32"}, stage=stage, gradient_accumulation_steps=2, **PRECISIONS[precision])
    ranks = run_ranks(2, check_block, config, 3)
    assert_right(ranks[0])
    if precision == "bf16, fp32 sums" and stage == 1:
        # Nothing is rounded to bf16 on the way to the fp32 weights, also where DeepSpeed would take BF16_Optimizer. At
        # ZeRO-2 it rounds the average of each micro-batch to the gradient's dtype, whatever that was reduced in.
        assert_right([[r for r in step if r.half == "muon"] for step in ranks[0]], 0.01)


@in_turns(ns_dtype=["bfloat16", "float16"], method=["gram", "standard"])
def test_iterating_in_half_precision_stays_within_its_tolerance(method: str, ns_dtype: str) -> None:
    config = ds_config({"ns_method": method, "ns_dtype": ns_dtype})
    assert_right(run_ranks(2, check_block, config, 3)[0])


def test_bf16_momentum_stays_within_bf16_of_the_reference() -> None:
    records = run_ranks(2, check_block, ds_config({"momentum_dtype": "bfloat16"}), 3)[0]
    assert_right([[r for r in step if r.half == "muon"] for step in records], 0.06)


def test_sequence_parallel_ranks_sum_their_gradients() -> None:
    """Two sequence-parallel ranks hold two parts of the same samples: their gradients add up."""
    ranks = run_ranks(2, check_sequence_parallel, ds_config({"lr": 0.5, "adam_lr": 0.05}), 3)
    assert_right(ranks[0])


def check_sequence_parallel(config: dict[str, Any], steps: int) -> list[list[UpdateRecord]]:
    from deepspeed.utils import groups

    with sequence_parallel(2) as mpu:
        records = check_block(config, steps, mpu=mpu)
        assert groups._get_sequence_parallel_world_size() == 2
        return records
