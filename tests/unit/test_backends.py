"""Which backend ``"auto"`` and a name stand for, and what is said where Triton cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Iterator

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


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a GPU, as far as anybody asks; its kernels are torch's, on CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Test")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(backends, "_triton", TorchOperations)
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
    assert not caplog.records


OBSTACLES = {
    "no triton": (lambda m: m.setattr(backends, "find_spec", lambda name: None), "not installed"),
    "old triton": (lambda m: m.setattr(backends, "_triton", lambda: 1 / 0), "division by zero"),
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
