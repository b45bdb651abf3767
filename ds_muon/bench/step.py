"""Whole iterations of one GPT with AdamW, DeepSpeed's own Muon, and DSMuon, on the same ranks.

All engines live in one launch and take turns, one iteration each (forward, backward, step), in another order every
round: a machine that is hot or shared is so for all. Same initial weights, same text (the Python standard library's
sources, as bytes), same order. What a config does not name is DeepSpeed's default, for all alike; gradient_clipping is
1.0. Where the engines would not fit on the device together, they are built one after another instead, in two passes
(A B C A B C), so that a drift does not fall on one of them alone; `--together` overrules the estimate.

    iteration    median of the rounds, of the slowest rank; from an idle device
                 to an idle device
    surcharge    what that is above AdamW's (FusedAdam's; torch's where
                 FusedAdam is missing)
    of Muon's    the surcharge over that of DeepSpeed's Muon
    resident     memory that building the engine added and that stays after its
                 first steps; the rank with most
    peak         the most that was allocated in its iterations, less what the
                 other engines hold; the rank with most
    on the wire  bytes that all ranks send in an iteration: gradients and
                 weights as rings do, from the parameter counts; the exchange
                 of matrices that several ranks hold, by the plan

DSMuon's parts come from iterations of their own, after the others, in which the device is idle whenever a part begins
or ends: they overlap nothing, and may add up to more than the median above.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from ds_muon import plan_cost
from ds_muon.bench.chart import draw_bars
from ds_muon.bench.parts import PARTS
from ds_muon.config import DSMuonConfig, DSMuonConfigError
from ds_muon.options import write_outputs
from ds_muon.ranks import RanksFailed, placement, run_ranks
from ds_muon.say import tell
from ds_muon.text import columns, json_text

MODELS = {"tiny": (3, 128), **{name.removeprefix("gpt-"): size for name, size in plan_cost.GPTS.items()}}
"""Layers and width: a tiny one for CPUs, and the planner's. An odd number of layers straddles two ranks."""

CANDIDATES = {
    "adamw": "AdamW, FusedAdam",
    "adamw-torch": "AdamW, torch fused",
    "muon": "DeepSpeed Muon",
    "dsmuon": "DSMuon",
    "adamw-allreduce": "AdamW, FusedAdam, reduce_scatter false",
}
"""Key and name. By default all but the last, which shows what of the difference is the reduction that DSMuon needs."""
DEFAULTS = ("adamw", "adamw-torch", "muon", "dsmuon")
BASELINES = tuple(CANDIDATES[key] for key in ("adamw", "adamw-torch", "adamw-allreduce"))
"""Surcharges are over the first of these that was measured."""

COULD_NOT_RUN = 2


@dataclass(frozen=True)
class Candidate:
    """An optimizer as a DeepSpeed config has it.

    Attributes:
        name: in the table.
        optimizer: the section of this name.
        zero: keys of ``zero_optimization``, beside the stage.
        problem: why it is not tried on this machine; None if it is.
    """

    name: str
    optimizer: dict[str, Any]
    zero: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Task:
    """What all candidates do. ``together``: "auto", "yes" or "no"; ``sequence``: tokens; ``micro_batch``: of them."""

    model: str
    stage: int
    micro_batch: int
    sequence: int
    rounds: int
    together: str
    candidates: tuple[Candidate, ...]

    @property
    def layers(self) -> int:
        return MODELS[self.model][0]

    @property
    def width(self) -> int:
        return MODELS[self.model][1]

    def to_json(self) -> str:
        return json_text(self)

    @classmethod
    def from_json(cls, text: str) -> Task:
        return TypeAdapter(cls).validate_json(text)


@dataclass(frozen=True)
class Wire:
    """Bytes that all ranks together send in an iteration."""

    reduction: int
    all_gather: int
    exchange: int


@dataclass(frozen=True)
class RankParts:
    """One rank's instrumented iterations.

    Attributes:
        iteration_ms: of one of them, the mean of the middle half by time.
        ms: of its parts, over the same ones; they add up to it.
        sent_bytes: by the exchange, in one of them.
    """

    iteration_ms: float
    ms: dict[str, float]
    sent_bytes: int


