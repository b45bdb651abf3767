"""``ds-muon plan``: the numbers follow from the partition plan, and from nothing else."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from ds_muon import cli
from ds_muon.plan.partition import Plan, make_plan
from ds_muon.plan.rates import RATES, Rates
from ds_muon.plan.zero_layout import flat_layout
from ds_muon.plan_cost import MODELS, default_settings, gpt, llama, step_cost, table

SETTINGS = default_settings()


@pytest.mark.parametrize(
    ("model", "matrices", "elements"),
    [
        ("gpt-303m", 144, 302e6),
        ("gpt-1.2b", 144, 1.21e9),
        ("gpt-3b", 192, 2.52e9),
        ("llama-3-8b", 224, 6.98e9),
        ("llama-3-70b", 560, 68.5e9),
    ],
)
def test_named_models_have_their_matrices(model: str, matrices: int, elements: float) -> None:
    shapes = MODELS[model]()
    assert len(shapes) == matrices == len({name for name, _ in shapes})
    assert sum(rows * cols for _, (rows, cols) in shapes) == pytest.approx(elements, rel=0.01)


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_does_everything_once_and_moves_nothing(model: str) -> None:
    shapes = MODELS[model]()
    cost = step_cost(shapes, 1, SETTINGS)
    assert cost.flops == cost.busiest_flops == cost.busiest_flops_repeated
    assert cost.flops == sum(SETTINGS.cost(*shape) for _, shape in shapes)
    assert (cost.straddling, cost.moved_bytes, cost.busiest_bytes) == (0, 0, 0)
    assert cost.balance == cost.repeated_over_planned == 1.0
    assert cost.runs_repeated == cost.matrices == len(shapes)


@pytest.mark.parametrize("world_size", [2, 3, 7, 64, 1000])
@pytest.mark.parametrize("shapes", [gpt(3, 96), llama(2, 64, 16, 176)], ids=["gpt", "llama"])
def test_every_number_follows_from_where_the_boundaries_fall(shapes: list, world_size: int) -> None:
    """Element by element, from ZeRO's layout alone."""
    cost = step_cost(shapes, world_size, SETTINGS)
    size = -(-sum(rows * cols for _, (rows, cols) in shapes) // (2 * world_size)) * 2
    holders, start = [], 0
    for _, (rows, cols) in shapes:
        holders.append(range(start // size, (start + rows * cols - 1) // size + 1))
        start += rows * cols
    assert cost.straddling == sum(len(ranks) > 1 for ranks in holders)
    assert cost.runs_repeated == sum(map(len, holders))
    assert cost.matrices == len(shapes)
    work = [0.0] * world_size
    for (_, shape), ranks in zip(shapes, holders, strict=True):
        for rank in ranks:
            work[rank] += SETTINGS.cost(*shape)
    assert cost.busiest_flops_repeated == max(work)
    assert cost.flops / world_size <= cost.busiest_flops <= cost.busiest_flops_repeated
    # U in fp32 to the owner, O in fp16 back: what the owner does not hold.
    layout = flat_layout([rows * cols for _, (rows, cols) in shapes], world_size)
    plan = make_plan([shapes], [layout], world_size, SETTINGS.cost)
    assert cost.loads == tuple(
        sum(SETTINGS.cost(m.rows, m.cols) for m in plan.units if m.owner == rank) for rank in range(world_size)
    )
    assert [(t.name, t.rows, t.cols, t.holders, t.owner) for t in cost.travellers] == [
        (unit.name, unit.rows, unit.cols, unit.holders, unit.owner) for unit in plan.units if unit.travels
    ]
    assert cost.moved_bytes == 6 * plan.moved_elements() == cost.moved_bytes_kept
    assert cost.moved_bytes / world_size <= cost.busiest_bytes <= cost.moved_bytes


@pytest.mark.parametrize("model", ["gpt-1.2b", "llama-3-70b"])
def test_no_world_size_makes_a_rank_do_more_than_each_holder_would(model: str) -> None:
    costs = [step_cost(MODELS[model](), 2**i, SETTINGS) for i in range(13)]
    assert all(cost.repeated_over_planned >= 1 for cost in costs)
    busiest = [cost.busiest_flops for cost in costs]
    assert busiest == sorted(busiest, reverse=True)
    # The end of it: one matrix, the largest.
    assert busiest[-1] == max(SETTINGS.cost(*shape) for _, shape in MODELS[model]())


def test_the_table_has_times_at_the_given_rates() -> None:
    rates = Rates(100e12, 10e9)
    cost = step_cost(MODELS["gpt-1.2b"](), 64, SETTINGS, rates=rates)
    # The plan is the engine's, whatever the rates.
    assert replace(cost, rates=RATES, seconds=0, seconds_kept=0) == replace(
        step_cost(MODELS["gpt-1.2b"](), 64, SETTINGS), seconds=0, seconds_kept=0
    )
    assert cost.seconds >= max(cost.busiest_flops / 100e12, cost.busiest_bytes / 10e9)
    blocks = table([cost], 50e9).split("\n\n")
    step, work, others, memory, _ = ([float(text) for text in block.splitlines()[-1].split()] for block in blocks)
    assert step[:4] == [64, pytest.approx(1e3 * cost.seconds, abs=0.01), cost.straddling, cost.moved]
    assert [1e6 * size for size in step[4:]] == pytest.approx([cost.moved_bytes, cost.busiest_bytes], abs=5e5)
    loads = [1e-12 * load for load in (min(cost.loads), sum(cost.loads) / 64, max(cost.loads))]
    assert work == pytest.approx([64, *loads, cost.balance], abs=0.01)
    kept = 1e3 * cost.seconds_kept, cost.balance_kept
    repeated = cost.runs_repeated, cost.repeated_over_planned
    assert others == pytest.approx([64, *kept, cost.balance_ideal, *repeated], abs=0.01)
    shown = [cost.exchange_memory, cost.step_memory, cost.saved_memory]
    assert [1e6 * size for size in memory[1:]] == pytest.approx(shown, abs=5e5)


def test_the_table_fits_a_narrow_terminal_and_has_one_line_of_headings() -> None:
    costs = [step_cost(MODELS["llama-3-70b"](), ranks, SETTINGS, rates=Rates(ranks_per_node=8)) for ranks in (8, 4096)]
    for block in table(costs, 50e9).split("\n\n"):
        lines = block.splitlines()
        assert max(map(len, lines)) <= 80
        (at,) = (number for number, line in enumerate(lines) if line.startswith("ranks  "))
        assert len(lines) == at + 3, "one line for each number of ranks"


@pytest.mark.parametrize(
    ("model", "world_size", "between", "if_unknown"),
    [
        ("llama-3-8b", 64, 0, 0),
        ("llama-3-8b", 512, 1_610_612_736, 1_610_612_736),
        ("llama-3-8b", 1024, 4_831_838_208, 19_327_352_832),
        ("llama-3-70b", 512, 12_079_595_520, 12_079_595_520),
        ("gpt-1.2b", 64, 0, 352_321_536),
    ],
)
def test_only_what_a_node_boundary_cuts_crosses_between_nodes_of_eight(
    model: str, world_size: int, between: int, if_unknown: int
) -> None:
    cost = step_cost(MODELS[model](), world_size, SETTINGS, rates=Rates(ranks_per_node=8))
    assert cost.links is not None
    assert (cost.links.between_nodes, cost.links.between_nodes_if_unknown) == (between, if_unknown)
    shapes = MODELS[model]()
    size = -(-sum(rows * cols for _, (rows, cols) in shapes) // (2 * world_size)) * 2
    least, start = 0, 0
    for _, (rows, cols) in shapes:
        end, of_node = start + rows * cols, Counter[int]()
        for rank in range(start // size, -(-end // size)):
            of_node[rank // 8] += min(end, (rank + 1) * size) - max(start, rank * size)
        least += rows * cols - max(of_node.values())
        start = end
    assert cost.links.between_nodes == 6 * least


@pytest.mark.parametrize("world_size", [16, 24, 40, 64, 104, 128, 192, 512, 640, 1000, 1024, 4096])
@pytest.mark.parametrize("model", ["gpt-1.2b", "llama-3-8b", "llama-3-70b"])
def test_owners_from_the_same_node_let_no_more_cross_and_make_no_rank_busier(model: str, world_size: int) -> None:
    cost = step_cost(MODELS[model](), world_size, SETTINGS, rates=Rates(ranks_per_node=8))
    links = cost.links
    assert links is not None and cost.balance <= links.balance_if_unknown + 1e-9
    assert links.between_nodes <= links.between_nodes_if_unknown
    assert links.busiest_between_nodes <= links.busiest_between_nodes_if_unknown
    assert cost.seconds <= links.seconds_if_unknown


def test_the_table_has_what_travels_by_either_link(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ["--ranks-per-node", "8", "--link", "40", "--link-in-node", "300"]
    assert cli.main(["plan", "llama-3-8b", "--world-size", "1024", *rates]) == 0
    head, *blocks = capsys.readouterr().out.strip().split("\n\n")
    assert "40 GB/s per rank between nodes of 8, 300 in one" in head
    cost = step_cost(MODELS["llama-3-8b"](), 1024, SETTINGS, rates=Rates(5e14, 4e10, 1e-4, 0.02, 3e11, 8))
    step, by_link, no_nodes, *_ = ([float(text) for text in block.splitlines()[-1].split()] for block in blocks)
    assert step[1] == pytest.approx(1e3 * cost.seconds, abs=0.01)
    assert by_link == pytest.approx([1024, 28991.0, 286.3, 4831.8, 75.5], abs=0.5)
    assert by_link[1] + by_link[3] == step[4]
    assert no_nodes[:3] == pytest.approx([1024, 19327.4, 302.0], abs=0.5)
    assert no_nodes[3] == pytest.approx(cost.balance, abs=0.01)


@pytest.mark.parametrize(("model", "world_size"), [("gpt-1.2b", 64), ("llama-3-8b", 100), ("llama-3-70b", 256)])
def test_whole_matrices_move_where_a_step_gets_faster(model: str, world_size: int) -> None:
    cost = step_cost(MODELS[model](), world_size, SETTINGS)
    assert cost.moved > 0 and cost.seconds < 0.98 * cost.seconds_kept
    assert cost.moved_bytes > cost.moved_bytes_kept
    normuon = step_cost(MODELS[model](), world_size, SETTINGS, normuon=True)
    assert normuon.moved_bytes_kept * 6 == cost.moved_bytes_kept * 8


@pytest.mark.parametrize(("model", "world_size"), [("llama-3-8b", 8), ("llama-3-8b", 512), ("llama-3-70b", 4096)])
def test_nothing_moves_where_ranks_are_even_or_one_matrix_is_the_most(model: str, world_size: int) -> None:
    cost = step_cost(MODELS[model](), world_size, SETTINGS)
    assert cost.moved == 0 and cost.seconds == cost.seconds_kept
    assert cost.moved_bytes == cost.moved_bytes_kept and cost.balance == cost.balance_kept


@pytest.mark.parametrize("model", ["gpt-1.2b", "llama-3-8b", "llama-3-70b"])
def test_memory_is_that_of_the_rank_that_needs_most(model: str) -> None:
    elements = sum(rows * cols for _, (rows, cols) in MODELS[model]())
    for world_size in (1, 8, 100, 4096):
        cost = step_cost(MODELS[model](), world_size, SETTINGS)
        assert 4 * elements <= cost.saved_memory * world_size < 4 * (elements + 2 * world_size)
        assert cost.exchange_memory < cost.step_memory
        assert (cost.exchange_memory > 0) == (cost.moved_bytes > 0)


@pytest.mark.parametrize("world_size", [2, 8, 64, 100, 128, 256, 4096])
@pytest.mark.parametrize("model", ["gpt-1.2b", "llama-3-8b", "llama-3-70b"])
def test_if_moving_is_free_ranks_are_as_even_as_the_matrices_allow(model: str, world_size: int) -> None:
    costs = sorted((SETTINGS.cost(*shape) for _, shape in MODELS[model]()), reverse=True)
    # Of k N + 1 matrices one rank has k + 1, and no cheaper ones than the last of these.
    pigeons = [sum(costs[k * world_size - k : k * world_size + 1]) for k in range(-(-len(costs) // world_size))]
    allowed = 1.05 * max(sum(costs) / world_size, *pigeons)
    if (model, world_size) in (("llama-3-8b", 100), ("llama-3-70b", 256)):
        # There are hardly more ranks than large matrices of the MLP, so many must take a square one as well.
        large, square = sorted(set(costs), reverse=True)[:2]
        allowed = large + square
    if (model, world_size) == ("llama-3-70b", 100):
        # 2.4 large ones to a rank, which two of them and square ones do not add up to.
        large, square = sorted(set(costs), reverse=True)[:2]
        allowed = 3 * large + square
    assert step_cost(MODELS[model](), world_size, SETTINGS).busiest_flops_ideal <= allowed


def test_offload_frees_what_it_puts_on_the_host_and_a_step_needs_no_more_for_a_longer_model() -> None:
    shallow, deep = (step_cost(gpt(layers, 2048), 1, SETTINGS) for layers in (12, 48))
    elements = sum(rows * cols for _, (rows, cols) in gpt(48, 2048))
    assert deep.offload.moved == 12 * elements
    assert deep.offload.step_memory == shallow.offload.step_memory < deep.offload.moved / 4
    # U and the model's weights up, O down: the bus carries both ways at once.
    assert deep.offload.bus_bytes == 8 * elements and deep.offload.seconds(50e9) == 6 * elements / 50e9
    (*_, line) = table([deep], 50e9).splitlines()
    ranks, *sizes, ms = (float(text) for text in line.split())
    assert [ranks, *sizes] == [1, *(round(1e-6 * n) for n in (12 * elements, deep.offload.step_memory, 8 * elements))]
    assert ms == pytest.approx(6e3 * elements / 50e9, abs=0.05)


def engines_plan(model: str, world_size: int) -> Plan:
    shapes = MODELS[model]()
    layout = flat_layout([math.prod(shape) for _, shape in shapes], world_size)
    return make_plan([shapes], [layout], world_size, SETTINGS.cost)


def with_owner(plan: Plan, index: int, owner: int) -> Plan:
    """The plan of one group, with another owner of one matrix."""
    (group,) = plan.groups
    matrices, loads = list(group.units), list(plan.loads)
    cost = SETTINGS.cost(matrices[index].rows, matrices[index].cols)
    loads[matrices[index].owner] -= cost
    loads[owner] += cost
    matrices[index] = replace(matrices[index], owner=owner)
    return Plan((replace(group, units=tuple(matrices)),), tuple(loads))


def seconds_after_the_best_move(plan: Plan) -> float:
    """The least time of a step that another owner of one matrix gives, or the plan's own."""
    times = [RATES.of_rank(load, 6 * moved) for load, moved in zip(plan.loads, plan.moved_by_rank(), strict=True)]
    slowest, idlest = max(times), sorted(range(len(times)), key=times.__getitem__)
    least = plan.seconds()
    for index, matrix in enumerate(plan.units):
        # A step gets faster only if all ranks that take longest do: a move changes the times of two.
        touched = {rank for rank in (matrix.owner, *matrix.holders) if times[rank] >= slowest * (1 - 1e-9)}
        if not touched or sum(time >= slowest * (1 - 1e-9) for time in times) > 2:
            continue
        # Of ranks that hold nothing of it, none is left with less to do than the one that has least.
        other = next(rank for rank in idlest if rank not in {matrix.owner, *matrix.holders})
        for owner in {*matrix.holders, other} - {matrix.owner}:
            least = min(least, with_owner(plan, index, owner).seconds())
    return least


def test_the_search_for_a_better_move_finds_one() -> None:
    plan = engines_plan("gpt-1.2b", 16)
    worse = with_owner(plan, 3, 9)
    assert worse.seconds() > 1.02 * plan.seconds()
    assert seconds_after_the_best_move(worse) == pytest.approx(plan.seconds())


@pytest.mark.parametrize("world_size", [2, 3, 6, 8, 16, 32, 40, 48, 64, 100, 128, 192, 256, 512, 1000, 4096])
@pytest.mark.parametrize("model", ["gpt-1.2b", "llama-3-8b", "llama-3-70b"])
def test_ranks_are_even_or_no_other_owner_of_a_matrix_makes_a_step_faster(model: str, world_size: int) -> None:
    """For the engine's own plan: beyond 1.05 of the mean, the link would cost more than it saves."""
    plan = engines_plan(model, world_size)
    assert plan.balance <= 1.05 or seconds_after_the_best_move(plan) >= plan.seconds() * (1 - 1e-4)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, chart = tmp_path / "out" / "plan.json", tmp_path / "pictures" / "plan.png"
    arguments = ["--world-size", "3", "17", "--json", str(path), "--chart", str(chart)]
    assert cli.main(["plan", "gpt-124m", "gpt-303m", *arguments]) == 0
    found = json.loads(path.read_text())
    assert list(found) == ["gpt-124m", "gpt-303m"]
    assert [row["world_size"] for row in found["gpt-124m"]] == [3, 17]
    assert math.isclose(found["gpt-124m"][0]["flops"], step_cost(MODELS["gpt-124m"](), 3, SETTINGS).flops)
    assert [len(row["loads"]) for row in found["gpt-303m"]] == [3, 17]
    assert all(sum(row["loads"]) == row["flops"] and row["matrices"] == 144 for row in found["gpt-303m"])
    assert chart.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "gpt-124m: 72 matrices, 84,934,656 elements" in out and "gpt-303m: 144 matrices" in out


def test_the_same_numbers_make_the_same_picture(tmp_path: Path) -> None:
    """So that the one of docs/plan.md changes only with what it shows."""
    for name in ("a.svg", "b.svg"):
        assert (
            cli.main(["plan", "gpt-124m", "gpt-303m", "--world-size", "1", "8", "--chart", str(tmp_path / name)]) == 0
        )
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_what_could_not_be_written_is_told_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    full = OSError(28, "No space left on device")
    with mock.patch("ds_muon.files.writing", side_effect=full):
        assert cli.main(["plan", "gpt-124m", "--world-size", "3", "--json", "numbers.json"]) == 2
    out, error = capsys.readouterr()
    assert "gpt-124m: " in out and "numbers: numbers.json could not be written: [Errno 28]" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["gpt-124m", "--world-size", "0"],
        ["gpt-124m", "--tflops", "-1"],
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", *arguments])
    assert "error: argument" in capsys.readouterr().err
