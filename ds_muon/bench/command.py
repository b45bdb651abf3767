"""``ds-muon bench``: the options of its subjects."""

from __future__ import annotations

import argparse
from types import ModuleType

from ds_muon.bench import newton_schulz, step
from ds_muon.options import Paragraphs, add_outputs, json_object, positive, shape
from ds_muon.orthogonalize import BACKENDS, COEFFICIENTS
from ds_muon.orthogonalize.defaults import NS_COEFFICIENTS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of both subjects."""
    subjects = parser.add_subparsers(required=True, metavar="SUBJECT")

    def subject(name: str, module: ModuleType, summary: str) -> argparse.ArgumentParser:
        parser = subjects.add_parser(name, help=summary, description=module.__doc__, formatter_class=Paragraphs)
        parser.set_defaults(run=module.run)
        return parser

    parser = subject("newton-schulz", newton_schulz, "alone, beside other implementations that are installed")
    parser.add_argument(
        "--shapes", type=shape, nargs="+", metavar="BxRxC", help="batch x rows x cols, such as 24x1024x4096"
    )
    parser.add_argument("--dtype", choices=("auto", "float16", "bfloat16", "float32"), default="auto", help="of ours")
    parser.add_argument(
        "--coefficients", choices=tuple(COEFFICIENTS), nargs="+", default=[NS_COEFFICIENTS], metavar="TABLE",
        help=f"ours with each of these: {', '.join(COEFFICIENTS)} (default: {NS_COEFFICIENTS})",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=15, metavar="N", help="timings of each (default: 15)")
    parser.add_argument("--candidates", nargs="+", metavar="PART", help="only those with one of these in their name")
    add_outputs(parser, "draw a bar chart there (.png)")

    parser = subject("step", step, "whole iterations beside AdamW and DeepSpeed's own Muon")
    parser.add_argument(
        "--model", choices=step.MODELS, help="a GPT of about so many parameters (default: 303m; on CPU: tiny)"
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="ranks to start on this machine (default: one per GPU, at most 2; on CPU: 2)",
    )
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2, help="of ZeRO (default: 2)")
    parser.add_argument("--micro-batch", type=positive, metavar="N", help="sequences per rank (default: 4; on CPU: 2)")
    parser.add_argument(
        "--sequence", type=positive, metavar="N", help="tokens of a sequence (default: 1024; on CPU: 64)"
    )
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help="timed iterations of each (default: 40; on CPU: 10)"
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
        "--params", type=json_object, default={}, metavar="JSON", help="DSMuon's optimizer.params, beside the rates"
    )
    parser.add_argument(
        "--together", choices=("auto", "yes", "no"), default="auto", help="all engines at once (default: if they fit)"
    )
    add_outputs(parser, "draw a bar chart there (.png)")
