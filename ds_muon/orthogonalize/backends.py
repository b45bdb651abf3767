"""The backends by name, and which of them can run where. Triton is imported only when it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ds_muon.extras import how_to_install
from ds_muon.orthogonalize.newton_schulz import Backend, Iteration, Operations, gram, passes, squares
from ds_muon.orthogonalize.torch_backend import TorchOperations, exact_products

_LOGGER = logging.getLogger(__name__)


@cache
def _triton() -> Backend:
    from ds_muon.orthogonalize.triton_backend import TritonBackend

    return TritonBackend()


BACKENDS: dict[str, Callable[[], Backend]] = {"torch": TorchOperations, "triton": _triton}


def choose_backend(ns_backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name in ``BACKENDS`` that ``ns_backend`` stands for, for an iteration in ``dtype`` on ``device``.

    ``"auto"`` is Triton on Hopper GPUs in half precision, where it was measured, and torch elsewhere: in fp32 because
    that is faster. Where Triton would be expected and cannot be used, the reason is logged, once.

    Raises:
        ValueError: an unknown backend, or one that cannot run on ``device``, with the reason.
    """
    if ns_backend == "auto":
        if device.type == "cpu" or dtype == torch.float32 or not _is_hopper(device):
            return "torch"
        reason = problem("triton", device, dtype)
        if reason is not None:
            _log_once(f"Newton-Schulz runs on torch's products, which take up to twice as long as Triton's: {reason}")
        return "triton" if reason is None else "torch"
    if ns_backend not in BACKENDS:
        raise ValueError(f"ns_backend = {ns_backend!r}: choose one of {sorted(['auto', *BACKENDS])}")
    reason = problem(ns_backend, device, dtype)
    if reason is not None:
        raise ValueError(f'ns_backend = "{ns_backend}": {reason}. Set "auto" or "torch"')
    return ns_backend


def problem(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run in ``dtype`` on a device; None if it can."""
    if name not in BACKENDS:
        return "there is no such backend here"
    if name != "triton":
        return None
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"Triton needs a GPU, and this is {device.type}"
    if torch.version.hip:
        return "the Triton kernels are for NVIDIA GPUs, and this is an AMD one"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"Triton needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    if find_spec("triton") is None:
        return f"Triton is not installed: {how_to_install('triton')}"
    if torch.cuda.is_current_stream_capturing():
        return "nothing can be tried while a CUDA graph is being captured"
    return _trial(device, dtype)


def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def _trial(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton fails on two small matrices here; None if it does not. Compiles kernels the first time on a machine.

    Whatever the reason is, an old Triton, no C compiler or too little shared memory, it shows before training.
    """
    generator = torch.Generator().manual_seed(0)
    matrices = list(torch.randn(2, 64, 160, generator=generator).to(device).unbind())
    triples = [(3.4445, -4.7750, 2.0315)] * 3

    def by(backend: Backend, dtype: torch.dtype) -> Tensor:
        def iterate(ops: Operations, x: Tensor, other: Tensor | None) -> Tensor:
            return gram(x, triples, ops, other)

        counts = passes(triples, dtype, "gram"), squares("gram")
        result = backend.run(matrices, Iteration(iterate, *counts, "trial", dtype, eps=0.0, flops=0))
        return result.to(torch.float32, copy=True)  # not what it lies in

    try:
        ops = _triton()
        # Launched, captured in a graph, replayed: nothing is kept, so the memory to work in is the same every time.
        by(ops, dtype)
        by(ops, dtype)
        found = by(ops, dtype)
        with exact_products():
            expected = by(TorchOperations(), torch.float32)
        error = float((found - expected).norm() / expected.norm())
        ops.release()
    except Exception as caught:
        return f"Triton cannot be used: {caught}"
    return None if error <= 0.06 else f"Triton's products are wrong here, by {error:.1e}"


def release() -> None:
    """Forget what backends keep from one batch to the next."""
    if _triton.cache_info().currsize:
        _triton().release()


@cache
def _log_once(message: str) -> None:
    _LOGGER.warning(message)
