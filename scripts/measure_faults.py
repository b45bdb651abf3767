"""What happens when one of two ranks fails, or is killed, in a step, a save or a load: the table of docs/measured.md.

    python scripts/measure_faults.py                              # on CPU
    DS_MUON_TEST_DEVICE=cuda python scripts/measure_faults.py     # on two GPUs

Prints rows of docs/measured/one-rank-fails.json: the phase, the fault, what the other rank does, whether the last
checkpoint, or the state before the step, is whole, and the seconds until the other rank has stopped, over gloo and over
NCCL. ``--json FILE`` writes there those of this backend.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.unit.support.drills import COMMIT, LOAD, PLACES, fail_at, gradients_of, killed, load_after
from tests.unit.support.models import ds_config, full_weights, start_groups, train_step
from tests.unit.support.ranks import RankFailure, run_ranks
from tests.unit.support.steps import SHAPES

CONFIG = ds_config({"variant": "normuon"})
ON_GPUS = os.environ.get("DS_MUON_TEST_DEVICE") == "cuda"
PHASES = ("take_gradients", "measure", "stage", "decide", "commit")


def raised(place: str) -> tuple[str, bool, float]:
    """What is raised here if rank 1 fails at a place, whether no weight has moved, and the seconds that took."""
    engine = start_groups(SHAPES, CONFIG, groups=2)
    train_step(engine, gradients_of(engine, 0))
    weights = full_weights(engine)
    engine.backward(engine(gradients_of(engine, 1)))
    start = time.monotonic()
    said = fail_at(place, engine, 1, engine.step)
    if place in COMMIT:
        assert said == "nothing"
        try:
            train_step(engine, gradients_of(engine, 2))
        except RuntimeError as error:
            said = str(error)
    seconds = time.monotonic() - start
    whole = all(torch.equal(weight, weights[name]) for name, weight in full_weights(engine).items())
    engine.destroy()
    return said, whole, seconds


def of_raised(place: str) -> list[Any]:
    phase = {**PLACES, **COMMIT}[place][0]
    said, whole, seconds = run_ranks(2, raised, place)[0]
    assert f"none for {place}" in said, said
    stops = "the next step" if place in COMMIT else "the same step"
    kept = "yes" if whole else "no; refused until a load"
    return [phase, f"an error: {place}", f"stops in {stops}, quoting it", kept, seconds]


def saved_and_loaded(folder: str) -> list[tuple[str, bool, float]]:
    """What is raised here if rank 1 cannot write to the disk in a save, or fails in a load; whether the last checkpoint
    loads afterwards; and the seconds that took."""
    engine = start_groups(SHAPES, CONFIG, groups=2)
    train_step(engine, gradients_of(engine, 0))
    engine.save_checkpoint(folder, tag="last")
    weights, found = full_weights(engine), []
    full = mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    for place in ("nowhere", *LOAD):
        train_step(engine, gradients_of(engine, 1))
        start = time.monotonic()
        if place in LOAD:
            said = fail_at(place, engine, 1, lambda: engine.load_checkpoint(folder))
        else:
            with full if torch.distributed.get_rank() == 1 else nullcontext():
                said = fail_at(place, engine, 1, lambda: engine.save_checkpoint(folder, tag="last"))
        seconds = time.monotonic() - start
        engine.load_checkpoint(folder)
        loads = all(torch.equal(weight, weights[name]) for name, weight in full_weights(engine).items())
        found.append((said, loads, seconds))
    engine.destroy()
    return found


def of_saved_and_loaded() -> Iterator[list[Any]]:
    faults = [("save_checkpoint", "a full disk"), *((LOAD[place][0], f"an error: {place}") for place in LOAD)]
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(2, saved_and_loaded, folder)[0]
    for (phase, fault), (said, loads, seconds) in zip(faults, found, strict=True):
        assert "rank 1 stopped" in said, said
        what = f"stops in the {phase.removesuffix('_checkpoint')}, quoting it"
        yield [phase, fault, what, "yes" if loads else "no", seconds]


def of_killed(phase: str) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_ranks(2, killed, CONFIG, phase, folder)
            raise AssertionError("nobody was killed")
        except RankFailure as failure:
            hangs = "hangs" in failure.errors[0]
        loads = all(run_ranks(2, load_after, CONFIG, folder))
        ended, at = Path(folder, "ended"), Path(folder, "killed").stat().st_mtime
        seconds = ended.stat().st_mtime - at if ended.exists() else None
    assert hangs == ON_GPUS, "gloo says that a connection is lost, and NCCL does not"
    what = "stops: its connection is lost; over NCCL waits until the launcher ends it"
    return [phase, "SIGKILL", what, "yes" if loads else "no", seconds]


def rows() -> Iterator[list[Any]]:
    for place in (*PLACES, *COMMIT):
        yield of_raised(place)
    yield from of_saved_and_loaded()
    for phase in PHASES:
        yield of_killed(phase)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file of docs/measured")
    path = parser.parse_args().json
    found = []
    for *words, seconds in rows():
        found.append([*words, None if seconds is None else round(seconds, 2)])
        print(json.dumps(found[-1]), flush=True)
    if path is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        before = json.loads(path.read_text())
        of_other = {tuple(row[:2]): row[4 if ON_GPUS else 5] for row in before["rows"]}
        for row in found:
            row.insert(4 if ON_GPUS else 5, of_other.get(tuple(row[:2])))
        backend, now = "NCCL" if ON_GPUS else "gloo", commit.stdout.strip()
        device = re.sub(rf"(?<={backend} \()\w+", now, before["device"])
        of_run = {"device": device, "commit": now, "recorded": now, "rows": found}
        path.write_text(json.dumps({**before, **of_run}, indent=2) + "\n")


if __name__ == "__main__":
    main()
