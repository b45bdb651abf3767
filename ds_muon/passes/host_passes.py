"""The passes over memory of the host as one compiled loop each, on all threads, with the bits of ``torch_passes``.

Importing this module compiles ``host.cpp``, once for a machine, and raises where that fails. Whatever else raises here
has written nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shlex
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.utils import cpp_extension

from ds_muon.files import writing
from ds_muon.layout import Piece
from ds_muon.passes import torch_passes
from ds_muon.passes.lift import Goal, Lift, Load, Loop
from ds_muon.passes.segments import SPAN, Moves, Segments
from ds_muon.passes.torch_passes import of_matrices, store_updates, sums_across

__all__ = ["adamw_", "advance_momentum_", "apply_update_", "round_to", "run_on", "store_updates", "sum_of_squares"]

# No fused multiply-adds. Vectors as long as the machine has them are chosen when the library is loaded.
_FLAGS = ["-O3", "-std=c++2a", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_int, _long, _float, _address = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_lift, _loads = ctypes.POINTER(Lift), ctypes.POINTER(Load)


def _built() -> ctypes.CDLL:
    """The library, from where it is kept, or compiled.

    Several ranks may compile at the same time, each for itself: none waits for a lock, which one that was killed would
    have left. The folder need not be writable.

    Raises:
        OSError: there is no compiler, or no folder from which programs may be loaded.
        RuntimeError: the compiler's words.
    """
    source = Path(__file__).with_name("host.cpp").read_bytes()
    command = [*shlex.split(os.environ.get("CXX") or "c++"), *_FLAGS, "-shared", "-fPIC", "-x", "c++", "-"]
    # Another source or machine must not meet this one's library.
    key = hashlib.sha256(source + repr((command, platform.machine())).encode()).hexdigest()[:8]
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    kept = Path(folder, f"ds_muon_host_{key}.so")
    if kept.exists():
        return ctypes.CDLL(str(kept))
    with TemporaryDirectory() as temporary:
        made = Path(temporary, kept.name)
        done = subprocess.run([*command, "-o", str(made)], input=source, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} fails: {done.stderr.decode(errors='replace').strip()[:1000]}")
        try:
            with writing(kept) as stream:
                stream.write(made.read_bytes())
        except OSError:
            return ctypes.CDLL(str(made))
    return ctypes.CDLL(str(kept))


def _compiled() -> ctypes.CDLL:
    """The library, with the types of its functions."""
    library = _built()
    for name, types in {
        "advance": [_loads, _long, _lift, _float, _float, _int, _int],
        "apply": [_loads, _long, _lift, _int, _float, _float],
        "adamw": [*[_address] * 4, _long, *[_float] * 7],
        "squares": [_address, _address, _long, _address],
        "sums": [_address, _address, _long, _address],
    }.items():
        function = getattr(library, f"ds_muon_{name}")
        function.argtypes, function.restype = types, _int if name in ("advance", "apply") else None
    return library


_LIBRARY = _compiled()


def advance_momentum_(
    gradient: Tensor,
    momentum_buffer: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    moves: Tensor | Moves | None = None,
    into: Tensor | Goal | None = None,
) -> None:
    """See ``torch_passes.advance_momentum_``. U may also go up to a ``Goal``."""
    g, m = _flat(gradient), _flat(momentum_buffer, torch.float32, torch.bfloat16)
    u, lift = _to(g if into is None else into, torch.float32)
    runs = _runs(moves, g, m, u)
    if runs is None:
        made = u if lift is None else torch.empty_like(g)
        torch_passes.advance_momentum_(g, m, momentum=momentum, nesterov=nesterov, moves=moves, into=made)
        if made is not u:
            u.copy_(made)
        return
    for start, end, flag in runs:
        if flag:
            load = Load(*_from(start, g, m, u), count=end - start, dtype=_DTYPES[m.dtype])
            _run(_LIBRARY.ds_muon_advance, load, lift, momentum, 1 - momentum, int(momentum < 0.5), int(nesterov))
        else:
            u[start:end].zero_()


def apply_update_(
    weight: Tensor,
    update: Tensor,
    *,
    lr: float,
    weight_decay: float,
    moves: Moves | None = None,
    scale: float = 1.0,
    rounded: Tensor | Goal | None = None,
) -> None:
    """See ``torch_passes.apply_update_``. The update stays as it is. Rounded weights may also go up to a ``Goal``."""
    w, u = _flat(weight), _flat(update, *_DTYPES)
    r, lift = _to(w if rounded is None else rounded, *_DTYPES)
    to = -1 if rounded is None else _DTYPES[r.dtype]
    runs = _runs(moves, w, u, r)
    if runs is None:
        torch_passes.apply_update_(weight, update, lr=lr, weight_decay=weight_decay, moves=moves, scale=scale)
        runs = [(0, w.numel(), False)]
    for start, end, flag in runs:
        dtype = _DTYPES[u.dtype] if flag else -1
        load = Load(*_from(start, w, u, r), count=end - start, scale=scale, dtype=dtype)
        _run(_LIBRARY.ds_muon_apply, load, lift, to, lr, 1 - lr * weight_decay)


def round_to(weight: Tensor, rounded: Goal) -> None:
    """Let weights, fp32 and contiguous, go up in the dtype of the goal."""
    w, r = _flat(weight), rounded.tensor
    _runs(None, w, r)
    load = Load(*_from(0, w, w, r), count=w.numel(), dtype=-1)
    _run(_LIBRARY.ds_muon_apply, load, rounded.lift, _DTYPES[r.dtype], 0.0, 1.0)


def run_on(threads: int) -> None:
    """Let what the calling thread runs take so many threads. Torch's function would set it for all that begin later."""
    torch.get_num_threads()  # else torch sets its own number when it first needs one here
    _LIBRARY.omp_set_num_threads(threads)


