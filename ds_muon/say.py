"""What is said to the user, in a way that never ends a run, or changes what a command has found."""

from __future__ import annotations

import io
import logging
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
            line = f"[ds_muon] {printable(text)}\n"
            for stream in (sys.stdout, sys.stderr):
                if _written(stream, line):
                    return


def log(text: str, level: int = logging.WARNING, *, logger: str = "DeepSpeed") -> None:
    """One line in a log, DeepSpeed's by default. Never raises, whatever its handlers do.

    Args:
        text: as in ``say``.
    """
    with suppress(Exception):
        # A handler whose stream lacks a letter writes a traceback in place of the line.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        line = f"[ds_muon] {printable(text)}".encode(encoding, "backslashreplace").decode(encoding)
        logging.getLogger(logger).log(level, "%s", line, stacklevel=2)


def tell(text: str, *, to: TextIO | None = None) -> bool:
    """Write the lines of a command, by default to stdout, with escapes for what else is not printable. Never raises.

    Returns:
        Whether they were taken: a closed pipe takes nothing, a full device not all.
    """
    lines = "\n".join(map(printable, text.split("\n")))
    return _written(sys.stdout if to is None else to, f"{lines}\n")


def printable(text: str) -> str:
    """The text with escapes for what is not printable: no parameter's name may begin a line of its own."""
    return "".join(map(_printable, text))


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
        plain = type(stream) is io.TextIOWrapper and "write" not in vars(stream)
        if plain and isinstance(stream.buffer, io.BufferedWriter | io.FileIO):
            # A line that stayed in the buffer of a full device would fail again at exit, and change the exit code.
            while data:
                data = data[os.write(stream.fileno(), data) :]
        else:  # a notebook, or a logger that copies what is written
            stream.write(data.decode(encoding))
            stream.flush()
    except Exception:
        return False
    return True
