"""What Muon's part of a step costs on any number of ranks, computed from the shapes of the matrices alone.

ZeRO lays the matrices of a model in one flat buffer, in the model's order, and cuts it into a partition for each rank.
A matrix that a boundary cuts has several holders, each with a slice of it. One rank, its owner, orthogonalizes it.

    DSMuon    the owner is a holder, or another rank where that makes a step
              at least 2 % faster
    kept      owners are always holders: only what a boundary cuts is exchanged
    ideal     as DSMuon, if the exchange took no time: no engine does this, it
              shows how even the ranks could be
    repeated  every holder orthogonalizes the whole matrix, as in DeepSpeed's
              own Muon, from the whole averaged gradient, which each has with
              `reduce_scatter: false`

Times are estimates. A rank takes the time of its operations at the rate of the iteration, and then that of the bytes
that it sends and receives at the rate of its link. A step takes as long as the slowest rank, and 0.1 ms more where
anything is exchanged. Owners are those of the engine, which reckons with 500 TFLOP/s and 100 GB/s, whatever rates are
given here. With --ranks-per-node, what stays in a node travels at a rate of its own, and of several ranks that have
time for a matrix, one of the node that holds most of it owns it.

Memory is an upper bound of what a rank allocates in a step beside its gradients, which AdamW's step needs as well.
Between steps Muon saves one of AdamW's two moments: where a step takes less than that, its peak is not above AdamW's.

With CPU offload owners are holders, and the time is that of the bus alone: per element of the partition, 6 bytes go up
(the blend of momentum and gradient, and the model's weight) while 2 come down (the result of Newton-Schulz).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType

import torch

from ds_muon.exchange import element_bytes, result_dtype
from ds_muon.layout import Piece
from ds_muon.offload import STAGING_BYTES
from ds_muon.orthogonalize import BACKENDS, WORKSPACE_BYTES, NewtonSchulz
from ds_muon.plan.partition import GroupPlan, Plan, make_plan, with_owners
from ds_muon.plan.rates import RATES, Rates
from ds_muon.plan.zero_layout import flat_layout
from ds_muon.text import columns

_WHOLE: Mapping[str, tuple[Piece, ...]] = MappingProxyType({})

FREE = Rates(bytes_per_second=math.inf, exchange_seconds=0.0, least_gain=0.0)
"""As if moving cost nothing: ranks are as even as the matrices allow."""

Shapes = list[tuple[str, tuple[int, ...]]]
"""Name and shape of each tensor: a matrix, unless pieces are given that it consists of."""


def default_settings() -> NewtonSchulz:
    """The defaults of the config on a GPU."""
    return NewtonSchulz.resolve(torch.device("cpu"), ns_dtype="float16")


def _stacked(layers: int, **block: tuple[int, int]) -> Shapes:
    return [(f"{layer}.{name}", shape) for layer in range(layers) for name, shape in block.items()]


def gpt(layers: int, width: int) -> Shapes:
    """A GPT with separate q, k, v, o and a 4 x MLP."""
    square, up, down = (width, width), (4 * width, width), (width, 4 * width)
    return _stacked(layers, q=square, k=square, v=square, o=square, up=up, down=down)


def llama(layers: int, width: int, kv: int, hidden: int) -> Shapes:
    """A Llama: grouped-query attention with ``kv`` rows of keys and of values, a gated MLP of ``hidden``."""
    square, grouped, up, down = (width, width), (kv, width), (hidden, width), (width, hidden)
    return _stacked(layers, q=square, k=grouped, v=grouped, o=square, gate=up, up=up, down=down)


GPTS = {"gpt-124m": (12, 768), "gpt-303m": (24, 1024), "gpt-1.2b": (24, 2048), "gpt-3b": (32, 2560)}
"""Layers and width."""

MODELS: dict[str, Callable[[], Shapes]] = {
    **{name: partial(gpt, *size) for name, size in GPTS.items()},
    "llama-3-8b": lambda: llama(32, 4096, 1024, 14336),
    "llama-3-70b": lambda: llama(80, 8192, 1024, 28672),
}


@dataclass(frozen=True)
class OffloadCost:
    """What CPU offload changes for a rank, of Muon's part: momentum in fp32, a model in half precision.

    Attributes:
        moved: bytes of the accelerator that it frees, and of the host that it takes: fp32 weights and momentum, and the
            fp32 gradient, which without it is there in a step.
        step_memory: an upper bound of the bytes that a step allocates on the accelerator.
        bus_bytes: up or down in a step. The gradients, in fp32, have come down before.
    """

    moved: int
    step_memory: int
    bus_bytes: int

    def seconds(self, bytes_per_second: float) -> float:
        """What the bus needs for what goes up in a step, at this rate in one direction."""
        return self.bus_bytes * _UP / (_UP + _DOWN) / bytes_per_second


# Bytes per element over the bus in a step: U in fp32 and the model's weight, and O.
_UP, _DOWN = 4 + 2, 2


@dataclass(frozen=True)
class LinkCost:
    """What travels by which link where nodes are known, and what would if owners did not come from the same node first.

    Attributes:
        between_nodes: bytes in a step, both ways, over all ranks. The rest of ``moved_bytes`` stays in a node.
        busiest_in_node: sent or received in its node by the rank that moves most there, both ways.
        busiest_between_nodes: the same of what leaves or enters its node.
        between_nodes_if_unknown: over all ranks, if owners are chosen without a look at nodes.
        busiest_between_nodes_if_unknown: of the busiest rank, the same.
        balance_if_unknown: work of the busiest rank over the mean, the same.
        seconds_if_unknown: of a step, the same.
    """

    between_nodes: int
    busiest_in_node: int
    busiest_between_nodes: int
    between_nodes_if_unknown: int
    busiest_between_nodes_if_unknown: int
    balance_if_unknown: float
    seconds_if_unknown: float


@dataclass(frozen=True)
class Traveller:
    """A matrix, or several side by side, of which a rank that is not the owner holds a slice."""

    name: str
    rows: int
    cols: int
    holders: tuple[int, ...]
    owner: int


@dataclass(frozen=True)
class StepCost:
    """Newton-Schulz at one world size, as the engine plans it; *kept*, *ideal* and *repeated*: see the module.

    Attributes:
        world_size: ranks.
        matrices: of the model.
        straddling: those that a boundary cuts.
        moved: those that a rank owns which holds nothing of them.
        moved_bytes: over the network in a step, both ways, over all ranks.
        moved_bytes_kept: the same, kept.
        busiest_bytes: sent or received by the rank that moves most, both ways.
        links: what of it travels by which link; None if nodes are not known.
        runs_repeated: matrices orthogonalized, over all ranks, repeated.
        flops: operations of the iteration, each matrix once.
        loads: operations of each rank, in order of rank.
        busiest_flops_ideal: of the busiest rank, ideal.
        busiest_flops_kept: of the busiest rank, kept.
        busiest_flops_repeated: of the busiest rank, repeated.
        rates: at which times are.
        seconds: of a step, estimated.
        seconds_kept: the same, kept.
        backend: of Newton-Schulz, for the two numbers that follow.
        exchange_memory: the most bytes that a rank has allocated in a step for what travels; see ``step_memory``.
        step_memory: the same, with the batch that Newton-Schulz works on.
        saved_memory: bytes that a rank needs less than with AdamW, between steps: one of two fp32 moments.
        offload: the same step with CPU offload.
        travellers: what crosses the network, with who holds and who owns it.
    """

    world_size: int
    matrices: int
    straddling: int
    moved: int
    moved_bytes: int
    moved_bytes_kept: int
    busiest_bytes: int
    links: LinkCost | None
    runs_repeated: int
    flops: float
    loads: tuple[float, ...]
    busiest_flops_ideal: float
    busiest_flops_kept: float
    busiest_flops_repeated: float
    rates: Rates
    seconds: float
    seconds_kept: float
    backend: str
    exchange_memory: int
    step_memory: int
    saved_memory: int
    offload: OffloadCost
    travellers: tuple[Traveller, ...]

    @property
    def busiest_flops(self) -> float:
        """Operations of the busiest rank."""
        return max(self.loads)

    @property
    def balance(self) -> float:
        """Work of the busiest rank over the mean."""
        return self.busiest_flops * self.world_size / self.flops

    @property
    def balance_ideal(self) -> float:
        """Work of the busiest rank over the mean, ideal."""
        return self.busiest_flops_ideal * self.world_size / self.flops

    @property
    def balance_kept(self) -> float:
        """Work of the busiest rank over the mean, kept."""
        return self.busiest_flops_kept * self.world_size / self.flops

    @property
    def repeated_over_planned(self) -> float:
        """Work of the busiest rank, repeated, over that of the engine's plan."""
        return self.busiest_flops_repeated / self.busiest_flops


