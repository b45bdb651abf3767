"""What a rank among thousands plans, keeps and does on the host, without the others: torch's fake process group.

    python scripts/measure_scale.py --json docs/measured/scale.json

For each model and number of ranks, of the rank that exchanges the most messages:

    plan        seconds to lay out, cut and give owners, on every rank alike; and the memory of the plan
    lists       memory of what the rank keeps of it: routes, batches, the tables of its partition, NorMuon's rows
    agree       milliseconds to compare a setting of every parameter with the other ranks, when an engine is built
    step        milliseconds on the host of a step's bookkeeping in this rank's Muon group: routes, batches, flags,
                copies. Newton-Schulz does nothing here, and collectives send nothing
    messages    sent and received by this rank each way, and by all ranks
    between     bytes of all ranks between nodes of ``NODE`` ranks, both ways, and if the plan does not know the nodes

The plan and the lists are those of the true shapes. For the step every side is ``SHRINK`` times smaller, and the cost
of a matrix that of the true one, so that owners and routes are the same but for rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import ds_muon
from ds_muon.agree import agree
from ds_muon.capture import NanCapture
from ds_muon.exchange import element_bytes
from ds_muon.muon_group import MuonGroup, Staged, in_turns
from ds_muon.passes import Held, Segments
from ds_muon.plan.partition import GroupPlan, Plan
from ds_muon.plan.rates import RATES, Rates
from ds_muon.plan_cost import MODELS, Shapes, default_settings

SHRINK, NODE = 64, 8
T = TypeVar("T")


@dataclass(frozen=True)
class Rank:
    """The columns of the table; times as in the module's docstring."""

    model: str
    ranks: int
    plan_seconds: float
    plan_bytes: int
    list_bytes: int
    agree_ms: float
    step_ms: float
    messages: int
    messages_of_all: int
    sent_bytes: int
    between_bytes: int
    between_bytes_if_unknown: int


COLUMNS: list[tuple[str, str | None, float]] = [
    ("model", None, 1),
    ("ranks", "d", 1),
    ("plan, s", ".2f", 1),
    ("plan, MB", ".1f", 1e-6),
    ("lists, MB", ".2f", 1e-6),
    ("agree, ms", ".1f", 1),
    ("step on the host, ms", ".2f", 1),
    ("messages each way, busiest rank", "d", 1),
    ("of all ranks", ",d", 1),
    ("MB of the busiest rank", ".0f", 1e-6),
    ("between nodes, GB", ".1f", 1e-9),
    ("if nodes are not known", ".1f", 1e-9),
]
"""Name, format and unit of each of ``Rank``'s fields."""


def planned(shapes: Shapes, ranks: int, shrink: int = 1, rates: Rates = RATES) -> Plan:
    """With ``shrink``, shapes are smaller by that, and cost and bytes are still those of the true ones."""
    settings = default_settings()
    layout = ds_muon.flat_layout([math.prod(shape) for _, shape in shapes], ranks)
    cost = cache(lambda rows, cols: settings.cost(shrink * rows, shrink * cols))
    size = element_bytes(settings, normuon=False) * shrink**2
    return ds_muon.make_plan([shapes], [layout], ranks, cost, rates=rates, element_bytes=size)


def messages(plan: GroupPlan) -> Counter[int]:
    """By rank, how many others it sends slices to or receives them from; as many travel back."""
    pairs = {(part.rank, unit.owner) for unit in plan.units for part in unit.slices if part.rank != unit.owner}
    return Counter(rank for pair in pairs for rank in pair)


def allocated(make: Callable[[], T]) -> tuple[T, int]:
    """What it makes, and the bytes of Python objects that stay."""
    tracemalloc.start()
    made = make()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return made, size


