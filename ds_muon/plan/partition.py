"""Who holds, who owns, and what travels: the plan of a step as pure functions of shapes and world size.

ZeRO-1/2 lays the parameters of a group end to end in one flat buffer and cuts it into ``world_size`` equal partitions,
wherever the cuts fall. A *holder* of a matrix has a slice of it in its partition. One rank, the *owner*, orthogonalizes
the matrix. Slices of other holders travel to the owner, which reassembles the matrix. A matrix with one holder travels
if another owner makes the step faster (``owners``). Matrices that lie side by side in the columns of a tensor do all
this together, as one *unit*; any other matrix is a unit of its own, whether it is a tensor, an expert of a stack or a
head. Nothing here communicates, so a plan can be made, printed and tested for any world size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from ds_muon.layout import Layout, Piece, out_and_in, whole
from ds_muon.plan.owners import Work, choose_owners
from ds_muon.plan.rates import RATES, Rates
from ds_muon.plan.zero_layout import FlatLayout, Slice, cut

ELEMENT_BYTES = 6
"""Bytes per element that travels, both ways together: U goes out in fp32, O comes back in half precision."""

_OUT_IN: Mapping[str, Layout] = MappingProxyType({})
_WHOLE: Mapping[str, tuple[Piece, ...]] = MappingProxyType({})


@dataclass(frozen=True)
class Matrix:
    """One (rows, cols) matrix as it is stored: what Newton-Schulz gets.

    Attributes:
        piece, number: of its unit, and of the strip that it is in that, if there are strips.
    """

    name: str
    rows: int
    cols: int
    layout: Layout
    piece: Piece
    number: int

    @property
    def sides(self) -> tuple[int, int]:
        """Numbers of outputs and inputs, however the matrix is stored."""
        return out_and_in(self.rows, self.cols, self.layout)


@dataclass(frozen=True)
class Unit:
    """What is held, sent and owned as a whole: a matrix, or a piece of a tensor with several matrices in strips.

    Attributes:
        name: of the matrix, or of the tensor with the place of the piece in it.
        tensor: the parameter that it is a piece of.
        piece: where it lies in that, and its strips.
        matrices: one, or one for each strip.
        slices: in order of rank.
        owner: the rank that orthogonalizes its matrices. It may hold nothing of them.
    """

    name: str
    tensor: str
    piece: Piece
    matrices: tuple[Matrix, ...]
    slices: tuple[Slice, ...]
    owner: int

    @property
    def rows(self) -> int:
        return self.piece.rows

    @property
    def cols(self) -> int:
        return self.piece.cols

    @property
    def straddles(self) -> bool:
        return len(self.slices) > 1

    @property
    def travels(self) -> bool:
        """Whether a rank that is not the owner holds a slice. Such slices cross the network, both ways."""
        return self.holders != (self.owner,)

    @property
    def given_away(self) -> bool:
        """Whether the owner holds nothing of it."""
        return self.owner not in self.holders

    @property
    def holders(self) -> tuple[int, ...]:
        return tuple(piece.rank for piece in self.slices)


@dataclass(frozen=True)
class GroupPlan:
    """All units of one param group, in flat order."""

    world_size: int
    partition_size: int
    units: tuple[Unit, ...]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for unit in self.units for matrix in unit.matrices)

    @property
    def straddlers(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if unit.straddles)

    @property
    def travellers(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if unit.travels)

    def held(self, rank: int) -> tuple[tuple[Unit, Slice], ...]:
        """Every unit that ``rank`` holds a slice of, with that slice."""
        return tuple((unit, part) for unit in self.units for part in unit.slices if part.rank == rank)

    def owned_travellers(self, rank: int) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.travellers if unit.owner == rank)

    def outgoing(self, rank: int) -> tuple[tuple[tuple[Unit, Slice], ...], ...]:
        """For each owner, the slices that ``rank`` sends it. None to itself."""
        return self._by_peer((u.owner, u, s) for u, s in self._travelling() if s.rank == rank)

    def incoming(self, rank: int) -> tuple[tuple[tuple[Unit, Slice], ...], ...]:
        """For each holder, the slices that it sends to ``rank``, in packing order."""
        return self._by_peer((s.rank, u, s) for u, s in self._travelling() if u.owner == rank)

    def _travelling(self) -> Iterator[tuple[Unit, Slice]]:
        return ((u, s) for u in self.units for s in u.slices if s.rank != u.owner)

    def _by_peer(self, slices: Iterable[tuple[int, Unit, Slice]]) -> tuple[tuple[tuple[Unit, Slice], ...], ...]:
        found: list[list[tuple[Unit, Slice]]] = [[] for _ in range(self.world_size)]
        for peer, unit, part in slices:
            found[peer].append((unit, part))
        return tuple(map(tuple, found))


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
    def units(self) -> tuple[Unit, ...]:
        return tuple(unit for group in self.groups for unit in group.units)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for group in self.groups for matrix in group.matrices)

    def moved_elements(self) -> int:
        """Elements that cross the network each way in a step."""
        return sum(self.moved_by_rank()) // 2

    def moved_by_rank(self, ranks_per_node: int = 1) -> tuple[int, ...]:
        """For each rank, the elements that it sends to owners and receives as an owner. As many travel back.

        Args:
            ranks_per_node: counts only what travels between nodes of so many ranks.
        """
        moved = [0] * len(self.loads)
        for unit in self.units:
            for part in unit.slices:
                if part.rank // ranks_per_node != unit.owner // ranks_per_node:
                    moved[part.rank] += part.numel
                    moved[unit.owner] += part.numel
        return tuple(moved)

    def seconds(self, rates: Rates = RATES, *, element_bytes: int = ELEMENT_BYTES) -> float:
        """The time of a step by the model of ``owners``, for ``loads`` in floating-point operations.

        Arguments as for ``make_plan``.
        """
        exchanges = sum(bool(group.travellers) for group in self.groups)
        size, moved = element_bytes, (self.moved_by_rank(rates.ranks_per_node or 1), self.moved_by_rank())
        ranks = zip(self.loads, *moved, strict=True)
        busiest = max(rates.of_rank(load, size * across, size * (total - across)) for load, across, total in ranks)
        return busiest + exchanges * rates.exchange_seconds

    @property
    def balance(self) -> float:
        """Load of the most loaded rank over the mean; 1 without any load."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    def summary(self) -> str:
        """One line for a log: matrices, straddling ones, elements moved, balance."""
        straddling = sum(len(group.straddlers) for group in self.groups)
        given_away = sum(unit.given_away for unit in self.units)
        return (
            f"{len(self.matrices)} matrices on {len(self.loads)} ranks, {straddling} straddle a partition boundary, "
            f"{given_away} move to a rank that holds nothing of them ({self.moved_elements():,} elements exchanged "
            f"each way), most loaded rank {self.balance:.2f} times the mean"
        )


