"""``ds-muon plan``: its options, and what it prints and writes."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from importlib.util import find_spec

from ds_muon import plan_cost, plan_model
from ds_muon.bench.chart import draw_costs
from ds_muon.extras import how_to_install
from ds_muon.options import add_outputs, positive, rate, write_outputs
from ds_muon.orthogonalize import BACKENDS
from ds_muon.plan.rates import RATES, Rates
from ds_muon.say import printable, tell
from ds_muon.text import count
from ds_muon.verify.outcome import COULD_NOT_RUN

MOST_RANKS = 100_000


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``ds-muon plan``."""
    parser.description = plan_cost.__doc__
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"whose matrices, as one param group: {', '.join(plan_cost.MODELS)}; or the folder or file of a Hugging "
        "Face config.json, whose routing is shown too",
    )
    parser.add_argument(
        "--model", metavar="MODULE:FACTORY",
        help="a model of yours, by the function that ds-muon verify takes; made on the meta device, without memory",
    )  # fmt: skip
    parser.add_argument(
        "--world-size", type=ranks, nargs="+", metavar="N", default=[2**i for i in range(13)],
        help="numbers of ranks (default: 1, 2, 4, ... 4096)",
    )  # fmt: skip
    parser.add_argument(
        "--tflops",
        type=rate,
        default=RATES.flops / 1e12,
        help="for the times: the iteration's rate (default: %(default)g; `ds-muon bench newton-schulz` measures it)",
    )
    parser.add_argument(
        "--link", type=rate, default=RATES.bytes_per_second / 1e9, metavar="GB/s",
        help="for the times: rate of a rank's link (default: %(default)g); between nodes, with --ranks-per-node",
    )  # fmt: skip
    parser.add_argument(
        "--ranks-per-node", type=positive, metavar="N",
        help="owners are then in the node that holds most of a matrix, where they can be (default: links are alike)",
    )  # fmt: skip
    parser.add_argument(
        "--link-in-node", type=rate, default=RATES.bytes_per_second_in_node / 1e9, metavar="GB/s",
        help="for the times, with --ranks-per-node: rate of a rank's link in its node (default: %(default)g)",
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


def ranks(text: str) -> int:
    """A number of ranks that a plan can be made for: it lists all of them."""
    if (number := positive(text)) > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text}: it must be at most {MOST_RANKS}")
    return number


def run(options: argparse.Namespace) -> int:
    """Print the plans of the models that were named. Returns the exit code."""
    backend = options.ns_backend
    if backend == "auto":
        backend = "torch" if find_spec("triton") is None else "triton"
    elif backend == "triton" and find_spec("triton") is None:
        tell(f"ds-muon plan: --ns-backend triton needs Triton: {how_to_install('triton')}", to=sys.stderr)
        return COULD_NOT_RUN
    settings = replace(plan_cost.default_settings(), backend=backend)
    rates = Rates(
        1e12 * options.tflops,
        1e9 * options.link,
        bytes_per_second_in_node=1e9 * options.link_in_node,
        ranks_per_node=options.ranks_per_node or 0,
    )
    link = f"{options.link:g} GB/s per rank"
    if rates.ranks_per_node:
        link += f" between nodes of {rates.ranks_per_node}, {options.link_in_node:g} in one"
    costs: dict[str, list[plan_cost.StepCost]] = {}
    routings: dict[str, list[plan_model.Row]] = {}
    try:
        if not options.models and options.model is None:
            raise plan_model.NoModel("give a MODEL, or --model MODULE:FACTORY")
        planned = [plan_model.named(name) for name in options.models]
        planned += [plan_model.made_by(options.model)] if options.model is not None else []
    except plan_model.NoModel as error:
        tell(f"ds-muon plan: {printable(str(error))}", to=sys.stderr)
        return COULD_NOT_RUN
    for model in planned:
        sizes = options.world_size
        found = [plan_cost.step_cost(model.shapes, size, settings, rates=rates, pieces=model.pieces) for size in sizes]
        costs[model.name] = found
        elements = sum(math.prod(shape) for _, shape in model.shapes)
        size = f"{elements / 1e9:.2f}B" if elements >= 1e8 else f"{elements:,}"
        tell(
            f"{printable(model.name)}: {count(found[0].matrices, 'matrix', 'matrices')}, {size} elements, in Muon\n"
            f"Defaults on a GPU, {backend} backend. Times are estimates, at {options.tflops:g} TFLOP/s and\n{link}.\n"
        )
        if model.routing is not None:
            routings[model.name] = plan_model.rows(model.routing)
            lines = [
                *model.routing.summary(),
                *model.routing.warnings(),
                "",
                plan_model.table(routings[model.name]),
                "",
            ]
            tell("\n".join(lines))
        tell(f"{plan_cost.table(found, 1e9 * options.bus)}\n")
    numbers: dict[str, object] = {**costs, **({"routing": routings} if routings else {})}
    written = write_outputs(options, numbers, lambda path: draw_costs(path, costs, options.tflops))
    return 0 if written else COULD_NOT_RUN