@dataclass(frozen=True)
class Parts:
    """DSMuon's parts, by rank."""

    ranks: tuple[RankParts, ...]

    @property
    def busiest(self) -> RankParts:
        """The rank that spends most on Newton-Schulz."""
        return max(self.ranks, key=lambda rank: rank.ms["newton_schulz"])

    @property
    def sent_bytes(self) -> int:
        """By the exchange of all ranks in an iteration."""
        return sum(rank.sent_bytes for rank in self.ranks)


@dataclass(frozen=True)
class Measured:
    """What was measured of a candidate.

    Attributes:
        name: the candidate's.
        problem: why there is nothing; None if there is.
        times_ms: of each round, the slowest rank's.
        resident_bytes, peak_bytes: see the module; None on CPU.
        loss: of the last round, mean over the ranks.
        wire, parts: see the module; ``parts`` of DSMuon only.
    """

    name: str
    problem: str | None = None
    times_ms: tuple[float, ...] = ()
    resident_bytes: int | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    wire: Wire | None = None
    parts: Parts | None = None

    @property
    def ms(self) -> float | None:
        """Median iteration."""
        return statistics.median(self.times_ms) if self.times_ms else None


@dataclass(frozen=True)
class Run:
    """All that the ranks found.

    Attributes:
        device: name of rank 0's.
        world_size: ranks.
        dtype: of the model.
        parameters: of the model.
        passes: 1 if the engines were there together, else how often each was built.
        notes: to be said beside the table.
        versions: of the packages.
        measured: by candidate, in the order of the task.
    """

    device: str
    world_size: int
    dtype: str
    parameters: int
    passes: int
    notes: tuple[str, ...]
    versions: dict[str, str]
    measured: tuple[Measured, ...]

    def to_json(self) -> str:
        return json_text(self)

    @classmethod
    def read(cls, path: Path) -> Run:
        """What rank 0 wrote."""
        return TypeAdapter(cls).validate_json(path.read_bytes())

    def baseline(self) -> Measured | None:
        """The AdamW that surcharges are over."""
        return next((m for name in BASELINES for m in self.measured if m.name == name and m.ms is not None), None)

    def surcharge_ms(self, measured: Measured) -> float | None:
        """Median above the baseline's; None if either is missing, and for the baseline itself."""
        baseline = self.baseline()
        if baseline is None or baseline is measured or baseline.ms is None or measured.ms is None:
            return None
        return measured.ms - baseline.ms

    def over_muon(self, measured: Measured) -> float | None:
        """Surcharge over that of DeepSpeed's Muon; None without one, or where that is no surcharge."""
        muon = next((m for m in self.measured if m.name == CANDIDATES["muon"]), None)
        theirs = None if muon is None else self.surcharge_ms(muon)
        ours = None if measured.name in BASELINES else self.surcharge_ms(measured)
        return ours / theirs if ours is not None and theirs is not None and theirs > 0 else None


# ---- the task -------------------------------------------------------------------------------------------------------


