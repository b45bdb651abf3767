"""``ds-muon verify --determinism``: whether runs that must end in the same bits do.

A run trains a new engine from the same seed, on prescribed gradients: a few bits each on rank 0, and zeros on the other
ranks, so that the average is the same, and exact, at any world size. Runs are compared by a digest of every tensor, of
the fp32 weights and of all state.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from ds_muon.ds_config import ABSENT, BATCH_SIZES, Place, changed, value_at
from ds_muon.files import keep, write_text
from ds_muon.ranks import say_progress
from ds_muon.refusals import DSMuonRefusal
from ds_muon.say import printable, tell
from ds_muon.text import columns, count, json_text
from ds_muon.verify.engine_view import CannotVerify, EngineView
from ds_muon.verify.outcome import COULD_NOT_RUN, RIGHT, WRONG
from ds_muon.verify.rank import Task, build_engine
from ds_muon.verify.subject import built_in_model, make_subject

_CAPTURE = "DS_MUON_NAN_CAPTURE"
_RESUMED = "resumed from a checkpoint"


@dataclass(frozen=True)
class Run:
    """What a run has ended in.

    Attributes:
        name: what is other in it than in the first.
        muon, adamw: digests by tensor, of the two halves.
        refused: why there is no such run; it has no digests then.
    """

    name: str
    muon: dict[str, str] = field(default_factory=dict)
    adamw: dict[str, str] = field(default_factory=dict)
    refused: str = ""


def runs(task: Task, *, once: bool) -> list[Run]:
    """All runs, or the first alone. Every rank calls it, in an initialized process group, and gets the same.

    Raises:
        CannotVerify: the first run cannot be made.
    """
    config = changed(task.config, {(key,): 1 if "micro" in key else ABSENT for key in BATCH_SIZES})
    variants = {count(dist.get_world_size(), "rank"): config}
    if not once:
        variants |= {"the same again": config, _RESUMED: config, "with the capture": config, **_variants(config)}
    box = [tempfile.mkdtemp(prefix="ds-muon-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    found: list[Run] = []
    try:
        for number, (name, variant) in enumerate(variants.items(), 1):
            say_progress(f"run {number} of {len(variants)}: {name}")
            with mock.patch.dict(os.environ, {_CAPTURE: str(int("capture" in name)), f"{_CAPTURE}_DIR": box[0]}):
                try:
                    found.append(_trained(name, variant, task, box[0] if name == _RESUMED else None))
                except DSMuonRefusal as error:
                    found.append(Run(name, refused=str(error).splitlines()[-1]))
            gc.collect()  # an engine is full of cycles
            if found[0].refused:
                raise CannotVerify(found[0].refused)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(box[0], ignore_errors=True)
    return found


def _variants(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The config with one setting turned, which must not change a bit."""
    overlap: Place = ("zero_optimization", "overlap_comm")
    guard: Place = ("optimizer", "params", "nan_guard")
    offload: Place = ("zero_optimization", "offload_optimizer")
    turned = {
        overlap: value_at(config, overlap) is not True,
        guard: "skip" if value_at(config, guard) in (ABSENT, "off") else "off",
        offload: {"device": "cpu"} if value_at(config, offload) is ABSENT else ABSENT,
    }
    return {f"{place[-1]}: {_shown(value)}": changed(config, {place: value}) for place, value in turned.items()}


def _shown(value: Any) -> str:
    return "none" if value is ABSENT else json_text(value)


