"""``telemetry_every``: every k steps, what a run with DSMuon looks like from inside, to DeepSpeed's monitors.

The step is observed from outside, by wrapping its phases for this one step; all other steps are as they are without.
Ranks add up what they found in one collective. Nothing that is observed is modified.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_muon.exchange import Transfer
from ds_muon.guard import Findings
from ds_muon.muon_group import Staged
from ds_muon.passes import sum_of_squares
from ds_muon.say import log, printable

PREFIX = "DSMuon/"
"""Of every name in a monitor."""

SAMPLED = 4
"""Most matrices that are looked at one by one, from all over the model."""

# Elements of AdamW's state that are looked at together, and of a Gram matrix.
_AT_A_TIME = 1 << 24
_VECTORS, _PRODUCTS = 4, 6


class Telemetry:
    """Observes each ``every``-th step of a ``MuonZeroOptimizer``. What goes wrong in it is logged, and raises nothing.

    Args:
        zero: the optimizer.
        engine: its engine, whose steps and samples are counted, and whose monitor writes.
        every: observe each so many steps, at least 1; the same on every rank.

    Attributes:
        last: name to value, of the last step that was observed; the same on every rank. Empty before the first.
    """

    def __init__(self, zero: Any, engine: Any, every: int) -> None:
        self.last: dict[str, float] = {}
        self._zero = zero
        self._engine = weakref.proxy(engine)
        self._every = every
        matrices = zero.plan.matrices
        count = min(SAMPLED, len(matrices))
        self._sampled = [matrices[i * (len(matrices) - 1) // max(1, count - 1)].name for i in range(count)]
        self._writes = True

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Around the optimizer's step, on every rank; a collective in the steps that are observed and not skipped."""
        if (self._engine.global_steps + 1) % self._every:
            yield
            return
        step = _ObservedStep(self._zero, self._sampled)
        with step.listening():
            yield
        self.last = step.values()
        self._write(self.last)

    def _write(self, values: dict[str, float]) -> None:
        if not (self._writes and self._engine.monitor.enabled):
            return
        try:
            samples = _samples_after(self._engine)
            self._engine.monitor.write_events([(PREFIX + name, value, samples) for name, value in values.items()])
        except Exception as error:  # a full disk, or a service that is away: no reason to stop a run
            self._writes = False
            log(f"telemetry ends, because the monitor cannot write it: {error!r}")


