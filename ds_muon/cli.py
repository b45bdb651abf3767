"""The command `ds-muon`: which module has the options of a subcommand, and runs it. Only that one is imported."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from ds_muon.options import Paragraphs
from ds_muon.say import tell
from ds_muon.version import VERSION

COULD_NOT_RUN = 2

# Each module has ``add_options``, which sets ``run``: what gets the options and returns the exit code.
COMMANDS = {
    "doctor": ("ds_muon.doctor.command", "check this machine and a config, and write the config that works"),
    "config": ("ds_muon.config_command", "print a config to start from, or list them"),
    "plan": ("ds_muon.plan_command", "what a step costs, and what goes to Muon, on any number of ranks"),
    "verify": ("ds_muon.verify.command", "train a few steps, and check every update against an fp64 reference"),
    "report": ("ds_muon.report_command", "show a run on one HTML page"),
    "replay": ("ds_muon.replay", "find out why an update was not finite, from a file that a run has saved"),
    "migrate": ("ds_muon.conversion.migrate", "convert a checkpoint of AdamW, or of DeepSpeed's Muon, for DSMuon"),
    "to-universal": ("ds_muon.conversion.to_universal", "write a checkpoint in DeepSpeed's universal layout"),
    "bench": ("ds_muon.bench.command", "time iterations beside AdamW and DeepSpeed's Muon, or Newton-Schulz alone"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="ds-muon", description="Muon for DeepSpeed ZeRO stages 1 and 2.")
    parser.add_argument("--version", action="version", version=f"ds-muon {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=Paragraphs)
        if given[:1] == [name]:
            import_module(module).add_options(command)
    parsed = parser.parse_args(given)
    if "run" not in parsed:
        tell(parser.format_help(), to=sys.stderr)
        return COULD_NOT_RUN
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
