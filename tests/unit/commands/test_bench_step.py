"""``ds-muon bench step``: a run on two CPU ranks whose numbers agree with each other and with the plan."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_muon import cli, plan_cost
from ds_muon.bench import parts, step, step_rank
from ds_muon.bench.parts import PARTS, Recorder, instrumented
from ds_muon.bench.step import CANDIDATES, Measured, Parts, RankParts, Run, Task, Wire, make_candidates
from ds_muon.bench.step_rank import _middle_half, bytes_together
from ds_muon.orthogonalize import NewtonSchulz
from ds_muon.ranks import RanksFailed, run_ranks
from ds_muon.say import tell
from tests.unit.support.cases import full
from tests.unit.support.ranks import run_ranks as run_in_workers

ADAMW, TORCH, MUON, OURS, ALLREDUCE = CANDIDATES.values()
ROUNDS = 3  # of which the median is not the mean
# 3 layers of 12 matrices' worth of 128 x 128, embedding and head of 256 bytes, 7 norms.
ELEMENTS = 3 * 12 * 128**2 + 2 * 256 * 128 + 7 * 128


def bench(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command, on CPU ranks."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        patch.setenv("DS_ACCELERATOR", "cpu")
        code = cli.main(["bench", "step", *arguments])
    return code, out.getvalue()


# ---- a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench_step")


def run_rank(arguments: list[str]) -> list[str]:
    """``python -m ds_muon.bench.step_rank``, but for the process; and what it says it is at."""
    said: list[str] = []
    with (
        mock.patch.object(sys, "argv", ["step_rank", *arguments]),
        mock.patch.object(step_rank, "say_progress", said.append),
        mock.patch.object(step_rank, "finish") as finish,
    ):
        step_rank.main()
    finish.assert_called_once_with(0)
    return said


def run_by_workers(
    module: str, arguments: Sequence[str], world_size: int, read: Callable[[Path], Run], environment: Any
) -> Run:
    """In place of ``ds_muon.ranks.run_ranks``, without a launch."""
    assert module == step_rank.__name__ and environment["DS_ACCELERATOR"] == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "run.json")
        for text in run_in_workers(world_size, run_rank, [*arguments, "--json", str(result)])[0]:
            tell(f"{text} ...", to=sys.stderr)
        return read(result)


@pytest.fixture(scope="module")
def ran(folder: Path, request: pytest.FixtureRequest) -> tuple[dict[str, Any], str]:
    """All candidates, DSMuon twice, and with a backend that needs a GPU. With ``--all`` the ranks are launched."""
    launched = request.config.getoption("--all")
    with nullcontext() if launched else mock.patch.object(step, "run_ranks", run_by_workers):
        code, out = bench(
            *("--candidates", "adamw", "adamw-torch", "muon", "dsmuon", "dsmuon", "--ns-backend", "torch", "triton"),
            *("--rounds", str(ROUNDS), "--json", str(folder / "n" / "step.json")),
            *("--chart", str(folder / "n" / "s.png")),
        )
    assert code == 0
    return json.loads((folder / "n" / "step.json").read_text()), out


@pytest.fixture(scope="module")
def entries(ran: tuple[dict[str, Any], str]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in ran[0]["candidates"]}


def there(entries: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (entry for entry in entries.values() if entry["problem"] is None)


def test_what_is_absent_is_listed_with_the_reason(entries: dict[str, dict[str, Any]], ran: Any) -> None:
    ours = [f"{OURS}, {backend}" for backend in ("torch", "triton")]
    assert list(entries) == [ADAMW, TORCH, MUON, *ours, *(f"{name}, 2" for name in ours)]
    assert [entry["name"] for entry in there(entries)] == [TORCH, MUON, ours[0], f"{ours[0]}, 2"]
    for name, reason in ((ADAMW, "a kernel for GPUs"), (ours[1], "Triton needs a GPU")):
        assert reason in entries[name]["problem"] and entries[name]["problem"] in ran[1]
        assert entries[name]["ms"] is None and entries[name]["times_ms"] == [] and entries[name]["parts"] is None


def test_it_says_what_it_is_at(ran: Any) -> None:
    lines = ran[1].splitlines()
    for at in (f"building: {OURS}, torch", f"round 1 of {ROUNDS}", f"measuring the parts of {OURS}, torch"):
        assert f"{at} ..." in lines


def test_surcharges_are_differences_of_medians(entries: dict[str, dict[str, Any]], ran: Any) -> None:
    assert ran[0]["baseline"] == TORCH
    adamw, muon = entries[TORCH], entries[MUON]
    assert adamw["surcharge_ms"] is None and adamw["over_muon"] is None
    for entry in there(entries):
        assert len(entry["times_ms"]) == ROUNDS and min(entry["times_ms"]) > 0
        assert entry["ms"] == statistics.median(entry["times_ms"])
        assert entry["tokens_per_second"] == pytest.approx(2 * 2 * 64 / (1e-3 * entry["ms"]))
        if entry is not adamw:
            assert entry["surcharge_ms"] == entry["ms"] - adamw["ms"]
            theirs = muon["ms"] - adamw["ms"]
            assert entry["over_muon"] == (pytest.approx(entry["surcharge_ms"] / theirs) if theirs > 0 else None)


def test_a_cpu_does_not_tell_its_memory(entries: dict[str, dict[str, Any]]) -> None:
    assert all(entry["resident_bytes"] is None and entry["peak_bytes"] is None for entry in entries.values())


def test_bytes_on_the_wire_follow_from_sizes(entries: dict[str, dict[str, Any]], ran: Any) -> None:
    assert ran[0]["parameters"] == ELEMENTS and ran[0]["world_size"] == 2
    for entry in there(entries):
        # The boundary halves an `up` matrix: fp32 to its owner, and fp32 back, for so is the iteration on a CPU.
        exchange = 4 * 128 * 128 // 2 * 8 if entry["optimizer"]["type"] == "DSMuon" else 0
        assert entry["wire"] == {"reduction": 2 * 4 * ELEMENTS, "all_gather": 4 * ELEMENTS, "exchange": exchange}


def test_everyone_trains_on_the_same_text_from_the_same_weights(entries: dict[str, dict[str, Any]]) -> None:
    losses = [entry["loss"] for entry in there(entries)]
    assert losses[2] == losses[3] and len(set(losses)) == 3  # twins, and three optimizers
    assert all(3 < loss < math.log(256) + 0.1 for loss in losses)


def test_parts_add_up_to_the_instrumented_iteration(entries: dict[str, dict[str, Any]]) -> None:
    assert entries[MUON]["parts"] is None
    ranks = entries[f"{OURS}, torch"]["parts"]["ranks"]
    assert len(ranks) == 2
    assert sum(rank["sent_bytes"] for rank in ranks) == entries[f"{OURS}, torch"]["wire"]["exchange"]
    for rank in ranks:
        assert list(rank["ms"]) == list(PARTS) and all(ms >= 0 for ms in rank["ms"].values())
        assert sum(rank["ms"].values()) == pytest.approx(rank["iteration_ms"])
        assert all(ms > 0 for part, ms in rank["ms"].items() if part != "rest")


def test_it_prints_a_table_and_draws_a_chart(ran: tuple[dict[str, Any], str], folder: Path) -> None:
    found, out = ran
    assert (folder / "n" / "s.png").read_bytes().startswith(b"\x89PNG")
    assert f"medians of {ROUNDS} rounds, engines taking turns" in out and "not compiled here" in out
    assert "measured separately: the device is idled around each, so nothing overlaps" in out
    assert f"surcharge: over {TORCH}" in out
    for entry in there({entry["name"]: entry for entry in found["candidates"]}):
        (cells,) = re.findall(rf"^{entry['name']}  +(\d.*)", out, flags=re.MULTILINE)
        assert cells.split()[0] == f"{entry['ms']:,.2f}" and cells.split()[4:6] == ["-", "-"]


def test_engines_built_one_after_another_share_the_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "run_ranks", run_by_workers)
    path = tmp_path / "alone.json"
    params = '{"variant": "normuon", "adamw_params": ["*up*"]}'
    arguments = ("--together", "no", "--rounds", "3", "--stage", "1", "--params", params)
    code, out = bench("--candidates", "dsmuon", *arguments, "--json", str(path))
    found = json.loads(path.read_text())
    assert code == 0 and found["passes"] == 2 and found["baseline"] is None and "no AdamW was measured" in out
    assert "built in 2 passes, one at a time" in out and "ZeRO-1" in out
    (entry,) = found["candidates"]
    assert len(entry["times_ms"]) == 3 and entry["surcharge_ms"] is None and entry["over_muon"] is None
    assert entry["optimizer"]["params"]["variant"] == "normuon"
    # The boundary would halve an `up` matrix, which --params routes to AdamW.
    assert entry["wire"]["exchange"] == sum(rank["sent_bytes"] for rank in entry["parts"]["ranks"]) == 0


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "7b"),
        ("--candidates", "lion"),
        ("--ns-backend", "cuda"),
        ("--stage", "3"),
        ("--rounds", "0"),
        ("--params", "[1"),
        ("--params", "3"),
        ("--together", "maybe"),
    ],
)
def test_what_is_not_known_is_refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "step", *arguments])
    assert ended.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_wrong_params_are_refused_before_ranks_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", "--params", '{"momentun": 0.9}']) == 2
    said = capsys.readouterr().err
    assert '--params.momentun = 0.9: is not a key of DSMuon; did you mean "momentum"' in said
    assert "starting" not in said


def test_models_are_the_planners() -> None:
    assert step.MODELS == {
        "tiny": (3, 128),
        "124m": (12, 768),
        "303m": (24, 1024),
        "1.2b": (24, 2048),
        "3b": (32, 2560),
    }


def test_as_many_ranks_as_gpus_but_no_more_than_two() -> None:
    assert [step.default_world_size({}, gpus) for gpus in (0, 1, 2, 8)] == [2, 1, 2, 2]
    assert step.default_world_size({"DS_ACCELERATOR": "cpu"}, 1) == 2


def test_candidates_differ_in_their_optimizer_only() -> None:
    adamw, theirs, torch_backend, triton = make_candidates(
        ["adamw", "muon", "dsmuon"], {"momentum": 0.9}, ["torch", "triton"], on_cpu=False
    )
    assert adamw.problem is None and theirs.optimizer == {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 3e-4}}
    assert torch_backend.optimizer["params"] == {**theirs.optimizer["params"], "momentum": 0.9, "ns_backend": "torch"}
    assert (torch_backend.name, triton.name) == (f"{OURS}, torch", f"{OURS}, triton")
    assert [c.zero for c in (adamw, theirs, triton)] == [{}, {}, {"reduce_scatter": False}]
    (alone,) = make_candidates(["dsmuon"], {"lr": 0.01}, None, on_cpu=False)
    assert alone.name == OURS and alone.optimizer["params"] == {"lr": 0.01, "adam_lr": 3e-4}


def test_adamw_can_be_reduced_as_dsmuon_is() -> None:
    adamw, reduced, ours = make_candidates(["adamw", "adamw-allreduce", "dsmuon"], {}, None, on_cpu=False)
    assert reduced.optimizer == adamw.optimizer and reduced.zero == ours.zero and reduced.name == ALLREDUCE
    (on_cpu,) = make_candidates(["adamw-allreduce"], {}, None, on_cpu=True)
    assert "a kernel for GPUs" in on_cpu.problem
    assert "adamw-allreduce" not in step.DEFAULTS and set(step.DEFAULTS) < set(CANDIDATES)
    run = Run("card", 2, "bf16", 10, 1, (), {}, (Measured(ALLREDUCE, times_ms=(10,)), Measured(OURS)))
    assert run.baseline() is run.measured[0]


def task(model: str, **other: Any) -> Task:
    candidates = make_candidates(step.DEFAULTS, {}, None, on_cpu=False)
    values = {"stage": 2, "micro_batch": 4, "sequence": 1024, "rounds": 10, "together": "auto"}
    return Task(model, **{**values, "candidates": candidates, **other})


def test_a_task_reaches_the_ranks_as_it_is() -> None:
    assert Task.from_json(task("1.2b").to_json()) == task("1.2b")


@pytest.mark.parametrize(
    ("model", "elements", "fits"), [("303m", 303e6, True), ("1.2b", 1.21e9, True), ("3b", 2.52e9, False)]
)
def test_four_engines_on_two_80_gb_cards(model: str, elements: float, fits: bool) -> None:
    assert (bytes_together(task(model), int(elements), 2) < 0.8 * 83e9) == fits
    assert bytes_together(task(model), int(elements), 1) > bytes_together(task(model), int(elements), 2)


# ---- what is derived ------------------------------------------------------------------------------------------------


def run_of(**times: Sequence[float]) -> Run:
    measured = [
        Measured(name, times_ms=tuple(times[key]), wire=Wire(1, 2, 3)) if key in times else Measured(name, "absent")
        for key, name in (("fused", ADAMW), ("torch", TORCH), ("muon", MUON), ("ours", OURS))
    ]
    return Run("card", 2, "bf16", 10, 1, ("note",), {"torch": "2"}, tuple(measured))


def test_the_baseline_is_fused_adam_where_it_is_there() -> None:
    run = run_of(fused=[10, 11, 90], torch=[12, 12, 12], muon=[30, 31, 32], ours=[5, 15, 16])
    assert [run.surcharge_ms(m) for m in run.measured] == [None, 1, 20, 4]
    assert [run.over_muon(m) for m in run.measured] == [None, None, 1.0, 0.2]
    run = run_of(torch=[12], muon=[32], ours=[17])
    assert [run.surcharge_ms(m) for m in run.measured] == [None, None, 20, 5]


def test_no_surcharge_is_no_yardstick() -> None:
    run = run_of(fused=[10], muon=[9], ours=[12])
    assert run.surcharge_ms(run.measured[3]) == 2 and run.over_muon(run.measured[3]) is None
    assert [run_of(ours=[1]).surcharge_ms(m) for m in run.measured] == [None] * 4


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    ranks = tuple(RankParts(3.0, {**dict.fromkeys(PARTS, 0.0), "newton_schulz": ms}, 8) for ms in (1.0, 2.0))
    found = Parts(ranks)
    run = Run("card", 2, "bf16", 10, 1, (), {}, (Measured(OURS, times_ms=(1.0,), parts=found),))
    (tmp_path / "run.json").write_text(run.to_json())
    assert Run.read(tmp_path / "run.json") == run
    assert found.busiest is ranks[1] and found.sent_bytes == 16


def test_matrices_straddle_on_cpus() -> None:
    settings = NewtonSchulz.resolve(torch.device("cpu"))
    shapes = plan_cost.gpt(*step.MODELS["tiny"])
    assert all(plan_cost.step_cost(shapes, size, settings).straddling for size in (2, 4, 8))


def test_the_middle_half_leaves_out_both_ends() -> None:
    iterations = [(float(ms), {part: ms / len(PARTS) for part in PARTS}) for ms in (900, 4, 5, 1, 3, 6, 2, 800)]
    whole, means = _middle_half(iterations)
    assert whole == pytest.approx(4.5) and means["norm"] == pytest.approx(4.5 / len(PARTS))


# ---- memory ---------------------------------------------------------------------------------------------------------


class Engine:
    """Takes memory as engines do: 40 for weights, 8 for the state of its first step, 100 while it works."""

    def __init__(self, memory: SimpleNamespace) -> None:
        self.memory, self.steps = memory, 0
        memory.now += 40

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.memory.peak = max(self.memory.peak, self.memory.now + 100)
        return torch.zeros(())

    def backward(self, loss: torch.Tensor) -> None:
        pass

    def step(self) -> None:
        self.memory.now += 8 if self.steps == 0 else 0
        self.steps += 1


def test_an_engine_is_charged_for_its_own_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(now=1000, peak=0)
    monkeypatch.setattr(step_rank, "_engine", lambda *args: Engine(memory))
    monkeypatch.setattr(step_rank, "_wire", lambda engine: None)
    monkeypatch.setattr(step_rank, "_allocated", lambda device: memory.now)
    monkeypatch.setattr(step_rank, "_first_problem", lambda problem: None)
    monkeypatch.setattr(step_rank, "synchronize", lambda device: None)
    monkeypatch.setattr(step_rank.dist, "barrier", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(memory, "peak", memory.now))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: memory.peak)
    text: Any = SimpleNamespace(window=lambda index: (torch.zeros(1), torch.zeros(1)))
    first, second = (step_rank.Contender(c, torch.device("cuda")) for c in task("303m").candidates[:2])
    first.build(task("303m"), text)
    second.build(task("303m"), text)
    memory.now += 500  # somebody else's, later
    for contender in (first, second):
        contender.measure(text.window(0))
        assert contender.resident_bytes == 48 and contender.peak_bytes == 148


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """Of two ranks, of which this is the first."""
    store = dist.HashStore()
    monkeypatch.setattr(step_rank, "_get_default_store", lambda: store)
    monkeypatch.setattr(step_rank, "_BUILDS", itertools.count())
    monkeypatch.setattr(step_rank, "_PATIENCE", 0.05)
    monkeypatch.setattr(step_rank.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(step_rank.dist, "get_world_size", lambda: 2)
    return store


def test_a_failure_on_any_rank_is_every_ranks_problem(monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> None:
    store.set("ds_muon.bench.step/0/1", "no compiler")
    monkeypatch.setattr(step_rank, "_engine", lambda *args: Engine(SimpleNamespace(now=0, peak=0)))
    monkeypatch.setattr(step_rank.dist, "barrier", lambda: None)
    text: Any = SimpleNamespace(window=lambda index: (torch.zeros(1), torch.zeros(1)))
    contender = step_rank.Contender(task("303m").candidates[0], torch.device("cpu"))
    contender.build(task("303m"), text)
    assert contender.problem == "no compiler" and contender.engine is None


def test_a_rank_that_fails_alone_does_not_wait_for_those_that_wait_for_it(store: dist.Store) -> None:
    with pytest.raises(RuntimeError, match="no memory"):
        step_rank._first_problem(RuntimeError("no memory\nand more"))
    store.set("ds_muon.bench.step/1/1", "")
    assert step_rank._first_problem(RuntimeError("no memory\nand more")) == "no memory"


@pytest.mark.slow
@pytest.mark.parametrize("method", [full("measure"), full("iterate")])
def test_one_failing_rank_ends_the_run(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it builds an engine, or in a round."""
    candidates = make_candidates(["dsmuon"], {}, None, on_cpu=True)
    small = task("tiny", micro_batch=1, sequence=16, rounds=1, candidates=candidates)
    path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "FAILING": method, "PYTHONPATH": path}
    begun = time.monotonic()
    with pytest.raises(RanksFailed, match="failed on rank 1: RuntimeError: rank 1 is at fault"):
        run_ranks("tests.unit.support.failing_rank", ["--task", small.to_json()], 2, Run.read, environment)
    assert time.monotonic() - begun < 300  # gloo would wait for 1800


