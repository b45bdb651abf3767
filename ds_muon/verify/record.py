"""What the harness finds: one record per parameter and step, and the result of a run. Plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """A relative Frobenius error beside what the arithmetic explains; see ``tolerances``."""

    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # a NaN is not

    @property
    def excess(self) -> float:
        """``error / tolerance``: above 1 is wrong; 0 for no error at all, infinite for a NaN."""
        if self.error == 0:
            return 0.0
        excess = self.error / self.tolerance if self.tolerance > 0 else math.inf
        return math.inf if math.isnan(excess) else excess


@dataclass(frozen=True)
class UpdateRecord:
    """One parameter in one optimizer step: what the engine did beside what it should have done.

    Attributes:
        step: of this check, from 1.
        name: the parameter.
        shape: its shape.
        half: ``"muon"`` or ``"adamw"``.
        group: index of its param group.
        cuts: (rank, elements) of every piece that ZeRO cut it into, in flat order.
        owner: the rank that orthogonalizes it; None in the AdamW half, or where the optimizer does not tell.
        against_fp64: the change of the fp32 weights beside the fp64 reference, from the raw gradients of all ranks.
        cosine: between the applied change and that of the fp64 reference.
        against_same_dtype: the change beside the same rule on the whole parameter in the engine's own dtypes, from the
            averaged gradient that ZeRO left: free of rounding, so that only a fault of the step remains. The worse of
            the norm and of the largest element, over a root mean square.
        gradient: the averaged gradient that ZeRO left beside the fp64 average of the raw ones. None where the optimizer
            has overwritten it.
        state: momentum, or the worse of AdamW's moments, beside the same-dtype reference. None where it cannot be read.
        stale_ranks: ranks whose model does not see the rounded fp32 weights.
        moved_before: whether the fp32 weights changed between the checked step before and this one.
        diagnosis: the fault that explains the errors; None where nothing is wrong.
    """

    step: int
    name: str
    shape: tuple[int, ...]
    half: str
    group: int
    cuts: tuple[tuple[int, int], ...]
    owner: int | None
    against_fp64: Comparison
    cosine: float
    against_same_dtype: Comparison
    gradient: Comparison | None
    state: Comparison | None
    stale_ranks: tuple[int, ...] = ()
    moved_before: bool = False
    diagnosis: str | None = None

    @property
    def relative_error(self) -> float:
        return self.against_fp64.error

    @property
    def tolerance(self) -> float:
        return self.against_fp64.tolerance

    @property
    def holders(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.cuts)

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """(rank, first, elements) of every piece, counted from the start of the parameter."""
        ends = accumulate(elements for _, elements in self.cuts)
        return [(rank, end - elements, elements) for (rank, elements), end in zip(self.cuts, ends, strict=True)]

    @property
    def straddles(self) -> bool:
        return len(self.cuts) > 1

    @property
    def travels(self) -> bool:
        """Whether it is orthogonalized on another rank than its only holder; False where no owner is told."""
        return self.owner is not None and self.holders != (self.owner,)

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """All that were made, by the name of their attribute."""
        every = {name: getattr(self, name) for name in ("against_fp64", "against_same_dtype", "gradient", "state")}
        return {name: comparison for name, comparison in every.items() if comparison is not None}

    @property
    def ok(self) -> bool:
        return self._is_in_place and all(comparison.ok for comparison in self.comparisons.values())

    @property
    def _is_in_place(self) -> bool:
        return not self.stale_ranks and not self.moved_before

    @property
    def excess(self) -> float:
        """How far the worst comparison is from its tolerance; above 1 is wrong."""
        excesses = [comparison.excess for comparison in self.comparisons.values()]
        return max(excesses) if self._is_in_place else math.inf


@dataclass(frozen=True)
class VerifyResult:
    """A run of ``ds-muon verify``.

    Attributes:
        optimizer: the ``type`` in the config.
        device: name of the accelerator, or ``"cpu"``.
        world_size: ranks.
        precision: one line: dtypes of model, sums, iteration and momentum, and the forms of the iteration that ran.
        steps: optimizer steps that were checked.
        skipped_steps: steps that the engine skipped for an overflow.
        partition_sizes: elements per rank, for every param group.
        config: the DeepSpeed config.
        versions: of ds_muon, deepspeed and torch.
        records: of every parameter and step.
        fault: the planted fault, if any.
    """

    optimizer: str
    device: str
    world_size: int
    precision: str
    steps: int
    skipped_steps: int
    partition_sizes: tuple[int, ...]
    config: dict[str, Any]
    versions: dict[str, str]
    records: tuple[UpdateRecord, ...]
    fault: str | None = None

    @property
    def ok(self) -> bool:
        """Something was checked, and all of it is right."""
        return bool(self.records) and all(record.ok for record in self.records)

    def worst(self) -> list[UpdateRecord]:
        """For every parameter the record of its worst step, worst parameter first.

        The diagnosis in it is that of the first wrong step: after it, state and reference have parted.
        """
        worst: dict[str, UpdateRecord] = {}
        for record in self.records:
            if record.name not in worst or record.excess > worst[record.name].excess:
                worst[record.name] = record
        return sorted(worst.values(), key=lambda record: -record.excess)
