"""``ds-muon replay``: a captured input through every backend, dtype and form, beside the fp64 reference."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_muon.capture import FORMAT
from ds_muon.dtypes import DTYPES, name_of
from ds_muon.orthogonalize import (
    BACKENDS,
    WORKSPACE_BYTES,
    NewtonSchulz,
    batches,
    orthogonalize,
    reference_newton_schulz,
    schedule,
)
from ds_muon.orthogonalize.backends import problem
from ds_muon.say import printable, tell
from ds_muon.text import columns, count
from ds_muon.verify.tolerances import AGAINST_FP64

DESCRIPTION = """\
Run the captured input of Newton-Schulz, on the GPU if there is one, through every backend, dtype and form, and compare
each result with the fp64 reference. * marks what ran when the file was saved. "error" is relative to the reference,
"allowed" what the rounding of the dtype explains, "orthogonality" is ||O O^T - I|| / sqrt(smaller side).

Exit code: 0 if everything is right, also where the fault is not reproduced; 1 if a backend, the input or the
coefficients are at fault; 2 if a file could not be read, or what it was saved with cannot run here.
"""

# Of an iteration, as in the config: what a file claims decides how long its replay takes.
_MOST_STEPS = 100

# Of what rounding the input to the iteration's dtype alone changes, the iteration may change so many times as much: it
# rounds after each of its products. Measured: up to 7.
_ROUNDINGS = 16

_HEADER = ("backend", "dtype", "form", "result", "error", "allowed", "orthogonality", "first bad iteration")
_COLUMNS = "<8 <8 <8 <10 <8 <8 <13 <"  # wide enough for any cell: each line is shown as it comes


# ---- what a file holds ----------------------------------------------------------------------------------------------


class CaptureError(ValueError):
    """A file that is not a capture, or a damaged one."""


@dataclass(frozen=True)
class Capture:
    """What a file holds.

    Attributes:
        input: (rows, cols) fp32, as it was before the iteration; on CPU.
        output: (rows, cols), what the iteration made of it.
        name: the parameter.
        batch: how many matrices of its shape ran together.
        rank, step: where and when; steps are counted from 1 since the process started.
        settings: of the iteration; its backend need not be available here.
        device: that it ran on.
        versions: of the libraries.
    """

    input: Tensor
    output: Tensor
    name: str
    batch: int
    rank: int
    step: int
    settings: NewtonSchulz
    device: str
    versions: dict[str, str | None]


def read_capture(path: Path) -> Capture:
    """Read a file that ``NanCapture`` wrote, without running any code in it.

    Raises:
        CaptureError: it cannot be read, is damaged, or is something else.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CaptureError(f"{path}: {error.strerror or error}") from None
    except Exception:  # whatever torch makes of a file that it did not write; its words advise to load it unsafely
        raise CaptureError(f"{path} is damaged, or no capture of ds_muon") from None
    if not isinstance(content, dict) or "ds_muon_capture" not in content:
        raise CaptureError(f"{path} is not a capture: it was saved by something else")
    found = content["ds_muon_capture"]
    if not isinstance(found, int) or found != FORMAT:
        raise CaptureError(f"{path} has format {found!s:.20}; this version reads format {FORMAT}")
    try:
        return _checked(content)
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CaptureError(f"{path} is a damaged capture: {error!r}") from None


