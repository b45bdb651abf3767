"""torch's default dtype and device as a script may have set them, around what an engine does.

``DS_MUON_TEST_DEFAULTS=bfloat16,meta`` lets every test of ranks run with engines that are built and used under these
(``float64,`` is a dtype alone); the tests' own tensors are made under torch's usual ones, before and after:

    DS_MUON_TEST_DEFAULTS=bfloat16,meta python -m pytest -m ranks tests/unit

On "meta" nothing can be computed: whatever lands there by default is missed at once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

FOREIGN = os.environ.get("DS_MUON_TEST_DEFAULTS", "")
# What a script calls of an engine. ``forward`` is the model's; ``destroy`` is left out, which garbage collection may
# call in the middle of anything.
METHODS = ("backward", "step", "save_checkpoint", "load_checkpoint", "offload_states", "reload_states")
CHECK_METHODS = ("__init__", "after_step")

_device: str | None = None


@contextmanager
def defaults(dtype: torch.dtype | None, device: str | None) -> Iterator[None]:
    """Within this context these are torch's defaults; None for its usual ones."""
    global _device
    before = torch.get_default_dtype(), _device

    def set_to(dtype: torch.dtype, device: str | None) -> None:
        global _device
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        _device = device

    set_to(dtype or torch.float32, device)
    try:
        yield
    finally:
        set_to(*before)


def use_foreign_defaults() -> None:
    """Let ``deepspeed.initialize`` in this process, the engines it returns, and checks run under the environment's."""
    import deepspeed

    from ds_muon.verify import UpdateCheck

    name, _, device = FOREIGN.partition(",")
    dtype = getattr(torch, name) if name else None

    def under_defaults(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with defaults(dtype, device or None):
                return function(*args, **kwargs)

        return wrapped

    def initialize(*args: Any, **kwargs: Any) -> Any:
        engine, *others = under_defaults(usual)(*args, **kwargs)
        for method in METHODS:
            setattr(engine, method, under_defaults(getattr(engine, method)))
        return engine, *others

    usual, deepspeed.initialize = deepspeed.initialize, initialize
    for method in CHECK_METHODS:
        setattr(UpdateCheck, method, under_defaults(getattr(UpdateCheck, method)))
