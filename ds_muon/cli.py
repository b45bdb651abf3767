"""The command `ds-muon`: its arguments, and what each subcommand calls."""

from __future__ import annotations

import argparse
import json
import math
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ds_muon
from ds_muon import planner
from ds_muon.bench import newton_schulz, step
from ds_muon.bench.chart import draw_costs, suffixes
from ds_muon.extras import how_to_install
from ds_muon.files import check_writable, keep, write_text
from ds_muon.launch import RanksFailed, run_ranks
from ds_muon.orthogonalize import BACKENDS
from ds_muon.owners import RATES, Rates
from ds_muon.replay import replay
from ds_muon.say import tell
from ds_muon.text import json_text
from ds_muon.verify import table
from ds_muon.verify.engine_view import CannotVerify
from ds_muon.verify.inject import FAULTS
from ds_muon.verify.outcome import COULD_NOT_RUN, Outcome, exit_code, load, save
from ds_muon.verify.record import VerifyResult
from ds_muon.verify.session import ALL_FAULTS, Task, optimizer_type, read_config
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


REPLAY = """\
Run the captured input of Newton-Schulz, on the GPU if there is one, through every backend, dtype and form, and compare
each result with the fp64 reference. * marks what ran when the file was saved. "error" is relative to the reference,
"allowed" what the rounding of the dtype explains, "orthogonality" is ||O O^T - I|| / sqrt(smaller side).

Exit code: 0 if everything is right, also where the fault is not reproduced; 1 if a backend, the input or the
coefficients are at fault; 2 if a file could not be read, or what it was saved with cannot run here.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ds-muon", description="Muon for DeepSpeed ZeRO stages 1 and 2.")
    parser.add_argument("--version", action="version", version=f"ds-muon {ds_muon.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_verify(commands)
    _add_replay(commands)
    _add_bench(commands)
    _add_plan(commands)
    parsed = parser.parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
    except KeyboardInterrupt:
        return 130
    except Exception:  # Python's own exit code for it, 1, would say that updates are wrong
        tell(traceback.format_exc(), to=sys.stderr)
        return COULD_NOT_RUN
    return code


# ---- verify ---------------------------------------------------------------------------------------------------------


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify",
        help="check every update of a DeepSpeed engine against the single-process reference",
        description=VERIFY,
        epilog=VERIFY_MODEL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_verify_options(parser)
    parser.set_defaults(run=_verify)


def add_verify_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``ds-muon verify`` and of ``python -m ds_muon.verify``."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="ds_config.json (default: DSMuon, ZeRO-2, fp32)")
    parser.add_argument("--world-size", type=_positive, metavar="N", help="ranks to start on this machine (default: 2)")
    parser.add_argument("--steps", type=_positive, default=3, metavar="K", help="optimizer steps to check (default: 3)")
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
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")


def check_verify_options(options: argparse.Namespace) -> Task:
    """The task that the options describe.

    Raises:
        CannotVerify: an option cannot be met; nothing has been started yet.
    """
    if options.report is not None and find_spec("matplotlib") is None:
        raise CannotVerify(f"--report needs matplotlib: {how_to_install('plot')}")
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
    from ds_muon.report import FILES

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
    from ds_muon.report import write_report

    for result in outcomes:
        if isinstance(result, VerifyResult):
            write_report(result, folder if len(outcomes) == 1 else folder / str(result.fault))


def _verify(options: argparse.Namespace) -> int:
    world_size = options.world_size or 2
    arguments = ["--steps", str(options.steps), "--seed", str(options.seed), "--world-size", str(world_size)]
    for name in ("config", "model", "inject"):
        if (value := getattr(options, name)) is not None:
            arguments += [f"--{name}", str(value)]
    try:
        check_verify_options(options)
        check_outputs(options)
        return present(run_ranks("ds_muon.verify", arguments, world_size, load), options)
    except RanksFailed as error:
        tell(str(error), to=sys.stderr)
    except (CannotVerify, OSError) as error:
        tell(f"ds-muon verify: {error}", to=sys.stderr)
    return COULD_NOT_RUN


# ---- replay ---------------------------------------------------------------------------------------------------------


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "replay",
        help="find the backend that is at fault, from a file that DS_MUON_NAN_CAPTURE=1 saved",
        description=REPLAY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what a rank saved in ds_muon_captures")
    parser.set_defaults(run=lambda options: replay(options.files))


# ---- bench ----------------------------------------------------------------------------------------------------------


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    subjects = commands.add_parser("bench", help="measure on this machine").add_subparsers(
        required=True, metavar="SUBJECT"
    )
    parser = subjects.add_parser(
        "newton-schulz",
        help="our backends beside every peer that is installed",
        description=newton_schulz.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shapes", type=_shape, nargs="+", metavar="BxRxC", help="batch x rows x cols, such as 24x1024x4096"
    )
    parser.add_argument("--dtype", choices=("auto", "float16", "bfloat16", "float32"), default="auto", help="of ours")
    parser.add_argument("--rounds", type=_positive, default=15, metavar="N", help="timings of each (default: 15)")
    parser.add_argument("--candidates", nargs="+", metavar="PART", help="only those with one of these in their name")
    _add_outputs(parser, "draw a bar chart there (.png)")
    parser.set_defaults(run=_bench_newton_schulz)
    parser = subjects.add_parser(
        "step",
        help="whole iterations beside AdamW and DeepSpeed's own Muon",
        description=step.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", choices=step.MODELS, help="a GPT of about so many parameters (default: 303m; on CPU: tiny)"
    )
    parser.add_argument(
        "--world-size",
        type=_positive,
        metavar="N",
        help="ranks to start on this machine (default: one per GPU, at most 2; on CPU: 2)",
    )
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2, help="of ZeRO (default: 2)")
    parser.add_argument("--micro-batch", type=_positive, metavar="N", help="sequences per rank (default: 4; on CPU: 2)")
    parser.add_argument(
        "--sequence", type=_positive, metavar="N", help="tokens of a sequence (default: 1024; on CPU: 64)"
    )
    parser.add_argument(
        "--rounds", type=_positive, metavar="N", help="timed iterations of each (default: 40; on CPU: 10)"
    )
    parser.add_argument(
        "--candidates", nargs="+", choices=step.CANDIDATES, default=list(step.DEFAULTS), metavar="CANDIDATE",
        help=f"whom to measure: {', '.join(step.CANDIDATES)} (default: all but the last)",
    )  # fmt: skip
    parser.add_argument(
        "--ns-backend", nargs="+", choices=("auto", *BACKENDS), metavar="BACKEND",
        help=f"DSMuon once with each of these: auto, {', '.join(BACKENDS)} (default: what --params says)",
    )  # fmt: skip
    parser.add_argument(
        "--params", type=_json_object, default={}, metavar="JSON", help="DSMuon's optimizer.params, beside the rates"
    )
    parser.add_argument(
        "--together", choices=("auto", "yes", "no"), default="auto", help="all engines at once (default: if they fit)"
    )
    _add_outputs(parser, "draw a bar chart there (.png)")
    parser.set_defaults(run=_bench_step)


def _bench_newton_schulz(options: argparse.Namespace) -> int:
    return newton_schulz.run(
        options.shapes, options.dtype, options.rounds, options.candidates, options.json, options.chart
    )


def _bench_step(options: argparse.Namespace) -> int:
    return step.run(
        model=options.model,
        world_size=options.world_size,
        stage=options.stage,
        micro_batch=options.micro_batch,
        sequence=options.sequence,
        rounds=options.rounds,
        candidates=options.candidates,
        ns_backends=options.ns_backend,
        params=options.params,
        together=options.together,
        json_file=options.json,
        chart=options.chart,
    )


# ---- plan -----------------------------------------------------------------------------------------------------------


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="what Muon's step costs at world sizes that are not at hand",
        description=planner.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        choices=planner.MODELS,
        help=f"whose matrices, as one param group: {', '.join(planner.MODELS)}",
    )
    parser.add_argument(
        "--world-size", type=_positive, nargs="+", metavar="N", default=[2**i for i in range(13)],
        help="numbers of ranks (default: 1, 2, 4, ... 4096)",
    )  # fmt: skip
    parser.add_argument(
        "--tflops",
        type=_rate,
        default=RATES.flops / 1e12,
        help="for the times: rate of the iteration per rank (default: %(default)g; see bench newton-schulz)",
    )
    parser.add_argument(
        "--link", type=_rate, default=RATES.bytes_per_second / 1e9, metavar="GB/s",
        help="for the times: rate of a rank's link (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--ns-backend", choices=("auto", *BACKENDS), default="auto",
        help="for the memory: whose batches (default: triton where it is installed, as on Hopper GPUs, else torch)",
    )  # fmt: skip
    _add_outputs(parser, "draw the times against the ranks there (.png)")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    backend = options.ns_backend
    if backend == "auto":
        backend = "torch" if find_spec("triton") is None else "triton"
    elif backend == "triton" and find_spec("triton") is None:
        tell(f"ds-muon plan: --ns-backend triton needs Triton: {how_to_install('triton')}", to=sys.stderr)
        return COULD_NOT_RUN
    settings = replace(planner.default_settings(), backend=backend)
    rates = Rates(1e12 * options.tflops, 1e9 * options.link)
    costs: dict[str, list[planner.StepCost]] = {}
    for model in options.models:
        shapes = planner.MODELS[model]()
        costs[model] = [planner.step_cost(shapes, size, settings, rates=rates) for size in options.world_size]
        elements = sum(rows * cols for _, (rows, cols) in shapes)
        tell(
            f"{model}: {len(shapes)} matrices, {elements / 1e9:.2f}B elements; defaults on a GPU "
            f"({options.tflops:g} TFLOP/s and {options.link:g} GB/s per rank), {backend} backend\n"
        )
        tell(f"{planner.table(costs[model])}\n")
    kept = []
    if options.json is not None:
        text = json_text(costs, indent=1) + "\n"
        kept.append(keep("numbers", options.json, lambda: write_text(options.json, text)))
    if options.chart is not None:
        kept.append(keep("chart", options.chart, lambda: draw_costs(options.chart, costs, options.tflops)))
    return 0 if all(kept) else COULD_NOT_RUN


def _add_outputs(parser: argparse.ArgumentParser, picture: str) -> None:
    """Files to write, refused before anything is measured."""
    parser.add_argument("--json", type=_writable, metavar="FILE", help="write every number there")
    parser.add_argument("--chart", type=_chart, metavar="FILE", help=picture)


def _writable(text: str) -> Path:
    """A file that can be written."""
    path = Path(text)
    try:
        check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from error
    return path


def _chart(text: str) -> Path:
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"it needs matplotlib: {how_to_install('plot')}")
    if Path(text).suffix.lower() not in suffixes():
        raise argparse.ArgumentTypeError(f"{text}: the name must end in one of {' '.join(suffixes())}")
    return _writable(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text}: not a JSON object; write \'{{"nan_guard": "skip"}}\'')
    return found


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: it must be a number above 0")
    return number


def _shape(text: str) -> tuple[int, int, int]:
    sizes = tuple(_positive(size) for size in text.split("x"))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text}: give batch x rows x cols, such as 24x1024x4096")
    return sizes


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: it must be a whole number, at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
