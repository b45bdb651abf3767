"""Results of ``ds-muon verify``, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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


def sample(
    elements: Sequence[int] = (600, 600, 800, 400),
    *,
    world_size: int = 2,
    names: Sequence[str] = (),
    adamw: Sequence[int] = (100, 60),
    partition_size: int | None = None,
    **of_result: Any,
) -> VerifyResult:
    """A right result of two steps: matrices of so many ``elements``, one after another, then the AdamW half."""
    records: list[UpdateRecord] = []
    sizes = []
    for group, (half, numels) in enumerate((("muon", elements), ("adamw", adamw))):
        size = partition_size or max(1, -(-sum(numels) // world_size))
        sizes.append(size)
        start = 0
        for i, numel in enumerate(numels):
            end = start + numel
            holders = range(start // size, (end - 1) // size + 1) if numel else ()
            cuts = tuple((rank, min(end, (rank + 1) * size) - max(start, rank * size)) for rank in holders)
            records.append(
                UpdateRecord(
                    step=1,
                    name=names[i] if half == "muon" and i < len(names) else f"{half}.{i}.weight",
                    shape=(numel // 20, 20) if half == "muon" else (numel,),
                    half=half,
                    group=group,
                    cuts=cuts,
                    owner=cuts[-1][0] if half == "muon" and cuts else None,
                    against_fp64=Comparison(2e-6, 1e-5),
                    cosine=1.0,
                    against_same_dtype=Comparison(1e-8, 1e-6),
                    gradient=Comparison(1e-8, 1e-7),
                    state=None,
                )
            )
            start = end
    result = VerifyResult(
        optimizer="DSMuon",
        device="cpu",
        world_size=world_size,
        precision="fp32 model, fp32 sums, standard in fp32, fp32 momentum",
        steps=2,
        skipped_steps=0,
        partition_sizes=tuple(sizes),
        config={"optimizer": {"type": "DSMuon"}, "note": "<config & more>"},
        versions={"ds_muon": "0.1.0", "deepspeed": "0.19.8", "torch": "2.9.1"},
        records=tuple(replace(r, step=step) for step in (1, 2) for r in records),
    )
    return replace(result, **of_result)
