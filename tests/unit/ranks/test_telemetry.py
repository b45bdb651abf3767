"""``telemetry_every``: what DeepSpeed's monitors get is what happened, and training does not notice."""

from __future__ import annotations

import csv
import gc
import math
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from ds_muon.telemetry import Telemetry, distance_from_orthogonal, largest_singular_value
from tests.unit.support.models import PrescribedGradients, ds_config, start, train_step
from tests.unit.support.ranks import DEVICE, run_ranks

SHAPES = [(16, 48), (40, 24), (14, 10), (7,), (30,)]  # the last matrix lies on one rank, and its updates are scaled
MUON, ADAMW = ["p0", "p1", "p2"], ["p3", "p4"]
RATES = {"lr": 0.03, "adam_lr": 0.002}
STEPS = 5


def gradients_of(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(config: dict[str, Any]) -> tuple[list[dict[str, Tensor]], list[int], dict[str, float]]:
    """fp32 weights before the first step and after each; reductions in each step; what was observed last."""
    engine = start(PrescribedGradients(SHAPES), config)

    def weights() -> dict[str, Tensor]:
        return {name: safe_get_full_fp32_param(p).cpu().clone() for name, p in engine.module.named_parameters()}

    seen, reductions = [weights()], []
    for step in range(STEPS):
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
            train_step(engine, [g.to(engine.device) for g in gradients_of(dist.get_rank(), step)])
        reductions.append(reduce.call_count)
        seen.append(weights())
    telemetry = engine.optimizer.telemetry
    engine.destroy()
    return seen, reductions, telemetry.last if telemetry else {}


def monitored(folder: Path, params: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    return ds_config({**RATES, **(params or {})}, csv_monitor=monitor, **top)


def written(folder: Path) -> dict[str, dict[int, float]]:
    """By the name of the file: samples to value."""
    found = {}
    for path in (folder / "run").glob("DSMuon_*.csv"):
        _, *lines = csv.reader(path.open())
        found[path.stem.removeprefix("DSMuon_")] = {int(samples): float(value) for samples, value in lines}
    return found


def rms(tensors: list[Tensor]) -> float:
    return torch.cat([tensor.flatten().double() for tensor in tensors]).square().mean().sqrt().item()


@pytest.mark.ranks
@pytest.mark.parametrize("offload", [False, True])
def test_the_monitor_gets_what_an_independent_computation_finds(tmp_path: Path, offload: bool) -> None:
    # With offload O stays in such a dtype until weights move.
    params, zero = ({"ns_dtype": "float16"}, {"offload_optimizer": {"device": "cpu"}}) if offload else ({}, None)
    plain = run_ranks(2, train, ds_config({**RATES, **params}, steps_per_print=2, zero=zero))
    observed = run_ranks(2, train, monitored(tmp_path, params, steps_per_print=2, zero=zero))
    weights, _, last = observed[0]
    for with_it, without in zip(observed, plain, strict=True):
        assert all(torch.equal(a[name], b[name]) for a, b in zip(with_it[0], without[0], strict=True) for name in a)
        assert with_it[2] == last and without[2] == {}
        # In the steps that are not observed nothing is reduced that was not before.
        assert [a - b for a, b in zip(with_it[1], without[1], strict=True)] == [0, 1, 0, 1, 0]

    found = written(tmp_path)
    assert {name.replace("/", "_"): value for name, value in last.items()} == {n: v[8] for n, v in found.items()}
    assert all(list(values) == [4, 8] for values in found.values())  # two samples a step
    momentum = [torch.zeros(shape) for shape in SHAPES[:3]]
    for step in range(STEPS):
        averages = [(a + b) / 2 for a, b in zip(gradients_of(0, step), gradients_of(1, step), strict=True)]
        momentum = [m + 0.05 * (g - m) for m, g in zip(momentum, averages, strict=False)]
        if (samples := 2 * (step + 1)) not in found["grad_norm_muon"]:
            continue
        us = [g + 0.95 * (m - g) for m, g in zip(momentum, averages, strict=False)]
        change = {name: weights[step][name] - weights[step + 1][name] for name in weights[0]}
        expected = {
            "grad_norm_muon": math.sqrt(sum(g.square().sum().item() for g in averages[:3])),
            "grad_norm_adamw": math.sqrt(sum(g.square().sum().item() for g in averages[3:])),
            "update_rms_muon": rms([change[name] / RATES["lr"] for name in MUON]),
            "update_rms_adamw": rms([change[name] / RATES["adam_lr"] for name in ADAMW]),
            "weight_rms_muon": rms([weights[step + 1][name] for name in MUON]),
            "weight_rms_adamw": rms([weights[step + 1][name] for name in ADAMW]),
            "lr_muon": RATES["lr"],
            "lr_adamw": RATES["adam_lr"],
        }
        for name, u in zip(MUON, us, strict=True):
            s = torch.linalg.svdvals(u)
            expected |= {
                f"u_norm_{name}": u.norm().item(),
                f"stable_rank_{name}": (s.square().sum() / s[0] ** 2).item(),
            }
        s = torch.linalg.svdvals(change["p0"] / RATES["lr"])  # wide: no factor
        expected["off_orthogonal_p0"] = rms([s.square() - 1])
        # O O^T is computed in O's dtype, which on GPUs is bf16.
        tolerance = 2e-4 if DEVICE == "cpu" and not offload else 5e-3
        assert {name: found[name][samples] for name in expected} == pytest.approx(expected, rel=tolerance)
        assert all(found[f"skipped_{kind}"][samples] == 0 for kind in ("spikes", "bad_gradients", "bad_updates"))
        assert found["newton_schulz_ms"][samples] > 0 and found["exchange_ms"][samples] > 0
        assert 1 <= found["balance"][samples] <= 2


def transfers_left(config: dict[str, Any]) -> int:
    """How many transfers of an observed step outlive it, without a collection of garbage."""
    engine = start(PrescribedGradients(SHAPES), config)
    exchange, made = engine.optimizer.muon_groups[0].exchange, []
    gather = exchange.gather

    def watched(partition: Tensor) -> Any:
        transfer = gather(partition)
        made.append(weakref.ref(transfer))
        return transfer

    gc.collect()
    gc.disable()
    with mock.patch.object(exchange, "gather", watched):
        train_step(engine, [g.to(engine.device) for g in gradients_of(dist.get_rank(), 0)])
    gc.enable()
    assert made and engine.optimizer.telemetry.last["exchange_ms"] > 0
    engine.destroy()
    return sum(transfer() is not None for transfer in made)


@pytest.mark.ranks
def test_an_observed_step_frees_gathered_matrices_like_any_other() -> None:
    assert run_ranks(2, transfers_left, ds_config({"telemetry_every": 1})) == [0, 0]


def skip_each_way(folder: str) -> list[dict[str, float]]:
    """What is observed of a good step, then of one skipped for each cause, then of a good one."""
    params = {"nan_guard": "skip", "grad_norm_skip_threshold": 100.0, "telemetry_every": 1, "verify_every": 1}
    engine = start(PrescribedGradients(SHAPES), monitored(Path(folder), params))
    group = engine.optimizer.muon_groups[0]
    seen = []
    for factor, of, break_it in ((1, 0, False), (math.inf, 0, False), (1e6, 4, False), (1, 0, True), (1, 0, False)):
        gradients = gradients_of(dist.get_rank(), 0)
        gradients[of] *= factor
        original = group.orthogonalize
        if break_it:
            group.orthogonalize = lambda batch, original=original: original(batch).mul_(math.nan)
        train_step(engine, [g.to(engine.device) for g in gradients])
        group.orthogonalize = original
        seen.append(engine.optimizer.telemetry.last)
    engine.destroy()
    return seen


@pytest.mark.ranks
def test_skipped_steps_are_counted_by_kind(tmp_path: Path) -> None:
    first, second = run_ranks(2, skip_each_way, str(tmp_path))
    assert str(first) == str(second)
    kinds = ("bad_gradients", "spikes", "bad_updates")
    assert [[int(values[f"skipped/{kind}"]) for kind in kinds] for values in first] == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]
    ]  # fmt: skip
    assert ["update_rms/muon" in values for values in first] == [True, False, False, False, True]
    assert first[1]["grad_norm/muon"] == math.inf and first[2]["grad_norm/adamw"] > 1e6
    assert 0 < first[-1]["verify_excess"] < 1
    assert list(written(tmp_path)["skipped_spikes"].values()) == [0, 0, 1, 1, 1]


