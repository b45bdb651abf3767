"""How fast a machine computes and sends, as the model of a step's time in ``owners`` sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """A machine, as the model of a step's time sees it.

    The defaults are those of one H100 among many: two thirds of what its large half-precision products reach, and a
    link four times slower than NVLink. The model adds up the bytes in both directions, though a link carries both at
    once. So the default also fits links between nodes with half this speed in each direction.

    Attributes:
        flops: operations of Newton-Schulz per second and rank.
        bytes_per_second: of a rank's link, sent and received together; ``math.inf`` makes travel free.
        bytes_per_second_in_node: the same to ranks of its own node, where nodes are known.
        exchange_seconds: fixed time for each param group in which anything travels: to start collectives and copies.
        least_gain: the fraction of a step's time that must be gained, or owners stay holders. A smaller gain would be
            lost in what the model leaves out. 1: they always do.
        ranks_per_node: each so many ranks, in order, share a node; 0 if that is not known, or no matter.

    Raises:
        ValueError: ``flops`` or a link's rate is not positive, ``exchange_seconds`` or ``ranks_per_node`` is negative,
            or ``least_gain`` is not from 0 to 1.
    """

    flops: float = 5e14
    bytes_per_second: float = 1e11
    exchange_seconds: float = 1e-4
    least_gain: float = 0.02
    bytes_per_second_in_node: float = 4e11
    ranks_per_node: int = 0

    def __post_init__(self) -> None:
        for name in ("flops", "bytes_per_second", "bytes_per_second_in_node"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Rates.{name} = {getattr(self, name)!r}: set a number above 0")
        for name in ("exchange_seconds", "ranks_per_node"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Rates.{name} = {getattr(self, name)!r}: set 0 or a number above")
        if not 0 <= self.least_gain <= 1:
            raise ValueError(f"Rates.least_gain = {self.least_gain!r}: set a number from 0 to 1")

    def of_rank(self, operations: float, moved_bytes: int, in_node: int = 0) -> float:
        """Seconds that a rank spends on its matrices and on its bytes, sent and received, and those in its node."""
        seconds = operations / self.flops + moved_bytes / self.bytes_per_second
        return seconds + in_node / self.bytes_per_second_in_node if in_node else seconds


RATES = Rates()
"""The engine plans with these on every device, because its results do not depend on the plan."""
