"""Engines that live in one process, side by side or one after another, train as each does alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor

from ds_muon import DSMuon
from tests.unit.support.around_engine import SHAPES, config_of, gradients_of, is_bound
from tests.unit.support.cases import full
from tests.unit.support.models import PrescribedGradients, ds_config, full_weights, start, train_step
from tests.unit.support.ranks import run_ranks
from tests.unit.support.steps import assert_equal

pytestmark = pytest.mark.ranks

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
CONFIGS: dict[str, dict[str, Any]] = {
    "bf16": ds_config({"weight_decay": 0.1}, dtype="bfloat16"),
    "fp32": ds_config({"variant": "normuon", "ns_dtype": "float32"}, stage=1),
    "fp16": ds_config({"ns_method": "standard", "nan_guard": "skip"}, dtype="float16", scheduler=WARMUP),
    "AdamW": config_of("AdamW", dtype="bfloat16"),
}
STEPS = 4


def train_together(names: list[str], folder: str) -> dict[str, dict[str, Tensor]]:
    """Steps of all engines by turns. Each is saved, trained, and loaded again; the first one ends before the others."""
    engines = {name: start(PrescribedGradients(SHAPES), CONFIGS[name]) for name in names}
    found = {}
    for step in range(STEPS):
        # Gradients of all are under way before the first engine steps.
        for engine in engines.values():
            engine.backward(engine(gradients_of(engine, step)))
        for engine in engines.values():
            engine.step()
        if step == 1:
            for name, engine in engines.items():
                engine.save_checkpoint(f"{folder}/{name}")
            for engine in engines.values():
                train_step(engine, gradients_of(engine, 9))
            for name, engine in engines.items():
                engine.load_checkpoint(f"{folder}/{name}")
        if step == STEPS - 2 and len(names) > 1:
            engines.pop(names[0]).destroy()
    for name, engine in engines.items():
        assert is_bound(engine)
        found[name] = full_weights(engine)
        engine.destroy()
    return found


@functools.cache
def alone(name: str, folder: str) -> dict[str, Tensor]:
    return run_ranks(2, train_together, [name], f"{folder}/alone")[0][name]


@pytest.mark.parametrize(
    "names", [["bf16", "fp32"], ["fp32", "fp16", "AdamW"], ["AdamW", "bf16"], full(["fp16", "bf16", "AdamW", "fp32"])]
)
def test_engines_side_by_side_train_as_each_does_alone(tmp_path_factory: Any, names: list[str]) -> None:
    folder = str(tmp_path_factory.getbasetemp())
    for found in run_ranks(2, train_together, names, f"{folder}/{'-'.join(names)}"):
        assert list(found) == names[1:]
        for name, weights in found.items():
            assert_equal(weights, alone(name, folder))


def train_again(config: dict[str, Any], again: bool) -> dict[str, Tensor]:
    """A step of an engine whose model another engine has trained, or of one whose model is new and has its weights."""
    engine = start(PrescribedGradients(SHAPES), config)
    train_step(engine, gradients_of(engine, 0))
    model, device = engine.module, engine.device
    engine.destroy()
    if not again:
        copy = PrescribedGradients(SHAPES).to(device)
        copy.load_state_dict(model.state_dict())
        model = copy
    engine = start(model, config)
    if isinstance(engine.optimizer.optimizer, DSMuon):
        assert not engine.optimizer.optimizer.momentum_buffer(0).any()
    for step in (1, 2):
        train_step(engine, gradients_of(engine, step))
    assert is_bound(engine)
    weights = full_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("name", ["bf16", "fp32", "AdamW"])
def test_a_model_trains_in_a_new_engine_after_another_one(name: str) -> None:
    anew, again = (run_ranks(2, train_again, CONFIGS[name], again)[0] for again in (False, True))
    assert_equal(again, anew)