def median_ms(call: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def tensor_bytes(of: Any) -> int:
    return sum(value.nbytes for value in vars(of).values() if isinstance(value, Tensor))


def group_of(plan: GroupPlan, rank: int, names: list[str], beta2: float | None = None) -> MuonGroup:
    settings = default_settings()
    capture = NanCapture(rank)
    return MuonGroup(plan, names, rank, None, settings, adjust_lr_fn="original", beta2=beta2, capture=capture)


def zeros(self: MuonGroup, batch: Any) -> Tensor:
    """In place of Newton-Schulz."""
    return torch.zeros(len(batch), *batch[0][1].shape, dtype=torch.float16)


def sends_nothing(output: Tensor, *_: Any, **__: Any) -> Any:
    """In place of an all-to-all: the fake process group refuses to receive where nothing is sent."""
    return dist.all_reduce(output, async_op=True)


def step_ms(plan: GroupPlan, rank: int, names: list[str], steps: int) -> float:
    group, partition = group_of(plan, rank, names), torch.zeros(plan.partition_size)

    def step() -> None:
        moves = group.squares(partition).ne(0)
        group.moves_here(partition, moves)
        in_turns([group.run_stage(Staged(partition, moves))])

    with patch.object(MuonGroup, "orthogonalize", zeros), patch.object(dist, "all_to_all_single", sends_nothing):
        return median_ms(step, steps)


def measure(model: str, ranks: int, steps: int) -> Rank:
    shapes = MODELS[model]()
    names = [name for name, _ in shapes]
    seconds = 1e-3 * median_ms(lambda: planned(shapes, ranks), 3)
    plan, plan_bytes = allocated(lambda: planned(shapes, ranks))
    small = planned([(name, tuple(side // SHRINK for side in shape)) for name, shape in shapes], ranks, SHRINK)
    (group,) = plan.groups
    by_rank = messages(group)
    rank, most = max(by_rank.items(), key=lambda item: (item[1], -item[0]), default=(0, 0))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        made, list_bytes = allocated(lambda: group_of(group, rank, names, beta2=0.95))
        held = [Held(unit.piece, part.start, part.offset, part.numel) for unit, part in group.held(rank)]
        tables = Segments.of(held, group.partition_size, torch.device("cpu"))
        list_bytes += tensor_bytes(made.row_variance) + tensor_bytes(tables)
        facts = {name: f"{shape}, to muon, stored out_in" for name, shape in shapes}
        agreed = median_ms(lambda: agree("parameters", facts, "build the same model"), steps)
        (of_small,) = small.groups
        busiest = max(messages(of_small).items(), key=lambda item: (item[1], -item[0]), default=(0, 0))[0]
        on_host = step_ms(of_small, busiest, names, steps)
    finally:
        dist.destroy_process_group()
    size = element_bytes(default_settings(), normuon=False)
    of_nodes = planned(shapes, ranks, rates=Rates(ranks_per_node=NODE))
    return Rank(
        *(model, ranks, seconds, plan_bytes, list_bytes, agreed, on_host),
        *(most, sum(by_rank.values()) // 2, max(plan.moved_by_rank()) * size),
        *(sum(of.moved_by_rank(NODE)) // 2 * size for of in (of_nodes, plan)),
    )


def published(found: list[Rank], arguments: str) -> dict[str, Any]:
    """The table of docs/measured."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    return {
        "device": "one core of a CPU, torch's fake process group",
        "commit": commit.strip(),
        "recorded": commit.strip(),
        "versions": {"torch": torch.__version__, "deepspeed": version("deepspeed")},
        "commands": [f"python scripts/measure_scale.py {arguments}".strip()],
        "notes": [
            "One process, as the rank that exchanges the most messages; the docstring of the script says what each "
            "column is. Nothing is sent and Newton-Schulz does nothing, so that what is left of a step is its "
            "bookkeeping on the host."
        ],
        "columns": [{"name": name, **({"format": form} if form else {})} for name, form, _ in COLUMNS],
        "rows": [
            [
                value if isinstance(value, str) else round(value * unit, 4) if unit != 1 else value
                for value, (_, _, unit) in zip(vars(rank).values(), COLUMNS, strict=True)
            ]
            for rank in found
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-3-8b", "llama-3-70b"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 1024, 4096])
    parser.add_argument("--steps", type=int, default=100, help="of which the median is taken (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the table there, as docs/measured has it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for model in options.models:
        for ranks in options.ranks:
            found.append(measure(model, ranks, options.steps))
            print(found[-1], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(published(found, ""), indent=2) + "\n")


if __name__ == "__main__":
    main()
