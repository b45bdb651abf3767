"""Which backend ``"auto"`` and a name stand for, and what is said where Triton cannot be used."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from ds_muon.orthogonalize import NewtonSchulz, backends
from ds_muon.orthogonalize.coefficients import Triple
from ds_muon.orthogonalize.torch_backend import TorchOperations

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HALF = (torch.float16, torch.bfloat16)


class Wrong(TorchOperations):
    def polynomial(self, r: Tensor, triple: Triple) -> Tensor:
        return super().polynomial(r, triple) * 1.2


class TooLarge(TorchOperations):
    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("out of resource: shared memory")


class NoMemoryOnce(TorchOperations):
    error: Exception | None = None

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        error = NoMemoryOnce.error
        if error is not None and a.dtype != torch.float32:  # not of the reference
            NoMemoryOnce.error = None
            raise error
        return super().symmetric(a, b)


LOAD = backends._triton


def test_release_is_for_a_backend_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []

    @cache
    def load() -> SimpleNamespace:
        return SimpleNamespace(release=lambda: released.append("triton"))

    monkeypatch.setattr(backends, "_triton", load)
    backends.release()
    assert released == [] and load.cache_info().currsize == 0
    load()
    backends.release()
    assert released == ["triton"]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a GPU, as far as anybody asks; its kernels are torch's, on CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Test")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(backends, "_triton", TorchOperations)
    monkeypatch.setattr(backends, "_compile_for_trial", lambda *_: None)
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    to = Tensor.to
    monkeypatch.setattr(
        Tensor, "to", lambda self, *args, **kwargs: to(self, *(CPU if a == GPU else a for a in args), **kwargs)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    backends._trial.cache_clear()
    backends._log_once.cache_clear()
    yield
    backends._trial.cache_clear()
    backends._log_once.cache_clear()


@pytest.mark.usefixtures("hopper")
def test_auto_is_triton_in_half_precision_on_hopper_and_torch_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for dtype in HALF:
        assert backends.choose_backend("auto", GPU, dtype) == "triton"
        assert backends.choose_backend("auto", CPU, dtype) == "torch"
    assert backends.choose_backend("auto", GPU, torch.float32) == "torch"
    assert backends.choose_backend("triton", GPU, torch.float32) == "triton"
    assert NewtonSchulz.resolve(GPU).backend == "triton" and NewtonSchulz.resolve(CPU).backend == "torch"
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        assert backends.choose_backend("auto", GPU, torch.float16) == "torch"
        assert backends.choose_backend("triton", GPU, torch.float16) == "triton"
    assert not caplog.records  # above INFO


OTHERS = {
    "ampere": (lambda m: m.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0)), "NVIDIA Test"),
    "turing": (lambda m: m.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5)), "8.0"),
    "amd": (lambda m: m.setattr(torch.version, "hip", "6.2"), "AMD"),
    "fp32": (lambda m: None, "fp32"),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("other", OTHERS)
def test_on_a_gpu_where_auto_does_not_try_triton_the_reason_is_logged_once_at_info(
    other: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place, reason = OTHERS[other]
    place(monkeypatch)
    with caplog.at_level(logging.INFO, backends.__name__):
        for _ in range(3):
            dtype = torch.float32 if other == "fp32" else torch.float16
            assert backends.choose_backend("auto", GPU, dtype) == "torch"
    (record,) = caplog.records
    assert record.levelno == logging.INFO and reason in record.getMessage()


def test_on_cpu_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, backends.__name__):
        for dtype in (*HALF, torch.float32):
            assert backends.choose_backend("auto", CPU, dtype) == "torch"
    assert not caplog.records


def old_triton(monkeypatch: pytest.MonkeyPatch, version: str = "3.3.1") -> None:
    """Another release in place of what is installed, and the loader as it is."""
    module = ModuleType("triton")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "triton", module)
    LOAD.cache_clear()
    monkeypatch.setattr(backends, "_triton", LOAD)


OBSTACLES = {
    "no triton": (lambda m: m.setattr(backends, "find_spec", lambda name: None), "not installed"),
    "old triton": (old_triton, "3.3.1 is installed, and 3.4 or newer is needed"),
    "shared memory": (lambda m: m.setattr(backends, "_triton", TooLarge), "out of resource: shared memory"),
    "wrong": (lambda m: m.setattr(backends, "_triton", Wrong), "wrong here"),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_where_triton_cannot_run_auto_says_why_once_and_the_name_is_refused(
    obstacle: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place, reason = OBSTACLES[obstacle]
    place(monkeypatch)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert backends.choose_backend("auto", GPU, torch.float16) == "torch"
    (record,) = caplog.records
    assert reason in record.getMessage()
    with pytest.raises(ValueError, match=f'ns_backend = "triton": .*{reason}.* Set "auto" or "torch"'):
        backends.choose_backend("triton", GPU, torch.float16)


@pytest.mark.parametrize("version", ["2.3.1", "3.3.1", "3.3.0+git1234", "3.2.0.post1"])
def test_kernels_are_not_loaded_with_a_triton_that_is_too_old(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old_triton(monkeypatch, version)
    with pytest.raises(ImportError, match="needed"):
        backends.BACKENDS["triton"]()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("ns_backend", ["auto", "triton"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA: out of memory")])
def test_a_lack_of_memory_is_raised_and_not_remembered(
    error: Exception, ns_backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(NoMemoryOnce, "error", error)
    monkeypatch.setattr(backends, "_triton", NoMemoryOnce)
    with pytest.raises(type(error), match="out of memory"):
        backends.choose_backend(ns_backend, GPU, torch.float16)
    assert backends.choose_backend(ns_backend, GPU, torch.float16) == "triton"
    assert not caplog.records


def test_without_a_gpu_triton_is_refused_and_an_unknown_name_too() -> None:
    with pytest.raises(ValueError, match="needs a GPU"):
        backends.choose_backend("triton", CPU, torch.float16)
    with pytest.raises(ValueError, match="ns_backend = 'cute'"):
        backends.choose_backend("cute", CPU, torch.float16)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "value", "reason"), [("get_device_capability", (7, 5), "8.0"), ("hip", "6.2", "AMD")], ids=str
)
def test_a_name_is_refused_on_gpus_that_the_kernels_are_not_for(
    name: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "hip":
        monkeypatch.setattr(torch.version, "hip", value)
    else:
        monkeypatch.setattr(torch.cuda, name, lambda device=None: value)
    assert backends.choose_backend("auto", GPU, torch.float16) == "torch"
    with pytest.raises(ValueError, match=reason):
        backends.choose_backend("triton", GPU, torch.float16)
