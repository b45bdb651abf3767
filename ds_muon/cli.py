"""The command `ds-muon`: which module has the options of a subcommand, and runs it. Only that one is imported."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from ds_muon.say import tell
from ds_muon.version import VERSION

COULD_NOT_RUN = 2

# Each module has ``add_options``, which sets ``run``: what gets the options and returns the exit code.
COMMANDS = {
    "verify": (
        "ds_muon.verify.command",
        "check every update of a DeepSpeed engine against the single-process reference",
    ),
    "replay": ("ds_muon.replay", "find the backend that is at fault, from a file that DS_MUON_NAN_CAPTURE=1 saved"),
    "bench": ("ds_muon.bench.command", "measure on this machine"),
    "doctor": ("ds_muon.doctor.command", "whether this machine and a config are fit for DSMuon; the config that is"),
    "config": ("ds_muon.config_command", "print a DeepSpeed config to start from, or list them"),
    "report": ("ds_muon.report_command", "a run on one page: loss, rates, norms, spectra, skipped steps, partitions"),
    "plan": ("ds_muon.plan_command", "what Muon's step costs at world sizes that are not at hand"),
    "to-universal": ("ds_muon.conversion.to_universal", "write a checkpoint in DeepSpeed's universal layout"),
    "migrate": (
        "ds_muon.conversion.migrate",
        "make a checkpoint of AdamW, or of DeepSpeed's Muon, one that DSMuon loads",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="ds-muon", description="Muon for DeepSpeed ZeRO stages 1 and 2.")
    parser.add_argument("--version", action="version", version=f"ds-muon {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if given[:1] == [name]:
            import_module(module).add_options(command)
    parsed = parser.parse_args(given)
    try:
        code: int = parsed.run(parsed)
    except KeyboardInterrupt:
        return 130
    except Exception:  # Python's own exit code for it, 1, would say that updates are wrong
        tell(traceback.format_exc(), to=sys.stderr)
        return COULD_NOT_RUN
    return code


if __name__ == "__main__":
    sys.exit(main())