class _ObservedStep:
    """One step of an optimizer, while it runs and just after it."""

    def __init__(self, zero: Any, sampled: list[str]) -> None:
        self._zero = zero
        self._sampled = sampled
        self._clock = _Clock()
        self._findings: Findings | None = None
        self._looks: dict[str, Callable[[], float]] = {}
        self._updates: list[Tensor] = []
        self._error: Exception | None = None

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """What fails here is kept for later: the step goes on."""
        try:
            yield
        except Exception as error:
            self._error = error

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While the step runs."""
        zero = self._zero
        with ExitStack() as stack:

            def wrap(target: Any, method: str, around: Callable[..., Any]) -> None:
                original = getattr(target, method)

                def wrapped(*args: Any, **kwargs: Any) -> Any:
                    return around(original, *args, **kwargs)

                stack.enter_context(mock.patch.object(target, method, wrapped))

            wrap(zero, "stage", self._stage)
            wrap(zero, "decide", self._decide)
            # Of the class: a transfer that knew its own wrapper would keep its matrices until garbage is collected.
            wrap(Transfer, "wait", self._exchange)
            for group in zero.muon_groups:
                wrap(group, "orthogonalize", self._orthogonalize)
                wrap(group.exchange, "gather", self._exchange)
                wrap(group.exchange, "scatter", self._exchange)
            yield

    def _stage(self, original: Callable[..., list[Staged]], *args: Any) -> list[Staged]:
        staged = original(*args)
        with self._looking():
            # Before ``commit``, which overwrites them.
            self._updates = [
                torch.stack([sum_of_squares(u.float()) * scale**2 for _, u, scale, _ in of_group.updates()]).sum()
                for of_group in staged
            ]
        return staged

    def _decide(self, original: Callable[..., Findings], *args: Any) -> Findings:
        self._findings = original(*args)
        return self._findings

    def _orthogonalize(self, original: Callable[..., Tensor], batch: Any) -> Tensor:
        with self._clock.timing("newton_schulz"):
            outputs = original(batch)
        with self._looking():
            for (matrix, u), o in zip(batch, outputs, strict=True):
                if matrix.name in self._sampled:
                    self._look(matrix.name, u, o)
        return outputs

    def _look(self, name: str, u: Tensor, o: Tensor) -> None:
        norm = torch.linalg.vector_norm(u, dtype=torch.float64)
        largest = largest_singular_value(u)
        # What is on the device is fetched after the step.
        self._looks[f"u_norm/{name}"] = norm.item
        self._looks[f"stable_rank/{name}"] = lambda: float(norm / largest) ** 2
        if name == self._sampled[0]:
            self._looks[f"off_orthogonal/{name}"] = distance_from_orthogonal(o).item

    def _exchange(self, original: Callable[..., Any], *args: Any) -> Any:
        with self._clock.timing("exchange"):
            return original(*args)

    def values(self) -> dict[str, float]:
        """What was found, by name. A collective that blocks the host, unless the step was skipped."""
        zero, findings = self._zero, self._findings
        assert findings is not None
        halves = {"muon": findings.muon, "adamw": findings.adamw}
        values = {}
        for half, squares in halves.items():
            if len(squares):
                total = sum(squares)
                values[f"grad_norm/{half}"] = math.sqrt(total) if math.isfinite(total) else math.inf
        for kind in ("spikes", "bad_gradients", "bad_updates"):
            values[f"skipped/{kind}"] = float(getattr(zero.skips, kind).count)
        if zero.overflow:
            return values
        for group in reversed(zero.optimizer.param_groups):  # the first of each half counts
            values[f"lr/{'muon' if group['use_muon'] else 'adamw'}"] = float(group["lr"])
        return {**values, **self._totals()}

    def _totals(self) -> dict[str, float]:
        """What all ranks have a part in."""
        zero, group = self._zero, self._zero.dp_process_group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        looks = [f"{kind}/{name}" for name in self._sampled for kind in ("u_norm", "stable_rank")]
        looks += [f"off_orthogonal/{name}" for name in self._sampled[:1]]
        halves = ("muon", "adamw") if len(zero.optimizer.adamw_groups) else ("muon",)
        sums = [f"{kind}/{half}" for half in halves for kind in ("update", "weight")]
        of_rank = ("newton_schulz", "exchange", "verify")
        try:
            found = self._found()
            mine = [found.get(name, 0.0) for name in (*sums, *looks)]
            mine += [found.get(name, 0.0) if r == rank else 0.0 for name in of_rank for r in range(ranks)]
        except Exception as error:  # the other ranks wait in the collective
            log(f"telemetry: rank {rank} could not look at its part of a step: {error!r}")
            mine = [math.nan] * (len(sums) + len(looks) + len(of_rank) * ranks)
        total = torch.tensor(mine, dtype=torch.float64, device=zero.accelerator)
        dist.all_reduce(total, group=group)
        numbers = iter(total.tolist())
        values = {}
        for name in sums:
            kind, half = name.split("/")
            values[f"{kind}_rms/{half}"] = math.sqrt(next(numbers) / max(1, _elements(zero, half == "muon")))
        values |= {printable(name): next(numbers) for name in looks}
        by_rank = {name: [next(numbers) for _ in range(ranks)] for name in of_rank}
        times = by_rank["newton_schulz"]
        values["newton_schulz_ms"], values["exchange_ms"] = max(times), max(by_rank["exchange"])
        values["balance"] = max(times) * ranks / sum(times) if sum(times) else 1.0
        if zero.training_check is not None:
            values["verify_excess"] = max(by_rank["verify"])
        return values

    def _found(self) -> dict[str, float]:
        """This rank's part of the totals. Blocks the host."""
        if self._error is not None:
            raise self._error
        zero = self._zero
        found: dict[str, float] = defaultdict(float)
        for i, (group, flat) in enumerate(
            zip(zero.optimizer.param_groups, zero.single_partition_of_fp32_groups, strict=True)
        ):
            half = "muon" if group["use_muon"] else "adamw"
            update = self._updates[i] if group["use_muon"] else _adamw_update(group, zero.optimizer.state[flat])
            found[f"update/{half}"] += float(update)
            found[f"weight/{half}"] += float(sum_of_squares(flat.detach()))
        found.update({name: look() for name, look in self._looks.items()})
        found.update(self._clock.ms())
        checked = None if zero.training_check is None else zero.training_check.last
        found["verify"] = 0.0 if checked is None else checked.excess
        return found


