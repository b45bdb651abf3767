"""``ds-muon migrate``: its options, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_muon.conversion.convert import Converted, convert
from ds_muon.conversion.ordinary import ConversionError, Ordinary
from ds_muon.conversion.to_universal import add_folders, tell_done
from ds_muon.say import printable, tell
from ds_muon.text import columns, count

DESCRIPTION = """\
Write a checkpoint of another optimizer so that DSMuon loads it, at any world size: engine.load_checkpoint(OUT), or
resume_from_checkpoint=OUT with Hugging Face's Trainer. From ZeRO stages 1 and 2:

  AdamW, Adam  moments and steps, of what stays in AdamW; Muon's momentum
               starts from zero
  Muon         DeepSpeed's: its momentum is the same average as DSMuon's. It is
               left out where gradients carried a dynamic loss scale, in whose
               units it then is; moments as above
  DSMuon       of an early version, whose shards load only in the layout that
               saved them: everything

The loading run routes the parameters: what they have no use for is left, and what they lack starts from zero; a line
says which. Rates, settings and weight decay are those of the loading run. Exit code: 0, or 2 with the reason.
"""
_MEANING = {
    "momentum": "what goes to Muon goes on",
    "moments": "what goes to AdamW goes on, and the rest starts from zero",
    "weights only": "starts from zero",
}
_NAMES_SHOWN = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``ds-muon migrate``."""
    add_folders(parser, DESCRIPTION, from_another)


def from_another(source: Ordinary, out: Path) -> None:
    """Convert a checkpoint of another optimizer, and tell what of it a run with DSMuon can take over."""
    if not (source.of_dsmuon or source.is_adam or source.is_deepspeeds_muon):
        raise ConversionError(
            f"{source.folder} was saved by {source.optimizer}, whose state is of no use to DSMuon; load its weights "
            "with engine.load_checkpoint(..., load_module_only=True)"
        )
    done = convert(source, out)
    tell_done(source, done, count(len(done.elements), "parameter"))
    tell("\n".join(table(done)))
    for reason in dict.fromkeys(done.why_not.values()):
        names = [name for name, why in done.why_not.items() if why == reason]
        tell(f"no momentum is kept of {_shown(names)}: {reason}")


def table(done: Converted) -> list[str]:
    """Lines: which state the parameters have, and what a run with DSMuon makes of it."""
    rows = [("state", "parameters", "elements", "", "names")]
    for kind, meaning in _MEANING.items():
        if names := done.with_state.get(kind):
            elements = sum(done.elements[name] for name in names)
            rows.append((kind, f"{len(names):,}", f"{elements:,}", meaning, _shown(names)))
    return columns(rows, "< > > < <")


def _shown(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return printable(", ".join(names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")