def make_plan(
    groups: Sequence[Sequence[tuple[str, Sequence[int]]]],
    layouts: Sequence[FlatLayout],
    world_size: int,
    cost: Callable[[int, int], float],
    *,
    rates: Rates = RATES,
    element_bytes: int = ELEMENT_BYTES,
    stored: Mapping[str, Layout] = _OUT_IN,
    pieces: Mapping[str, tuple[Piece, ...]] = _WHOLE,
) -> Plan:
    """Cut every piece of every tensor and give it an owner.

    Args:
        groups: per Muon param group, the (name, shape) of its tensors in the group's order.
        layouts: ``flat_layout`` of each group.
        world_size: ranks that share the groups.
        cost: floating-point operations for one (rows, cols) matrix.
        rates: of the machine, by which owners are chosen over all groups together; see ``choose_owners``.
        element_bytes: bytes per element that travels, both ways together.
        stored: layout of tensors by name; "out_in" by default.
        pieces: of tensors by name, in order; by default a tensor is one matrix, and its shape is that of a matrix.
    """
    cut_groups = [
        GroupPlan(
            world_size,
            layout.partition_size,
            tuple(
                Unit(piece.name(name), name, piece, _matrices(name, piece, stored.get(name, "out_in")), slices, -1)
                for index, offset in zip(layout.order, layout.offsets, strict=True)
                for name, shape in [group[index]]
                for piece in pieces.get(name) or whole(*shape)
                for slices in [cut(offset + piece.start, piece.numel, layout.partition_size)]
            ),
        )
        for group, layout in zip(groups, layouts, strict=True)
    ]
    return with_owners(cut_groups, world_size, cost, rates=rates, element_bytes=element_bytes)


def with_owners(
    groups: Sequence[GroupPlan],
    world_size: int,
    cost: Callable[[int, int], float],
    *,
    rates: Rates = RATES,
    element_bytes: int = ELEMENT_BYTES,
) -> Plan:
    """The plan of groups whose units are cut, whoever owned them. Arguments as for ``make_plan``."""
    cost = cache(cost)
    works = [
        Work(
            g,
            sum(cost(matrix.rows, matrix.cols) for matrix in unit.matrices),
            tuple((part.rank, part.numel) for part in unit.slices),
        )
        for g, group in enumerate(groups)
        for unit in group.units
    ]
    owners = choose_owners(works, world_size, rates, element_bytes)
    loads: list[float] = [0] * world_size
    for work, owner in zip(works, owners, strict=True):
        loads[owner] += work.cost
    remaining = iter(owners)
    return Plan(
        tuple(
            replace(group, units=tuple(replace(unit, owner=next(remaining)) for unit in group.units))
            for group in groups
        ),
        tuple(loads),
    )


def _matrices(tensor: str, piece: Piece, layout: Layout) -> tuple[Matrix, ...]:
    described = enumerate(zip(piece.names(tensor), piece.shapes(), strict=True))
    return tuple(Matrix(name, *shape, layout, piece, number) for number, (name, shape) in described)
