"""Text that every machine has: the standard library's own sources, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

_TEXT_BYTES = 2_000_000


def draw_windows(text: Tensor, sequences: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and targets, each (sequences, length) int64 on the CPU, of windows of a text drawn at random."""
    starts = torch.randint(len(text) - length, (sequences, 1), generator=generator, device="cpu")
    rows = text[starts + torch.arange(length + 1, device="cpu")].long()
    return rows[:, :-1], rows[:, 1:]


def standard_library() -> Tensor:
    """Bytes of the modules at the top level of the standard library, by name; uint8, 1-D."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > _TEXT_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)