def _trained(name: str, config: dict[str, Any], task: Task, folder: str | None) -> Run:
    """Train for the steps of the task; with a folder by two engines, of which the first saves what the second loads."""
    engine = _engine(config, task)
    for step in range(max(2, task.steps)):
        if folder is not None and step == 1:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = _engine(config, task)
            engine.load_checkpoint(folder)
        engine.backward(engine(step))
        engine.step()
    view = EngineView(engine.optimizer, engine.module)
    digests: tuple[dict[str, str], dict[str, str]] = {}, {}
    seen = view.complete(view.look())
    for placed, weight, state in zip(view.placed, seen.weights, seen.states, strict=True):
        content = {"weight": weight, **state}
        bits = [
            value.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            for value in content.values()
            if value is not None
        ]
        digests[not placed.use_muon][placed.name] = hashlib.sha256(b"".join(bits)).hexdigest()
    if engine.skipped_steps:
        raise CannotVerify(f"{engine.skipped_steps} steps were skipped: set a smaller initial_scale_power")
    engine.destroy()
    return Run(name, *digests)


def _engine(config: dict[str, Any], task: Task) -> Any:
    torch.manual_seed(task.seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = built_in_model() if task.model is None else make_subject(task.model, rank, world_size)[0]

    def forward(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(task.seed + step)
        sums = []
        for p in model.parameters():
            if p.requires_grad:
                gradient = torch.randint(-8, 9, p.shape, generator=generator, dtype=torch.int64, device="cpu")
                gradient = gradient * ((rank == 0) * world_size / 1024)
                sums.append((p * gradient.to(p)).sum())
        return torch.stack(sums).sum()

    model.forward = forward
    engine = build_engine(model, config)
    if not hasattr(engine.optimizer, "newton_schulz"):
        raise CannotVerify('--determinism is of DSMuon: set optimizer.type to "DSMuon"')
    return engine


# ---- what is found --------------------------------------------------------------------------------------------------


def compared(first: Run, run: Run) -> tuple[bool | None, str]:
    """Whether a run has the bits of the first, and a remark; None if there was no such run."""
    if run.refused:
        return None, run.refused
    # Beside an accelerator, the AdamW of the host rounds in its own way.
    only_muon = "offload" in run.name
    halves = [(first.muon, run.muon)] if only_muon else [(first.muon, run.muon), (first.adamw, run.adamw)]
    tensors = [(name, bits, other.get(name)) for one, other in halves for name, bits in one.items()]
    differ = [name for name, bits, other in tensors if bits != other]
    what = f"{count(len(tensors), 'tensor')}{' of Muon' if only_muon else ''}"
    return not differ, f"{len(differ)} of {what}, first {printable(differ[0])}" if differ else what


def present(found: Sequence[Run], options: argparse.Namespace) -> int:
    """Print the table, write ``--json``, and return the exit code."""
    first, *others = found
    words = {True: "the same bits", False: "DIFFERENT", None: "not run"}
    rows = [[first.name, "compared with:"], *([run.name, words[same], why] for run, (same, why) in _results(found))]
    tell("\n".join(columns(rows, "< < <")))
    if options.json is not None:
        keep("digests", options.json, lambda: write_text(options.json, json_text(found, indent=1) + "\n"))
    code = exit_code(found)
    verdict = {
        COULD_NOT_RUN: "NOTHING could be compared",
        RIGHT: f"RIGHT: {count(len(others), 'run')} with the bits of the first",
        WRONG: "WRONG: runs that must have the same bits differ",
    }[code]
    if not tell(f"\n{verdict}"):
        tell(verdict, to=sys.stderr)
    return code


def exit_code(found: Sequence[Run]) -> int:
    """0 if all that could be compared have the same bits, 1 if one has not, 2 if there was nothing to compare."""
    ran = [same for _, (same, _) in _results(found) if same is not None]
    return WRONG if not all(ran) else RIGHT if ran or len(found) == 1 else COULD_NOT_RUN


def _results(found: Sequence[Run]) -> list[tuple[Run, tuple[bool | None, str]]]:
    return [(run, compared(found[0], run)) for run in found[1:]]


def load(path: Path) -> list[Run]:
    """What ``present`` has written."""
    return _RUNS.validate_json(path.read_bytes())


_RUNS: TypeAdapter[list[Run]] = TypeAdapter(list[Run])
