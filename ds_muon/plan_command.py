"""``ds-muon plan``: its options, and what it prints and writes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from importlib.util import find_spec

from ds_muon import plan_cost
from ds_muon.bench.chart import draw_costs
from ds_muon.extras import how_to_install
from ds_muon.options import add_outputs, positive, rate, write_outputs
from ds_muon.orthogonalize import BACKENDS
from ds_muon.plan.owners import RATES, Rates
from ds_muon.say import tell
from ds_muon.verify.outcome import COULD_NOT_RUN


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``ds-muon plan``."""
    parser.description = plan_cost.__doc__
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        choices=plan_cost.MODELS,
        help=f"whose matrices, as one param group: {', '.join(plan_cost.MODELS)}",
    )
    parser.add_argument(
        "--world-size", type=positive, nargs="+", metavar="N", default=[2**i for i in range(13)],
        help="numbers of ranks (default: 1, 2, 4, ... 4096)",
    )  # fmt: skip
    parser.add_argument(
        "--tflops",
        type=rate,
        default=RATES.flops / 1e12,
        help="for the times: rate of the iteration per rank (default: %(default)g; see bench newton-schulz)",
    )
    parser.add_argument(
        "--link", type=rate, default=RATES.bytes_per_second / 1e9, metavar="GB/s",
        help="for the times: rate of a rank's link (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--bus", type=rate, default=50.0, metavar="GB/s",
        help="for the times with CPU offload: between host and GPU, in one direction (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--ns-backend", choices=("auto", *BACKENDS), default="auto",
        help="for the memory: whose batches (default: triton where it is installed, as on Hopper GPUs, else torch)",
    )  # fmt: skip
    add_outputs(parser, "draw the times against the ranks there (.png)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plans of the models that were named. Returns the exit code."""
    backend = options.ns_backend
    if backend == "auto":
        backend = "torch" if find_spec("triton") is None else "triton"
    elif backend == "triton" and find_spec("triton") is None:
        tell(f"ds-muon plan: --ns-backend triton needs Triton: {how_to_install('triton')}", to=sys.stderr)
        return COULD_NOT_RUN
    settings = replace(plan_cost.default_settings(), backend=backend)
    rates = Rates(1e12 * options.tflops, 1e9 * options.link)
    costs: dict[str, list[plan_cost.StepCost]] = {}
    for model in options.models:
        shapes = plan_cost.MODELS[model]()
        costs[model] = [plan_cost.step_cost(shapes, size, settings, rates=rates) for size in options.world_size]
        elements = sum(rows * cols for _, (rows, cols) in shapes)
        tell(
            f"{model}: {len(shapes)} matrices, {elements / 1e9:.2f}B elements; defaults on a GPU "
            f"({options.tflops:g} TFLOP/s and {options.link:g} GB/s per rank), {backend} backend\n"
        )
        tell(f"{plan_cost.table(costs[model], 1e9 * options.bus)}\n")
    written = write_outputs(options, costs, lambda path: draw_costs(path, costs, options.tflops))
    return 0 if written else COULD_NOT_RUN