def _checked(content: dict[str, Any]) -> Capture:
    """A capture of the right types and shapes. Raises whatever comes of others."""
    settings = dict(content["settings"])
    settings["dtype"] = DTYPES[settings["dtype"]]
    settings["triples"] = tuple((float(a), float(b), float(c)) for a, b, c in settings["triples"])
    settings["eps"] = float(settings["eps"])
    schedule(settings["triples"], len(settings["triples"]))
    if len(settings["triples"]) > _MOST_STEPS:
        raise ValueError(f"there is no iteration of {len(settings['triples'])} steps")
    if settings["method"] not in ("gram", "standard") or not 0 <= settings["eps"] < 1:
        raise ValueError(f"there is no iteration of method {settings['method']!r}, eps {settings['eps']}")
    matrix, output = content["input"], content["output"]
    for tensor in (matrix, output):
        if tensor.ndim != 2 or tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            raise ValueError("input and output are not matrices")
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize:
            raise ValueError("there is less data than the shapes tell")
    if matrix.dtype != torch.float32 or matrix.shape != output.shape or not output.is_floating_point():
        raise ValueError("the input is not in fp32, or the output has another shape or type")
    batch = max(1, int(content["batch"]))
    if batch > max(1, WORKSPACE_BYTES // (matrix.numel() * settings["dtype"].itemsize)):
        raise ValueError(f"a batch of {batch} such matrices is more than is ever run at once")
    return Capture(
        input=matrix,
        output=output,
        name=str(content["name"]),
        batch=batch,
        rank=int(content["rank"]),
        step=int(content["step"]),
        settings=NewtonSchulz(**settings | {"backend": str(settings["backend"])}),
        device=str(content["device"]),
        versions={str(library): version for library, version in content["versions"].items()},
    )


# ---- its input, through everything that runs here -------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """One run of the iteration on a captured input.

    Attributes:
        backend, dtype, form: what ran.
        as_captured: whether that is what ran when the file was written.
        error: relative Frobenius distance from the fp64 reference; NaN if the result is not finite.
        allowed: what the rounding of this dtype explains.
        orthogonality: ``||O O^T - I||_F / sqrt(m)``, with the smaller side m; the reference's own is printed beside it.
        first_bad: the first iteration, from 1, after which the result is not finite or off; None if none is.
        cannot_run: why there is no result; None if there is.
    """

    backend: str
    dtype: str
    form: str
    as_captured: bool
    error: float = math.nan
    allowed: float = math.nan
    orthogonality: float = math.nan
    first_bad: int | None = None
    cannot_run: str | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # a NaN is not

    @property
    def result(self) -> str:
        if self.cannot_run is not None:
            return f"cannot run here: {self.cannot_run}"
        return "right" if self.ok else "not finite" if math.isnan(self.error) else "WRONG"

    def __str__(self) -> str:
        return f"the {printable(self.backend)} backend in {self.dtype}, {self.form} form"


class _Reference:
    """The fp64 results for one input: after each number of iterations, and for the input rounded to a dtype."""

    def __init__(self, matrix: Tensor, settings: NewtonSchulz) -> None:
        self._matrix = matrix.double()
        self._triples = settings.triples
        self.after = cache(self._after)
        self.rounding = cache(self._rounding)

    def _after(self, steps: int) -> Tensor:
        return self._run(self._matrix, steps)

    def _rounding(self, dtype: torch.dtype) -> float:
        """What rounding the normalized input to ``dtype`` changes, relatively."""
        exact = self.after(len(self._triples))
        norm = torch.linalg.vector_norm(self._matrix).clamp_min(torch.finfo(torch.float64).tiny)
        rounded = (self._matrix / norm).to(dtype).double()
        return _distance(self._run(rounded, len(self._triples)), exact)

    def _run(self, matrix: Tensor, steps: int) -> Tensor:
        return reference_newton_schulz(matrix, ns_steps=steps, ns_coefficients=self._triples[:steps])


def attempts(capture: Capture, device: torch.device) -> Iterator[Attempt]:
    """Run the input on everything that can run here.

    What the file was written with comes last, for a kernel that faults takes the device with it; it runs in a batch of
    as many copies as there were matrices, or as this device takes at once.

    Args:
        capture: with a finite input.
        device: to run on.
    """
    matrix, captured = capture.input.to(device), capture.settings
    reference = _Reference(matrix, captured)
    others = [
        replace(captured, backend=backend, dtype=dtype, method=method)
        for backend in BACKENDS
        for dtype in AGAINST_FP64
        if problem(backend, device, dtype) is None
        for method in ("gram", "standard")
    ]
    # "gram" means the standard form where that is better: each form once.
    distinct = {_key(settings, matrix): settings for settings in others}
    distinct.pop(_key(captured, matrix), None)
    for settings in distinct.values():
        yield _attempt(matrix, 1, settings, reference, as_captured=False)
    yield _attempt(matrix, capture.batch, captured, reference, as_captured=True)


def _key(settings: NewtonSchulz, matrix: Tensor) -> tuple[str, str, str]:
    rows, cols = matrix.shape
    return settings.backend, name_of(settings.dtype), settings.form(rows, cols)


def _attempt(
    matrix: Tensor, batch: int, settings: NewtonSchulz, reference: _Reference, *, as_captured: bool
) -> Attempt:
    attempt = Attempt(*_key(settings, matrix), as_captured)
    reason = problem(settings.backend, matrix.device, settings.dtype)
    if reason is not None:
        return replace(attempt, cannot_run=reason)
    try:
        # Several batches would only take longer than one.
        rows, cols = matrix.shape
        matrices = [matrix] * max(map(len, batches([(rows, cols)] * batch, matrix.device, settings)))
        return _judged(attempt, matrices, settings, reference)
    except Exception as error:  # what a kernel makes of a device that it was not written for
        return replace(attempt, cannot_run=(str(error) or type(error).__name__).splitlines()[0])


def _judged(attempt: Attempt, matrices: Sequence[Tensor], settings: NewtonSchulz, reference: _Reference) -> Attempt:
    steps = len(settings.triples)
    error, output = _worst(orthogonalize(matrices, settings), reference.after(steps))
    attempt = replace(
        attempt,
        error=error,
        allowed=AGAINST_FP64[settings.dtype] + _ROUNDINGS * reference.rounding(settings.dtype),
        orthogonality=orthogonality_error(output),
    )
    return attempt if attempt.ok else replace(attempt, first_bad=_first_bad(matrices, settings, reference, attempt))


def _first_bad(
    matrices: Sequence[Tensor], settings: NewtonSchulz, reference: _Reference, attempt: Attempt
) -> int | None:
    for steps in range(1, len(settings.triples) + 1):
        outputs = orthogonalize(matrices, replace(settings, triples=settings.triples[:steps]))
        error, _ = _worst(outputs, reference.after(steps))
        if not error <= attempt.allowed:
            return steps
    return None  # this time it was right


def _worst(outputs: Sequence[Tensor], expected: Tensor) -> tuple[float, Tensor]:
    """Of the copies in a batch the one that is farthest off, and how far; one that is not finite is the farthest."""
    distances = [(_distance(output.double(), expected), output) for output in outputs]
    return max(distances, key=lambda found: math.inf if math.isnan(found[0]) else found[0])


def orthogonality_error(matrix: Tensor) -> float:
    """``||O O^T - I||_F / sqrt(m)`` of a (rows, cols) matrix, in fp64, with the smaller side m."""
    o = matrix.double()
    o = o.mT if o.shape[0] > o.shape[1] else o
    gram = o @ o.mT
    gram.diagonal().sub_(1)
    return float(torch.linalg.vector_norm(gram)) / math.sqrt(o.shape[0])


def _distance(found: Tensor, expected: Tensor) -> float:
    """Relative; NaN if ``found`` is not finite. Of a zero matrix nothing may be left."""
    size = float(torch.linalg.vector_norm(expected))
    distance = float(torch.linalg.vector_norm(found - expected))
    return math.nan if not math.isfinite(distance) else distance / size if size else distance


# ---- the command ----------------------------------------------------------------------------------------------------

ALL_RIGHT, AT_FAULT, NOT_REPLAYED = 0, 1, 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``ds-muon replay``."""
    parser.description = DESCRIPTION
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what a rank saved in ds_muon_captures")
    parser.set_defaults(run=lambda options: replay(options.files))


def replay(paths: list[Path]) -> int:
    """Print a table and a verdict for each file.

    Returns:
        The exit code: 0 if everything is right, 1 if something is at fault, 2 if a file could not be read or replayed.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codes = [ALL_RIGHT]
    for path in paths:
        try:
            codes.append(_replay_one(path, read_capture(path), device))
        except (CaptureError, RuntimeError, MemoryError) as error:  # RuntimeError: no room on the device, for one
            tell(f"ds-muon replay: {printable(str(error))}", to=sys.stderr)
            codes.append(NOT_REPLAYED)
    return max(codes)


def _replay_one(path: Path, capture: Capture, device: torch.device) -> int:
    tell(printable(str(path)))
    (rows, cols), settings = capture.input.shape, capture.settings
    backend, dtype, form = _key(settings, capture.input)
    outcome = "finite" if capture.output.isfinite().all() else "not finite"
    versions = ", ".join(f"{name} {version}" for name, version in capture.versions.items() if version)
    steps = count(len(settings.triples), "step")
    ran = f"{backend} backend, {dtype}, {form} form, {steps}; {capture.device}; {versions}"
    where = f"{capture.name} ({rows} x {cols}), rank {capture.rank}, step {capture.step}"
    tell(f"  {printable(where)}: the output was {outcome}")
    tell(f"  {printable(ran)}")
    bad = int(capture.input.isfinite().logical_not().sum())
    if bad:
        tell(
            f"\n  INPUT: of its {rows * cols} elements {bad} {'is' if bad == 1 else 'are'} not finite. The fault lies "
            "before Newton-Schulz, in the gradient or the momentum\n"
        )
        return AT_FAULT
    reference = reference_newton_schulz(capture.input, ns_steps=len(settings.triples), ns_coefficients=settings.triples)
    if not reference.abs().max() <= torch.finfo(settings.dtype).max:
        tell(
            f"\n  COEFFICIENTS: in fp64 as well, {steps} with {settings.triples[-1]} leave the range of {dtype} on "
            "this input."
        )
        tell('  Set "ns_coefficients": "quintic", or fewer "ns_steps"\n')
        return AT_FAULT
    own = orthogonality_error(reference)
    tell(f"  replayed on {device.type}; the fp64 reference's own orthogonality error is {own:.2g}\n")
    tell("  " + columns([_HEADER], _COLUMNS)[0])
    results = []
    for attempt in attempts(capture, device):  # large matrices take their time: each line as it comes
        results.append(attempt)
        tell("  " + columns([_cells(attempt)], _COLUMNS)[0])
    tell(f"\n  {verdict(results)}\n")
    if not all(attempt.ok or attempt.cannot_run for attempt in results):
        return AT_FAULT
    return NOT_REPLAYED if results[-1].cannot_run else ALL_RIGHT


def _cells(attempt: Attempt) -> tuple[str, ...]:
    name = printable(attempt.backend) + ("*" if attempt.as_captured else "")
    if attempt.cannot_run is not None:
        return (name, attempt.dtype, attempt.form, attempt.result)
    numbers = (f"{attempt.error:.1e}", f"{attempt.allowed:.1e}", f"{attempt.orthogonality:.2g}")
    return (name, attempt.dtype, attempt.form, attempt.result, *numbers, str(attempt.first_bad or "-"))


def verdict(results: list[Attempt]) -> str:
    """Which backend is at fault, in one line."""
    captured = next(attempt for attempt in results if attempt.as_captured)
    right = [attempt for attempt in results if attempt.ok]
    wrong = [
        attempt for attempt in results if not attempt.ok and attempt.cannot_run is None and not attempt.as_captured
    ]
    also = f". Also at fault: {'; '.join(map(str, wrong))}" if wrong else ""
    if captured.cannot_run is not None:
        return (
            f"NOT REPLAYED: {captured} cannot run here (*); {len(right)} of {len(results) - 1} others are right{also}"
        )
    if captured.ok:
        return (
            f"NOT REPRODUCED: {captured} (*) is right here. What went wrong was of that moment, possibly "
            f"another device or driver, or memory that something else wrote to{also}"
        )
    start = "" if captured.first_bad is None else f" from iteration {captured.first_bad} on"
    return f"AT FAULT: {captured} (*), {captured.result}{start}{also}"