def step_cost(
    shapes: Shapes,
    world_size: int,
    settings: NewtonSchulz,
    *,
    rates: Rates = RATES,
    normuon: bool = False,
    pieces: Mapping[str, tuple[Piece, ...]] = _WHOLE,
) -> StepCost:
    """The cost of one step.

    Args:
        shapes: of each tensor, in the model's order.
        world_size: ranks, at least 1.
        settings: of the iteration.
        rates: for the times; the owners are the engine's on such nodes, whatever the rates.
        normuon: whether results travel with NorMuon's factors, in fp32.
        pieces: which matrices lie where in a tensor, by its name; see ``make_plan``.
    """
    layout = flat_layout([math.prod(shape) for _, shape in shapes], world_size)
    size = element_bytes(settings, normuon=normuon)
    cost_of = cache(settings.cost)
    nodes = rates.ranks_per_node
    chosen_by = replace(RATES, ranks_per_node=nodes)
    plan = make_plan([shapes], [layout], world_size, cost_of, rates=chosen_by, element_bytes=size, pieces=pieces)
    other_owners = partial(with_owners, plan.groups, world_size, cost_of, element_bytes=size)
    ideal, kept = (other_owners(rates=other) for other in (FREE, replace(chosen_by, least_gain=1.0)))
    (group,) = plan.groups
    by_shape = Counter((matrix.rows, matrix.cols) for matrix in group.matrices)
    repeated = [0.0] * world_size
    for unit in group.units:
        for part in unit.slices:
            repeated[part.rank] += sum(cost_of(matrix.rows, matrix.cols) for matrix in unit.matrices)
    exchange, with_batch = step_memory(group, settings, normuon=normuon)
    return StepCost(
        world_size=world_size,
        matrices=len(group.matrices),
        straddling=len(group.straddlers),
        moved=sum(unit.given_away for unit in group.units),
        moved_bytes=plan.moved_elements() * size,
        moved_bytes_kept=kept.moved_elements() * size,
        busiest_bytes=max(plan.moved_by_rank()) * size,
        links=_link_cost(plan, other_owners(rates=RATES), rates, size) if nodes else None,
        runs_repeated=sum(len(unit.slices) * len(unit.matrices) for unit in group.units),
        flops=sum(count * cost_of(*shape) for shape, count in by_shape.items()),
        loads=plan.loads,
        busiest_flops_ideal=max(ideal.loads),
        busiest_flops_kept=max(kept.loads),
        busiest_flops_repeated=max(repeated),
        rates=rates,
        seconds=plan.seconds(rates, element_bytes=size),
        seconds_kept=kept.seconds(rates, element_bytes=size),
        backend=settings.backend,
        exchange_memory=max(exchange),
        step_memory=max(with_batch),
        saved_memory=torch.float32.itemsize * group.partition_size,
        offload=offload_cost(kept.groups[0], settings, normuon=normuon),
        travellers=tuple(Traveller(u.name, u.rows, u.cols, u.holders, u.owner) for u in group.travellers),
    )