def make_candidates(
    keys: Sequence[str], params: Mapping[str, Any], ns_backends: Sequence[str] | None, *, on_cpu: bool
) -> tuple[Candidate, ...]:
    """The candidates of these keys of ``CANDIDATES``, DSMuon once per Newton-Schulz backend.

    Args:
        keys: which ones, in this order; one that is there again is a twin, whose difference is noise.
        params: DSMuon's ``optimizer.params``, beside the rates.
        ns_backends: overrules ``params``; None leaves it alone.
        on_cpu: where the ranks run.

    Raises:
        DSMuonConfigError: DSMuon cannot take its params.
    """
    rates = {"lr": 0.02, "adam_lr": 3e-4}
    torch_adam = {"torch_adam": True} if on_cpu else {}  # for AdamW's half, where FusedAdam is not to be had
    torchs = {"lr": 3e-4, "torch_adam": True, "fused": True}
    all_reduce = {"reduce_scatter": False}
    fused = Candidate(
        CANDIDATES["adamw"],
        {"type": "AdamW", "params": {"lr": 3e-4}},
        problem="a kernel for GPUs; torch's is the baseline on CPU" if on_cpu else None,
    )
    found = {
        "adamw": [fused],
        "adamw-allreduce": [replace(fused, name=CANDIDATES["adamw-allreduce"], zero=all_reduce)],
        "adamw-torch": [Candidate(CANDIDATES["adamw-torch"], {"type": "AdamW", "params": torchs})],
        "muon": [Candidate(CANDIDATES["muon"], {"type": "Muon", "params": {**rates, **torch_adam}})],
        "dsmuon": [],
    }
    backends: Sequence[str | None] = ns_backends or [None]
    for backend in backends:
        ours = {**rates, **params, **({} if backend is None else {"ns_backend": backend})}
        DSMuonConfig.parse(ours, where="--params")
        name = CANDIDATES["dsmuon"] + (f", {backend}" if ns_backends and len(ns_backends) > 1 else "")
        found["dsmuon"].append(Candidate(name, {"type": "DSMuon", "params": ours}, all_reduce))
    chosen = [candidate for key in keys for candidate in found[key]]
    names = [candidate.name for candidate in chosen]
    seen = [names[:place].count(name) for place, name in enumerate(names)]
    return tuple(replace(c, name=f"{c.name}, {n + 1}") if n else c for c, n in zip(chosen, seen, strict=True))


def default_world_size(environment: Mapping[str, str], gpus: int) -> int:
    """As many ranks as GPUs, at most two; two on a CPU."""
    return 2 if gpus == 0 or environment.get("DS_ACCELERATOR") == "cpu" else min(2, gpus)


# ---- the command ----------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Start the ranks, print what they found, and write the files that were asked for. Returns the exit code."""
    gpus = torch.cuda.device_count()
    world_size = options.world_size or default_world_size(os.environ, gpus)
    environment = dict(os.environ)
    try:
        placed, _ = placement(environment, world_size, gpus)
        on_cpu = placed["DS_ACCELERATOR"] == "cpu"
        if on_cpu:
            # DeepSpeed's Muon is compiled, on a CPU for minutes and to no use.
            environment.setdefault("TORCHDYNAMO_DISABLE", "1")
        task = Task(
            model=options.model or ("tiny" if on_cpu else "303m"),
            stage=options.stage,
            micro_batch=options.micro_batch or (2 if on_cpu else 4),
            sequence=options.sequence or (64 if on_cpu else 1024),
            rounds=options.rounds or (10 if on_cpu else 40),
            together=options.together,
            candidates=make_candidates(options.candidates, options.params, options.ns_backend, on_cpu=on_cpu),
        )
        found = run_ranks("ds_muon.bench.step_rank", ["--task", task.to_json()], world_size, Run.read, environment)
    except (RanksFailed, DSMuonConfigError) as error:
        tell(f"ds-muon bench step: {error}", to=sys.stderr)
        return COULD_NOT_RUN
    tell("\n".join(_lines(task, found)) + "\n")
    measured = any(candidate.ms is not None for candidate in found.measured)
    written = write_outputs(options, numbers(task, found), partial(_draw, task, found) if measured else None)
    return 0 if measured and written else COULD_NOT_RUN


def numbers(task: Task, found: Run) -> dict[str, Any]:
    """Everything that the table is made of, as JSON has it."""
    baseline = found.baseline()
    tokens = found.world_size * task.micro_batch * task.sequence
    entries = []
    for candidate, measured in zip(task.candidates, found.measured, strict=True):
        entry = asdict(measured) | {"optimizer": candidate.optimizer, "zero_optimization": candidate.zero}
        entry |= {"ms": measured.ms, "tokens_per_second": None if measured.ms is None else 1e3 * tokens / measured.ms}
        entry |= {"surcharge_ms": found.surcharge_ms(measured), "over_muon": found.over_muon(measured)}
        entries.append(entry)
    return {
        **{key: value for key, value in asdict(task).items() if key != "candidates"},
        **{key: value for key, value in asdict(found).items() if key != "measured"},
        "layers": task.layers,
        "width": task.width,
        "tokens": tokens,
        "baseline": None if baseline is None else baseline.name,
        "candidates": entries,
    }


