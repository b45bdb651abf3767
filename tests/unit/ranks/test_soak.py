"""Many steps with faults at random: nothing moves in a bad one, no rank ever differs from another, and what the faults
leave is the training without them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.soak import GROWTH, Found, Options, Sample, Soak, rows_of
from tests.unit.support.cases import first_of, full
from tests.unit.support.faulty import faulty_backend, sick
from tests.unit.support.models import PrescribedGradients, ds_config, full_weights, start, train_step
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import state_by_key

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SHAPES = [(30, 20), (12, 12), (20, 36), (5,), (9,)]
FAULTS = ("gradient", "output", "spike")
MAY_MOVE: dict[str, set[str]] = {"gradient": set(), "output": {"momentum_buffer"}, "spike": set()}


def soak(config: dict[str, Any], seed: int, steps: int) -> dict[str, int]:
    """Train with a fault in every third step or so; counts of steps by what happened in them."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine = start(PrescribedGradients(SHAPES), config)
    device = engine.device
    shared, own = random.Random(seed), torch.Generator().manual_seed(rank)
    counts = dict.fromkeys(("clean", *FAULTS), 0)
    before, state = full_weights(engine), state_by_key(engine)
    with faulty_backend(engine):
        for step in range(steps):
            fault = shared.choice(FAULTS) if shared.random() < 0.3 else "clean"
            bad_rank, which = shared.randrange(world_size), shared.randrange(len(SHAPES))
            matrix, poison = shared.choice(SHAPES[:3]), shared.choice([torch.nan, torch.inf, -torch.inf])
            gradients = [torch.randn(shape, generator=own).to(device) for shape in SHAPES]
            if rank == bad_rank and fault == "gradient":
                gradients[which].view(-1)[0] = poison
            if rank == bad_rank and fault == "spike":
                gradients[3] *= 1e6
            with sick(matrix if fault == "output" else None):  # on every rank; its owner runs it
                train_step(engine, gradients)
            counts[fault] += 1
            after, state_after = full_weights(engine), state_by_key(engine)
            moved = {name for name in after if not torch.equal(after[name], before[name])}
            assert moved == (set(after) if fault == "clean" else set()), (step, fault, moved)
            assert all(weight.isfinite().all() for weight in after.values()), step
            state_moved = {k for (g, k), t in state_after.items() if not torch.equal(t, state[g, k])}
            assert state_moved <= MAY_MOVE.get(fault, set(state_moved)), (step, fault, state_moved)
            assert_the_same_on_every_rank(engine, step)
            before, state = after, state_after
        assert engine.skipped_steps == steps - counts["clean"]
    return counts


def assert_the_same_on_every_rank(engine: Any, step: int) -> None:
    flat = torch.cat([p.detach().reshape(-1).float() for p in engine.module.parameters()])
    everyones: list[Tensor] = [torch.empty_like(flat) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyones, flat)
    assert all(torch.equal(flat, other) for other in everyones), step


@pytest.mark.parametrize("steps", first_of([60, 500]))
@pytest.mark.parametrize(("stage", "dtype", "variant"), [(2, "float32", "muon"), full(1, "bfloat16", "normuon")])
def test_many_steps_with_faults_at_random(stage: int, dtype: str, variant: str, steps: int) -> None:
    params = {"nan_guard": "skip", "grad_norm_skip_threshold": 1e4, "variant": variant, "weight_decay": 0.01}
    first, second = run_ranks(2, soak, ds_config(params, stage=stage, dtype=dtype), 7, steps)
    assert first == second and all(first[fault] > steps / 25 for fault in FAULTS) and first["clean"] > 0.6 * steps


def beside_a_training_without_faults(options: Options) -> Found:
    return Soak(options).go()


@pytest.mark.parametrize("steps", first_of([60, 600]))
def test_faults_saves_and_loads_leave_the_training_without_them(steps: int) -> None:
    """It raises where loss or state differ. Gradients accumulate, over a rate that falls."""
    faults = {"gradient": 50, "spike": 30, "update": 15, "rank": 20, "load": 15, "new engine": 10, "evaluation": 20}
    options = Options(steps, seed=4, often=2.5, faults=faults, samples=6, stage=1, dtype="bfloat16")
    first, second = run_ranks(2, beside_a_training_without_faults, options)
    assert first.counts == second.counts and set(first.counts) == {*faults, "none", "save"}
    assert first.positions > steps / 4 and first.compared > 2


@pytest.mark.parametrize("name", GROWTH)
def test_what_grows_through_a_run_is_named(name: str) -> None:
    held = dict(vars(Sample(0, 0, *[1000.0] * 3, *[100] * 3, 1000.0, 1000.0, 1.0)))
    samples = [Sample(**{**held, "step": step, name: held[name] * (1 + step / 40)}) for step in range(1, 101)]
    growing = [row[0] for row in rows_of([Found(100, 100, {}, 2, 1.0, samples)]) if row[-1]]
    assert growing == [name]
