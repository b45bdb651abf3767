"""Trainer and Accelerate in ranks that live on."""

from __future__ import annotations

import sys


def forget_accelerate() -> None:
    """Ranks live on from test to test, and Accelerate keeps what it is asked once for the process."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
