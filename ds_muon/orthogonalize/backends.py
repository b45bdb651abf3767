"""What a backend is, the backends by name, and which of them can run where. Triton is imported only when it is used."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from ds_muon.extras import OLDEST_TRITON, how_to_install
from ds_muon.kernels.available import why_not
from ds_muon.orthogonalize.newton_schulz import Iteration, gram_blocks
from ds_muon.orthogonalize.torch_backend import TorchOperations, exact_products
from ds_muon.say import log


class Backend(Protocol):
    """Runs an iteration on a batch: normalization, products, and the memory for both."""

    compact: bool
    """Whether a result of ``run`` keeps no other memory of ``run`` alive."""

    def alone(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a matrix must be a batch of its own, because its result might depend on others in the batch."""

    def workspace(self, rows: int, cols: int, dtype: torch.dtype, buffers: int) -> int:
        """Bytes that ``run`` allocates for each (rows, cols) matrix of a batch, its result included.

        Args:
            buffers: of the ``Iteration``.
        """

    def run(self, matrices: Sequence[Tensor], iteration: Iteration) -> Tensor:
        """Normalize the matrices, (rows, cols) in fp32 each, and iterate on them as one batch.

        Each is divided by its largest magnitude, then by its Frobenius norm. The first division keeps the squares in
        the second in range. So U and c U give the same result up to rounding, for any scale that fp32 can hold.

        Returns:
            (batch, rows, cols) of the iteration's dtype, in storage that shares nothing with ``matrices``.
        """

    def release(self) -> None:
        """Free whatever is kept from one ``run`` to the next."""

    def for_trial(self, device: torch.device, dtype: torch.dtype) -> Sequence[Backend]:
        """Backends that together use every way of computing a product that this one may choose there."""


@cache
def _triton() -> Backend:
    """Raises ``ImportError`` for a Triton that is too old, which lacks descriptors made on the host."""
    import triton

    if tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2]) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        raise ImportError(f"version {triton.__version__} is installed, and {oldest} or newer is needed")
    from ds_muon.orthogonalize.triton_backend import TritonBackend

    return TritonBackend()


BACKENDS: dict[str, Callable[[], Backend]] = {"torch": TorchOperations, "triton": _triton}