def _link_cost(plan: Plan, anywhere: Plan, rates: Rates, size: int) -> LinkCost:
    """Of the engine's plan, beside one that does not know the nodes. ``size``: bytes per element, both ways."""
    between, between_if_unknown = plan.moved_by_rank(rates.ranks_per_node), anywhere.moved_by_rank(rates.ranks_per_node)
    in_node = [total - across for total, across in zip(plan.moved_by_rank(), between, strict=True)]
    return LinkCost(
        between_nodes=sum(between) // 2 * size,  # a sender and a receiver
        busiest_in_node=max(in_node) * size,
        busiest_between_nodes=max(between) * size,
        between_nodes_if_unknown=sum(between_if_unknown) // 2 * size,
        busiest_between_nodes_if_unknown=max(between_if_unknown) * size,
        balance_if_unknown=anywhere.balance,
        seconds_if_unknown=anywhere.seconds(rates, element_bytes=size),
    )


def offload_cost(plan: GroupPlan, settings: NewtonSchulz, *, normuon: bool = False) -> OffloadCost:
    """The cost of a step of a param group with CPU offload, for the rank that needs most; see ``step_memory``."""
    exchange, _ = step_memory(plan, settings, normuon=normuon)
    backend, size, half = BACKENDS[settings.backend](), plan.partition_size, STAGING_BYTES // 2

    def staged(rows: int, cols: int) -> int:
        """U of two batches, O of two, and what Newton-Schulz works in."""
        u = rows * cols * torch.float32.itemsize
        count = max(1, min(half // u, size * torch.float32.itemsize // u))
        one = backend.workspace(rows, cols, settings.dtype, settings.iteration(rows, cols).buffers)
        return count * (2 * u + 2 * rows * cols * result_dtype(settings, normuon=normuon).itemsize + one)

    shapes = {(matrix.rows, matrix.cols) for unit in plan.units for matrix in unit.matrices}
    return OffloadCost(
        moved=3 * torch.float32.itemsize * size,
        step_memory=max(exchange) + max(staged(*shape) for shape in shapes),
        bus_bytes=(_UP + _DOWN) * size,
    )


def step_memory(plan: GroupPlan, settings: NewtonSchulz, *, normuon: bool = False) -> tuple[list[int], list[int]]:
    """An upper bound of the bytes that each rank allocates in the step of a param group, beside its gradients.

    A rank has, of the travelling matrices that it owns, U in fp32 and a copy of O; and of each slice that it sends or
    receives, a packed copy each way. Newton-Schulz works on one batch at a time, in ``WORKSPACE_BYTES`` or in what one
    matrix needs. Of several groups, two are under way at a time.

    Args:
        plan: of the group.
        settings: of the iteration; its backend says what a batch works in.
        normuon: whether results are NorMuon's.

    Returns:
        By rank: for what travels, and that together with a batch.
    """
    backend = BACKENDS[settings.backend]()
    elements = [0] * plan.world_size
    runs: list[Counter[tuple[int, int]]] = [Counter() for _ in range(plan.world_size)]
    for unit in plan.units:
        for matrix in unit.matrices:
            runs[unit.owner][matrix.rows, matrix.cols] += 1
        if unit.travels:
            elements[unit.owner] += unit.piece.numel
        for part in unit.slices:
            if part.rank != unit.owner:
                elements[part.rank] += part.numel
                elements[unit.owner] += part.numel

    def batch(rows: int, cols: int, count: int) -> int:
        one = backend.workspace(rows, cols, settings.dtype, settings.iteration(rows, cols).buffers)
        return min(count * one, max(WORKSPACE_BYTES, one))

    exchange = [element_bytes(settings, normuon=normuon) * count for count in elements]
    largest = [max((batch(*shape, count) for shape, count in of_rank.items()), default=0) for of_rank in runs]
    return exchange, [sum(both) for both in zip(exchange, largest, strict=True)]


@dataclass(frozen=True)
class _Block:
    """Lines of text, then a table: its headings, and the cells of a line for each world size."""

    title: str
    headings: tuple[str, ...]
    cells: Callable[[StepCost], tuple[str, ...]]

    def lines(self, costs: Sequence[StepCost]) -> list[str]:
        rows = [("ranks", *self.headings), *((str(cost.world_size), *self.cells(cost)) for cost in costs)]
        return [self.title, *columns(rows, len(rows[0]) * "> ")]


def _megabytes(size: int, digits: int = 0) -> str:
    return f"{size / 1e6:.{digits}f}"


_STEP = _Block(
    "Muon's part of a step. Cut: matrices of which several ranks hold a slice.\n"
    "Moved: those orthogonalized by a rank that holds nothing of them. MB: both ways",
    ("ms", "cut", "moved", "MB exchanged by all", "by the busiest rank"),
    lambda cost: (
        f"{1e3 * cost.seconds:.2f}",
        *(str(cost.straddling), str(cost.moved)),
        *(_megabytes(cost.moved_bytes), _megabytes(cost.busiest_bytes, 1)),
    ),
)

_WORK = _Block(
    "Newton-Schulz of a rank in TFLOP, and of the busiest rank over the mean",
    ("least", "mean", "busiest", "busiest/mean"),
    lambda cost: (
        *(f"{1e-12 * flops:.3f}" for flops in (min(cost.loads), cost.flops / cost.world_size, cost.busiest_flops)),
        f"{cost.balance:.2f}",
    ),
)

_OTHERS = _Block(
    "The same, shared out in other ways\n"
    "  kept      only ranks that hold a slice of a matrix may orthogonalize it\n"
    "  ideal     as DSMuon, if the exchange took no time\n"
    "  repeated  every rank that holds a slice orthogonalizes the whole matrix, as in\n"
    "            DeepSpeed's Muon. Runs: of Newton-Schulz, over all ranks. Work: of\n"
    "            the busiest rank, over that of DSMuon's",
    ("kept: ms", "kept: busiest/mean", "ideal: busiest/mean", "repeated: runs", "work"),
    lambda cost: (
        f"{1e3 * cost.seconds_kept:.2f}",
        *(f"{ratio:.2f}" for ratio in (cost.balance_kept, cost.balance_ideal)),
        *(str(cost.runs_repeated), f"{cost.repeated_over_planned:.2f}"),
    ),
)

_MEMORY = _Block(
    "Memory of a GPU in MB: what a step takes, at most, and what Muon saves between\nsteps beside AdamW",
    ("for the exchange", "with Newton-Schulz", "saved"),
    lambda cost: (
        *(_megabytes(size) for size in (cost.exchange_memory, cost.step_memory)),
        _megabytes(cost.saved_memory, 1),
    ),
)


def _of_links(cost: StepCost) -> tuple[str, ...]:
    link = cost.links
    assert link is not None
    within = cost.moved_bytes - link.between_nodes, link.busiest_in_node
    between = link.between_nodes, link.busiest_between_nodes
    return tuple(_megabytes(size, digits) for both in (within, between) for digits, size in enumerate(both))


_LINKS = _Block(
    "MB exchanged, by all ranks and by the busiest one",
    ("within nodes", "busiest", "between nodes", "busiest"),
    _of_links,
)


def _of_no_nodes(cost: StepCost) -> tuple[str, ...]:
    link = cost.links
    assert link is not None
    sizes = _megabytes(link.between_nodes_if_unknown), _megabytes(link.busiest_between_nodes_if_unknown, 1)
    return *sizes, f"{link.balance_if_unknown:.2f}"


_NO_NODES = _Block(
    "The same, if ranks were chosen without a look at nodes",
    ("between nodes", "busiest", "busiest/mean of Newton-Schulz"),
    _of_no_nodes,
)


def table(costs: Sequence[StepCost], bus: float) -> str:
    """Blocks with a line per world size: time and exchange; by which link, where nodes are known; work, also shared out
    in other ways; memory; CPU offload. At most 80 columns, unless numbers are large.

    Args:
        costs: of one model.
        bus: bytes per second between host and accelerator, in one direction.
    """
    offload = _Block(
        f"With CPU offload, MB of a rank, and the ms that the bus alone takes at {bus / 1e9:g} GB/s",
        ("on the host", "on the GPU in a step", "over the bus", "ms"),
        lambda cost: (
            *map(_megabytes, (cost.offload.moved, cost.offload.step_memory, cost.offload.bus_bytes)),
            f"{1e3 * cost.offload.seconds(bus):.1f}",
        ),
    )
    of_links = [_LINKS, _NO_NODES] if all(cost.links for cost in costs) else []
    blocks = _STEP, *of_links, _WORK, _OTHERS, _MEMORY, offload
    return "\n\n".join("\n".join(block.lines(costs)) for block in blocks)
