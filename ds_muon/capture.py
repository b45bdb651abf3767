"""Saves the input of a Newton-Schulz result that is not finite, as it was before the kernel ran, to a file.

The environment switches it on, so that no configuration need change:

    DS_MUON_NAN_CAPTURE=1            save such inputs, on any rank that sees one
    DS_MUON_NAN_CAPTURE_DIR          the folder; default ./ds_muon_captures
    DS_MUON_NAN_CAPTURE_RAISE        1 (default): stop after the step in which one was saved; 0: go on
    DS_MUON_NAN_CAPTURE_MAX          most files of a rank in the folder; default 10

``ds-muon replay FILE`` says which backend is at fault.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_muon.dtypes import name_of
from ds_muon.files import writing
from ds_muon.orthogonalize import NewtonSchulz
from ds_muon.say import log

# Version of the file's content; raised when that changes.
FORMAT = 1

_SWITCH = "DS_MUON_NAN_CAPTURE"
_DEFAULT_FOLDER, _DEFAULT_MAX = "ds_muon_captures", 10


class NanCapture:
    """The capture of one rank. It needs no other rank and never raises: a folder that cannot be written is a warning.

    Off, it costs one look at the environment a step. On, every batch is copied before it is orthogonalized, and the
    host waits for its result.

    Args:
        rank: appears in the names of the files.
    """

    def __init__(self, rank: int) -> None:
        self.saved: list[Path] = []
        """Absolute paths of the files of this step and the one before."""
        self.seen: list[str] = []
        """The parameters whose update was not finite in this step."""
        self.seen_before: list[str] = []
        """The same for the step before."""
        self._saved_before = 0
        self._rank = rank
        self.is_on = False
        """Whether inputs are saved in this step."""
        self._step = 0
        self._warned = False

    def start_step(self, step: int, may_move: Tensor) -> None:
        """Read the environment, which then holds for this step.

        Args:
            step: counted from 1 since the process started.
            may_move: bool scalar on the device; if false, nothing is saved. With the capture on, the host waits for it.
        """
        switch = os.environ.get(_SWITCH, "0")
        self.is_on = switch == "1" and bool(may_move)
        if switch not in ("", "0", "1"):
            self._warn(f"{_SWITCH}={switch} is neither 1 nor 0: nothing is saved")
        self._step = step
        self.seen_before, self.seen = self.seen, []
        del self.saved[: self._saved_before]
        self._saved_before = len(self.saved)

    @property
    def stops_training(self) -> bool:
        """Whether to stop because of an update seen in this step. Its input, or earlier ones, are in a file."""
        return bool(self.seen) and os.environ.get(f"{_SWITCH}_RAISE", "1") != "0"

    def keep(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Copies of ``matrices`` from before the kernel runs; none if the capture is off or memory is short."""
        if not self.is_on:
            return []
        try:
            return [matrix.clone() for matrix in matrices]
        except (RuntimeError, MemoryError) as error:
            self._warn(f"could not copy the inputs of a batch: {error}")
            return []

    def save_nonfinite(
        self, names: Sequence[str], kept: Sequence[Tensor], outputs: Tensor, settings: NewtonSchulz
    ) -> None:
        """Write a file for each matrix whose output is not finite.

        Args:
            names: the parameters of a batch.
            kept: what ``keep`` returned for the batch.
            outputs: (batch, rows, cols), as Newton-Schulz returned them.
            settings: of the iteration.
        """
        if not kept:
            return
        finite = outputs.isfinite().flatten(start_dim=1).all(dim=1).tolist()
        for name, matrix, output, is_finite in zip(names, kept, outputs, finite, strict=True):
            if not is_finite:
                try:
                    self._save({**self._content(matrix, output, settings), "name": name, "batch": len(kept)})
                except (OSError, RuntimeError, ValueError, MemoryError) as error:  # RuntimeError: a full disk
                    self._warn(f"could not save the input of {name}: {error}")

    def _save(self, content: dict[str, Any]) -> None:
        folder = Path(os.environ.get(f"{_SWITCH}_DIR") or _DEFAULT_FOLDER).expanduser().absolute()
        most = self._most()
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob(f"rank{self._rank}_*.pt"))) >= most:
            self._warn(
                f"{folder} holds all of the {most} files that rank {self._rank} may leave there: remove some, or raise "
                f"{_SWITCH}_MAX"
            )
            self.seen.append(content["name"])
            return
        path = _unused_path(folder, self._rank, content["input"])
        with writing(path) as file:
            torch.save(content, file)
        self.saved.append(path)
        self.seen.append(content["name"])
        name = content["name"]
        log(f"the update of {name} is not finite; its input is saved: ds-muon replay {shlex.quote(str(path))}")

    def _most(self) -> int:
        given = os.environ.get(f"{_SWITCH}_MAX") or str(_DEFAULT_MAX)
        if given.isdecimal():
            return int(given)
        self._warn(f'{_SWITCH}_MAX="{given}" is not a number; {_DEFAULT_MAX} files are saved')
        return _DEFAULT_MAX

    def _content(self, matrix: Tensor, output: Tensor, settings: NewtonSchulz) -> dict[str, Any]:
        return {
            "ds_muon_capture": FORMAT,
            "input": matrix.cpu(),
            "output": output.contiguous().cpu(),
            "rank": self._rank,
            "step": self._step,
            "settings": asdict(settings) | {"dtype": name_of(settings.dtype)},
            "device": torch.cuda.get_device_name(matrix.device) if matrix.is_cuda else str(matrix.device),
            "versions": {
                "torch": str(torch.__version__),
                "cuda": torch.version.cuda,
                "deepspeed": getattr(sys.modules.get("deepspeed"), "__version__", None),
            },
        }

    def _warn(self, problem: str) -> None:
        """Once, because the same problem comes with every matrix and step."""
        if not self._warned:
            log(f"capture on rank {self._rank}: {problem}")
        self._warned = True


def _unused_path(folder: Path, rank: int, matrix: Tensor) -> Path:
    rows, cols = matrix.shape
    now = int(1e3 * time.time())
    while (path := folder / f"rank{rank}_{rows}x{cols}_pid{os.getpid()}_{now}.pt").exists():
        now += 1
    return path