def adamw_(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """A step of AdamW, as in ``torch.optim.AdamW``: the moments have its bits, weights differ in last ones.

    Args:
        weight, exp_avg, exp_avg_sq: fp32, contiguous; overwritten.
        gradient: the same; not modified.
        step: the number of the step, from 1 on.
    """
    flat = [_flat(tensor) for tensor in (weight, gradient, exp_avg, exp_avg_sq)]
    _runs(None, *flat)
    beta1, beta2 = betas
    _LIBRARY.ds_muon_adamw(
        *(tensor.data_ptr() for tensor in flat), flat[0].numel(), 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2,
        math.sqrt(1 - beta2**step), eps, lr / (1 - beta1**step),
    )  # fmt: skip


def sum_of_squares(x: Tensor, segments: Segments | None = None) -> Tensor:
    """See ``torch_passes.sum_of_squares``. Sums of exact squares; torch's go through roots and have other last bits."""
    x = _flat(x)
    if segments is None:
        starts = torch.arange(0, x.numel() + SPAN, SPAN, dtype=torch.int64, device="cpu").clamp_(max=x.numel())
        firsts = torch.tensor([0, len(starts) - 1], dtype=torch.int64, device="cpu")
    else:
        starts, firsts = segments.pieces, segments.first_pieces
    sums = _squares(x, starts)
    totals = torch.empty(len(firsts) - 1, dtype=torch.float64, device="cpu")
    _LIBRARY.ds_muon_sums(sums.data_ptr(), firsts.data_ptr(), len(totals), totals.data_ptr())
    if segments is None:
        return totals[0]
    return totals if segments.striped is None else of_matrices(totals, x, segments, _across)


def _squares(x: Tensor, starts: Tensor) -> Tensor:
    """The sum of squares from each of ``starts`` to before the next: (len(starts) - 1,) fp64."""
    sums = torch.empty(len(starts) - 1, dtype=torch.float64, device="cpu")
    _LIBRARY.ds_muon_squares(x.data_ptr(), starts.data_ptr(), len(sums), sums.data_ptr())
    return sums


def _across(part: Tensor, piece: Piece, start: int) -> Tensor:
    """See ``torch_passes.sums_across``."""
    if piece.axis:
        return sums_across(part, piece, start)
    edges = (torch.arange(piece.rows + 1, dtype=torch.int64, device="cpu") * piece.cols - start).clamp_(0, part.numel())
    return _squares(part, edges)


def _flat(tensor: Tensor, *dtypes: torch.dtype) -> Tensor:
    """A flat view, for memory that the loops may walk through: contiguous, on the host, in fp32 or one of the dtypes.

    Raises:
        ValueError: it is not.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype not in (dtypes or (torch.float32,)):
        raise ValueError(f"the loops need contiguous tensors on the host, in fp32, not {tensor.dtype}")
    return tensor.detach().view(-1)


def _to(goal: Tensor | Goal, *dtypes: torch.dtype) -> tuple[Tensor, Lift | None]:
    """A flat view of what is written to, and the way there, if there is one."""
    if isinstance(goal, Goal):
        return goal.tensor, goal.lift
    return _flat(goal, *dtypes), None


def _run(loop: Loop, load: Load, lift: Lift | None, *settings: float) -> None:
    if lift is None:
        loop(ctypes.byref(load), 1, None, *settings)
    else:
        lift.take(loop, load, settings)


def _from(start: int, *tensors: Tensor) -> list[int]:
    """The addresses of an element."""
    return [tensor.data_ptr() + start * tensor.element_size() for tensor in tensors]


def _runs(moves: Tensor | Moves | None, *tensors: Tensor) -> list[tuple[int, int, bool]] | None:
    """First element, end and flag of what the loops pass over; None if neighbouring elements have flags of their own.

    Raises:
        ValueError: the tensors have not equally many elements.
    """
    numel = tensors[0].numel()
    if any(tensor.numel() != numel for tensor in tensors):
        raise ValueError(f"the loops need equally many elements, not {[tensor.numel() for tensor in tensors]}")
    if isinstance(moves, Moves):
        return moves.runs(numel)
    return [(0, numel, moves is None or bool(moves))]