def _lines(task: Task, found: Run) -> Iterator[str]:
    versions = ", ".join(f"{package} {version}" for package, version in found.versions.items())
    yield f"{found.world_size} x {found.device}, {versions}"
    yield (
        f"{task.model}: GPT with {task.layers} layers, {task.width} wide, {found.parameters / 1e6:.1f}M parameters, "
        f"{found.dtype}; ZeRO-{task.stage}; {task.micro_batch} x {task.sequence} tokens per rank"
    )
    turns = "engines taking turns" if found.passes == 1 else f"engines built in {found.passes} passes, one at a time"
    yield f"whole iterations (forward, backward, step), medians of {task.rounds} rounds, {turns}"
    yield from found.notes
    yield ""
    yield from columns([*_TITLES, *map(_cells, numbers(task, found)["candidates"])], "<" + 10 * " >")
    baseline = found.baseline()
    yield "surcharge: " + ("no AdamW was measured" if baseline is None else f"over {baseline.name}")
    for measured in found.measured:
        if measured.parts is not None:
            yield from _part_lines(measured.name, measured.parts)


_TITLES = (
    ("", "iteration", "surcharge", "of Muon", "", "resident", "peak", "on the wire, MB:", "", "", ""),
    ("", "ms", "ms", "", "tokens/s", "MiB", "MiB", "gradients", "weights", "exchange", "loss"),
)


def _cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    if entry["problem"] is not None:
        return entry["name"], entry["problem"]
    times = _number(entry["ms"], 2), _number(entry["surcharge_ms"], 2), _number(entry["over_muon"], 3)
    memory = (entry[key] and entry[key] / 2**20 for key in ("resident_bytes", "peak_bytes"))
    wire = (entry["wire"][key] / 1e6 for key in ("reduction", "all_gather", "exchange"))
    return (
        *(entry["name"], *times, _number(entry["tokens_per_second"], 0)),
        *(_number(mib, 0) for mib in memory),
        *(_number(megabytes, 1) for megabytes in wire),
        _number(entry["loss"], 3),
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _part_lines(name: str, parts: Parts) -> Iterator[str]:
    yield f"\n{name}, parts in ms, measured separately: the device is idled around each, so nothing overlaps"
    busiest = parts.busiest
    rows = [("", "busiest rank", "mean", "")]
    for part, meaning in PARTS.items():
        mean = statistics.fmean(rank.ms[part] for rank in parts.ranks)
        rows.append((f"  {part}", f"{busiest.ms[part]:.2f}", f"{mean:.2f}", meaning))
    whole = statistics.fmean(rank.iteration_ms for rank in parts.ranks)
    rows.append(("  iteration", f"{busiest.iteration_ms:.2f}", f"{whole:.2f}", ""))
    yield from columns(rows, "< > > <")
    yield f"  exchange {parts.sent_bytes / 1e6:.2f} MB"


def _draw(task: Task, found: Run, path: Path) -> None:
    """Iteration and memory of each candidate over those of the baseline, or of the first one. Writes ``path``."""
    first = found.baseline() or next(measured for measured in found.measured if measured.ms is not None)
    rows = {"iteration": "ms", "peak memory": "peak_bytes", "resident memory": "resident_bytes"}
    shown = {row: key for row, key in rows.items() if getattr(first, key) is not None}
    series: dict[str, list[float | None]] = {}
    for measured in found.measured:
        values = [getattr(measured, key) for key in shown.values()]
        ones = [getattr(first, key) for key in shown.values()]
        series[measured.name] = [None if v is None else v / one for v, one in zip(values, ones, strict=True)]
    title = f"{task.model} GPT, ZeRO-{task.stage}, {found.world_size} x {found.device}; {first.name}: {first.ms:.1f} ms"
    draw_bars(path, title, f"over {first.name}", list(shown), series)
