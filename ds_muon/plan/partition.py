"""Who holds, who owns, and what travels: the plan of a step as pure functions of shapes and world size.

ZeRO-1/2 lays the parameters of a group end to end in one flat buffer and cuts it into ``world_size`` equal partitions,
wherever the cuts fall. A *holder* of a matrix has a slice of it in its partition. One rank, the *owner*, orthogonalizes
the matrix. Slices of other holders travel to the owner, which reassembles the matrix. A matrix with one holder travels
if another owner makes the step faster (``owners``). Nothing here communicates, so a plan can be made, printed and
tested for any world size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ds_muon.layout import Layout, out_and_in
from ds_muon.plan.owners import RATES, Rates, Work, choose_owners, least_loaded_holders

# ZeRO pads a partition to a multiple of this many elements, so that every partition starts on a 4-byte boundary.
_ELEMENTS_PER_RANK = 2
# ZeRO's ``parameter_alignment`` starts every parameter on a boundary of this many bytes.
_ALIGNMENT_BYTES = 16

ELEMENT_BYTES = 6
"""Bytes per element that travels, both ways together: U goes out in fp32, O comes back in half precision."""


_OUT_IN: Mapping[str, Layout] = MappingProxyType({})


@dataclass(frozen=True)
class FlatLayout:
    """Where ZeRO puts the parameters of one group.

    Attributes:
        order: position in the flat buffer -> index of the parameter in the group.
        offsets: first element of each parameter, by position in the flat buffer.
        partition_size: elements per rank, padding included.
    """

    order: tuple[int, ...]
    offsets: tuple[int, ...]
    partition_size: int


@dataclass(frozen=True)
class Slice:
    """The elements of a matrix that one rank holds.

    Attributes:
        rank: the holder.
        start: first element, counted in the flattened matrix.
        numel: number of elements, at least 1.
        offset: first element, counted in the holder's partition.
    """

    rank: int
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class Matrix:
    """One (rows, cols) matrix as it is stored, its slices in order of rank, and its owner, which may hold nothing."""

    name: str
    rows: int
    cols: int
    slices: tuple[Slice, ...]
    owner: int
    layout: Layout = "out_in"

    @property
    def sides(self) -> tuple[int, int]:
        """Numbers of outputs and inputs, however the matrix is stored."""
        return out_and_in(self.rows, self.cols, self.layout)

    @property
    def straddles(self) -> bool:
        return len(self.slices) > 1

    @property
    def travels(self) -> bool:
        """Whether a rank that is not the owner holds a slice. Such slices cross the network, both ways."""
        return self.holders != (self.owner,)

    @property
    def moved(self) -> bool:
        """Whether the owner holds nothing of the matrix."""
        return self.owner not in self.holders

    @property
    def holders(self) -> tuple[int, ...]:
        return tuple(piece.rank for piece in self.slices)


@dataclass(frozen=True)
class GroupPlan:
    """All matrices of one param group, in flat order."""

    world_size: int
    partition_size: int
    matrices: tuple[Matrix, ...]

    @property
    def straddlers(self) -> tuple[Matrix, ...]:
        return tuple(matrix for matrix in self.matrices if matrix.straddles)

    @property
    def travellers(self) -> tuple[Matrix, ...]:
        return tuple(matrix for matrix in self.matrices if matrix.travels)

    def held(self, rank: int) -> tuple[tuple[Matrix, Slice], ...]:
        """Every matrix that ``rank`` holds a slice of, with that slice."""
        return tuple((m, piece) for m in self.matrices for piece in m.slices if piece.rank == rank)

    def owned_travellers(self, rank: int) -> tuple[Matrix, ...]:
        return tuple(m for m in self.travellers if m.owner == rank)

    def outgoing(self, rank: int) -> tuple[tuple[tuple[Matrix, Slice], ...], ...]:
        """For each owner, the slices that ``rank`` sends it. None to itself."""
        return self._routes((m.owner, m, s) for m, s in self._moving() if s.rank == rank)

    def incoming(self, rank: int) -> tuple[tuple[tuple[Matrix, Slice], ...], ...]:
        """For each holder, the slices that it sends to ``rank``, in packing order."""
        return self._routes((s.rank, m, s) for m, s in self._moving() if m.owner == rank)

    def _moving(self) -> Iterator[tuple[Matrix, Slice]]:
        return ((m, s) for m in self.matrices for s in m.slices if s.rank != m.owner)

    def _routes(self, moves: Iterable[tuple[int, Matrix, Slice]]) -> tuple[tuple[tuple[Matrix, Slice], ...], ...]:
        routes: list[list[tuple[Matrix, Slice]]] = [[] for _ in range(self.world_size)]
        for peer, matrix, piece in moves:
            routes[peer].append((matrix, piece))
        return tuple(map(tuple, routes))


@dataclass(frozen=True)
class Plan:
    """The plan of all Muon param groups, and the work of each rank.

    Attributes:
        groups: one plan per Muon param group, in the optimizer's order.
        loads: cost of the matrices each rank orthogonalizes, over all groups.
    """

    groups: tuple[GroupPlan, ...]
    loads: tuple[float, ...]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for group in self.groups for matrix in group.matrices)

    def moved_elements(self) -> int:
        """Elements that cross the network each way in a step."""
        return sum(self.moved_by_rank()) // 2

    def moved_by_rank(self) -> tuple[int, ...]:
        """For each rank, the elements that it sends to owners and receives as an owner. As many travel back."""
        moved = [0] * len(self.loads)
        for matrix in self.matrices:
            for piece in matrix.slices:
                if piece.rank != matrix.owner:
                    moved[piece.rank] += piece.numel
                    moved[matrix.owner] += piece.numel
        return tuple(moved)

    def seconds(self, rates: Rates = RATES, *, element_bytes: int = ELEMENT_BYTES) -> float:
        """The time of a step by the model of ``owners``. Takes ``loads`` as floating-point operations.

        Args:
            rates: of the machine.
            element_bytes: bytes per element that travels, both ways together.
        """
        exchanges = sum(bool(group.travellers) for group in self.groups)
        ranks = zip(self.loads, self.moved_by_rank(), strict=True)
        busiest = max(rates.of_rank(load, element_bytes * moved) for load, moved in ranks)
        return busiest + exchanges * rates.exchange_seconds

    @property
    def balance(self) -> float:
        """Load of the most loaded rank over the mean; 1 without any load."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    def summary(self) -> str:
        """One line for a log: matrices, straddling ones, elements moved, balance."""
        straddling = sum(len(group.straddlers) for group in self.groups)
        moved = sum(matrix.moved for matrix in self.matrices)
        return (
            f"{len(self.matrices)} matrices on {len(self.loads)} ranks, {straddling} straddle a partition boundary, "
            f"{moved} move to a rank that holds nothing of them ({self.moved_elements():,} elements exchanged each "
            f"way), most loaded rank {self.balance:.2f} times the mean"
        )


