"""Kernels compiled ahead: all that would be launched, without a launch, and everything as before afterwards."""

from __future__ import annotations

from concurrent.futures import Executor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.support.interpreter import defining_kernels

with defining_kernels():
    from ds_muon.kernels import ahead, elementwise
    from ds_muon.passes import triton_passes


class Kernel:
    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launched.append((grid, args, options))

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.compiled.append((grid, args, options))


class Beside:
    """Stands for Triton's mode, which counts who is inside."""

    inside = 0
    pool: Executor

    def __init__(self, pool: Executor, *, ignore_errors: bool) -> None:
        assert ignore_errors
        Beside.pool = pool

    def __enter__(self) -> None:
        Beside.inside += 1

    def __exit__(self, *error: object) -> None:
        Beside.inside -= 1


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(ahead, "triton", SimpleNamespace(JITFunction=Kernel, AsyncCompileMode=Beside))
    monkeypatch.setattr(ahead, "_threads", lambda: 4)
    module = ModuleType("kernels")
    module.product, module._part, module.SIDE = Kernel(), Kernel(), 64  # type: ignore[attr-defined]
    return module


def launched_by(kernels: Any) -> Any:
    def launch() -> None:
        kernels.product[(3,)](1, 2, num_warps=4)
        kernels._part[(1,)]()

    return launch


def test_what_would_be_launched_is_compiled_and_only_inner_functions_stay(kernels: Any) -> None:
    product, part = kernels.product, kernels._part
    ahead.compile_ahead(kernels, launched_by(kernels))
    assert product.compiled == [((3,), (1, 2), {"num_warps": 4})] and not product.launched
    assert part.launched and not part.compiled
    assert kernels.product is product and Beside.inside == 0


def test_of_each_signature_the_launcher_is_made_once_and_one_that_fails_costs_no_kernel(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def launcher(src: Any, metadata: object) -> None:
        made.append(f"{src.name} {', '.join(src.signature.values())}")
        raise RuntimeError("no C compiler")

    driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher))
    monkeypatch.setattr(ahead.triton, "runtime", SimpleNamespace(driver=driver), raising=False)
    types = [("product", "tensordesc<fp16[1, 64, 64]>"), ("product", "tensordesc<fp16[1, 32, 64]>"), ("sum", "*fp32")]
    compiled = [
        SimpleNamespace(src=SimpleNamespace(name=name, signature={"x": of}), metadata=None) for name, of in types
    ]
    got: list[object] = []

    def launch() -> None:
        for kernel in compiled:
            got.append(Beside.pool.submit(lambda kernel=kernel: kernel).result())

    ahead.compile_ahead(kernels, launch)
    assert got == compiled and len(made) == 2


def test_after_an_error_the_kernels_are_launched_again(kernels: Any) -> None:
    product = kernels.product
    with pytest.raises(ZeroDivisionError):
        ahead.compile_ahead(kernels, lambda: 1 // 0)
    assert kernels.product is product and Beside.inside == 0


@pytest.mark.parametrize("reason", ["Triton 3.4", "Triton 3.5", "one core"])
def test_nothing_is_done_where_nothing_can_be_gained(
    kernels: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "one core":
        monkeypatch.setattr(ahead, "_threads", lambda: 1)
    elif reason == "Triton 3.4":
        monkeypatch.delattr(ahead.triton, "AsyncCompileMode")
    else:
        monkeypatch.setattr(ahead.triton, "AsyncCompileMode", lambda executor: 1 // 0)
    ahead.compile_ahead(kernels, launched_by(kernels))
    assert not kernels.product.compiled and not kernels.product.launched


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda process: range(32))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for ranks, threads in (("", 16), ("1", 16), ("4", 8), ("64", 1)):
        monkeypatch.setenv("LOCAL_SIZE", ranks)
        assert ahead._threads() == threads


def test_the_kernels_of_a_first_step_are_all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {name: Kernel() for name, of in vars(elementwise).items() if hasattr(of, "arg_names") and name[0] != "_"}
    for name, kernel in kernels.items():
        monkeypatch.setattr(elementwise, name, kernel)
    monkeypatch.setattr(ahead, "compile_ahead", lambda module, launch: launch())
    triton_passes.compile_ahead(
        torch.device("cpu"),
        momentum=0.95,
        nesterov=True,
        momentum_dtype=torch.bfloat16,
        result_dtype=torch.float16,
        weight_decay=0.1,
    )
    assert len(kernels) == 5 and all(kernel.launched for kernel in kernels.values())
