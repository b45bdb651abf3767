"""Which rank orthogonalizes which matrix: a choice by a simple model of a step's time. Pure; the same on every rank.

    time of a rank = operations of the matrices it owns / rate of the iteration
                     + bytes it sends and receives, U and O, both ways / rate of its link
    time of a step = the largest of these + a fixed price for each param group that exchanges anything

It is a model: it leaves out what overlaps, how well a shape runs, and how far apart two ranks are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

# The search for the least time ends when it is known to this fraction.
_PRECISION = 1e-4


@dataclass(frozen=True)
class Rates:
    """What the model of a step's time takes a machine for.

    The defaults are those of one H100 among many: two thirds of what its large half-precision products reach, and a
    link that is slower than NVLink by a factor of four. A rank's bytes in both directions count one after the other,
    as they would in one direction; for that, the figure also does for the links between nodes, at half of it.

    Attributes:
        flops: operations of Newton-Schulz per second and rank.
        bytes_per_second: of a rank's link, in a direction; ``math.inf`` makes moving free.
        exchange_seconds: what it costs, beside the bytes, that a param group exchanges anything in a step: collectives
            and copies that have to be started, both ways.
        least_gain: by which part of its time a step must become faster, or owners stay holders: less is lost in what
            the model leaves out.

    Raises:
        ValueError: a rate that is not positive, a price below 0, or a gain that is not from 0 to below 1.
    """

    flops: float = 5e14
    bytes_per_second: float = 1e11
    exchange_seconds: float = 1e-4
    least_gain: float = 0.02

    def __post_init__(self) -> None:
        for name in ("flops", "bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Rates.{name} = {getattr(self, name)!r}: set a number above 0")
        if not self.exchange_seconds >= 0:
            raise ValueError(f"Rates.exchange_seconds = {self.exchange_seconds!r}: set 0 or a number above")
        if not 0 <= self.least_gain < 1:
            raise ValueError(f"Rates.least_gain = {self.least_gain!r}: set a number from 0 to below 1")

    def of_rank(self, operations: float, moved_bytes: int) -> float:
        """Seconds that a rank spends on its matrices and on its bytes, sent and received."""
        return operations / self.flops + moved_bytes / self.bytes_per_second


RATES = Rates()
"""Those that the engine plans with, on every device: its results do not depend on the plan."""


@dataclass(frozen=True)
class Work:
    """A matrix, as far as the choice of its owner goes.

    Attributes:
        group: its param group.
        cost: operations.
        held: (rank, elements) of its slices, in order of rank.
    """

    group: int
    cost: float
    held: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        return sum(elements for _, elements in self.held)

    def travels(self, owner: int) -> bool:
        """Whether anything of it has to be sent to ``owner``."""
        return any(rank != owner for rank, _ in self.held)


def least_loaded_holders(works: Sequence[Work], world_size: int) -> list[int]:
    """The owner of each matrix, if owners are holders: the least loaded one, the costliest straddling matrix first.

    A matrix that lies whole on a rank is that rank's. A load is the cost of what a rank owns, in all groups.
    """
    loads: list[float] = [0] * world_size
    owners = [work.held[0][0] for work in works]
    for work in works:
        if len(work.held) == 1:
            loads[work.held[0][0]] += work.cost
    for index in _costliest_first(works):
        if len(works[index].held) > 1:
            # Among equally loaded holders the one with the largest slice: it leaves the least to send.
            owner = min(works[index].held, key=lambda piece: (loads[piece[0]], -piece[1], piece[0]))[0]
            owners[index] = owner
            loads[owner] += works[index].cost
    return owners


def choose_owners(works: Sequence[Work], world_size: int, rates: Rates, element_bytes: int) -> list[int]:
    """The owner of each matrix, holder or not, so that the model's time of a step is small.

    Args:
        works: all matrices of all groups.
        world_size: ranks that share the groups.
        rates: of the model.
        element_bytes: of an element that travels, both ways together.

    Returns:
        ``least_loaded_holders``, unless other owners are found whose step is faster. Where moving costs nothing and any
        gain is taken, the most loaded rank does no more than the mean of all ranks and the costliest matrix together,
        but for 0.01 %.

    Owners are dealt out with a time that no rank may exceed, the costliest matrix first: to the holder with most of it
    where that one stays within the time, else to the rank that has least to do. The least such time is searched by
    bisection, so no more moves than this balance needs.
    """
    owners = least_loaded_holders(works, world_size)
    if world_size == 1 or not works:
        return owners
    kept = _Ledger(works, world_size, rates, element_bytes)
    for work, owner in zip(works, owners, strict=True):
        kept.give(work, owner)
    # No assignment beats the mean, nor the costliest matrix.
    too_short = max(sum(w.cost for w in works) / world_size, max(w.cost for w in works)) / rates.flops
    enough = kept.busiest_seconds()
    best: list[int] | None = None
    order = _costliest_first(works)
    while enough - too_short > _PRECISION * enough:
        limit = (too_short + enough) / 2
        ledger = _Ledger(works, world_size, rates, element_bytes)
        found = _deal(works, order, ledger, limit)
        if found is None:
            too_short = limit
        else:
            best, enough = found, ledger.busiest_seconds()
    if best is None:
        return owners
    before = kept.busiest_seconds() + rates.exchange_seconds * _exchanges(works, owners)
    after = enough + rates.exchange_seconds * _exchanges(works, best)
    return best if after < before * (1 - rates.least_gain) else owners


class _Ledger:
    """What every rank owns and moves. At first nothing is owned, and every slice is to be sent.

    So giving away a matrix changes the numbers of one rank only, its owner's.
    """

    def __init__(self, works: Sequence[Work], world_size: int, rates: Rates, element_bytes: int) -> None:
        self.world_size = world_size
        # Sums of integers, where costs are integers: exact, so that every rank comes to the same.
        self._operations: list[float] = [0] * world_size
        self._elements = [0] * world_size
        self._rates, self._element_bytes = rates, element_bytes
        for work in works:
            for rank, elements in work.held:
                self._elements[rank] += elements

    def seconds(self, rank: int, operations: float = 0, elements: int = 0) -> float:
        """The rank's time, with so much more to do and to move."""
        moved = self._element_bytes * (self._elements[rank] + elements)
        return self._rates.of_rank(self._operations[rank] + operations, moved)

    def busiest_seconds(self) -> float:
        return max(map(self.seconds, range(len(self._elements))))

    def give(self, work: Work, rank: int) -> None:
        """The rank owns the matrix: receives what it does not hold, and sends nothing of what it holds."""
        self._operations[rank] += work.cost
        self._elements[rank] += work.elements - 2 * dict(work.held).get(rank, 0)