# ---- the recorder ---------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def test_a_part_is_without_the_parts_inside_it(clock: SimpleNamespace) -> None:
    waits = []
    recorder = Recorder(lambda: waits.append(clock.seconds))
    with recorder.part("outer"):
        clock.seconds += 1
        for _ in range(2):
            with recorder.part("inner"):
                clock.seconds += 2
        clock.seconds += 4
    assert recorder.ms == {"outer": 5000, "inner": 4000}
    assert waits == [0, 1, 3, 3, 5, 9]  # around each


def test_an_engine_is_instrumented_for_as_long_as_it_is_asked_for(clock: SimpleNamespace) -> None:
    calls = []

    class Has:
        def __init__(self, *methods: str, **attributes: Any) -> None:
            for method in methods:
                setattr(type(self), method, lambda self, *args, name=method, **kwargs: self.call(name, *args))
            vars(self).update(attributes)

        def call(self, name: str, *args: Any) -> Any:
            calls.append(name)
            clock.seconds += 1
            return args

    exchange = Has("gather", "scatter")
    group = Has("orthogonalize", exchange=exchange)
    phases = ("take_gradients", "measure", "stage", "decide", "commit")
    zero = Has(*phases, "update_lp_params", optimizer=Has("advance_momentum_"), muon_groups=[group])
    before = [dict(vars(target)) for target in (zero, group, exchange, zero.optimizer)]
    recorder = Recorder(lambda: None)
    with instrumented(SimpleNamespace(optimizer=zero), recorder):
        assert zero.take_gradients(7) == (7,)
        zero.commit(1)
        zero.commit(1, 2)
    assert recorder.ms == {"flatten": 1000, "apply": 2000}
    assert before == [dict(vars(target)) for target in (zero, group, exchange, zero.optimizer)]
    zero.commit(1)
    assert recorder.ms["apply"] == 2000 and len(calls) == 4
    assert set(recorder.ms) < set(PARTS)
