"""In which order the matrices of a param group lie, so that fewer boundaries cut one. Pure; the same on every rank.

Partitions are filled one after another with whole matrices. Where none of those left fits into what is left of a
partition, one straddles: a matrix that no partition could hold, if there is one, else the one that is cheapest to send.
Which one is next of those that fit is told by a rule, and no rule is best for every model and world size. Neither is
any always better than the user's own order, in which equal layers repeat: cuts and work are often even there. So a step
is planned with each, and the model of its time (``owners``) decides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ds_muon.orthogonalize import NewtonSchulz
from ds_muon.owners import RATES, Rates
from ds_muon.partition import ELEMENT_BYTES, flat_layout, make_plan, start_multiple

Shape = tuple[int, int]
Order = tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """A matrix that fits into what is left of a partition.

    Attributes:
        index: its place in the user's order.
        elements: of the matrix.
        unevenness: how far the partition's work is from its share of the group's work, if this one is next and what is
            left then is filled at the group's mean of work per element.
    """

    index: int
    elements: int
    unevenness: float


# The least is next.
RULES: dict[str, Callable[[Candidate], tuple[float, int]]] = {
    "largest": lambda candidate: (-candidate.elements, candidate.index),
    "most even": lambda candidate: (candidate.unevenness, -candidate.elements),
    "first": lambda candidate: (0, candidate.index),
}


def default_settings() -> NewtonSchulz:
    """The defaults of the config on a GPU, by whose cost orders are chosen: a checkpoint fits its order only."""
    return NewtonSchulz.resolve(torch.device("cpu"), ns_dtype="float16")


def fastest_order(
    groups: Sequence[Sequence[Shape]],
    world_size: int,
    cost: Callable[[int, int], float],
    *,
    element_size: int = 4,
    parameter_alignment: bool = False,
    rates: Rates = RATES,
    element_bytes: int = ELEMENT_BYTES,
) -> tuple[Order, ...]:
    """For each group, the indices of its matrices in the order in which to lay them out.

    Args:
        groups: per Muon param group, the (rows, cols) of its matrices in the user's order.
        world_size: ranks that share the groups.
        cost: work of one (rows, cols) matrix, in operations.
        element_size: as for ``flat_layout``.
        parameter_alignment: as for ``flat_layout``.
        rates: as for ``make_plan``.
        element_bytes: as for ``make_plan``.

    Returns:
        The orders with the fastest step, if it is faster than with the user's by ``rates.least_gain``, else the user's.
        Matrices of equal size and cost stay in the user's order.
    """

    def seconds(orders: Sequence[Order]) -> float:
        ordered = [[("", group[i]) for i in order] for group, order in zip(groups, orders, strict=True)]
        layouts = [
            flat_layout(
                [math.prod(shape) for _, shape in group],
                world_size,
                element_size=element_size,
                parameter_alignment=parameter_alignment,
            )
            for group in ordered
        ]
        plan = make_plan(ordered, layouts, world_size, cost, rates=rates, element_bytes=element_bytes)
        return plan.seconds(rates, element_bytes=element_bytes)

    best = tuple(tuple(range(len(group))) for group in groups)
    least = seconds(best) * (1 - rates.least_gain)
    multiple = start_multiple(element_size, parameter_alignment)
    for rule in RULES.values():
        orders = tuple(filled(group, world_size, cost, rule, multiple) for group in groups)
        if (found := seconds(orders)) < least:
            best, least = orders, found
    return best


def filled(
    shapes: Sequence[Shape],
    world_size: int,
    cost: Callable[[int, int], float],
    rule: Callable[[Candidate], tuple[float, int]],
    multiple: int = 1,
) -> Order:
    """The order in which ``rule`` fills the partitions of one group.

    Args:
        shapes: (rows, cols) of its matrices, in the user's order.
        world_size: ranks that share the group.
        cost: work of one (rows, cols) matrix.
        rule: one of ``RULES``.
        multiple: every matrix starts at a multiple of so many elements.
    """
    alike: dict[tuple[int, float], deque[int]] = {}
    for index, shape in enumerate(shapes):
        # With what alignment adds to it.
        elements = -(-math.prod(shape) // multiple) * multiple
        alike.setdefault((elements, cost(*shape)), deque()).append(index)
    total = sum(elements * len(queue) for (elements, _), queue in alike.items())
    work = sum(operations * len(queue) for (_, operations), queue in alike.items())
    size = flat_layout([total], world_size).partition_size
    order: list[int] = []
    end = 0
    done: float = 0
    while alike:
        partition, inside = divmod(end, size)
        room = size - inside
        best: tuple[float, int] | None = None
        for (elements, operations), queue in alike.items():
            if elements <= room:
                # Times world_size and total, which keeps integers integers.
                ahead = (done + operations) * world_size - work * (partition + 1)
                uneven = abs(ahead * total + (room - elements) * work * world_size)
                key = rule(Candidate(queue[0], elements, uneven))
                if best is None or key < best:
                    best, chosen = key, (elements, operations)
        if best is None:
            # The smaller piece travels.
            chosen = min(alike, key=lambda kind: (kind[0] <= size, min(room, kind[0] - room), -kind[0]))
        order.append(alike[chosen].popleft())
        end, done = end + chosen[0], done + chosen[1]
        if not alike[chosen]:
            del alike[chosen]
    return tuple(order)
