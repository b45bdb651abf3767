"""How far work that may take long has come."""

from __future__ import annotations

import time

from ds_muon.say import say

PATIENCE_SECONDS = 5.0
"""How long it may take before anything is said. From line to line the time doubles."""


class Progress:
    """Says on rank 0 how many bytes are done: after some seconds, and then less and less often. No collective.

    Args:
        what: what is done with them, such as "read".
        total: bytes in all.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._start, self._patience = time.monotonic(), PATIENCE_SECONDS

    def add(self, done: int) -> None:
        self._done += done
        seconds = time.monotonic() - self._start
        if seconds >= self._patience:
            self._patience = 2 * seconds
            say(f"{self._what} {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB in {seconds:.0f} s")
