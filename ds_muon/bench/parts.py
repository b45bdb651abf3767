"""Where the time of a DSMuon iteration goes: the phases of a running engine's step, timed from outside.

For as long as the step is instrumented, its methods are wrapped on their objects, the device is idle whenever a part
begins or ends, and what travels is waited for at once: nothing overlaps, so the parts may add up to more than an
iteration takes by itself. Ranks begin a group's updates together: where a rank waits for others in "exchange", it is
for their Newton-Schulz. Such iterations are for the parts only. The ranges ``ds_muon::...`` that torch's profiler shows
are of the step as it is.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from ds_muon.exchange import Transfer

PARTS = {
    "forward": "forward",
    "backward": "backward, with the reduction of the gradients",
    "flatten": "averaged gradients to one fp32 tensor per group",
    "norm": "norm of the gradients, summed over the ranks",
    "momentum": "momentum and blend",
    "wait": "for the other ranks, before each group's updates",
    "exchange": "travelling matrices to their owners and back",
    "newton_schulz": "Newton-Schulz",
    "write": "updates into the partition, scaled (NorMuon: its rows)",
    "decide": "the ranks agree, the host waits",
    "apply": "AdamW clipped; weights and AdamW's state",
    "all_gather": "weights to the model's dtype, all-gathered",
    "rest": "everything else",
}
"""Key and meaning, in the order of an iteration."""


class Recorder:
    """Times of nested parts, each without the parts inside it, so that together they are the whole.

    Args:
        synchronize: waits until the device is idle.

    Attributes:
        ms: milliseconds of each part since the last ``reset``.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.ms: dict[str, float] = defaultdict(float)
        self._synchronize = synchronize
        self._inside: list[float] = []

    def reset(self) -> None:
        """Forget what was recorded."""
        self.ms.clear()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what runs in this context as a part of this name."""
        self._synchronize()
        start = time.perf_counter()
        self._inside.append(0.0)
        yield
        self._synchronize()
        whole = 1e3 * (time.perf_counter() - start)
        self.ms[name] += whole - self._inside.pop()
        if self._inside:
            self._inside[-1] += whole


@contextmanager
def instrumented(engine: Any, recorder: Recorder) -> Iterator[None]:
    """Within this context the engine's DSMuon steps tell ``recorder`` of their parts. Afterwards it is as before."""
    zero = engine.optimizer
    with ExitStack() as stack:

        def time_as(part: str, target: Any, method: str) -> None:
            original = getattr(target, method)

            def timed(*args: Any, **kwargs: Any) -> Any:
                with recorder.part(part):
                    result = original(*args, **kwargs)
                    if isinstance(result, Transfer):
                        result.wait()
                return result

            stack.enter_context(mock.patch.object(target, method, timed))

        def gather_together(exchange: Any) -> None:
            original = exchange.gather

            def together(partition: Tensor) -> Transfer:
                with recorder.part("wait"):
                    dist.barrier()
                transfer: Transfer = original(partition)
                return transfer

            stack.enter_context(mock.patch.object(exchange, "gather", together))

        time_as("flatten", zero, "take_gradients")
        time_as("norm", zero, "measure")
        time_as("momentum", zero.optimizer, "advance_momentum_")
        for group in zero.muon_groups:
            time_as("exchange", group.exchange, "gather")
            gather_together(group.exchange)
            time_as("exchange", group.exchange, "scatter")
            time_as("newton_schulz", group, "orthogonalize")
        time_as("write", zero, "stage")
        time_as("decide", zero, "decide")
        time_as("apply", zero, "commit")
        time_as("all_gather", zero, "update_lp_params")
        yield
