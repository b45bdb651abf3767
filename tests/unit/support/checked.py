"""Runs whose every update is checked against the references."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ds_muon.sample.gpt import GPT, GPTConfig
from ds_muon.verify import UpdateCheck, UpdateRecord
from ds_muon.verify.inject import FAULTS, plant
from tests.unit.support.models import Block, PrescribedGradients, start, train_step

# Three layers: the boundary between two ranks cuts a matrix of the middle one.
MODEL = GPTConfig(n_layer=3, n_head=2, n_embd=48, block_size=16)
# What the model here cannot show, test_conv1d and test_blocks do.
SHOWN = [fault for fault in FAULTS if fault not in ("conv1d-scale", "unsplit")]


def train_gpt(engine: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(steps):
        tokens = torch.randint(256, (4, 17), generator=generator).to(engine.device)
        train_step(engine, tokens[:, :-1], tokens[:, 1:])


def check_gpt(
    config: dict[str, Any], fault: str | None = None, steps: int = 3, model: type[GPT] = GPT
) -> list[UpdateRecord]:
    torch.manual_seed(0)
    engine = start(model(MODEL), config)
    records = []
    with nullcontext() if fault is None else plant(fault, engine):
        check = UpdateCheck(engine)
        for _ in range(steps):
            train_gpt(engine, 1)
            records += check.after_step()
    check.close()
    engine.destroy()
    return records


def check_prescribed(shapes: list[tuple[int, ...]], config: dict[str, Any], steps: int) -> list[list[UpdateRecord]]:
    engine = start(PrescribedGradients(shapes), config)
    check = UpdateCheck(engine)
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    records = []
    for _ in range(steps):
        gradients = [torch.randn(shape, generator=generator).to(engine.device) for shape in shapes]
        train_step(engine, gradients)
        records.append(check.after_step())
    engine.destroy()
    return records


def assert_right(records: list[list[UpdateRecord]], tolerance: float | None = None) -> None:
    assert records and all(records)
    for step, step_records in enumerate(records):
        for record in step_records:
            assert record.ok, (step, record)
            assert tolerance is None or record.relative_error <= tolerance, (step, record)


def check_block(config: dict[str, Any], steps: int, **kwargs: Any) -> list[list[UpdateRecord]]:
    """A real network, other data on every rank, as many micro-batches as the config accumulates."""
    torch.manual_seed(0)
    engine = start(Block(), config, **kwargs)
    check = UpdateCheck(engine)
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    records = []
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            tokens, targets = torch.randint(0, 40, (2, 4, 32), generator=generator).to(engine.device)
            train_step(engine, tokens, targets)
        records.append(check.after_step())
    engine.destroy()
    return records
