"""However many backwards make a step, and however they are run, momentum moves once and the update is the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_muon import DSMuon
from tests.unit.support.around_engine import SHAPES, config_of, is_bound
from tests.unit.support.cases import in_turns
from tests.unit.support.drills import fail_at
from tests.unit.support.models import (
    Block,
    PrescribedGradients,
    ds_config,
    full_momentum,
    full_weights,
    start,
    train_step,
)
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import assert_equal

pytestmark = pytest.mark.ranks

SAMPLES = 8


# ---- micro-batches --------------------------------------------------------------------------------------------------


def samples(step: int, device: torch.device) -> list[list[Tensor]]:
    """Gradients by sample, of so few bits that no sum and no average of them is rounded, in bf16 either."""
    generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
    return [
        [(torch.randint(-2, 3, shape, generator=generator) / 64.0).to(device) for shape in SHAPES]
        for _ in range(SAMPLES)
    ]


def micro_batches(step: int, size: int, device: torch.device) -> list[list[Tensor]]:
    """The mean gradients of every ``size`` samples."""
    of_all = samples(step, device)
    return [
        [sum(gs) / size for gs in zip(*of_all[first : first + size], strict=True)]  # type: ignore[misc]
        for first in range(0, SAMPLES, size)
    ]


def managed(engine: Any, batches: list[list[Tensor]]) -> None:
    for gradients in batches:
        engine.backward(engine(gradients))
        engine.step()


def by_the_script(engine: Any, batches: list[list[Tensor]]) -> None:
    for gradients in batches:
        engine.backward(engine(gradients) / len(batches))
    engine.step()


def of_one_forward(engine: Any, batches: list[list[Tensor]]) -> None:
    """Several losses, each with a backward of its own, through what they share."""
    losses = [engine(gradients) / len(batches) for gradients in batches]
    for loss in losses:
        engine.backward(loss)
    engine.step()


def with_the_boundary_set(engine: Any, batches: list[list[Tensor]]) -> None:
    """As Accelerate does it."""
    for i, gradients in enumerate(batches):
        engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
        engine.backward(engine(gradients))
    engine.step()


def without_sync(engine: Any, batches: list[list[Tensor]]) -> None:
    with engine.no_sync():
        for gradients in batches[:-1]:
            engine.backward(engine(gradients) / len(batches))
    engine.backward(engine(batches[-1]) / len(batches))
    engine.step()


def reduced_at_once(engine: Any, batches: list[list[Tensor]]) -> None:
    with engine.coalesce_grad_reduction():
        for gradients in batches:
            engine.backward(engine(gradients) / len(batches))
    engine.step()


Way = Callable[[Any, list[list[Tensor]]], None]
UNMANAGED = {"managed_gradient_accumulation": False}
# How the samples of a step are run, of how many a micro-batch is, and what the config says of it.
WAYS: dict[str, tuple[Way, int, dict[str, Any]]] = {
    "8 x 1": (managed, 1, {"gradient_accumulation_steps": 8}),
    "4 x 2": (managed, 2, {"gradient_accumulation_steps": 4}),
    "2 x 4": (managed, 4, {"gradient_accumulation_steps": 2}),
    "boundary set": (with_the_boundary_set, 2, {"gradient_accumulation_steps": 4}),
    "by the script": (by_the_script, 2, UNMANAGED),
    "of one forward": (of_one_forward, 4, UNMANAGED),
    "no_sync": (without_sync, 2, UNMANAGED),
    "coalesced": (reduced_at_once, 2, {}),
}
REDUCTIONS: list[dict[str, Any]] = [
    {},
    {"reduce_bucket_size": 300},
    {"contiguous_gradients": False},
    {"round_robin_gradients": True},
]
# DeepSpeed has no no_sync at stage 2.
CASES = [(way, stage) for way in WAYS for stage in (1, 2) if (way, stage) != ("no_sync", 2)]


def two_steps(config: dict[str, Any], way: Way, size: int) -> list[dict[str, Tensor]]:
    """Weights, and of DSMuon the momentum."""
    engine = start(PrescribedGradients(SHAPES), config)
    for step in range(2):
        way(engine, micro_batches(step, size, engine.device))
    assert is_bound(engine) and engine.global_steps == 2
    found = [full_weights(engine)]
    if isinstance(engine.optimizer.optimizer, DSMuon):
        found.append(full_momentum(engine))
    engine.destroy()
    return found


@functools.cache
def at_once(optimizer: str, dtype: str) -> list[dict[str, Tensor]]:
    return run_ranks(2, two_steps, config_of(optimizer, dtype=dtype), managed, SAMPLES)[0]


@pytest.mark.parametrize("optimizer", ["DSMuon", "AdamW"])
@pytest.mark.parametrize(("way", "stage"), CASES)
def test_a_step_is_the_same_in_however_many_backwards(way: str, stage: int, optimizer: str) -> None:
    run, size, settings = WAYS[way]
    number = CASES.index((way, stage))
    dtype, reduction = ("float32", "bfloat16")[number // 4 % 2], REDUCTIONS[number % 4]
    config = config_of(optimizer, dtype=dtype, stage=stage, zero=reduction, **settings)
    for found, expected in zip(run_ranks(2, two_steps, config, run, size)[0], at_once(optimizer, dtype), strict=True):
        assert_equal(found, expected)


# ---- an error that the script catches -------------------------------------------------------------------------------


def fail_once(config: dict[str, Any], way: Way, fails: bool) -> list[dict[str, Tensor]]:
    """Weights and momentum after steps 0 and 2; if it ``fails``, a step between them that one rank stops at its end."""
    engine = start(PrescribedGradients(SHAPES), config)
    for step in (0, 1, 2) if fails else (0, 2):
        batches = micro_batches(step, 2, engine.device)
        if step != 1:
            way(engine, batches)
            continue
        error = fail_at("the first flatten", engine, 1, lambda batches=batches: way(engine, batches))  # type: ignore[misc]
        assert "NoMemory: none for the first flatten" in error
    counts = {"steps": torch.tensor([engine.global_steps, engine.global_samples])}
    found = [full_weights(engine), full_momentum(engine), counts]
    engine.destroy()
    return found


@in_turns(
    way=["4 x 2", "boundary set", "by the script", "coalesced"],
    stage=[2, 1],
    dtype=["bfloat16", "float32"],
    top=[{"wall_clock_breakdown": True}, {"data_types": {"grad_accum_dtype": "fp32"}}],
    zero=[{}, {"offload_optimizer": {"device": "cpu"}}],
)
def test_after_a_step_that_failed_the_next_micro_batches_make_a_whole_step_anew(
    way: str, stage: int, dtype: str, top: dict[str, Any], zero: dict[str, Any]
) -> None:
    run, _, settings = WAYS[way]
    config = config_of("DSMuon", dtype=dtype, stage=stage, zero=zero, **settings, **top)
    failed, good = (run_ranks(2, fail_once, config, run, fails)[0] for fails in (True, False))
    for found, expected in zip(failed, good, strict=True):
        assert_equal(found, expected)


def interrupt(config: dict[str, Any]) -> list[str]:
    """What all that comes after a backward pass with an error on every rank raises."""
    engine = start(PrescribedGradients(SHAPES), config)
    first, second = micro_batches(0, 4, engine.device)

    def stop(_: Tensor) -> None:
        raise KeyboardInterrupt

    said = []
    hook = engine.module.p1.register_hook(stop)
    for do in (lambda: engine.backward(engine(first)), engine.step, lambda: managed(engine, [first, second])):
        try:
            do()
        except BaseException as error:
            said.append(f"{type(error).__name__}: {error}")
        hook.remove()
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [1, 2])
def test_after_a_backward_pass_that_failed_no_step_is_made(stage: int) -> None:
    config = ds_config(stage=stage, gradient_accumulation_steps=1)
    ((stopped, *refused),) = run_ranks(1, interrupt, config)
    assert stopped == "KeyboardInterrupt: " and len(refused) == 2
    assert all("DSMuonRefusal: a backward pass has ended in an error (KeyboardInterrupt" in text for text in refused)


# ---- activation checkpointing ---------------------------------------------------------------------------------------


def kept(part: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    return part(h)


CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "kept": kept,
    "re-entrant": functools.partial(checkpoint, use_reentrant=True),
    "not re-entrant": functools.partial(checkpoint, use_reentrant=False),
    "DeepSpeed's": deepspeed.checkpointing.checkpoint,
}


class Checkpointed(Block):
    def __init__(self, how: str) -> None:
        super().__init__(vocabulary=12, width=16)
        self.run = CHECKPOINTS[how]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.norm(self.embedding(tokens))
        h = h + self.run(self.square, h)
        # A part within a part.
        h = h + self.run(lambda x: self.wide(self.run(lambda y: torch.relu(self.tall(y)), x)), h)
        return nn.functional.cross_entropy(self.lm_head(h).float().flatten(0, 1), targets.flatten())


def train_checkpointed(config: dict[str, Any], how: str) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    engine = start(Checkpointed(how), config)
    if how == "DeepSpeed's":
        deepspeed.checkpointing.configure(None, deepspeed_config=config)
    for micro_step in range(4):
        generator = torch.Generator().manual_seed(10 * micro_step + torch.distributed.get_rank())
        train_step(engine, *torch.randint(0, 12, (2, 2, 8), generator=generator).to(engine.device))
    assert engine.global_steps == 2
    found = [full_weights(engine), full_momentum(engine)]
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_activation_checkpointing_changes_no_bit(stage: int, dtype: str) -> None:
    config = ds_config(stage=stage, dtype=dtype, gradient_accumulation_steps=2)
    expected = run_ranks(2, train_checkpointed, config, "kept")[0]
    for how in ("re-entrant", "not re-entrant", "DeepSpeed's"):
        found = run_ranks(2, train_checkpointed, config, how)[0]
        for right, left in zip(expected, found, strict=True):
            assert_equal(left, right)
