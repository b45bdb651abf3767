"""Which rank orthogonalizes which matrix, by a simple model of a step's time. Pure; the same on every rank.

    time of a rank = operations on the matrices it owns / operations per second
                     + bytes of U and O it sends and receives / bytes per second of its link
    time of a step = the largest of these + a fixed time for each param group in which anything travels

The model leaves out overlap, how well a shape runs, and how far apart two ranks are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

# The search for the least time ends at this relative precision.
_PRECISION = 1e-4


@dataclass(frozen=True)
class Rates:
    """A machine, as the model of a step's time sees it.

    The defaults are those of one H100 among many: two thirds of what its large half-precision products reach, and a
    link four times slower than NVLink. The model adds up the bytes in both directions, though a link carries both at
    once. So the default also fits links between nodes with half this speed in each direction.

    Attributes:
        flops: operations of Newton-Schulz per second and rank.
        bytes_per_second: of a rank's link, sent and received together; ``math.inf`` makes travel free.
        exchange_seconds: fixed time for each param group in which anything travels: to start collectives and copies.
        least_gain: the fraction of a step's time that must be gained, or owners stay holders. A smaller gain would be
            lost in what the model leaves out.

    Raises:
        ValueError: ``flops`` or ``bytes_per_second`` is not positive, ``exchange_seconds`` is negative, or
            ``least_gain`` is not from 0 to below 1.
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
"""The engine plans with these on every device, because its results do not depend on the plan."""


@dataclass(frozen=True)
class Work:
    """A matrix, as the choice of its owner sees it.

    Attributes:
        group: index of its param group.
        cost: floating-point operations.
        held: (rank, elements) of each slice, in order of rank.
    """

    group: int
    cost: float
    held: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        return sum(elements for _, elements in self.held)

    def travels(self, owner: int) -> bool:
        """Whether any slice must be sent to ``owner``."""
        return any(rank != owner for rank, _ in self.held)


def least_loaded_holders(works: Sequence[Work], world_size: int) -> list[int]:
    """The owner of each matrix, if owners are holders: the least loaded one, the costliest straddling matrix first.

    A matrix with one holder stays there. A load is the cost of all matrices that a rank owns, in all groups.
    """
    loads: list[float] = [0] * world_size
    owners = [work.held[0][0] for work in works]
    for work in works:
        if len(work.held) == 1:
            loads[work.held[0][0]] += work.cost
    for index in _costliest_first(works):
        if len(works[index].held) > 1:
            # Among equally loaded holders, the one with the largest slice leaves the least to send.
            owner = min(works[index].held, key=lambda piece: (loads[piece[0]], -piece[1], piece[0]))[0]
            owners[index] = owner
            loads[owner] += works[index].cost
    return owners


def choose_owners(works: Sequence[Work], world_size: int, rates: Rates, element_bytes: int) -> list[int]:
    """The owner of each matrix, holder or not, so that the model's time of a step is small.

    Matrices are dealt out under a limit on every rank's time, the costliest first: to the holder of the largest slice
    that stays within the limit, else to the rank with the least time. Bisection finds the smallest limit that works. So
    no more travels than this balance needs.

    Args:
        works: all matrices of all groups.
        world_size: ranks that share the groups.
        rates: of the machine.
        element_bytes: bytes per element that travels, both ways together.

    Returns:
        ``least_loaded_holders``, unless other owners make the step faster by ``rates.least_gain``. With free travel and
        ``least_gain`` 0, the largest load is at most the mean load plus the costliest matrix, within 0.01 %.
    """
    owners = least_loaded_holders(works, world_size)
    if world_size == 1 or not works:
        return owners
    kept = _Ledger(works, world_size, rates, element_bytes)
    for work, owner in zip(works, owners, strict=True):
        kept.give(work, owner)
    # No assignment is faster than the mean, or than the costliest matrix.
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
    """What every rank has to compute, send and receive. At first nobody owns a matrix, and every slice is to be sent.

    So giving a matrix to an owner changes the numbers of that rank only.
    """

    def __init__(self, works: Sequence[Work], world_size: int, rates: Rates, element_bytes: int) -> None:
        self.world_size = world_size
        # Costs that are integers add up exactly, so that every rank gets the same sums.
        self._operations: list[float] = [0] * world_size
        self._elements = [0] * world_size
        self._rates, self._element_bytes = rates, element_bytes
        for work in works:
            for rank, elements in work.held:
                self._elements[rank] += elements

    def seconds(self, rank: int, operations: float = 0, elements: int = 0) -> float:
        """The rank's time, with this much more to compute, and to send and receive."""
        moved = self._element_bytes * (self._elements[rank] + elements)
        return self._rates.of_rank(self._operations[rank] + operations, moved)

    def busiest_seconds(self) -> float:
        return max(map(self.seconds, range(len(self._elements))))

    def give(self, work: Work, rank: int) -> None:
        """Make ``rank`` the owner: it receives the slices that it does not hold, and need not send the one it holds."""
        self._operations[rank] += work.cost
        self._elements[rank] += work.elements - 2 * dict(work.held).get(rank, 0)


def _deal(works: Sequence[Work], order: Sequence[int], ledger: _Ledger, limit: float) -> list[int] | None:
    """Owners with which no rank takes longer than ``limit``, entered in ``ledger``. None if this finds none."""
    owners = [0] * len(works)
    # May hold outdated entries, but always a current one for each rank.
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
    """The number of groups in which anything travels."""
    return len({work.group for work, owner in zip(works, owners, strict=True) if work.travels(owner)})
