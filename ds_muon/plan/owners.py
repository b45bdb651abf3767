"""Which rank orthogonalizes which matrix, by a simple model of a step's time. Pure; the same on every rank.

    time of a rank = operations on the matrices it owns / operations per second
                     + bytes of U and O it sends and receives / bytes per second of its link
    time of a step = the largest of these + a fixed time for each param group in which anything travels

The model leaves out overlap and how well a shape runs. To choose owners it takes every link to be as slow as one
between nodes. But among ranks that have time for a matrix, those of the node that holds most of it come first.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from ds_muon.plan.rates import Rates

# The search for the least time ends at this relative precision.
_PRECISION = 1e-4


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

    @cached_property
    def elements(self) -> int:
        return sum(elements for _, elements in self.held)

    def holders(self, ranks_per_node: int = 0) -> tuple[tuple[int, int], ...]:
        """``held``: first the node that has most of the matrix, and in a node the largest slice."""
        per_node = ranks_per_node or sys.maxsize
        of_node: Counter[int] = Counter()
        for rank, elements in self.held:
            of_node[rank // per_node] += elements
        return tuple(sorted(self.held, key=lambda piece: (-of_node[piece[0] // per_node], -piece[1], piece[0])))


def least_loaded_holders(works: Sequence[Work], world_size: int, ranks_per_node: int = 0) -> list[int]:
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
            # Among equally loaded holders, the first one leaves the least to send to another node, or at all.
            owner = min(works[index].holders(ranks_per_node), key=lambda piece: loads[piece[0]])[0]
            owners[index] = owner
            loads[owner] += works[index].cost
    return owners


def choose_owners(works: Sequence[Work], world_size: int, rates: Rates, element_bytes: int) -> list[int]:
    """The owner of each matrix, holder or not, so that the model's time of a step is small.

    Matrices are dealt out under a limit on every rank's time, the costliest first: to the first of ``Work.holders``
    that stays within the limit, else to a rank of the node that holds most of it, else to the rank with the least time.
    Bisection finds the smallest limit that works. So no more travels than this balance needs.

    Args:
        works: all matrices of all groups.
        world_size: ranks that share the groups.
        rates: of the machine.
        element_bytes: bytes per element that travels, both ways together.

    Returns:
        ``least_loaded_holders``, unless other owners make the step faster by ``rates.least_gain``. With free travel and
        ``least_gain`` 0, the largest load is at most the mean load plus the costliest matrix, within 0.01 %.
    """
    owners = least_loaded_holders(works, world_size, rates.ranks_per_node)
    if world_size == 1 or not works or rates.least_gain == 1:
        return owners
    held = [0] * world_size
    for work in works:
        for rank, elements in work.held:
            held[rank] += elements
    kept = _Ledger(held, rates, element_bytes)
    for work, owner in zip(works, owners, strict=True):
        kept.give(work, owner, dict(work.held)[owner])
    # No assignment is faster than the mean, or than the costliest matrix.
    too_short = max(sum(w.cost for w in works) / world_size, max(w.cost for w in works)) / rates.flops
    before = enough = max(kept.seconds)
    best: list[int] | None = None
    alike = groupby(_costliest_first(works), key=lambda index: (works[index].cost, works[index].held))
    runs = []
    for indices in (list(run) for _, run in alike):
        holders = works[indices[0]].holders(rates.ranks_per_node)
        first = holders[0][0] - holders[0][0] % max(1, rates.ranks_per_node)
        runs.append(_Run(works[indices[0]], indices, holders, range(world_size)[first : first + rates.ranks_per_node]))
    while enough - too_short > _PRECISION * enough:
        limit = (too_short + enough) / 2
        ledger = _Ledger(held, rates, element_bytes)
        found = _deal(runs, ledger, limit)
        if found is None:
            too_short = limit
        else:
            best, enough = found, max(ledger.seconds)
    if best is None:
        return owners
    before += rates.exchange_seconds * _exchanges(works, owners)
    after = enough + rates.exchange_seconds * _exchanges(works, best)
    return best if after < before * (1 - rates.least_gain) else owners


class _Run(NamedTuple):
    """A matrix, the indices of those that are held as it is and cost as much, and who comes first to own them."""

    work: Work
    indices: list[int]
    holders: tuple[tuple[int, int], ...]
    node: range
    """The ranks of the node that has most of it; none if nodes are not known."""


class _Ledger:
    """What every rank has to compute, send and receive. At first nobody owns a matrix, and every slice is to be sent.

    So giving a matrix to an owner changes the numbers of that rank only.

    Args:
        held: elements of matrices that each rank holds.
        rates, element_bytes: as for ``choose_owners``.

    Attributes:
        seconds: each rank's time.
    """

    def __init__(self, held: Sequence[int], rates: Rates, element_bytes: int) -> None:
        # Costs that are integers add up exactly, so that every rank gets the same sums.
        self._operations: list[float] = [0] * len(held)
        self._elements = list(held)
        self._rates, self._element_bytes = rates, element_bytes
        self.seconds = [rates.of_rank(0, element_bytes * elements) for elements in held]

    def give(self, work: Work, rank: int, held: int, most: int = 1, limit: float = math.inf) -> int:
        """Make ``rank`` the owner of up to ``most`` such matrices, until another would take it beyond ``limit``.

        It receives the slices that it does not hold, and need not send the ``held`` elements of each that it does.

        Returns:
            How many it owns now.
        """
        operations, elements, received = self._operations[rank], self._elements[rank], work.elements - 2 * held
        cost, of_rank, size = work.cost, self._rates.of_rank, self._element_bytes
        given = 0
        while given < most:
            seconds = of_rank(operations + cost, size * (elements + received))
            if seconds > limit:
                break
            given += 1
            operations, elements, self.seconds[rank] = operations + cost, elements + received, seconds
        self._operations[rank], self._elements[rank] = operations, elements
        return given


def _deal(runs: Sequence[_Run], ledger: _Ledger, limit: float) -> list[int] | None:
    """Owners with which no rank takes longer than ``limit``, entered in ``ledger``. None if this finds none."""
    owners = [0] * sum(len(run.indices) for run in runs)
    # May hold outdated entries, but always a current one for each rank.
    idlest = [(seconds, rank) for rank, seconds in enumerate(ledger.seconds)]
    heapq.heapify(idlest)
    for work, indices, holders, node in runs:
        given = 0
        # A holder that has no time for one has none for those that are like it.
        for rank, held in holders:
            if taken := ledger.give(work, rank, held, len(indices) - given, limit):
                for index in indices[given : given + taken]:
                    owners[index] = rank
                given += taken
                heapq.heappush(idlest, (ledger.seconds[rank], rank))
        for index in indices[given:]:
            near = min(node, key=ledger.seconds.__getitem__, default=None)
            if near is not None and ledger.give(work, near, dict(work.held).get(near, 0), 1, limit):
                owners[index] = near
                heapq.heappush(idlest, (ledger.seconds[near], near))
                continue
            while idlest[0][0] != ledger.seconds[idlest[0][1]]:
                heapq.heappop(idlest)
            owners[index] = rank = idlest[0][1]
            if not ledger.give(work, rank, dict(work.held).get(rank, 0), 1, limit):
                return None
            heapq.heappush(idlest, (ledger.seconds[rank], rank))
    return owners if max(ledger.seconds) <= limit else None


def _costliest_first(works: Sequence[Work]) -> list[int]:
    return sorted(range(len(works)), key=lambda index: (-works[index].cost, index))


def _exchanges(works: Sequence[Work], owners: Sequence[int]) -> int:
    """The number of groups in which anything travels."""
    owned = zip(works, owners, strict=True)
    return len({work.group for work, owner in owned if any(rank != owner for rank, _ in work.held)})
