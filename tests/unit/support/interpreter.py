"""Triton's interpreter, which runs kernels where there is no GPU."""

from __future__ import annotations

import sys


def may_interpret() -> bool:
    """Whether kernels that are defined with ``TRITON_INTERPRET=1`` can run: Triton's own must have been, too."""
    if "triton" not in sys.modules:
        return True
    import triton.language

    return type(triton.language.sum).__name__ == "InterpretedFunction"
