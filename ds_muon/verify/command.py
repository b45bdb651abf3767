"""``ds-muon verify``: its options, and what becomes of what the ranks found."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ds_muon.extras import how_to_install
from ds_muon.files import check_writable, keep
from ds_muon.options import positive
from ds_muon.ranks import RanksFailed, run_ranks
from ds_muon.say import tell
from ds_muon.verify import table
from ds_muon.verify.engine_view import CannotVerify
from ds_muon.verify.inject import FAULTS
from ds_muon.verify.outcome import COULD_NOT_RUN, Outcome, exit_code, load, save
from ds_muon.verify.rank import ALL_FAULTS, Task, optimizer_type, read_config
from ds_muon.verify.record import VerifyResult
from ds_muon.verify.subject import parse_spec

VERIFY = """\
Train a few steps on several ranks, and compare every change of every weight with the one that a single process would
have made from the full gradient: with an fp64 reference that starts from the raw gradients of all ranks, and with the
same rule in the engine's own dtypes.

Exit code: 0 if all is right; 1 if something is wrong; 2 if it could not run.
"""
VERIFY_MODEL = """\
--model module:factory names a function of yours, in a module that is importable from the current folder:

    def factory(rank, world_size):
        return model, batches

model: an nn.Module, the same on every rank, that returns its loss: a scalar tensor, .loss, ["loss"], or the first of a
tuple. batches: an iterable of this rank's micro-batches, each a tensor or a tuple (positional arguments of the model)
or a dict (keyword arguments). They are moved to the device, but keep their dtype: under fp16 or bf16 the model casts
its inputs itself. They are started over when they run out, if they can be. torch is seeded alike on every rank: let
rank make the data differ.

Ranks that are already there, started by `deepspeed --module ds_muon.verify` or `mpirun python -m ds_muon.verify`, take
the same options.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``ds-muon verify`` and of ``python -m ds_muon.verify``."""
    parser.description, parser.epilog = VERIFY, VERIFY_MODEL
    parser.add_argument("--config", type=Path, metavar="FILE", help="ds_config.json (default: DSMuon, ZeRO-2, fp32)")
    parser.add_argument("--world-size", type=positive, metavar="N", help="ranks to start on this machine (default: 2)")
    parser.add_argument("--steps", type=positive, default=3, metavar="K", help="optimizer steps to check (default: 3)")
    parser.add_argument("--model", metavar="MODULE:FACTORY", help="your model and batches; see below (default: a GPT)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write the picture (PNG, SVG) and a page there")
    parser.add_argument(
        "--inject",
        choices=[*FAULTS, ALL_FAULTS],
        metavar="FAULT",
        help="plant this fault, and exit with 0 if the check finds and names it: "
        + "; ".join(f"{fault.name} ({fault.summary})" for fault in FAULTS.values())
        + f"; or {ALL_FAULTS}, one after another",
    )
    parser.add_argument(
        "--determinism",
        nargs="?",
        const="all",
        choices=("all", "once"),
        metavar="all",
        help="instead, compare the bits of runs that must not differ: again, resumed, with and without overlap_comm, "
        "nan_guard, capture and offload_optimizer, and on one rank less",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    parser.set_defaults(run=run)


def check_options(options: argparse.Namespace) -> Task:
    """The task that the options describe.

    Raises:
        CannotVerify: an option cannot be met; nothing has been started yet.
    """
    if options.report is not None and find_spec("matplotlib") is None:
        raise CannotVerify(f"--report needs matplotlib: {how_to_install('plot')}")
    if options.determinism is not None and (options.inject is not None or options.report is not None):
        raise CannotVerify("--determinism checks no update: leave --inject and --report out")
    if options.model is not None:
        parse_spec(options.model)
    config = read_config(options.config)
    optimizer_type(config)
    return Task(config, options.steps, options.model, options.seed, options.inject)


def check_outputs(options: argparse.Namespace) -> None:
    """Look whether the files that the options ask for can be written, on whoever will write them.

    Raises:
        CannotVerify: one cannot.
    """
    from ds_muon.verify.report import FILES

    wanted = [("--json", options.json)] if options.json is not None else []
    if options.report is not None:
        folders = [options.report / name for name in FAULTS] if options.inject == ALL_FAULTS else [options.report]
        wanted += [("--report", folder / name) for folder in folders for name in FILES]
    for option, path in wanted:
        try:
            check_writable(path)
        except OSError as error:
            raise CannotVerify(f"{option}: {path} cannot be written: {error.strerror}") from None


def present(outcomes: Sequence[Outcome], options: argparse.Namespace) -> int:
    """Print what was found, write the files that were asked for, and end with one line of verdict.

    Returns:
        The exit code, which is that of the outcomes whatever can be printed or written.
    """
    if heading := table.heading(outcomes, options.config and str(options.config), options.model):
        tell(f"{heading}\n")
    if options.inject == ALL_FAULTS:
        tell(table.fault_table(outcomes))
        verdict = table.faults_verdict(outcomes)
    else:
        (result,) = outcomes
        assert isinstance(result, VerifyResult)
        tell(table.parameter_table(result))
        verdict = table.verdict(result) if options.inject is None else table.fault_verdict(result)
    if options.json is not None or options.report is not None:
        tell("")
    if options.json is not None:
        keep("numbers", options.json, lambda: save(outcomes, options.json, as_list=options.inject == ALL_FAULTS))
    if options.report is not None:
        keep("report", options.report, lambda: _write_reports(outcomes, options.report))
    if not tell(f"\n{verdict}"):
        tell(verdict, to=sys.stderr)
    return exit_code(outcomes)


def _write_reports(outcomes: Sequence[Outcome], folder: Path) -> None:
    """One report, or one per fault in a folder of its own."""
    from ds_muon.verify.report import write_report

    for result in outcomes:
        if isinstance(result, VerifyResult):
            write_report(result, folder if len(outcomes) == 1 else folder / str(result.fault))


def _run_determinism(arguments: Sequence[str], world_size: int, options: argparse.Namespace) -> int:
    from ds_muon.verify import determinism

    found = run_ranks(
        "ds_muon.verify", [*arguments, "--determinism", options.determinism], world_size, determinism.load
    )
    if world_size > 1 and options.determinism == "all":
        fewer = [*arguments, "--world-size", str(world_size - 1), "--determinism", "once"]
        found += run_ranks("ds_muon.verify", fewer, world_size - 1, determinism.load)
    return determinism.present(found, options)


def run(options: argparse.Namespace) -> int:
    """Start the ranks and present what they found. Returns the exit code."""
    world_size = options.world_size or 2
    arguments = ["--steps", str(options.steps), "--seed", str(options.seed), "--world-size", str(world_size)]
    for name in ("config", "model", "inject"):
        if (value := getattr(options, name)) is not None:
            arguments += [f"--{name}", str(value)]
    try:
        check_options(options)
        check_outputs(options)
        if options.determinism is not None:
            return _run_determinism(arguments, world_size, options)
        return present(run_ranks("ds_muon.verify", arguments, world_size, load), options)
    except RanksFailed as error:
        tell(str(error), to=sys.stderr)
    except (CannotVerify, OSError) as error:
        tell(f"ds-muon verify: {error}", to=sys.stderr)
    return COULD_NOT_RUN
