"""The order of one Muon group's step: what travels does so while batches run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_muon.capture import NanCapture
from ds_muon.exchange import Transfer
from ds_muon.orthogonalize import BACKENDS, NewtonSchulz, orthogonalize
from ds_muon.orthogonalize.torch_backend import TorchOperations
from ds_muon.stage import MuonGroup
from tests.unit.test_exchange import group_plan

CPU = torch.device("cpu")


class Reusing(TorchOperations):
    """As a backend that works in the same memory in every run: the next one destroys the result of the last."""

    compact = False
    last: Tensor | None = None

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        result = super().run(*args, **kwargs)
        if Reusing.last is not None:
            Reusing.last.fill_(torch.nan)
        Reusing.last = result
        return result


@pytest.fixture(params=["torch", "reusing"])
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NewtonSchulz:
    monkeypatch.setitem(BACKENDS, "reusing", Reusing)
    return replace(NewtonSchulz.resolve(CPU), backend=request.param)


class Wire:
    """In place of the exchange of rank 0 of two: the other rank's slices are zeros until they have been waited for."""

    def __init__(self, group: MuonGroup, rest: Tensor, log: list[str]) -> None:
        (self._matrix,) = group.exchange.owned
        self.owned = group.exchange.owned
        self._rest, self._log = rest, log

    def gather(self, partition: Tensor) -> Any:
        self._log.append("gather starts")
        (here, _) = self._matrix.slices
        full = torch.zeros(self._matrix.rows * self._matrix.cols)
        full[: here.numel] = partition[here.offset :][: here.numel]
        return Arriving([full.view(self._matrix.rows, self._matrix.cols)], self._log, "gather", self._rest)

    def scatter(self, outputs: list[Tensor], partition: Tensor, dtype: torch.dtype) -> Any:
        self._log.append("scatter starts")
        (here, _) = self._matrix.slices
        partition[here.offset :][: here.numel] = outputs[0].reshape(-1)[: here.numel]
        return Arriving([], self._log, "scatter", None)


class Arriving(Transfer):
    def __init__(self, tensors: list[Tensor], log: list[str], name: str, rest: Tensor | None) -> None:
        super().__init__(tensors)
        self._log, self._name, self._rest = log, name, rest

    def wait(self) -> list[Tensor]:
        self._log.append(f"{self._name} is waited for")
        if self._rest is not None:
            self.tensors[0].view(-1)[-self._rest.numel() :] = self._rest
        return self.tensors


def test_batches_run_while_slices_of_straddling_matrices_travel(
    settings: NewtonSchulz, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 0 holds three whole matrices and owns the one that straddles the boundary.
    plan = group_plan([(4, 4), (5, 4), (6, 4), (6, 14), (9, 9)], 2)
    straddler = plan.matrices[3]
    assert straddler.straddles and straddler.owner == 0
    group = MuonGroup(
        plan,
        [matrix.name for matrix in plan.matrices],
        0,
        None,
        adjust_lr_fn="none",
        beta2=None,
        capture=NanCapture(0),
    )
    log: list[str] = []
    generator = torch.Generator().manual_seed(0)
    partition = torch.zeros(plan.partition_size)
    for _, piece in plan.held(0):
        partition[piece.offset :][: piece.numel] = torch.randn(piece.numel, generator=generator)
    rest = torch.randn(straddler.slices[1].numel, generator=generator)
    whole = [partition[s.offset :][: s.numel].clone().view(m.rows, m.cols) for m, s in plan.held(0)[:3]]
    (kept, _) = straddler.slices
    full = torch.cat([partition[kept.offset :][: kept.numel], rest]).view(6, 14)
    expected = orthogonalize([*whole, full], NewtonSchulz.resolve(CPU))

    monkeypatch.setattr(group, "exchange", Wire(group, rest, log))
    run = group._orthogonalize
    monkeypatch.setattr(
        group, "_orthogonalize", lambda batch, s: (log.append(f"{batch[0][0].rows} rows"), run(batch, s))[1]
    )
    group.orthogonalize_(partition, None, settings)
    first, last = log.index("gather is waited for"), log.index("scatter starts")
    assert log[0] == "gather starts" and first > 1  # something ran meanwhile
    assert log[first + 1 : last] == ["6 rows"]
    assert log[-1] == "scatter is waited for" and len(log) - 2 > last
    assert sum(entry.endswith("rows") for entry in log) == 4
    for (_, piece), output in zip(plan.held(0), expected, strict=True):
        assert torch.equal(partition[piece.offset :][: piece.numel], output.reshape(-1)[: piece.numel])


def test_what_orthogonalize_returns_outlives_what_the_backend_works_in(settings: NewtonSchulz) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator) for shape in [(4, 6), (5, 5), (4, 6), (9, 4)]]
    for output, expected in zip(
        orthogonalize(matrices, settings), orthogonalize(matrices, NewtonSchulz.resolve(CPU)), strict=True
    ):
        assert torch.equal(output, expected)
