"""Reads files of a checkpoint without running code in them: tensors, plain values, and objects of DeepSpeed's own."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date, datetime, time, timedelta, timezone
from fractions import Fraction
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals
from torch.torch_version import TorchVersion

from ds_muon.say import printable

# A rate that a script has computed may be a number of numpy's, and numpy's random state is an array of it. Both are
# saved under a name of its version.
_NUMBER, _ARRAY = np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]
_OF_NUMPY = [
    (of, f"numpy.{core}.multiarray.{name}")
    for core in ("core", "_core")
    for of, name in ((_NUMBER, "scalar"), (_ARRAY, "_reconstruct"))
]
# Not those that hold Python's objects: what a file says of these, numpy takes for addresses.
_KINDS = np.typecodes["All"].translate({ord(kind): None for kind in "OV"})
_DTYPES = [np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in _KINDS}]
# Arguments may be paths, whose module has another name in Python 3.13.
_PATHS = [(type(Path()), f"{module}.{type(Path()).__name__}") for module in ("pathlib", "pathlib._local")]
# Of Python's own. Torch fills no other list than list, and no defaultdict.
_VALUES = [frozenset, range, slice, date, datetime, time, timedelta, timezone, Fraction, UUID]
_OF_DEEPSPEED = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
_TYPES = [*_OF_DEEPSPEED, *_VALUES, Namespace, SimpleNamespace, TorchVersion, *_PATHS, *_OF_NUMPY, *_DTYPES]


def read_file(path: Path, *, trusted: bool = False, mapped: bool = True) -> dict[str, Any]:
    """The contents of a file, with its tensors on the host.

    Args:
        trusted: whether to make objects of any type, by whatever code the file names.
        mapped: whether to read tensors only when they are used, if the format allows it.

    Raises:
        ValueError: it cannot be read, is none of a checkpoint, or holds objects of other types.
    """
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": not trusted}
    try:
        with _allowed():
            try:
                contents = torch.load(path, mmap=mapped, **options)
            except RuntimeError:  # another format than torch's present one
                contents = torch.load(path, **options)
    except Exception as error:
        if name := _refused_type(error):
            raise ValueError(
                f"{path} holds a {name}, and to read that may run any code; if you trust it, let it be read: by "
                "torch.serialization.add_safe_globals in a script, by --trust of a command"
            ) from None
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {_reason(error)}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} is no file of a checkpoint, but holds a {type(contents).__name__}")
    return contents


def refused(path: Path) -> str:
    """Why ``read_file`` will refuse a file that torch has just written; empty if it will not. Never raises."""
    types: list[str] = []
    with _allowed(), suppress(Exception):  # a file system may map no files
        try:
            torch.load(path, mmap=True, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            name = _refused_type(error)  # the first; some are not among those below, as a dtype of numpy's
            types = [] if name is None else [name]
            with suppress(UnpicklingError):
                types = get_unsafe_globals_in_checkpoint(path) or types
            if not types:
                return _reason(error)
    if not types:
        return ""
    return (
        "it holds objects of types that are refused until the script allows them by "
        f"torch.serialization.add_safe_globals: {', '.join(sorted(types))}"
    )


def _refused_type(error: Exception) -> str | None:
    """The type that torch names as it refuses to make an object; None if something else is wrong."""
    found = re.search(r"GLOBAL (\S+)|but got <class '([\w.]+)'>", str(error))
    return found and printable(found[1] or found[2])


def _reason(error: Exception) -> str:
    """What torch says, without its page on what to set."""
    if "weights_only" not in str(error):
        return str(error)
    said = str(error).partition("WeightsUnpickler error: ")[2].strip()
    about = f" ({printable(said.splitlines()[0])})" if said else ""
    return f"it is damaged, none of torch's, or holds what cannot be read without running code{about}"


@contextmanager
def _allowed() -> Iterator[None]:
    by_a_script = get_safe_globals()  # these stay so
    with safe_globals([of for of in _TYPES if of not in by_a_script]):
        yield


def below(folder: Path, name: str) -> Path:
    """The place of this name in a folder, or deeper.

    Raises:
        ValueError: it leads elsewhere.
    """
    path = Path(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} leads out of {folder}")
    return folder / path