def choose_backend(ns_backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name in ``BACKENDS`` that ``ns_backend`` stands for, for an iteration in ``dtype`` on ``device``.

    ``"auto"`` is Triton on Hopper GPUs in half precision, where it was measured, and torch elsewhere: in fp32 because
    that is faster. Why it is torch on a GPU is logged once: as a warning where Triton was expected and cannot be used,
    at INFO where it is not tried. On CPU nothing is logged.

    Raises:
        ValueError: an unknown backend, or one that cannot run on ``device``, with the reason.
        torch.OutOfMemoryError: there was no memory to try Triton, or another error that says so.
    """
    if ns_backend == "auto":
        reason = _why_not_tried(device, dtype)
        if reason is not None:
            if device.type != "cpu":
                _log_once(logging.INFO, f"Newton-Schulz runs on torch's products: {reason}")
            return "torch"
        reason = problem("triton", device, dtype)
        if reason is not None:
            _log_once(
                logging.WARNING,
                f"Newton-Schulz runs on torch's products, which take up to twice as long as Triton's: {reason}",
            )
        return "triton" if reason is None else "torch"
    if ns_backend not in BACKENDS:
        raise ValueError(f"ns_backend = {ns_backend!r}: choose one of {sorted(['auto', *BACKENDS])}")
    reason = problem(ns_backend, device, dtype)
    if reason is not None:
        raise ValueError(f'ns_backend = "{ns_backend}": {reason}. Set "auto" or "torch"')
    return ns_backend


def why_torch(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why ``"auto"`` is torch there; None where it is Triton. Raises what ``_trial`` raises."""
    return _why_not_tried(device, dtype) or problem("triton", device, dtype)


def problem(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run in ``dtype`` on a device; None if it can. Raises what ``_trial`` raises."""
    if name not in BACKENDS:
        return "there is no such backend here"
    if name != "triton":
        return None
    reason = why_not(device)
    if reason is not None:
        return reason
    if find_spec("triton") is None:
        return f"Triton is not installed: {how_to_install('triton')}"
    if torch.cuda.is_current_stream_capturing():
        return "nothing can be tried while a CUDA graph is being captured"
    return _trial(device, dtype)


def _why_not_tried(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why ``"auto"`` does not so much as try Triton; None where it does."""
    reason = why_not(device)
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(device)[0] != 9:
        name = torch.cuda.get_device_name(device)
        return (
            f'the Triton kernels were measured on Hopper GPUs only, and this is {name}; ns_backend "triton" runs them'
        )
    return "they are faster than Triton's in fp32" if dtype == torch.float32 else None


@cache
def _trial(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton fails on two small matrices here; None if it does not. Compiles kernels the first time on a machine.

    The matrices are wide and go through the Gram form with each tile that training may use on this device: plain
    products, symmetric ones, and those with a C. So a C compiler that is missing, or a tile that takes more shared
    memory or registers than there are, shows before training, and what is compiled here training uses.

    Raises:
        torch.OutOfMemoryError: or another error that says so. Nothing is remembered then: it may pass. It is not taken
            for a fault of Triton, for one rank would quietly go on with torch; to raise stops all of them.
    """
    generator = torch.Generator().manual_seed(0)
    matrices = list(torch.randn(2, 64, 160, generator=generator, dtype=torch.float32, device="cpu").to(device))
    triples = [(3.4445, -4.7750, 2.0315)] * 3

    def by(backend: Backend, dtype: torch.dtype) -> Tensor:
        result = backend.run(matrices, Iteration(gram_blocks(triples, dtype), dtype, eps=0.0))
        return result.to(torch.float32, copy=True)  # not what it lies in

    try:
        with exact_products():
            expected = by(TorchOperations(), torch.float32)
        _compile_for_trial(matrices, Iteration(gram_blocks(triples, dtype), dtype, eps=0.0))
        errors = []
        for ops in _triton().for_trial(device, dtype):
            # Launched, captured in a graph, replayed: nothing is kept, so the memory to work in is the same every time.
            by(ops, dtype)
            by(ops, dtype)
            errors.append(float((by(ops, dtype) - expected).norm() / expected.norm()))
    except Exception as caught:
        if isinstance(caught, torch.OutOfMemoryError) or "out of memory" in str(caught):
            raise
        return f"Triton cannot be used: {caught}"
    # NaN is not within any bound.
    worst = next((error for error in errors if not error <= 0.06), None)
    return None if worst is None else f"Triton's products are wrong here, by {worst:.1e}"


def _compile_for_trial(matrices: Sequence[Tensor], iteration: Iteration) -> None:
    """Compile what the trial launches, and what tall matrices need besides, in threads."""
    with suppress(Exception):  # whatever it is, the trial launches the same and says what is wrong
        from ds_muon.kernels import products
        from ds_muon.kernels.ahead import compile_ahead

        def launch() -> None:
            for ops in _triton().for_trial(matrices[0].device, iteration.dtype):
                for batch in (matrices, [matrix.mT for matrix in matrices]):
                    ops.run(batch, iteration)

        compile_ahead(products, launch)


def compile_ahead(name: str, shapes: Iterable[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> None:
    """Compile what a backend launches for (rows, cols) matrices of these shapes, and its trial has not, in threads."""
    if name == "triton":
        with suppress(Exception):  # whatever it is, the first step launches the same and says what is wrong
            from ds_muon.orthogonalize import triton_backend

            triton_backend.compile_ahead(shapes, device, dtype)


def release() -> None:
    """Forget what backends keep from one batch to the next. Who goes on, another engine say, makes it anew."""
    if _triton.cache_info().currsize:
        _triton().release()


@cache
def _log_once(level: int, message: str) -> None:
    log(message, level, logger=__name__)
