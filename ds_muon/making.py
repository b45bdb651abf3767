"""How all ranks stop if one of them fails while an engine is made: wherever that is, the others wait for it.

Between two collectives a rank is on its own. It may lack the memory for its part, or the compiler that the others have.
So every collective begins with a meeting, and a rank that fails before it goes there, with its error, at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ds_muon.agree import raise_together
from ds_muon.failure import place_of


class Making:
    """The making of engines, one after another or one within another. One instance per process: ``making``."""

    def __init__(self) -> None:
        self._apart = False  # whether others wait for this rank at the next meeting, whatever becomes of it

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside are collectives, and nothing that may fail on one rank alone. A collective.

        Raises:
            RuntimeError: another rank has failed. It quotes that rank.
        """
        self._apart = False
        raise_together(None)
        yield
        self._apart = dist.get_world_size() > 1

    @contextmanager
    def of_engine(self, advice: Callable[[], str]) -> Iterator[None]:
        """Around the making of an engine. A collective, once all ranks have met inside.

        Args:
            advice: what to change if it is memory that this rank lacks; asked for after an error.

        Raises:
            Exception: whatever has failed on this rank.
            RuntimeError: another rank has failed. It quotes that rank.
        """
        # A function of the script's, such as one that builds a scheduler, may make another engine on the way.
        outer, self._apart = self._apart, False
        error: Exception | None = None
        try:
            try:
                yield
            except Exception as caught:
                if not self._apart:  # raised on all ranks, or before they have met
                    raise
                traceback.clear_frames(caught.__traceback__)  # it may have been for want of memory
                error = caught
            if self._apart:
                raise_together(error, about=_about(error, advice))
        finally:
            self._apart = outer


def _about(error: Exception | None, advice: Callable[[], str]) -> str:
    if error is None or isinstance(error, ValueError):  # a refusal, say, whose message is all that it takes
        return ""
    return f". In initialize, at {place_of(error)}. No engine is made{advice()}"


making = Making()
