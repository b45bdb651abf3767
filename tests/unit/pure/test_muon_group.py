"""The order of one Muon group's step: what travels does so while batches run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_muon.capture import NanCapture
from ds_muon.exchange import Transfer
from ds_muon.muon_group import MuonGroup, Staged, in_turns
from ds_muon.orthogonalize import BACKENDS, NewtonSchulz, orthogonalize
from ds_muon.orthogonalize.torch_backend import TorchOperations
from tests.unit.support.plans import group_plan

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

    def __init__(self, group: MuonGroup, rest: Tensor, log: list[str], name: str = "") -> None:
        (self._matrix,) = group.exchange.owned
        self.owned = group.exchange.owned
        self._rest, self._log, self._name = rest, log, name

    def gather(self, partition: Tensor) -> Any:
        self._log.append(f"{self._name}gather starts")
        (here, _) = self._matrix.slices
        full = torch.zeros(self._matrix.rows * self._matrix.cols)
        full[: here.numel] = partition[here.offset :][: here.numel]
        name = f"{self._name}gather"
        return Arriving([full.view(self._matrix.rows, self._matrix.cols)], self._log, name, self._rest)

    def scatter(self, outputs: list[Tensor], partition: Tensor, dtype: torch.dtype) -> Any:
        self._log.append(f"{self._name}scatter starts")
        (here, _) = self._matrix.slices
        partition[here.offset :][: here.numel] = outputs[0].reshape(-1)[: here.numel]
        return Arriving([], self._log, f"{self._name}scatter", None)


class Arriving(Transfer):
    def __init__(self, tensors: list[Tensor], log: list[str], name: str, rest: Tensor | None) -> None:
        super().__init__(tensors)
        self._log, self._name, self._rest = log, name, rest

    def wait(self) -> list[Tensor]:
        self._log.append(f"{self._name} is waited for")
        if self._rest is not None:
            self.tensors[0].view(-1)[-self._rest.numel() :] = self._rest
        return self.tensors


class Rank0:
    """Of two ranks, the one that owns the only matrix that straddles their boundary, the last but one of ``shapes``."""

    def __init__(self, shapes: list[tuple[int, int]], settings: NewtonSchulz, log: list[str], name: str = "") -> None:
        self.plan = group_plan(shapes, 2)
        straddler = self.plan.units[-2]
        assert straddler.straddles and straddler.owner == 0
        assert [matrix.owner for matrix in self.plan.units] == [0] * (len(shapes) - 1) + [1]
        names = [matrix.name for matrix in self.plan.units]
        capture = NanCapture(0)
        self.group = MuonGroup(self.plan, names, 0, None, settings, adjust_lr_fn="none", beta2=None, capture=capture)
        generator = torch.Generator().manual_seed(0)
        self.partition = torch.zeros(self.plan.partition_size)
        for _, piece in self.plan.held(0):
            self.partition[piece.offset :][: piece.numel] = torch.randn(piece.numel, generator=generator)
        kept, away = straddler.slices
        rest = torch.randn(away.numel, generator=generator)
        whole = [self.partition[s.offset :][: s.numel].clone().view(m.rows, m.cols) for m, s in self.plan.held(0)[:-1]]
        full = torch.cat([self.partition[kept.offset :][: kept.numel], rest]).view(shapes[-2])
        self._expected = orthogonalize([*whole, full], NewtonSchulz.resolve(CPU))
        self.group.exchange = Wire(self.group, rest, log, name)  # type: ignore[assignment]
        run = self.group.orthogonalize
        self.group.orthogonalize = lambda batch: (  # type: ignore[method-assign]
            log.append(f"{name}{len(batch)} of {batch[0][0].rows} rows"),
            run(batch),
        )[1]

    def run_stage(self) -> Iterator[None]:
        return self.group.run_stage(Staged(self.partition, torch.ones(len(self.plan.units), dtype=torch.bool)))

    def assert_right(self) -> None:
        for (_, piece), output in zip(self.plan.held(0), self._expected, strict=True):
            assert torch.equal(self.partition[piece.offset :][: piece.numel], output.reshape(-1)[: piece.numel])


def test_batches_run_while_slices_of_straddling_matrices_travel(settings: NewtonSchulz) -> None:
    log: list[str] = []
    rank = Rank0([(4, 4), (5, 4), (6, 4), (6, 14), (9, 9)], settings, log)
    in_turns([rank.run_stage()])
    first, last = log.index("gather is waited for"), log.index("scatter starts")
    assert log[0] == "gather starts" and first > 1  # something ran meanwhile
    assert log[first + 1 : last] == ["1 of 6 rows"]
    assert log[-1] == "scatter is waited for" and len(log) - 2 > last
    assert sum(entry.endswith("rows") for entry in log) == 4
    rank.assert_right()


class Batching(Reusing):
    """Takes equal shapes in one batch, as on GPUs."""

    def alone(self, device: torch.device, dtype: torch.dtype) -> bool:
        return False


@pytest.mark.parametrize(
    ("shapes", "log"),
    [
        # All are of the straddler's shape: they do not wait for it.
        (
            [(6, 7), (6, 7), (6, 7), (11, 11)],
            ["gather starts", "2 of 6 rows", "gather is waited for", "1 of 6 rows", "scatter starts"],
        ),
        # There is enough to do meanwhile: they share its batch.
        (
            [(6, 7), (9, 9), (6, 7), (12, 12)],
            ["gather starts", "1 of 9 rows", "gather is waited for", "2 of 6 rows", "scatter starts"],
        ),
    ],
)
def test_a_matrix_waits_in_the_batch_of_a_straddler_where_there_is_other_work(
    shapes: list[tuple[int, int]], log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "batching", Batching)
    seen: list[str] = []
    rank = Rank0(shapes, replace(NewtonSchulz.resolve(CPU), backend="batching"), seen)
    in_turns([rank.run_stage()])
    assert seen == [*log, "scatter is waited for"]
    rank.assert_right()


def test_what_one_group_sends_travels_while_another_computes(settings: NewtonSchulz) -> None:
    log: list[str] = []
    # The first has nothing but its straddler.
    first = Rank0([(6, 14), (7, 9)], settings, log, "first: ")
    others = [Rank0([(4, 4), (6, 14), (9, 9)], settings, log, name) for name in ("second: ", "third: ")]
    ranks = [first, *others]
    in_turns([rank.run_stage() for rank in ranks])
    assert log == [
        *("first: gather starts", "second: gather starts"),
        *("first: gather is waited for", "first: 1 of 6 rows", "first: scatter starts"),
        *("third: gather starts", "second: 1 of 4 rows"),
        *("second: gather is waited for", "second: 1 of 6 rows", "second: scatter starts"),
        "first: scatter is waited for",
        *("third: 1 of 4 rows", "third: gather is waited for", "third: 1 of 6 rows", "third: scatter starts"),
        *("second: scatter is waited for", "third: scatter is waited for"),
    ]
    for rank in ranks:
        rank.assert_right()


def test_what_was_gathered_is_freed_before_the_rest_runs(settings: NewtonSchulz) -> None:
    log: list[str] = []
    rank = Rank0([(4, 4), (5, 4), (6, 4), (6, 14), (9, 9)], settings, log)
    gather, run = rank.group.exchange.gather, rank.group.orthogonalize
    gathered: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def noted(partition: Tensor) -> Transfer:
        transfer = gather(partition)
        gathered.append(weakref.ref(transfer.tensors[0]))
        return transfer

    def looked(*args: Any) -> Tensor:
        alive.append(gathered[0]() is not None)
        return run(*args)

    rank.group.exchange.gather = noted  # type: ignore[method-assign]
    rank.group.orthogonalize = looked  # type: ignore[method-assign]
    in_turns([rank.run_stage()])
    after = len(log) - log.index("scatter starts") - 2
    assert after >= 1 and alive[-after:] == [False] * after and all(alive[:-after])


def test_what_orthogonalize_returns_outlives_what_the_backend_works_in(settings: NewtonSchulz) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator) for shape in [(4, 6), (5, 5), (4, 6), (9, 4)]]
    for output, expected in zip(
        orthogonalize(matrices, settings), orthogonalize(matrices, NewtonSchulz.resolve(CPU)), strict=True
    ):
        assert torch.equal(output, expected)
