"""``ds-muon doctor``: its options, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_muon import ds_config
from ds_muon.config import show
from ds_muon.doctor.examine import Finding, examine
from ds_muon.doctor.machine import Machine, look
from ds_muon.doctor.mend import mend, mended_text
from ds_muon.doctor.switch import Change
from ds_muon.files import keep, write_text
from ds_muon.options import writable
from ds_muon.say import printable, tell
from ds_muon.text import columns, count, json_text

DESCRIPTION = """\
Look at this machine: what is installed, which Newton-Schulz "auto" takes and why, and whether it is right beside fp64.

With --config, also at a DeepSpeed config, without an engine and a model: all that DSMuon would refuse or warn about in
it, and what to change. "auto" is read as Hugging Face Trainer fills it in. Configs of other optimizers are read as if
they were to be DSMuon's.

Exit code: 0 if DSMuon can train here, with the config if one is given; 1 if not; 2 if a file cannot be read or written.
With --fix, the config is the one that was written.
"""
FIT, UNFIT, COULD_NOT_LOOK = 0, 1, 2


@dataclass(frozen=True)
class Changed:
    """A key and what became of its value; None for one that was or is not there."""

    key: str
    before: Any
    after: Any
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """All that was found: the content of ``--json``.

    Attributes:
        ok: whether DSMuon can train here, with the config as it stands or, with --fix, as it was written.
        machine: this one.
        findings: in the config as it stands.
        changes: that make it work.
        left: findings that remain with them.
    """

    ok: bool
    machine: Machine
    findings: Sequence[Finding] = ()
    changes: Sequence[Changed] = ()
    left: Sequence[Finding] = ()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``ds-muon doctor``."""
    parser.description = DESCRIPTION
    parser.add_argument("--config", type=Path, metavar="FILE", help="a ds_config.json to look at as well")
    parser.add_argument("--fix", type=writable, metavar="OUT", help="write the config that works there")
    parser.add_argument("--overwrite", action="store_true", help="even if OUT is there, as FILE itself is")
    parser.add_argument("--json", type=writable, metavar="FILE", help="write all that was found there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look, print, write. Returns the exit code."""
    try:
        text, config = _read(options)
    except ds_config.NotAConfig as error:
        tell(f"ds-muon doctor: {error}", to=sys.stderr)
        return COULD_NOT_LOOK
    machine = look()
    tell(_of_machine(machine))
    diagnosis = Diagnosis(machine.ok, machine)
    written = True
    if config is not None:
        changes, after = mend(config)
        diagnosis = _of_config(config, changes, after, machine, fix=options.fix is not None)
        tell(_findings(f"\n{printable(str(options.config))}", diagnosis.findings))
        if changes:
            tell("\nwhat " + ("has changed:" if options.fix else "--fix OUT would change:"))
            tell("\n".join(_line(changed) for changed in diagnosis.changes))
        if diagnosis.left and (changes or options.fix):
            tell(_findings("\nwith that", diagnosis.left))
        if options.fix is not None:
            fixed = mended_text(text, changes)
            assert json.loads(fixed) == after
            tell("")
            written = keep("config", options.fix, lambda: write_text(options.fix, fixed))
    if options.json is not None:
        written &= keep("findings", options.json, lambda: write_text(options.json, json_text(diagnosis, 1) + "\n"))
    tell(f"\n{_verdict(diagnosis, options)}")
    if not written:
        return COULD_NOT_LOOK
    return FIT if diagnosis.ok else UNFIT


def _read(options: argparse.Namespace) -> tuple[str, dict[str, Any] | None]:
    if options.fix is not None and options.config is None:
        raise ds_config.NotAConfig("--fix OUT writes what --config FILE becomes: give a FILE")
    if options.fix is not None and options.fix.exists() and not options.overwrite:
        raise ds_config.NotAConfig(f"--fix {printable(str(options.fix))} is there already: give --overwrite as well")
    return ("", None) if options.config is None else ds_config.read(options.config)


def _of_config(
    config: dict[str, Any], changes: Sequence[Change], after: dict[str, Any], machine: Machine, *, fix: bool
) -> Diagnosis:
    findings = examine(config)
    left = [finding for finding in examine(after) if finding.kind != "note"] if changes else findings
    refused = any(finding.kind == "refused" for finding in (left if fix else findings))
    listed, at = [], config
    for change in changes:
        before, value = ds_config.value_at(at, change.place), change.value
        at = ds_config.changed(at, {change.place: value})
        before, value = (None if each is ds_config.ABSENT else each for each in (before, value))
        listed.append(Changed(".".join(change.place), before, value, change.why))
    return Diagnosis(machine.ok and not refused, machine, findings, listed, left if changes else ())


def _of_machine(machine: Machine) -> str:
    rows = [(package.name, package.version or "-", package.remark) for package in machine.packages]
    lines = [f"{machine.python}; accelerator: {machine.device}", "", *columns(rows, "< < <"), ""]
    if machine.problem is not None:
        return "\n".join([*lines, printable(f"Newton-Schulz does not run here: {machine.problem}")])
    lines.append(f'Newton-Schulz: "auto" takes {machine.backend} in {machine.dtype}: {machine.why}')
    lines += [
        f"  {check.shape[0]} x {check.shape[1]}: {check.error:.1e} from fp64, {check.allowed:g} allowed"
        + ("" if check.ok else ": WRONG")
        for check in machine.checks
    ]
    return "\n".join([*lines, f"  checked in {machine.seconds:.1f} s"])


def _findings(heading: str, findings: Sequence[Finding]) -> str:
    kinds = [finding.kind for finding in findings]
    refused, warned = kinds.count("refused"), count(kinds.count("warning"), "warning")
    return "\n".join(
        [f"{heading}: {refused} refused, {warned}", *(f"  {each.kind}: {printable(each.text)}" for each in findings)]
    )


def _line(changed: Changed) -> str:
    before = "" if changed.before is None else f" was {show(changed.before)},"
    after = "is removed" if changed.after is None else f"is {show(changed.after)}"
    return f"  {printable(changed.key)}{before} {after}: {changed.why}"


def _verdict(diagnosis: Diagnosis, options: argparse.Namespace) -> str:
    if diagnosis.ok:
        return "FIT: DSMuon can train here" + (" with this config" if options.config else "")
    if not diagnosis.machine.ok:
        return "UNFIT: this machine is not, see above"
    if options.fix is None and not any(finding.kind == "refused" for finding in diagnosis.left) and diagnosis.changes:
        return "UNFIT: DSMuon refuses this config; --fix OUT writes the one that works"
    return "UNFIT: what is refused is left to you"
