"""The rates of the model of a step's time (``owners``), measured on these ranks: what ``ds-muon plan`` is told.

All ranks measure at once, each time from a barrier, for what they share, such as the cores of a CPU, belongs to the
rate. In every round the slowest rank counts, for which the others would wait in a step.

    flops               of our Newton-Schulz on random matrices of each shape of the plan, as many as a rank has if all
                        have equally many, each shape counted as often as the plan has it
    exchange_seconds    of an exchange between neighbours, both ways, of next to nothing: collectives and copies
    bytes_per_second    by what a large one takes more

Means of the middle half of the rounds, as of the iterations with which the model is compared.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ds_muon.agree import gather
from ds_muon.bench.clock import milliseconds
from ds_muon.exchange import Exchange, element_bytes, result_dtype
from ds_muon.orthogonalize import NewtonSchulz, batches, orthogonalize_batch
from ds_muon.owners import Rates
from ds_muon.partition import GroupPlan, Matrix, Plan, Slice

# Bytes of the random matrices of one shape.
_MOST_BYTES = 512 << 20
# Elements that the exchanges move each way between two neighbours: next to nothing, and many.
_FEW, _MANY = 16, {"cuda": 1 << 24, "cpu": 1 << 18}
_WARMUP = 3  # the second call of a batch captures a CUDA graph


class RateMeter:
    """Measures in rounds, so that something else can be timed in turns with them.

    Args:
        plan: whose shapes to run.
        settings: of the iteration.
        device: of this rank.
        normuon: whether results travel with NorMuon's factors.
    """

    def __init__(self, plan: Plan, settings: NewtonSchulz, device: torch.device, *, normuon: bool) -> None:
        self._settings, self._device, self._normuon = settings, device, normuon
        self._counts = Counter((matrix.rows, matrix.cols) for matrix in plan.matrices)
        self._probes = [self._newton_schulz(shape) for shape in self._counts]
        if dist.get_world_size() > 1:
            self._probes += [self._exchange(elements) for elements in (_FEW, _MANY[device.type])]
        self._ms: list[list[float]] = [[] for _ in self._probes]
        for _ in range(_WARMUP):
            self.measure()
        for times in self._ms:
            times.clear()

    def measure(self) -> None:
        """One round. A collective."""
        for probe, times in zip(self._probes, self._ms, strict=True):
            dist.barrier()
            times.append(milliseconds(probe, self._device))

    def rates(self) -> Rates:
        """Of all rounds and ranks; among one rank, exchange costs nothing. A collective."""
        of_ranks = gather((self._ms_of_all(), *self._ms[len(self._counts) :]), None)
        seconds = [1e-3 * middle_mean_of_slowest(rounds) for rounds in zip(*of_ranks, strict=True)]
        flops = sum(count * self._settings.cost(*shape) for shape, count in self._counts.items()) / seconds[0]
        if len(of_ranks) == 1:
            return Rates(flops, math.inf, 0.0)
        few, many = seconds[1:]
        size = element_bytes(self._settings, normuon=self._normuon)
        more = size * (_MANY[self._device.type] - _FEW)
        # Where the large one took no longer, its bytes are lost in the noise.
        return Rates(flops, more / (many - few) if many > few else math.inf, few)

    def _ms_of_all(self) -> list[float]:
        """By round, what all matrices of the plan would take this rank."""
        weights = [count / self._held(shape) for shape, count in self._counts.items()]
        rounds = zip(*self._ms[: len(weights)], strict=True)
        return [sum(weight * ms for weight, ms in zip(weights, of_round, strict=True)) for of_round in rounds]

    def _held(self, shape: tuple[int, int]) -> int:
        share = -(-self._counts[shape] // dist.get_world_size())
        return max(1, min(share, _MOST_BYTES // (math.prod(shape) * torch.float32.itemsize)))

    def _newton_schulz(self, shape: tuple[int, int]) -> Callable[[], object]:
        matrices = torch.randn(self._held(shape), *shape, device=self._device).unbind()

        def run() -> None:
            for indices in batches(matrices, self._settings):
                orthogonalize_batch([matrices[i] for i in indices], self._settings)

        return run

    def _exchange(self, elements: int) -> Callable[[], object]:
        exchange = Exchange(neighbours(dist.get_world_size(), elements), dist.get_rank(), None)
        partition = torch.zeros(elements, device=self._device)
        dtype = result_dtype(self._settings, normuon=self._normuon)
        outputs = [torch.zeros(m.rows, m.cols, dtype=dtype, device=self._device) for m in exchange.owned]

        def run() -> None:
            exchange.gather(partition).wait()
            exchange.scatter(outputs, partition, dtype).wait()

        return run


def neighbours(world_size: int, elements: int) -> GroupPlan:
    """Ranks 0 and 1 share a matrix of two rows of so many elements, and so do 2 and 3, and so on.

    The lower rank owns it: the other sends it a row, and gets one back.
    """
    matrices = [
        Matrix(f"{rank}", 2, elements, (Slice(rank, 0, elements, 0), Slice(rank + 1, elements, elements, 0)), rank)
        for rank in range(0, world_size - 1, 2)
    ]
    return GroupPlan(world_size, elements, tuple(matrices))


def middle_mean_of_slowest(of_ranks: Sequence[Sequence[float]]) -> float:
    """Of times by rank and round: the longest of each round; of these the mean without the ends, a quarter each."""
    slowest = sorted(map(max, zip(*of_ranks, strict=True)))
    quarter = len(slowest) // 4
    return statistics.fmean(slowest[quarter : len(slowest) - quarter])
