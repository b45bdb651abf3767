"""What ``ds-muon verify`` feeds to a model, and takes for its loss: the built-in model's, or those of a factory."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_muon.verify import subject
from ds_muon.verify.engine_view import CannotVerify


def test_batches_are_positional_or_keyword_arguments() -> None:
    cpu = torch.device("cpu")
    loss = torch.tensor(1.0)

    def model(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return loss

    calls: list[Any] = []
    for batch in (loss, (loss, 2), [loss, {"k": [loss]}], {"x": loss, "n": None}):
        assert subject.loss_of(model, batch, cpu) is loss
    assert calls == [((loss,), {}), ((loss, 2), {}), ((loss, {"k": [loss]}), {}), ((), {"x": loss, "n": None})]


def test_tensors_at_any_depth_are_moved() -> None:
    moved = subject.on_device({"a": (torch.ones(1), [torch.ones(1)]), "b": 3}, torch.device("meta"))
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["b"] == 3 and isinstance(moved["a"], tuple)


def test_the_loss_is_found_in_what_models_return() -> None:
    loss = torch.tensor(1.0)
    logits = torch.ones(2, 2)
    for output in (loss, SimpleNamespace(loss=loss), {"loss": loss}, (loss, logits), [loss]):
        assert subject.pick_loss(output) is loss
    for output in (logits, {"logits": loss}, SimpleNamespace(logits=loss), (), (logits, loss), None):
        with pytest.raises(CannotVerify, match="return the loss as a scalar tensor"):
            subject.pick_loss(output)


def test_batches_start_over_if_they_can() -> None:
    feed = subject.endless([1, 2])
    assert [next(feed) for _ in range(5)] == [1, 2, 1, 2, 1]
    once = subject.endless(iter([1, 2]))
    assert [next(once), next(once)] == [1, 2]
    with pytest.raises(CannotVerify, match="cannot be started over"):
        next(once)
    with pytest.raises(CannotVerify, match="no batches"):
        next(subject.endless([]))


def test_the_built_in_batches_differ_by_rank_and_seed_only() -> None:
    def first(rank: int, seed: int) -> torch.Tensor:
        tokens, targets = next(subject.built_in_batches(3, rank, 2, seed))
        assert torch.equal(tokens[:, 1:], targets[:, :-1]) and tokens.shape == (3, subject.BUILT_IN.block_size)
        return tokens

    assert torch.equal(first(0, 0), first(0, 0))
    assert not torch.equal(first(0, 0), first(1, 0)) and not torch.equal(first(0, 0), first(0, 1))


def test_a_factory_is_loaded_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_factory_module.py").write_text(
        "from torch import nn\n"
        "value = 3\n"
        "def make(rank, world_size): return nn.Linear(rank, world_size), [1]\n"
        "def unpaired(rank, world_size): return nn.Linear(1, 1)\n"
        "def unbatched(rank, world_size): return nn.Linear(1, 1), 3\n"
    )
    (tmp_path / "my_broken_module.py").write_text("import no_such_module_of_mine")
    model, batches = subject.make_subject("my_factory_module:make", 1, 2)
    assert isinstance(model, torch.nn.Linear) and model.in_features == 1 and batches == [1]
    for spec, message in {
        "my_factory_module": "write it as module:factory",
        "my_factory_module:": "write it as module:factory",
        "no_such_module_of_mine:make": "no module no_such_module_of_mine in .*set PYTHONPATH",
        "my_factory_module:nothing": "has no function nothing",
        "my_factory_module:value": "has no function value",
        "my_factory_module:unpaired": "returned a Linear: return a pair",
        "my_factory_module:unbatched": "batches of type a int|a int: return a list",
    }.items():
        with pytest.raises(CannotVerify, match=message):
            subject.make_subject(spec, 0, 1)
    with pytest.raises(ModuleNotFoundError):  # the module's own mistake keeps its traceback
        subject.make_subject("my_broken_module:make", 0, 1)
