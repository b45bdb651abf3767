"""``ds-muon to-universal``: its options, and what it prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ds_muon.conversion.convert import Converted, convert
from ds_muon.conversion.ordinary import ConversionError, Ordinary
from ds_muon.say import printable, tell
from ds_muon.text import count

DESCRIPTION = """\
Write a checkpoint of DSMuon in DeepSpeed's universal layout: one file for each parameter and kind of state. Other tools
read its fp32 weights and Adam's moments. engine.load_checkpoint reads all of it, at any world size, as it reads the
checkpoint itself.

Needs no GPU, and beside the files' pages the memory of one parameter, twice. Exit code: 0, or 2 with the reason.
"""
DONE, NOT_DONE = 0, 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``ds-muon to-universal``."""
    add_folders(parser, DESCRIPTION, of_dsmuon)


def add_folders(parser: argparse.ArgumentParser, description: str, run: Callable[[Ordinary, Path], None]) -> None:
    """``IN`` and ``OUT``, and what is done with them; it may raise a ``ValueError`` or an ``OSError``."""
    parser.description = description
    parser.add_argument(
        "source", type=Path, metavar="IN", help="a checkpoint, or the folder in which the file latest names one"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder, for engine.load_checkpoint(OUT)")
    parser.add_argument(
        "--trust", action="store_true",
        help="read IN by pickle, which runs whatever code its files name: for a script's own objects in them"
    )  # fmt: skip
    parser.set_defaults(run=lambda options: _run(parser.prog, options, run))


def of_dsmuon(source: Ordinary, out: Path) -> None:
    """Convert a checkpoint of DSMuon's, and tell of it."""
    if not source.of_dsmuon:
        raise ConversionError(
            f"{source.folder} was saved by {source.optimizer}, and not by DSMuon; use ds-muon migrate"
        )
    done = convert(source, out)
    kinds = ", ".join(f"{count(len(names), 'parameter')} with {kind}" for kind, names in done.with_state.items())
    tell_done(source, done, kinds)


def tell_done(source: Ordinary, done: Converted, what: str) -> None:
    """Where the checkpoint is and what it has."""
    saved = f"{source.optimizer}, step {source.model.get('global_steps')}, by {count(len(source.shards), 'rank')}"
    tell(f"{printable(str(done.folder))}: {what} (saved by {printable(saved)})")


def _run(command: str, options: argparse.Namespace, work: Callable[[Ordinary, Path], None]) -> int:
    try:
        work(Ordinary(options.source, trusted=options.trust), options.out)
    except Exception as error:  # other than these: whatever comes of a file that DeepSpeed has not written
        known = isinstance(error, ValueError | OSError)
        reason = str(error) if known else f"{options.source} is damaged, or not of DeepSpeed: {error!r}"
        tell(f"{command}: {printable(reason)}", to=sys.stderr)
        return NOT_DONE
    return DONE