def _deal(works: Sequence[Work], order: Sequence[int], ledger: _Ledger, limit: float) -> list[int] | None:
    """Owners with whom no rank takes longer than ``limit``, entered in the ledger; None if this finds none."""
    owners = [0] * len(works)
    # May hold entries of the past, but always one of the present for each rank.
    idlest = [(ledger.seconds(rank), rank) for rank in range(ledger.world_size)]
    heapq.heapify(idlest)
    for index in order:
        work = works[index]
        for rank, elements in sorted(work.held, key=lambda piece: (-piece[1], piece[0])):
            if ledger.seconds(rank, work.cost, work.elements - 2 * elements) <= limit:
                break
        else:
            while idlest[0][0] != ledger.seconds(idlest[0][1]):
                heapq.heappop(idlest)
            rank = idlest[0][1]
            if ledger.seconds(rank, work.cost, work.elements - 2 * dict(work.held).get(rank, 0)) > limit:
                return None
        ledger.give(work, rank)
        owners[index] = rank
        heapq.heappush(idlest, (ledger.seconds(rank), rank))
    return owners if ledger.busiest_seconds() <= limit else None


def _costliest_first(works: Sequence[Work]) -> list[int]:
    return sorted(range(len(works)), key=lambda index: (-works[index].cost, index))


def _exchanges(works: Sequence[Work], owners: Sequence[int]) -> int:
    """Groups of which anything travels."""
    return len({work.group for work, owner in zip(works, owners, strict=True) if work.travels(owner)})
