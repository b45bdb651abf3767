"""Newton-Schulz by every backend of ours and every peer that is installed, one batch at a time.

All of them orthogonalize the same fp32 matrices, each time right behind a large bf16 matmul, whose rate is the
yardstick: a card that is hot or shared is so for all. Two times are taken. In a training step, what the host launches
waits in a queue behind other work: the first is from the end of that matmul until the device is done, and holds host
time only where launching takes longer than the work. The second, taken after all of the first, is of a call on an idle
device until that is done. Memory is the most that a call has allocated at a time, its result included. In each round
the order is another, shuffled with a fixed seed, so that nobody always follows the same neighbour.

An optimizer has separate matrices. Peers that take a batch pay for stacking them, as in the optimizers of their users;
what torch.stack alone takes, behind the matmul in the same rounds, stands beside their times, to be subtracted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_muon.bench.chart import draw_bars
from ds_muon.bench.clock import YARDSTICK, Yardstick, milliseconds
from ds_muon.bench.peers import PEERS, Orthogonalize, Stacked, stack
from ds_muon.options import write_outputs
from ds_muon.orthogonalize import (
    BACKENDS,
    NewtonSchulz,
    batches,
    orthogonalize,
    orthogonalize_batch,
    reference_newton_schulz,
)
from ds_muon.orthogonalize.defaults import NS_COEFFICIENTS
from ds_muon.say import tell
from ds_muon.text import columns

GPU_SHAPES = (
    (24, 1024, 1024),
    (24, 1024, 4096),
    (12, 2048, 2048),
    (8, 2048, 8192),
    (6, 4096, 4096),
    (4, 4096, 11008),
    (1, 4096, 4096),
    (1, 2048, 8192),
)
CPU_SHAPES = ((4, 64, 64), (4, 64, 256), (1, 128, 128))
_WARMUP = 3
_STACK = "torch.stack alone"
_DEFAULT = tuple(f"ds_muon {backend}" for backend in BACKENDS)  # our names, with the default table
_T = TypeVar("_T")


@dataclass(frozen=True)
class Timing:
    """One candidate on one batch.

    Attributes:
        name: of the candidate.
        ms: behind other work, median of the rounds; None where it cannot run.
        call_ms: of a call on an idle device, host time included.
        tflops: effective rate, by the operations that symmetry leaves to do in five quintic steps.
        over_floor: ``ms`` over the time of as many operations at the rate of the matmuls right before.
        error: relative Frobenius error of the first matrix against fp64.
        peak_bytes: the most that a call allocates, beside what CUDA graphs of others keep; None on CPU.
        stack_ms: what of ``ms`` torch.stack alone takes; None for those that take separate matrices.
        problem: why it cannot run here; None if it can.
    """

    name: str
    ms: float | None = None
    call_ms: float | None = None
    tflops: float | None = None
    over_floor: float | None = None
    error: float | None = None
    peak_bytes: int | None = None
    stack_ms: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Row:
    """All candidates on one batch. ``matmul_tflops``: rate of the yardstick meanwhile."""

    batch: int
    rows: int
    cols: int
    matmul_tflops: float
    timings: tuple[Timing, ...]

    @property
    def title(self) -> str:
        return f"{self.batch} x {self.rows} x {self.cols}"

    @property
    def lead(self) -> float | None:
        """``ms`` of the fastest peer over that of our fastest; None if either is missing."""
        return self._lead([(t.name, t.ms) for t in self.timings if t.ms is not None])

    @property
    def call_lead(self) -> float | None:
        """The same for ``call_ms``."""
        return self._lead([(t.name, t.call_ms) for t in self.timings if t.call_ms is not None])

    def _lead(self, times: Sequence[tuple[str, float]]) -> float | None:
        ours = [ms for name, ms in times if name in _DEFAULT]
        peers = [ms for name, ms in times if not name.startswith(("ds_muon", "torch,"))]
        return min(peers) / min(ours) if ours and peers else None


def floor_flops(rows: int, cols: int) -> int:
    """Operations of five quintic steps that symmetry leaves to do: 20 m^3 for a square, else 14 m^3 + 6 m^2 n."""
    m, n = sorted((rows, cols))
    return 20 * m**3 if m == n else 14 * m**3 + 6 * m * m * n


def candidates(
    device: torch.device, dtype: str, tables: Sequence[str] = (NS_COEFFICIENTS,)
) -> Iterator[tuple[str, Orthogonalize | str]]:
    """Name and function of all that can run, or the reason why it cannot; ours with each table of coefficients."""
    for backend, table in product(BACKENDS, tables):
        default = table == NS_COEFFICIENTS
        name = f"ds_muon {backend}" if default else f"ds_muon {backend}, {table}"
        try:
            settings = NewtonSchulz.resolve(device, ns_dtype=dtype, ns_backend=backend, ns_coefficients=table)
        except ValueError as error:
            yield name, str(error)
            continue
        yield name, partial(_in_batches, settings=settings)
        if backend == "torch" and default:
            yield "torch, one by one", partial(_one_by_one, settings=settings)
    for name, load in PEERS.items():
        try:
            yield name, load()
        except Exception as error:  # not installed, or not for this machine
            yield name, (str(error) or type(error).__name__).splitlines()[0]


def _in_batches(matrices: Sequence[Tensor], settings: NewtonSchulz) -> Tensor:
    """As an optimizer step does, which uses up the results of a batch before the next. Returns the first result."""
    first = None
    for indices in batches([(m.shape[0], m.shape[1]) for m in matrices], matrices[0].device, settings):
        outputs = orthogonalize_batch([matrices[i] for i in indices], settings)
        # A result may keep the memory of the whole batch.
        first = outputs[0].clone() if first is None else first
        del outputs
    assert first is not None
    return first


def _one_by_one(matrices: Sequence[Tensor], settings: NewtonSchulz) -> list[Tensor]:
    return [output for matrix in matrices for output in orthogonalize([matrix], settings)]


def _reference(function: Orthogonalize, matrix: Tensor) -> Tensor:
    """The fp64 result of what ``function`` iterates: of ours its own coefficients, of peers the quintic ones."""
    settings = function.keywords.get("settings") if isinstance(function, partial) else None
    return reference_newton_schulz(matrix, ns_coefficients=settings.triples if settings else NS_COEFFICIENTS)


def measure(
    shapes: Sequence[tuple[int, int, int]],
    device: torch.device,
    dtype: str,
    rounds: int,
    only: Sequence[str] | None = None,
    tables: Sequence[str] = (NS_COEFFICIENTS,),
) -> Iterator[Row]:
    """One row per (batch, rows, cols), as they are done; of candidates with one of ``only`` in their name, if given."""
    every = candidates(device, dtype, tables)
    found = [(name, f) for name, f in every if only is None or any(part in name for part in only)]
    matmul = Yardstick(device)
    for batch, rows, cols in shapes:
        matrices = list(torch.randn(batch, rows, cols, dtype=torch.float32, device=device).unbind())
        ready: dict[str, Orthogonalize] = {}
        problems: dict[str, str] = {}
        errors: dict[str, float] = {}
        for name, function in found:
            if isinstance(function, str):
                problems[name] = function
                continue
            try:
                for _ in range(_WARMUP):
                    output = function(matrices)
                exact = _reference(function, matrices[0])
                errors[name] = float((_first(output).double() - exact).norm() / exact.norm())
                ready[name] = function
            except Exception as error:  # whatever a kernel makes of this shape or device
                problems[name] = (str(error) or type(error).__name__).splitlines()[0]
        stacked = any(isinstance(function, Stacked) for function in ready.values())
        # In a row: a device that idles in between cools down, and the matmul is faster than in training.
        behind = _take_turns(matmul.before, {**ready, **({_STACK: stack} if stacked else {})}, matrices, rounds)
        alone = _take_turns(partial(milliseconds, device=device), ready, matrices, rounds)
        peaks = {name: _peak_bytes(partial(function, matrices), device) for name, function in ready.items()}
        flops = batch * floor_flops(rows, cols)
        timings = []
        for name, _ in found:
            if name in problems:
                timings.append(Timing(name, problem=problems[name]))
                continue
            yardstick, ms = (statistics.median(column) for column in zip(*behind[name], strict=True))
            over_floor = 1e-3 * ms * matmul.rate(yardstick) / flops
            call_ms = statistics.median(alone[name])
            stack_ms = statistics.median(ms for _, ms in behind[_STACK]) if isinstance(ready[name], Stacked) else None
            timings.append(Timing(name, ms, call_ms, flops / ms / 1e9, over_floor, errors[name], peaks[name], stack_ms))
        yardsticks = [yardstick for pairs in behind.values() for yardstick, _ in pairs]
        rate = matmul.rate(statistics.median(yardsticks)) if yardsticks else 0.0
        yield Row(batch, rows, cols, rate / 1e12, tuple(timings))


def _take_turns(
    clock: Callable[[Callable[[], object]], _T],
    functions: Mapping[str, Orthogonalize],
    matrices: Sequence[Tensor],
    rounds: int,
) -> dict[str, list[_T]]:
    """What ``clock`` says of each function in every round. The order is shuffled in each, and the same in every run."""
    shuffle, order = random.Random(0).shuffle, list(functions)
    times: dict[str, list[_T]] = {name: [] for name in functions}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(clock(partial(functions[name], matrices)))
    return times


def _peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def _first(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = output[0]
    return output[0] if output.ndim == 3 else output


# ---- the command ----------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Measure, print each row as it is done, and write the files that were asked for. Returns the exit code."""
    only, dtype, rounds = options.candidates, options.dtype, options.rounds
    names = [*_DEFAULT, "torch, one by one", *PEERS]
    if only is not None and not any(part in name for part in only for name in names):
        tell(f"ds-muon: --candidates {' '.join(only)}: no part of any of {names}", to=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    side, kind = YARDSTICK[device.type]
    tell(f"{name}, torch {torch.__version__}; ours in {dtype}; medians of {rounds} rounds")
    tell(f'"x floor": time over that of five steps by symmetric products, at the rate of a {side}^3 {kind} matmul\n')
    shapes = options.shapes or (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES)
    done = []
    for row in measure(shapes, device, dtype, rounds, only, options.coefficients):
        done.append(row)
        tell("\n".join(_lines(row)))
    settings = {"device": name, "torch": torch.__version__, "dtype": dtype, "rounds": rounds}
    rows = [{**asdict(row), "lead": row.lead, "call_lead": row.call_lead} for row in done]

    def draw(path: Path) -> None:
        series = {t.name: [_over_floor(row, t.name) for row in done] for t in done[0].timings}
        heading = f"Five Newton-Schulz steps, {name}, ours in {dtype}"
        draw_bars(path, heading, "time over the floor", [row.title for row in done], series)

    return 0 if write_outputs(options, {**settings, "rows": rows}, draw) else 2


def _over_floor(row: Row, name: str) -> float | None:
    return next(t.over_floor for t in row.timings if t.name == name)


def _lines(row: Row) -> Iterator[str]:
    leads = [(row.lead, "as fast as the best peer"), (row.call_lead, "in a call on an idle device")]
    said = "".join(f"; {lead:.2f} times {where}" for lead, where in leads if lead is not None)
    yield f"{row.title}: matmul {row.matmul_tflops:.3g} TFLOP/s{said}"
    yield from columns([("  ", *_cells(timing)) for timing in row.timings], _COLUMNS)


_COLUMNS = "<2 <32 >11 >14 >14 >18 >9 < <"  # least widths, for all batches to be alike


def _cells(t: Timing) -> tuple[str, ...]:
    if t.ms is None:
        return t.name, t.problem or ""
    rates = f"{t.ms:.3f} ms", f"{t.tflops:.3g} TFLOP/s", f"{t.over_floor:.2f} x floor", f"{t.call_ms:.3f} ms a call"
    memory = "" if t.peak_bytes is None else f"{t.peak_bytes / 2**20:.0f} MiB"
    stacking = "" if t.stack_ms is None else f"of it stacking {t.stack_ms:.3f} ms"
    return t.name, *rates, memory, f"error {t.error:.1e}", stacking
