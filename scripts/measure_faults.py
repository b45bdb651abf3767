"""What happens when one of two ranks fails, or is killed, in each phase of a step: the table of docs/measured.md.

    python scripts/measure_faults.py                              # on CPU
    DS_MUON_TEST_DEVICE=cuda python scripts/measure_faults.py     # on two GPUs

Prints the rows of docs/measured/one-rank-fails.json: the phase, the fault, what the other rank does, whether the last
checkpoint, or the state before the step, is whole, and the seconds until the other rank has stopped.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.unit.support.drills import COMMIT, PLACES, fail_at, gradients_of, killed, load_after
from tests.unit.support.models import ds_config, full_weights, start_groups, train_step
from tests.unit.support.ranks import RankFailure, run_ranks
from tests.unit.support.steps import SHAPES

CONFIG = ds_config({"variant": "normuon"})
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
    return [phase, f"an error: {place}", f"stops in {stops}, quoting it", "yes" if whole else "no", seconds]


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
    what = "waits until the launcher ends it" if hangs else "stops: its connection is lost"
    return [phase, "SIGKILL", what, "yes" if loads else "no", seconds]


def show(row: list[Any]) -> None:
    *words, seconds = row
    print(json.dumps([*words, None if seconds is None else round(seconds, 2)]), flush=True)


def main() -> None:
    for place in (*PLACES, *COMMIT):
        show(of_raised(place))
    for phase in PHASES:
        show(of_killed(phase))


if __name__ == "__main__":
    main()