def train_where_it_fails(folder: str, offload: bool) -> tuple[list[str], int]:
    """What is logged of steps in which looking, or writing, fails on one rank; and the steps made."""
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else None
    engine = start(PrescribedGradients(SHAPES), monitored(Path(folder), {"telemetry_every": 1}, zero=zero))
    said: list[str] = []

    def refuse(events: list[tuple[str, float, int]]) -> None:
        if events[0][0].startswith("DSMuon/"):  # a script cannot train on where DeepSpeed's own fail
            raise OSError("full")

    with (
        mock.patch("ds_muon.telemetry.log", side_effect=said.append),
        mock.patch.object(engine.monitor, "write_events", refuse),
    ):
        for step, breaks in enumerate([None, "_adamw_update", "sum_of_squares", "largest_singular_value", None]):
            if breaks and dist.get_rank() == 1:
                mock.patch(f"ds_muon.telemetry.{breaks}", side_effect=MemoryError("no room")).start()
            train_step(engine, [g.to(engine.device) for g in gradients_of(dist.get_rank(), step)])
            mock.patch.stopall()
            assert math.isnan(engine.optimizer.telemetry.last["update_rms/muon"]) == bool(breaks)
    return said, engine.global_steps


@pytest.mark.ranks
@pytest.mark.parametrize("offload", [False, True])
def test_what_goes_wrong_in_it_is_said_and_the_run_goes_on(tmp_path: Path, offload: bool) -> None:
    (of_first, steps), (of_second, _) = run_ranks(2, train_where_it_fails, str(tmp_path), offload)
    assert steps == 5
    assert of_first == ["telemetry ends, because the monitor cannot write it: OSError('full')"]
    words = "telemetry: rank 1 could not look at its part of a step: MemoryError('no room')"
    assert [text for text in of_second if words in text] == [words] * 3


