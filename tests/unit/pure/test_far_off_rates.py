"""Rates that are valid but likely not meant are warned about."""

from __future__ import annotations

from typing import Any

import pytest

from ds_muon import DSMuonConfig
from ds_muon.learning_rates import GroupRate, far_off


@pytest.mark.parametrize(
    ("params", "muon", "adamw", "expected"),
    [
        ({}, 5e-5, 5e-5, ["match_rms_adamw"]),
        ({}, 9e-4, 3e-4, ["muon_lr"]),
        ({}, 1e-3, 5e-3, []),
        ({}, 0.02, 0.02, ["adam_lr"]),
        ({"adam_lr": 0.02}, 0.02, 0.02, ["adam_lr"]),
        ({}, 1e-4, 0.02, ["match_rms_adamw", "adam_lr"]),
        ({}, 0.0, 0.0, []),
        ({"adjust_lr_fn": "match_rms_adamw"}, 5e-5, 5e-5, []),
        ({"adjust_lr_fn": "none"}, 5e-5, 5e-5, []),
    ],
)
def test_a_rate_that_is_far_off_is_warned_about_with_the_remedies(
    params: Any, muon: float, adamw: float, expected: list[str]
) -> None:
    groups = [GroupRate(1.0, True, 0), GroupRate(1.0, False, 0)]
    lines = far_off([muon, adamw], groups, DSMuonConfig.parse(params))
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert f'"{part}"' in line and f"is {adamw if part == 'adam_lr' else muon:g}" in line


def test_a_model_of_matrices_alone_has_no_adamw_to_warn_of() -> None:
    assert far_off([0.02], [GroupRate(0.02, True, 0)], DSMuonConfig.parse({})) == []
