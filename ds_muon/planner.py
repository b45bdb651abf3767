"""What Muon's step costs at world sizes that are not at hand: ``ds-muon plan``. Pure functions of shapes; no ranks.

The matrices of a model lie in one flat buffer, in the model's order, as ZeRO lays them out. Two schemes are compared:

    ours         a matrix that straddles a boundary travels to one of its holders and is orthogonalized there, once
    each holder  every rank that holds a piece of a matrix orthogonalizes all of it, as DeepSpeed's own Muon does

The second needs the whole averaged gradient on every holder, which `reduce_scatter: false` leaves there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ds_muon.orthogonalize import NewtonSchulz
from ds_muon.partition import flat_layout, make_plan

Shapes = list[tuple[str, tuple[int, int]]]

# U travels in fp32, O comes back in the iteration's dtype.
_BYTES_OUT = 4


def gpt(layers: int, width: int) -> Shapes:
    """A GPT with separate q, k, v, o and a 4 x MLP."""
    square, up, down = (width, width), (4 * width, width), (width, 4 * width)
    block = {"q": square, "k": square, "v": square, "o": square, "up": up, "down": down}
    return [(f"{layer}.{name}", shape) for layer in range(layers) for name, shape in block.items()]


def llama(layers: int, width: int, kv: int, hidden: int) -> Shapes:
    """A Llama: grouped-query attention with ``kv`` rows of keys and of values, a gated MLP of ``hidden``."""
    block = {
        "q": (width, width),
        "k": (kv, width),
        "v": (kv, width),
        "o": (width, width),
        "gate": (hidden, width),
        "up": (hidden, width),
        "down": (width, hidden),
    }
    return [(f"{layer}.{name}", shape) for layer in range(layers) for name, shape in block.items()]


GPTS = {"gpt-124m": (12, 768), "gpt-303m": (24, 1024), "gpt-1.2b": (24, 2048), "gpt-3b": (32, 2560)}
"""Layers and width."""

MODELS: dict[str, Callable[[], Shapes]] = {
    **{name: partial(gpt, *size) for name, size in GPTS.items()},
    "llama-3-8b": lambda: llama(32, 4096, 1024, 14336),
    "llama-3-70b": lambda: llama(80, 8192, 1024, 28672),
}


@dataclass(frozen=True)
class StepCost:
    """Newton-Schulz at one world size.

    Attributes:
        world_size: ranks.
        matrices: of the model.
        straddling: those that a boundary cuts.
        moved_bytes: over the network in a step, both ways, over all ranks; ours.
        busiest_bytes: sent or received by the rank that moves most, both ways.
        runs_each_holder: matrices orthogonalized, over all ranks, if each holder does it; ours are ``matrices``.
        flops: operations of the iteration, each matrix once.
        busiest_flops: of the most loaded rank; ours.
        busiest_flops_each_holder: of the most loaded rank, if each holder does it.
    """

    world_size: int
    matrices: int
    straddling: int
    moved_bytes: int
    busiest_bytes: int
    runs_each_holder: int
    flops: float
    busiest_flops: float
    busiest_flops_each_holder: float

    @property
    def balance(self) -> float:
        """Work of the most loaded rank over the mean; ours."""
        return self.busiest_flops * self.world_size / self.flops

    @property
    def over_ours(self) -> float:
        """Work of the most loaded rank if each holder orthogonalizes, over ours."""
        return self.busiest_flops_each_holder / self.busiest_flops


def step_cost(shapes: Shapes, world_size: int, settings: NewtonSchulz) -> StepCost:
    """The cost of one step.

    Args:
        shapes: name and (rows, cols) of each matrix, in the model's order.
        world_size: ranks, at least 1.
        settings: of the iteration.
    """
    layout = flat_layout([math.prod(shape) for _, shape in shapes], world_size)
    plan = make_plan([shapes], [layout], world_size, settings.cost)
    (group,) = plan.groups
    moved = [0] * world_size
    each_holder = [0.0] * world_size
    for matrix in group.matrices:
        for piece in matrix.slices:
            each_holder[piece.rank] += settings.cost(matrix.rows, matrix.cols)
            if piece.rank != matrix.owner:
                for rank in (piece.rank, matrix.owner):
                    moved[rank] += piece.numel * (_BYTES_OUT + settings.dtype.itemsize)
    return StepCost(
        world_size=world_size,
        matrices=len(shapes),
        straddling=len(group.straddlers),
        moved_bytes=plan.moved_elements() * (_BYTES_OUT + settings.dtype.itemsize),
        busiest_bytes=max(moved),
        runs_each_holder=sum(len(matrix.slices) for matrix in group.matrices),
        flops=sum(settings.cost(*shape) for _, shape in shapes),
        busiest_flops=max(plan.loads),
        busiest_flops_each_holder=max(each_holder),
    )


def default_settings() -> NewtonSchulz:
    """The defaults of the config on a GPU."""
    return NewtonSchulz.resolve(torch.device("cpu"), ns_dtype="float16")


def table(costs: Sequence[StepCost], tflops: float, gigabytes: float) -> str:
    """One line per world size, with times at a rate of the iteration and of a rank's link."""
    lines = [
        f"{'ranks':>6}{'straddling':>12}{'moved MB':>10}{'busiest MB':>12}{'busiest, TFLOP':>16}{'over mean':>11}"
        f"{'Newton-Schulz, ms':>19}{'exchange, ms':>14}{'each holder: runs':>19}{'over ours':>11}"
    ]
    for cost in costs:
        iteration = cost.busiest_flops / tflops / 1e9
        exchange = cost.busiest_bytes / gigabytes / 1e6
        lines.append(
            f"{cost.world_size:>6}{cost.straddling:>12}{cost.moved_bytes / 1e6:>10.0f}{cost.busiest_bytes / 1e6:>12.1f}"
            f"{cost.busiest_flops / 1e12:>16.3f}{cost.balance:>11.2f}{iteration:>19.2f}{exchange:>14.2f}"
            f"{cost.runs_each_holder:>19}{cost.over_ours:>11.2f}"
        )
    return "\n".join(lines)
