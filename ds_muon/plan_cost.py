"""What Muon's step costs at world sizes that are not at hand: ``ds-muon plan``. Pure functions of shapes; no ranks.

The matrices of a model lie in one flat buffer, in the model's order, as ZeRO lays them out.
These schemes are compared:

    ours         a matrix is orthogonalized once, by its owner: one of its holders, or a rank that holds nothing of it
                 where a step is faster for it
    by holders   the same, if owners are always holders: only what straddles a boundary travels
    if free      the same, if moving cost nothing: no engine does this, it shows how even ranks could be
    each holder  every rank that holds a piece of a matrix orthogonalizes all of it, as DeepSpeed's own Muon does

For the last, every holder needs the whole averaged gradient, which `reduce_scatter: false` leaves there.

Times are those of a model, no measurement: of a rank, its operations at the rate of the iteration, and then the bytes
that it sends and receives at the rate of its link; of a step, those of the rank that takes longest, and 0.1 ms if
anything is exchanged. The owners are the engine's, which it chooses by that model at 500 TFLOP/s and 100 GB/s; a step
must be 2 % faster for an owner that holds nothing. With a number of ranks per node, what stays in a node travels at a
rate of its own, and among ranks that have time for a matrix, those of the node that holds most of it own it.

Memory is the most that a rank can have allocated at the same time inside a step, beside its gradients, which AdamW's
step needs as well: for what travels, and with the batch that Newton-Schulz works in. Beside it stands what Muon saves
between steps, one of AdamW's two moments. Where the former is less, the peak of a step is not above that of AdamW's.

With CPU offload owners are holders. Its time is that of the bus alone, in the direction that carries more: U and the
model's weights go up in a step, 6 bytes per element of the partition, while O comes down.
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
        balance_if_unknown: work of the most loaded rank over the mean, the same.
        seconds_if_unknown: of a step by the model, the same.
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
    """Newton-Schulz at one world size.

    Attributes:
        world_size: ranks.
        matrices: of the model.
        straddling: those that a boundary cuts.
        moved: those that a rank owns which holds nothing of them; ours.
        moved_bytes: over the network in a step, both ways, over all ranks; ours.
        moved_bytes_by_holders: the same, if owners are holders.
        busiest_bytes: sent or received by the rank that moves most, both ways; ours.
        links: what of it travels by which link; None if nodes are not known.
        runs: matrices orthogonalized, over all ranks; ours.
        runs_each_holder: the same, if each holder does it.
        flops: operations of the iteration, each matrix once.
        loads: operations of each rank, in order of rank; ours.
        busiest_flops_if_free: of the most loaded rank, if moving cost nothing.
        busiest_flops_by_holders: of the most loaded rank, if owners are holders.
        busiest_flops_each_holder: of the most loaded rank, if each holder does it.
        rates: at which times are.
        seconds: of a step by the model; ours.
        seconds_by_holders: the same, if owners are holders.
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
    moved_bytes_by_holders: int
    busiest_bytes: int
    links: LinkCost | None
    runs: int
    runs_each_holder: int
    flops: float
    loads: tuple[float, ...]
    busiest_flops_if_free: float
    busiest_flops_by_holders: float
    busiest_flops_each_holder: float
    rates: Rates
    seconds: float
    seconds_by_holders: float
    backend: str
    exchange_memory: int
    step_memory: int
    saved_memory: int
    offload: OffloadCost
    travellers: tuple[Traveller, ...]

    @property
    def busiest_flops(self) -> float:
        """Operations of the most loaded rank; ours."""
        return max(self.loads)

    @property
    def balance(self) -> float:
        """Work of the most loaded rank over the mean; ours."""
        return self.busiest_flops * self.world_size / self.flops

    @property
    def balance_if_free(self) -> float:
        """Work of the most loaded rank over the mean, if moving cost nothing."""
        return self.busiest_flops_if_free * self.world_size / self.flops

    @property
    def balance_by_holders(self) -> float:
        """Work of the most loaded rank over the mean, if owners are holders."""
        return self.busiest_flops_by_holders * self.world_size / self.flops

    @property
    def over_ours(self) -> float:
        """Work of the most loaded rank if each holder orthogonalizes, over ours."""
        return self.busiest_flops_each_holder / self.busiest_flops


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
    if_free, by_holders = (other_owners(rates=other) for other in (FREE, replace(chosen_by, least_gain=1.0)))
    (group,) = plan.groups
    by_shape = Counter((matrix.rows, matrix.cols) for matrix in group.matrices)
    each_holder = [0.0] * world_size
    for unit in group.units:
        for part in unit.slices:
            each_holder[part.rank] += sum(cost_of(matrix.rows, matrix.cols) for matrix in unit.matrices)
    exchange, with_batch = step_memory(group, settings, normuon=normuon)
    return StepCost(
        world_size=world_size,
        matrices=len(group.matrices),
        straddling=len(group.straddlers),
        moved=sum(unit.given_away for unit in group.units),
        moved_bytes=plan.moved_elements() * size,
        moved_bytes_by_holders=by_holders.moved_elements() * size,
        busiest_bytes=max(plan.moved_by_rank()) * size,
        links=_link_cost(plan, other_owners(rates=RATES), rates, size) if nodes else None,
        runs=len(group.matrices),
        runs_each_holder=sum(len(unit.slices) * len(unit.matrices) for unit in group.units),
        flops=sum(count * cost_of(*shape) for shape, count in by_shape.items()),
        loads=plan.loads,
        busiest_flops_if_free=max(if_free.loads),
        busiest_flops_by_holders=max(by_holders.loads),
        busiest_flops_each_holder=max(each_holder),
        rates=rates,
        seconds=plan.seconds(rates, element_bytes=size),
        seconds_by_holders=by_holders.seconds(rates, element_bytes=size),
        backend=settings.backend,
        exchange_memory=max(exchange),
        step_memory=max(with_batch),
        saved_memory=torch.float32.itemsize * group.partition_size,
        offload=offload_cost(by_holders.groups[0], settings, normuon=normuon),
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


def table(costs: Sequence[StepCost], bus: float) -> str:
    """Blocks with a line per world size: what travels, and the time of a step; by which link, where nodes are known;
    work and memory; CPU offload.

    Args:
        costs: of one model.
        bus: bytes per second between host and accelerator, in one direction.
    """
    moves: list[tuple[str, ...]] = [
        ("", "", "", "exchanged, MB:", "", "step, model, ms:", "", "runs:", "", "work of each holder,"),
        (
            *("ranks", "straddling", "moved", "by all", "busiest"),
            *("ours", "by holders", "ours", "each holder", "over ours"),
        ),
    ]
    links: list[tuple[str, ...]] = [
        ("", "in a node, MB:", "", "between nodes:", "", "if nodes were not known:", "", "most over mean:", ""),
        ("ranks", *3 * ("by all", "busiest"), "ours", "not known"),
    ]
    loads: list[tuple[str, ...]] = [
        ("", "TFLOP of a rank:", "", "", "most over mean:", "", "", "MB in a step:", "", "saved between"),
        ("ranks", "least", "mean", "most", "ours", "if free", "by holders", "exchange", "and a batch", "steps"),
    ]
    offloads: list[tuple[str, ...]] = [
        ("", "with CPU offload, MB of a rank:", "", "", "step, bus"),
        ("ranks", "to the host", "in a step", "over the bus", "alone, ms"),
    ]
    for cost in costs:
        exchanged = f"{cost.moved_bytes / 1e6:.0f}", f"{cost.busiest_bytes / 1e6:.1f}"
        ms = f"{1e3 * cost.seconds:.2f}", f"{1e3 * cost.seconds_by_holders:.2f}"
        runs = str(cost.runs), str(cost.runs_each_holder), f"{cost.over_ours:.2f}"
        moves.append((str(cost.world_size), str(cost.straddling), str(cost.moved), *exchanged, *ms, *runs))
        if (link := cost.links) is not None:
            pairs = (
                (cost.moved_bytes - link.between_nodes, link.busiest_in_node),
                (link.between_nodes, link.busiest_between_nodes),
                (link.between_nodes_if_unknown, link.busiest_between_nodes_if_unknown),
            )
            sent = [text for of_all, busiest in pairs for text in (f"{of_all / 1e6:.0f}", f"{busiest / 1e6:.1f}")]
            links.append((str(cost.world_size), *sent, f"{cost.balance:.2f}", f"{link.balance_if_unknown:.2f}"))
        work = (f"{1e-12 * flops:.3f}" for flops in (min(cost.loads), cost.flops / cost.world_size, max(cost.loads)))
        balance = (f"{ratio:.2f}" for ratio in (cost.balance, cost.balance_if_free, cost.balance_by_holders))
        memory = f"{cost.exchange_memory / 1e6:.0f}", f"{cost.step_memory / 1e6:.0f}", f"{cost.saved_memory / 1e6:.1f}"
        loads.append((str(cost.world_size), *work, *balance, *memory))
        offload = cost.offload
        sizes = (f"{n / 1e6:.0f}" for n in (offload.moved, offload.step_memory, offload.bus_bytes))
        offloads.append((str(cost.world_size), *sizes, f"{1e3 * offload.seconds(bus):.1f}"))
    of_links = [columns(links, 9 * "> ")] if len(links) > 2 else []
    blocks = columns(moves, 10 * "> "), *of_links, columns(loads, 10 * "> "), columns(offloads, 5 * "> ")
    return "\n\n".join("\n".join(block) for block in blocks)