def flat_layout(
    numels: Sequence[int],
    world_size: int,
    *,
    element_size: int = 4,
    parameter_alignment: bool = False,
    round_robin: bool = False,
) -> FlatLayout:
    """ZeRO's own layout of one param group.

    Args:
        numels: elements of each parameter, in the group's order; all positive.
        world_size: ranks that share the group.
        element_size: bytes per element of the model's dtype; has an effect with ``parameter_alignment`` only.
        parameter_alignment: ``zero_optimization.parameter_alignment``.
        round_robin: ``zero_optimization.round_robin_gradients``: deal the parameters to the ranks like cards.
    """
    dealt = [range(first, len(numels), world_size) for first in range(world_size if round_robin else 1)]
    order = tuple(index for hand in dealt for index in hand) if round_robin else tuple(range(len(numels)))
    boundary = start_multiple(element_size, parameter_alignment)
    offsets = []
    end = 0
    for index in order:
        start = -(-end // boundary) * boundary
        offsets.append(start)
        end = start + numels[index]
    multiple = _ELEMENTS_PER_RANK * world_size
    return FlatLayout(order, tuple(offsets), -(-end // multiple) * multiple // world_size)


def start_multiple(element_size: int, parameter_alignment: bool) -> int:
    """Every parameter starts at a multiple of this many elements. Arguments as for ``flat_layout``."""
    return _ALIGNMENT_BYTES // math.gcd(_ALIGNMENT_BYTES, element_size) if parameter_alignment else 1


def cut(offset: int, numel: int, partition_size: int) -> tuple[Slice, ...]:
    """The slices of a parameter that starts at ``offset`` of the flat buffer, in order of rank."""
    slices = []
    start = 0
    while start < numel:
        rank, inside = divmod(offset + start, partition_size)
        taken = min(numel - start, partition_size - inside)
        slices.append(Slice(rank, start, taken, inside))
        start += taken
    return tuple(slices)


def make_plan(
    groups: Sequence[Sequence[tuple[str, tuple[int, int]]]],
    layouts: Sequence[FlatLayout],
    world_size: int,
    cost: Callable[[int, int], float],
    *,
    rates: Rates | None = RATES,
    element_bytes: int = ELEMENT_BYTES,
    stored: Mapping[str, Layout] = _OUT_IN,
) -> Plan:
    """Cut every matrix and give it an owner.

    Args:
        groups: per Muon param group, the (name, (rows, cols)) of its matrices in the group's order.
        layouts: ``flat_layout`` of each group.
        world_size: ranks that share the groups.
        cost: floating-point operations for one (rows, cols) matrix.
        rates: of the machine, by which owners are chosen over all groups together; see ``choose_owners``. None takes
            ``least_loaded_holders``.
        element_bytes: bytes per element that travels, both ways together.
        stored: layout of matrices by name; "out_in" by default.
    """
    cuts = [
        [(*group[index], cut(offset, math.prod(group[index][1]), layout.partition_size)) for index, offset in placed]
        for group, layout in zip(groups, layouts, strict=True)
        for placed in [zip(layout.order, layout.offsets, strict=True)]
    ]
    works = [
        Work(g, cost(*shape), tuple((piece.rank, piece.numel) for piece in slices))
        for g, group_cuts in enumerate(cuts)
        for _, shape, slices in group_cuts
    ]
    if rates is None:
        owners = least_loaded_holders(works, world_size)
    else:
        owners = choose_owners(works, world_size, rates, element_bytes)
    loads: list[float] = [0] * world_size
    for work, owner in zip(works, owners, strict=True):
        loads[owner] += work.cost
    remaining = iter(owners)
    return Plan(
        groups=tuple(
            GroupPlan(
                world_size,
                layout.partition_size,
                tuple(
                    Matrix(name, *shape, slices, next(remaining), stored.get(name, "out_in"))
                    for name, shape, slices in group_cuts
                ),
            )
            for layout, group_cuts in zip(layouts, cuts, strict=True)
        ),
        loads=tuple(loads),
    )