def intervals(folder: str) -> list[int]:
    """How often steps are observed; of a monitor that only rank 0 has, as well."""
    found = []
    for params, top in (
        ({}, {"csv_monitor": {"enabled": False}}),
        ({"telemetry_every": 3}, {"csv_monitor": {"enabled": False}}),
        ({"telemetry_every": 0}, {}),
        ({}, {}),
        ({}, {"steps_per_print": 7}),
        ({}, {"steps_per_print": math.inf}),
        ({}, {"steps_per_print": 7} if dist.get_rank() == 0 else {"csv_monitor": {"enabled": False}}),
    ):
        engine = start(PrescribedGradients(SHAPES), {**monitored(Path(folder), params), **top})
        telemetry = engine.optimizer.telemetry
        assert telemetry is None or isinstance(telemetry, Telemetry)
        found.append(telemetry._every if telemetry else 0)
        engine.destroy()
    return found


@pytest.mark.ranks
def test_steps_are_observed_where_a_monitor_is_on_or_where_the_key_says(tmp_path: Path) -> None:
    assert run_ranks(2, intervals, str(tmp_path)) == [[0, 3, 0, 100, 7, 100, 7]] * 2


@pytest.mark.parametrize("shape", [(5, 9), (300, 40), (64, 64), (200, 500)])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_the_spectral_norm_is_close_whatever_the_spectrum(shape: tuple[int, int], scale: float) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    noise = torch.randn(shape, generator=generator)
    spike = noise + torch.outer(torch.ones(shape[0]), torch.ones(shape[1])) / 10
    before = torch.get_rng_state()
    for matrix in (noise, spike, torch.eye(*shape), torch.outer(noise[:, 0], noise[0])):
        exact = torch.linalg.matrix_norm(matrix.double(), 2) * scale
        assert float(largest_singular_value(matrix * scale)) == pytest.approx(float(exact), rel=1e-2)
    assert torch.equal(before, torch.get_rng_state())
    assert float(largest_singular_value(torch.zeros(shape))) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_distance_from_orthogonal_is_that_of_the_singular_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    o = (torch.randn(60, 90, generator=generator) / 9).to(dtype)
    s = torch.linalg.svdvals(o.double())
    with mock.patch("ds_muon.telemetry._AT_A_TIME", 1000):  # in several parts
        for matrix in (o, o.mT):
            assert float(distance_from_orthogonal(matrix)) == pytest.approx(rms([s.square() - 1]), rel=5e-3)
