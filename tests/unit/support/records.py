"""Results of ``ds-muon verify``, made by hand."""

from __future__ import annotations

from typing import Any

from ds_muon.verify.rank import DEFAULT_CONFIG
from ds_muon.verify.record import Comparison, UpdateRecord, VerifyResult


def record(name: str = "w", error: float = 1e-6, **other: Any) -> UpdateRecord:
    values: dict[str, Any] = {
        "step": 1,
        "name": name,
        "shape": (8, 4),
        "half": "muon",
        "group": 0,
        "cuts": ((0, 20), (1, 12)),
        "owner": 0,
        "against_fp64": Comparison(error, 1e-5),
        "cosine": 1.0,
        "against_same_dtype": Comparison(0.0, 1e-6),
        "gradient": Comparison(1e-8, 1e-7),
        "state": None,
    }
    return UpdateRecord(**{**values, **other})


def result(*records: UpdateRecord, fault: str | None = None) -> VerifyResult:
    return VerifyResult(
        optimizer="DSMuon",
        device="cpu",
        world_size=2,
        precision="fp32 model",
        steps=1,
        skipped_steps=0,
        partition_sizes=(20,),
        config=DEFAULT_CONFIG,
        versions={"ds_muon": "1", "deepspeed": "2", "torch": "3"},
        records=records,
        fault=fault,
    )


def wrong(name: str = "w", diagnosis: str = "clipped update: 0.5 times", error: float = 0.5) -> UpdateRecord:
    return record(name, error, diagnosis=diagnosis)


def planted(name: str, *records: UpdateRecord) -> VerifyResult:
    return result(*records, fault=name)
