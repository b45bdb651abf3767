"""A line that the user sees whatever the log level, and that never ends a run."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

import torch.distributed as dist


def say(text: str, *, every_rank: bool = False) -> None:
    """Write one line to stdout, or to stderr where stdout takes nothing. Never raises.

    Args:
        text: without a line break: what is not printable, such as one in a parameter's name, is escaped.
        every_rank: else rank 0 alone writes.

    No collective. A full disk, a closed pipe or a terminal without umlauts on one rank would otherwise stop that rank
    in the middle of a step, and leave the others waiting.
    """
    with suppress(Exception):
        if every_rank or _rank() == 0:
            line = f"[ds_muon] {''.join(map(_printable, text))}\n"
            for stream in (sys.stdout, sys.stderr):
                if _written(stream, line):
                    return


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _written(stream: TextIO | None, line: str) -> bool:
    if stream is None:  # Python was started without it
        return False
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        data = line.encode(encoding, "backslashreplace")
        stream.flush()
        if type(stream) is io.TextIOWrapper and "write" not in vars(stream):
            # A line that stayed in the buffer of a full device would fail again at exit, and change the exit code.
            os.write(stream.fileno(), data)
        else:  # a notebook, or a logger that copies what is written
            stream.write(data.decode(encoding))
            stream.flush()
    except Exception:
        return False
    return True
