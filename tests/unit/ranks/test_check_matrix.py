"""Combinations that users are likely to run, each update against the references: on CPU ranks, or on two GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.support.cases import pairwise
from tests.unit.support.checked import assert_right, check_block
from tests.unit.support.models import ds_config
from tests.unit.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


@pairwise(
    dtype=["float32", "bfloat16", "float16"],
    stage=[1, 2],
    method=["gram", "standard"],
    overlap=[True, False],
    accumulation=[1, 4],
    variant=["muon", "normuon"],
)
def test_every_update_is_right(
    dtype: str, stage: int, method: str, overlap: bool, accumulation: int, variant: str
) -> None:
    config: dict[str, Any] = ds_config(
        {"ns_method": method, "ns_dtype": dtype, "weight_decay": 0.1, "variant": variant},
        dtype=dtype,
        stage=stage,
        zero={"overlap_comm": overlap},
        gradient_accumulation_steps=accumulation,
        gradient_clipping=1.0,
    )
    ranks = run_ranks(2, check_block, config, 3)
    assert_right(ranks[0])
    assert all(ranks[0] == other for other in ranks[1:])
    assert any(record.straddles and record.half == "muon" for record in ranks[0][0])
