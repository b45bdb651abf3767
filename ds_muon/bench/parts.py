"""Where the time of a DSMuon iteration goes: methods of a running engine, timed from outside.

The step has no hooks for this. For as long as it is instrumented, the methods are wrapped on their objects, the device
is idle whenever a part begins or ends, and what travels is waited for at once: nothing overlaps, so the parts may add
up to more than an iteration takes by itself. Ranks begin a group's updates together: where a rank waits for others in
"exchange", it is for their Newton-Schulz. Such iterations are for the parts only.
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
        sent_bytes: sent by this rank's exchanges since then.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.ms: dict[str, float] = defaultdict(float)
        self.sent_bytes = 0
        self._synchronize = synchronize
        self._inside: list[float] = []

    def reset(self) -> None:
        """Forget what was recorded."""
        self.ms.clear()
        self.sent_bytes = 0

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

        def begin_together(group: Any) -> None:
            original = group.begin

            def together(*args: Any) -> None:
                with recorder.part("wait"):
                    dist.barrier()
                original(*args)

            stack.enter_context(mock.patch.object(group, "begin", together))

        def count_bytes(exchange: Any) -> None:
            original = exchange._all_to_all

            def counted(packed: Tensor, *args: Any) -> Any:
                recorder.sent_bytes += packed.numel() * packed.element_size()
                return original(packed, *args)

            stack.enter_context(mock.patch.object(exchange, "_all_to_all", counted))

        time_as("flatten", zero, "_take_gradient")
        time_as("norm", zero, "_measure")
        time_as("momentum", zero.optimizer, "advance_momentum_")
        for group in zero.muon_groups:
            for method in ("begin", "run", "finish"):
                time_as("write", group, method)
            begin_together(group)
            time_as("newton_schulz", group, "_orthogonalize")
            time_as("exchange", group.exchange, "gather")
            time_as("exchange", group.exchange, "scatter")
            count_bytes(group.exchange)
        time_as("decide", zero.guard, "decide")
        time_as("apply", zero, "_clip_adamw_")
        time_as("apply", zero, "_commit")
        time_as("all_gather", zero, "update_lp_params")
        yield
