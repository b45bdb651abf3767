"""Who holds, who owns, and what moves: the plan of a step as pure functions of shapes and world size.

ZeRO-1/2 lays the parameters of a group end to end in one flat buffer and cuts it into ``world_size`` equal pieces,
wherever the cuts fall. A matrix is orthogonalized by one rank, its owner. One that straddles a cut travels there, to be
reassembled, and so does one that lies whole on a rank, where it is worth it that another one owns it (``owners``).
Nothing here communicates, so a plan can be made, printed and tested for world sizes that are not at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from ds_muon.plan.owners import RATES, Rates, Work, choose_owners, least_loaded_holders

# ZeRO pads a flat buffer to this many elements per rank, so that every piece starts on a 4-byte boundary.
_ELEMENTS_PER_RANK = 2
# ZeRO's ``parameter_alignment`` starts every parameter on a boundary of this many bytes.
_ALIGNMENT_BYTES = 16

ELEMENT_BYTES = 6
"""Of an element that travels, both ways together: U goes out in fp32, O comes back in half precision."""


Layout: TypeAlias = Literal["out_in", "in_out"]
"""What the rows of a matrix are: its outputs, as in nn.Linear, or its inputs, as in transformers' Conv1D."""

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
        offset: where they lie in the holder's partition.
    """

    rank: int
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class Matrix:
    """One (rows, cols) matrix, its slices in order of rank, and the rank that orthogonalizes it, holder or not.

    Rows and columns are those of the weight as it is stored; ``layout`` says what they are.
    """

    name: str
    rows: int
    cols: int
    slices: tuple[Slice, ...]
    owner: int
    layout: Layout = "out_in"

    @property
    def sides(self) -> tuple[int, int]:
        """Numbers of outputs and of inputs, however they are stored."""
        return out_and_in(self.rows, self.cols, self.layout)

    @property
    def straddles(self) -> bool:
        return len(self.slices) > 1

    @property
    def travels(self) -> bool:
        """Whether it does not lie whole on its owner: every slice of other ranks crosses the network, both ways."""
        return self.holders != (self.owner,)

    @property
    def moved(self) -> bool:
        """Whether its owner holds nothing of it."""
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
        """Every matrix of which ``rank`` has a slice, with that slice."""
        return tuple((m, piece) for m in self.matrices for piece in m.slices if piece.rank == rank)

    def owned_travellers(self, rank: int) -> tuple[Matrix, ...]:
        return tuple(m for m in self.travellers if m.owner == rank)

    def outgoing(self, rank: int) -> tuple[tuple[tuple[Matrix, Slice], ...], ...]:
        """For each rank, the slices that ``rank`` sends it: those of matrices it owns. None to itself."""
        return self._routes((m.owner, m, s) for m, s in self._moving() if s.rank == rank)

    def incoming(self, rank: int) -> tuple[tuple[tuple[Matrix, Slice], ...], ...]:
        """For each rank, the slices that it sends to ``rank``, in the order in which it packs them."""
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
    """The groups of one optimizer and the work of each rank.

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
        """Elements that each rank sends to owners and receives as one; as many take the way back."""
        moved = [0] * len(self.loads)
        for matrix in self.matrices:
            for piece in matrix.slices:
                if piece.rank != matrix.owner:
                    moved[piece.rank] += piece.numel
                    moved[matrix.owner] += piece.numel
        return tuple(moved)

    def seconds(self, rates: Rates = RATES, *, element_bytes: int = ELEMENT_BYTES) -> float:
        """The time of a step by the model of ``owners``; ``loads`` are taken for operations.

        Args:
            rates: of the model.
            element_bytes: of an element that travels, both ways together.
        """
        exchanges = sum(bool(group.travellers) for group in self.groups)
        ranks = zip(self.loads, self.moved_by_rank(), strict=True)
        busiest = max(rates.of_rank(load, element_bytes * moved) for load, moved in ranks)
        return busiest + exchanges * rates.exchange_seconds

    @property
    def balance(self) -> float:
        """Load of the most loaded rank over the mean; 1 where there is no load."""
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


def out_and_in(rows: int, cols: int, layout: Layout) -> tuple[int, int]:
    """Numbers of outputs and of inputs of a matrix that is stored as (rows, cols)."""
    return (rows, cols) if layout == "out_in" else (cols, rows)


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
        element_size: bytes per element of the model's dtype; matters with ``parameter_alignment`` only.
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
    """Every parameter starts at a multiple of so many elements of a flat buffer. Arguments as for ``flat_layout``."""
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
        cost: work of one (rows, cols) matrix, in operations.
        rates: of the model by which owners are chosen, counting what each rank has to do in all groups; see ``owners``.
            None: owners are holders, the least loaded ones, whatever travels.
        element_bytes: of an element that travels, both ways together.
        stored: how matrices lie in memory, by name; "out_in" where nothing is said.
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
