"""Every combination that a user is likely to run, each update against the references: on CPU ranks, and on two GPUs.

With ``DS_MUON_TEST_DEVICE=cuda`` the ranks are on GPUs; the cases of the device that they are not on are skipped.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.unit.support.checked import assert_right, check_block
from tests.unit.support.models import ds_config
from tests.unit.support.ranks import DEVICE, run_ranks

pytestmark = pytest.mark.ranks

DTYPES = ("float32", "bfloat16", "float16")
CASES = [(*case, "muon") for case in itertools.product((1, 2), ("gram", "standard"), DTYPES, (True, False), (1, 4))]
CASES += [(*case, "normuon") for case in itertools.product((1, 2), ("gram", "standard"), DTYPES, (True,), (4,))]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("stage", "method", "dtype", "overlap", "accumulation", "variant"),
    CASES,
    ids=[f"zero{s}-{m}-{d}-{'overlap' if o else 'no_overlap'}-accumulate{a}-{v}" for s, m, d, o, a, v in CASES],
)
def test_every_update_is_right(
    stage: int, method: str, dtype: str, overlap: bool, accumulation: int, variant: str, device: str
) -> None:
    if device != DEVICE:
        pytest.skip("needs 2 GPUs" if device == "cuda" else "the ranks of this run are on GPUs")
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
