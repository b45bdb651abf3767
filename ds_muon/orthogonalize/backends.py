"""The backends by name, and which of them can run where. Triton is imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

from ds_muon.orthogonalize.newton_schulz import Operations
from ds_muon.orthogonalize.torch_backend import TorchOperations


@cache
def _triton() -> Operations:
    from ds_muon.orthogonalize.triton_backend import TritonOperations

    return TritonOperations()


BACKENDS: dict[str, Callable[[], Operations]] = {"torch": TorchOperations, "triton": _triton}


def choose_backend(ns_backend: str, device: torch.device) -> str:
    """The name in ``BACKENDS`` that ``ns_backend`` stands for on this device.

    Raises:
        ValueError: an unknown backend, or one that cannot run on ``device``, with the reason.
    """
    if ns_backend == "auto":
        return "torch"
    if ns_backend not in BACKENDS:
        raise ValueError(f"ns_backend = {ns_backend!r}: choose one of {sorted(['auto', *BACKENDS])}")
    reason = problem(ns_backend, device)
    if reason is not None:
        raise ValueError(f'ns_backend = "{ns_backend}": {reason}. Set "auto" or "torch"')
    return ns_backend


def problem(name: str, device: torch.device) -> str | None:
    """Why a backend cannot run on a device; None if it can."""
    if name not in BACKENDS:
        return "there is no such backend here"
    if name != "triton":
        return None
    if device.type != "cuda":
        return f"it needs a GPU, and this is {device.type}"
    if find_spec("triton") is None:
        return "Triton is not installed: pip install 'ds-muon[triton]'"
    try:
        _triton()
    except Exception as error:  # an older Triton lacks a name, or cannot take the kernels
        return f"Triton cannot be used: {error}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    return None
