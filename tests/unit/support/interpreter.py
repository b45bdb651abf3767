"""Triton's interpreter, which runs kernels where there is no GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

GPU = torch.cuda.is_available()


@contextmanager
def defining_kernels() -> Iterator[None]:
    """Around the imports of modules with kernels: on a GPU they are Triton's, elsewhere the interpreter's.

    Skips the importing module without Triton; fails it if Triton is there for compiling already, and there is no GPU.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton", allow_module_level=True)
    if not GPU and not _may_interpret():
        # Not a skip: it would hide that the kernels go untested.
        pytest.fail("Triton was imported before this module could set TRITON_INTERPRET=1; set it for the whole run")
    with pytest.MonkeyPatch.context() as environment:
        if not GPU:
            # Read when kernels are defined.
            environment.setenv("TRITON_INTERPRET", "1")
        yield


@contextmanager
def interpreting() -> Iterator[None]:
    """Around launches, where there is no GPU.

    Triton gives its language the interpreter's meaning at each launch, and again at each call of a function in a
    kernel, which takes half the time of a test. Here it has that meaning all the while.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # as what a kernel sees
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # which a first launch reads too
        scope = interpreter._patch_lang(language)
        # Triton 3.6 makes an integer of an array of one element, which numpy 2.4 no longer does.
        scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
        patch.setattr(interpreter, "_patch_lang", lambda kernel: interpreter._LangPatchScope())
        try:
            yield
        finally:
            scope.restore()


def _may_interpret() -> bool:
    """Whether kernels that are defined with ``TRITON_INTERPRET=1`` can run: Triton's own must have been, too."""
    if "triton" not in sys.modules:
        return True
    import triton.language

    return type(triton.language.sum).__name__ == "InterpretedFunction"
