"""What is installed here, which Newton-Schulz "auto" takes and why, and whether that is right beside fp64."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import torch
from deepspeed.accelerator import get_accelerator

from ds_muon.dtypes import name_of
from ds_muon.extras import OLDEST_TRITON
from ds_muon.orthogonalize import NewtonSchulz, orthogonalize, reference_newton_schulz
from ds_muon.orthogonalize.backends import why_torch
from ds_muon.refusals import SUPPORTED_DEEPSPEED
from ds_muon.verify.tolerances import AGAINST_FP64
from ds_muon.version import VERSION

# As in pyproject.toml.
OLDEST = {"torch": (2, 6), "pydantic": (2, 8), "triton": OLDEST_TRITON}
OPTIONAL = ("triton", "transformers", "accelerate")
# With sides for which ``AGAINST_FP64`` holds in every dtype.
_SHAPES = ((512, 512), (512, 1536), (1024, 512))


@dataclass(frozen=True)
class Package:
    """Attributes: name; version, None if it is not installed; what is to be said of that; whether it can be used."""

    name: str
    version: str | None
    remark: str
    ok: bool = True


@dataclass(frozen=True)
class Check:
    """Newton-Schulz of a random (rows, cols) matrix: relative error beside fp64, and what the dtype allows."""

    shape: tuple[int, int]
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # not for NaN


@dataclass(frozen=True)
class Machine:
    """What a machine has.

    Attributes:
        python: version and platform.
        packages: those that matter here.
        device: type of DeepSpeed's accelerator, its name, and how many there are.
        backend: that "auto" takes.
        dtype: that "auto" takes.
        why: for both.
        checks: against fp64; none where Newton-Schulz did not run.
        seconds: that they took.
        problem: why Newton-Schulz did not run.
    """

    python: str
    packages: Sequence[Package]
    device: str
    backend: str
    dtype: str
    why: str
    checks: Sequence[Check]
    seconds: float
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None and all(package.ok for package in self.packages) and all(c.ok for c in self.checks)


def look() -> Machine:
    """Look at this machine. Takes seconds; compiles Triton's kernels where they are tried for the first time."""
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    about = "CPU" if device.type == "cpu" else f"{accelerator.device_count()} x {_name_of(device)}"
    start = time.perf_counter()
    backend = dtype = why = ""
    checks: list[Check] = []
    problem = None
    try:
        settings = NewtonSchulz.resolve(device)
        backend, dtype, why = settings.backend, name_of(settings.dtype), _why(device, settings)
        checks = [_check(shape, device, settings) for shape in _SHAPES]
    except Exception as error:  # no memory, a driver that does not answer: what it is, is to be said
        problem = str(error) or type(error).__name__
    python = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    seconds = time.perf_counter() - start
    return Machine(python, _packages(), about, backend, dtype, why, checks, seconds, problem)


def _why(device: torch.device, settings: NewtonSchulz) -> str:
    of_dtype = "a CPU iterates in fp32" if device.type == "cpu" else "fp16 is as fast as bf16, with 8 times less error"
    of_backend = why_torch(device, settings.dtype) or "the Triton kernels run here, and are faster than torch's"
    return f"{of_backend}; {of_dtype}"


def _check(shape: tuple[int, int], device: torch.device, settings: NewtonSchulz) -> Check:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)
    expected = reference_newton_schulz(matrix)
    (found,) = orthogonalize([matrix], settings)
    error = float((found.double() - expected).norm() / expected.norm())
    return Check(shape, error, AGAINST_FP64[settings.dtype])


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _packages() -> list[Package]:
    names = ("deepspeed", "torch", "pydantic", *OPTIONAL)
    return [Package("ds_muon", VERSION, ""), *(_package(name, _version(name)) for name in names)]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str, version: str | None) -> Package:
    if version is None:
        remark = "not needed" if name in OPTIONAL else "is not installed by pip: no version to look at"
        return Package(name, None, remark)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if name == "deepspeed":
        # A part that is missing has ended the import of this package.
        tested = version == SUPPORTED_DEEPSPEED
        return Package(name, version, "tested" if tested else f"has the parts needed; tested is {SUPPORTED_DEEPSPEED}")
    if name in OLDEST:
        oldest = ".".join(map(str, OLDEST[name]))
        if numbers >= OLDEST[name]:
            return Package(name, version, f"{oldest} or newer")
        if name in OPTIONAL:  # such as the Triton that torch 2.6 brings: torch's operations run in its place
            return Package(name, version, f"is too old to be used: {oldest} or newer")
        return Package(name, version, f"is too old: {oldest} or newer", ok=False)
    return Package(name, version, "any that goes with DeepSpeed")