class _Clock:
    """Milliseconds by name: of the accelerator's stream, by events, or of the host where that is the accelerator."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, Any, Any]] = []
        self._on_host = get_accelerator().is_synchronized_device()

    def _now(self) -> Any:
        if self._on_host:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    def ms(self) -> dict[str, float]:
        """Waits for the accelerator."""
        if not self._on_host:
            get_accelerator().synchronize()
        total: dict[str, float] = defaultdict(float)
        for name, start, end in self._spans:
            total[name] += 1e3 * (end - start) if self._on_host else start.elapsed_time(end)
        return total


def largest_singular_value(matrix: Tensor) -> Tensor:
    """The spectral norm, a scalar: exact for sides of up to 28, else from below, in most cases by less than 0.1 %.

    By Lanczos in blocks, which takes a few products with thin matrices. No random numbers: the model's dropout uses
    the same generator.

    Args:
        matrix: (rows, cols) fp32; not modified.
    """
    u = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    largest = u.abs().max()
    u = u / torch.where(largest > 0, largest, 1)  # its square could be 0, or infinite
    places = torch.arange(1, u.shape[0] + 1, dtype=torch.float32, device=u.device)
    waves = torch.arange(1, _VECTORS + 1, dtype=torch.float32, device=u.device)
    blocks = [torch.cos(places[:, None] * waves.sqrt())]
    for _ in range(_PRODUCTS):
        blocks.append(torch.linalg.qr(u @ (u.mT @ blocks[-1])).Q)
    basis = torch.linalg.qr(torch.cat(blocks, dim=1)).Q
    inside = (u.mT @ basis).double()
    squares = torch.linalg.eigvalsh(inside.mT @ inside)
    found: Tensor = squares[-1].clamp(min=0).sqrt() * largest
    return found


def distance_from_orthogonal(o: Tensor) -> Tensor:
    """The root mean square, over the singular values s of ``o``, of s^2 - 1, and of how far its vectors lean: a scalar.

    Args:
        o: (rows, cols); not modified.
    """
    o = o if o.shape[0] <= o.shape[1] else o.mT
    total = torch.zeros((), dtype=torch.float64, device=o.device)
    every = max(1, _AT_A_TIME // o.shape[0])
    for first, rows in zip(range(0, o.shape[0], every), torch.split(o, every), strict=True):
        gram = (rows @ o.mT).float()
        gram.diagonal(first).sub_(1)
        total += gram.square().sum(dtype=torch.float64)
    return (total / o.shape[0]).sqrt()


def _adamw_update(group: dict[str, Any], state: dict[str, Tensor]) -> float:
    """The sum of squares of what AdamW's last step has applied, without rate and decay."""
    (beta1, beta2), step = group["betas"], float(state["step"])
    total = 0.0
    moments = (torch.split(state[key], _AT_A_TIME) for key in ("exp_avg", "exp_avg_sq"))
    for mean, square in zip(*moments, strict=True):
        denominator = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        total += float(sum_of_squares((mean / (1 - beta1**step)).div_(denominator)))
    return total


def _elements(zero: Any, of_muon: bool) -> int:
    groups = zip(zero.optimizer.param_groups, zero.bit16_groups, strict=True)
    return sum(p.numel() for group, params in groups if group["use_muon"] is of_muon for p in params)


def _samples_after(engine: Any) -> int:
    """What the engine will count when the step ends: DeepSpeed's own numbers stand there."""
    batch: int = engine.train_batch_size()
    if not engine.managed_gradient_accumulation():
        batch = batch // engine.gradient_accumulation_steps() * engine._unmanaged_backward_count
    return int(engine.global_samples) + batch
