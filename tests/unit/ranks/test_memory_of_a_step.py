"""The bound of what a step allocates, beside engines."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_muon.plan_cost import step_memory
from tests.unit.support.models import PrescribedGradients, ds_config, start, train_step
from tests.unit.support.ranks import run_ranks

# ---- memory, beside engines -----------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Counts the bytes of all storages that operations make in this context, while they live; ``peak`` is the most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
                self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        return result

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._now -= nbytes


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def memory_of_a_step(params: dict[str, Any]) -> tuple[int, int, int]:
    """What a rank allocates in the updates of its only Muon group, and the bounds: for what travels, and in all."""
    engine = start(PrescribedGradients(STRADDLING), ds_config(params))
    zero, rank = engine.optimizer, torch.distributed.get_rank()
    (group,) = zero.muon_groups
    run_stage, counted = group.run_stage, Allocations()

    def counting(*args: Any) -> Iterator[None]:
        with counted:
            yield from run_stage(*args)

    with mock.patch.object(group, "run_stage", counting):
        train_step(engine, [torch.ones(shape, device=engine.device) for shape in STRADDLING])
    exchange, both = step_memory(zero.plan.groups[0], zero.newton_schulz, normuon=params.get("variant") == "normuon")
    engine.destroy()
    return counted.peak, exchange[rank], both[rank]


STRADDLING = [(24, 24), (16, 40), (40, 16), (24, 24), (16, 16), (64, 48), (16, 40), (24, 24)]


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "variant"), [(2, "muon"), (4, "muon"), (2, "normuon")])
def test_a_step_allocates_no_more_than_the_plan_says(world_size: int, variant: str) -> None:
    ranks = run_ranks(world_size, memory_of_a_step, {"variant": variant})
    # NorMuon's moments and norms of the rows, in fp32 and fp64.
    slack = 64 * sum(rows for rows, _ in STRADDLING) if variant == "normuon" else 0
    assert any(exchange for _, exchange, _ in ranks)
    for peak, exchange, both in ranks:
        assert exchange <= both and peak <= both + slack
        assert peak > both / 8
