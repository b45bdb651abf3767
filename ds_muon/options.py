"""Types of options that several commands have, and the files that they can write."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_muon.extras import how_to_install
from ds_muon.files import check_writable, keep, write_text
from ds_muon.text import json_text


class Paragraphs(argparse.HelpFormatter):
    """Fills the paragraphs of a description for the terminal, and leaves those with indented lines as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = partial(textwrap.fill, width=width, break_on_hyphens=False)
        return "\n\n".join(part if "\n " in f"\n{part}" else fill(part) for part in text.strip().split("\n\n"))


def add_outputs(parser: argparse.ArgumentParser, picture: str) -> None:
    """Files to write, refused before anything is measured."""
    parser.add_argument("--json", type=writable, metavar="FILE", help="write every number there")
    parser.add_argument("--chart", type=chart, metavar="FILE", help=picture)


def write_outputs(options: argparse.Namespace, numbers: object, draw: Callable[[Path], object] | None) -> bool:
    """Write those of ``add_outputs`` that were asked for, and tell where they are; see ``files.keep``.

    Args:
        options: as parsed.
        numbers: for ``json_text``.
        draw: writes the picture; None if there is nothing to draw.

    Returns:
        Whether all of them are there.
    """
    kept = []
    if options.json is not None:
        text = json_text(numbers, indent=1) + "\n"
        kept.append(keep("numbers", options.json, lambda: write_text(options.json, text)))
    if options.chart is not None and draw is not None:
        kept.append(keep("chart", options.chart, lambda: draw(options.chart)))
    return all(kept)


def writable(text: str) -> Path:
    """A file that can be written."""
    path = Path(text)
    try:
        check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from error
    return path


def chart(text: str) -> Path:
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"it needs matplotlib: {how_to_install('plot')}")
    if Path(text).suffix.lower() not in _suffixes():
        raise argparse.ArgumentTypeError(f"{text}: the name must end in one of {' '.join(_suffixes())}")
    return writable(text)


def _suffixes() -> list[str]:
    """Of the files that can be written, with their dots.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    return [f".{suffix}" for suffix in sorted(FigureCanvasBase.get_supported_filetypes())]


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text}: not a JSON object; write \'{{"nan_guard": "skip"}}\'')
    return found


def rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: it must be a number above 0")
    return number


def shape(text: str) -> tuple[int, int, int]:
    sizes = tuple(positive(size) for size in text.split("x"))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text}: give batch x rows x cols, such as 24x1024x4096")
    return sizes


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: it must be a whole number, at least 1")
    return int(text)
