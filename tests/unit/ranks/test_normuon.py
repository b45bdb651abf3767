"""``variant: "normuon"``: its rule, and that its variance is the same on every rank and for any cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_muon import muon_update, reference_newton_schulz
from ds_muon.update import advance_row_variance, update_scale
from ds_muon.verify import UpdateCheck, UpdateRecord
from ds_muon.verify.reference import RowNormalization
from tests.unit.support.models import (
    PrescribedGradients,
    ds_config,
    full_weights,
    start,
    start_groups,
    train_step,
    variances,
)
from tests.unit.support.ranks import run_ranks
from tests.unit.support.spectra import gaussian
from tests.unit.support.steps import SHAPES, assert_equal, exact_gradients, muon_names, train

NORMUON = {"variant": "normuon", "weight_decay": 0.1}
GRIDS = [(16, 16), (24, 40), (40, 24), (3, 50), (2, 3)]


def paper(orthogonal: Tensor, variance: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    """Algorithm 1 of arXiv:2510.05491 in fp64, times 5 / eta: with eta_hat = 0.2 eta sqrt(m n) / ||N||."""
    variance = beta2 * variance + (1 - beta2) * (orthogonal * orthogonal).mean(dim=1)
    normalized = orthogonal / variance.sqrt()[:, None]
    return normalized * math.sqrt(orthogonal.numel()) / normalized.norm(), variance


# ---- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", GRIDS)
def test_with_match_rms_adamw_the_update_is_the_papers(shape: tuple[int, int]) -> None:
    momentum_buffer, row_variance = torch.zeros(shape), torch.zeros(shape[0])
    m, v = torch.zeros(shape).double(), torch.zeros(shape[0]).double()
    for step in range(4):
        gradient = gaussian(*shape, seed=step)
        update = muon_update(
            gradient, momentum_buffer, adjust_lr_fn="match_rms_adamw", row_variance=row_variance, beta2=0.9
        )
        m = 0.95 * m + 0.05 * gradient.double()
        expected, v = paper(reference_newton_schulz(0.05 * gradient.double() + 0.95 * m), v, 0.9)
        assert (update - 0.2 * expected).norm() <= 1e-4 * (0.2 * expected).norm()
        assert (row_variance - v).norm() <= 1e-4 * v.norm()
        assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", "none"])
@pytest.mark.parametrize("shape", GRIDS)
def test_the_norm_is_that_of_an_orthogonal_matrix_times_the_scale(shape: tuple[int, int], adjust: str) -> None:
    update = muon_update(gaussian(*shape), torch.zeros(shape), adjust_lr_fn=adjust, row_variance=torch.zeros(shape[0]))
    expected = update_scale(adjust, *shape) * math.sqrt(min(shape))
    assert float(update.norm()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("side", [2, 16, 48])
def test_no_gradient_is_no_update_in_the_reference_either(side: int) -> None:
    normalize = RowNormalization(torch.zeros(side).double(), 0.95)
    assert torch.equal(normalize(torch.zeros(side, 50).double()), torch.zeros(side, 50).double())
    assert (
        muon_update(torch.zeros(side, 50), torch.zeros(side, 50), row_variance=torch.zeros(side)).count_nonzero() == 0
    )
    first = gaussian(side, 50).double()
    assert normalize(first).norm() == pytest.approx(math.sqrt(side))


def test_on_the_first_step_all_rows_get_the_same_norm() -> None:
    gradient = gaussian(12, 20) * torch.logspace(0, -6, 12)[:, None]
    rows = muon_update(gradient, torch.zeros(12, 20), row_variance=torch.zeros(12)).norm(dim=1)
    assert float(rows.max() / rows.min()) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e25])
def test_neither_update_nor_variance_depends_on_the_gradients_scale(scale: float) -> None:
    variance, scaled_variance = torch.zeros(24), torch.zeros(24)
    update = muon_update(gaussian(24, 40), torch.zeros(24, 40), row_variance=variance)
    scaled = muon_update(gaussian(24, 40) * scale, torch.zeros(24, 40), row_variance=scaled_variance)
    assert (scaled - update).norm() <= 1e-5 * update.norm()
    assert (scaled_variance - variance).norm() <= 1e-5 * variance.norm()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (8, 8)])
def test_zero_rows_and_zero_matrices_stay_zero(shape: tuple[int, int], dtype: str) -> None:
    gradient = gaussian(*shape)
    gradient[2] = 0
    update = muon_update(gradient, torch.zeros(shape), row_variance=torch.zeros(shape[0]), ns_dtype=dtype)
    assert update.isfinite().all() and not update[2].any() and update[3].any()
    zero = muon_update(torch.zeros(shape), torch.zeros(shape), row_variance=torch.zeros(shape[0]), ns_dtype=dtype)
    assert not zero.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e25])
def test_a_result_out_of_range_shows_in_every_factor(value: float) -> None:
    orthogonal = gaussian(6, 9)[None].clone()
    orthogonal[0, 2, 3] = value
    _, factors = advance_row_variance(orthogonal, torch.zeros(1, 6), beta2=0.9)
    assert not factors.isfinite().any()


def test_the_variance_of_rows_without_elements_falls_where_it_is_advanced_and_stays_where_they_do_not_move() -> None:
    advanced, factors = advance_row_variance(torch.zeros(1, 4, 0), torch.ones(1, 4), beta2=0.5)
    assert torch.equal(advanced, torch.full((1, 4), 0.5)) and factors.shape == (1, 4, 1)
    variance = torch.ones(4)
    assert muon_update(torch.zeros(4, 0), torch.zeros(4, 0), row_variance=variance, beta2=0.5).shape == (4, 0)
    assert torch.equal(variance, torch.ones(4))


def test_without_a_variance_the_update_is_muons() -> None:
    plain, normuon = (muon_update(gaussian(6, 9), torch.zeros(6, 9), row_variance=v) for v in (None, torch.zeros(6)))
    assert torch.equal(plain, muon_update(gaussian(6, 9), torch.zeros(6, 9)))
    assert not torch.equal(plain, normuon)


@pytest.mark.parametrize("shape", [(9,), (6, 1), (5,), ()])
def test_a_variance_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="row_variance of shape"):
        muon_update(gaussian(6, 9), torch.zeros(6, 9), row_variance=torch.zeros(shape))


def test_beta2_dtype_and_device_are_checked() -> None:
    for beta2 in (1.0, 1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"beta2 = .*set a number from 0 to below 1"):
            muon_update(gaussian(6, 9), torch.zeros(6, 9), row_variance=torch.zeros(6), beta2=beta2)
    with pytest.raises(ValueError, match="has no effect without row_variance"):
        muon_update(gaussian(6, 9), torch.zeros(6, 9), beta2=0.9)
    with pytest.raises(ValueError, match=r"in float32 on cpu, got .* in bfloat16"):
        muon_update(gaussian(6, 9), torch.zeros(6, 9), row_variance=torch.zeros(6, dtype=torch.bfloat16))
    buffer = torch.zeros(6, 9)
    with pytest.raises(ValueError, match=r"on cpu, got .* on meta"):
        muon_update(gaussian(6, 9), buffer, row_variance=torch.zeros(6, device="meta"))
    assert torch.count_nonzero(buffer) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tall", [False, True])
def test_a_batch_gives_every_matrix_its_own_factors(dtype: torch.dtype, tall: bool) -> None:
    batch = gaussian(5 * 17, 33).view(5, 17, 33).to(dtype)
    batch = batch.mT if tall else batch
    variance = torch.rand(5, batch.shape[1], generator=torch.Generator().manual_seed(0))
    before = variance.clone()
    advanced, factors = advance_row_variance(batch, variance, beta2=0.9)
    assert torch.equal(variance, before)
    for i in range(5):
        alone, alone_factors = advance_row_variance(batch[i : i + 1], variance[i : i + 1], beta2=0.9)
        assert torch.equal(alone[0], advanced[i]) and torch.equal(alone_factors[0], factors[i])


# ---- in a step ------------------------------------------------------------------------------------------------------


def train_variances(config: dict[str, Any], steps: int, groups: int) -> dict[str, Tensor]:
    engine = start_groups(SHAPES, config, groups)
    for step in range(steps):
        train_step(engine, exact_gradients(SHAPES, step, engine.device))
    return variances(engine)


@pytest.fixture(scope="module")
def one_rank() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    config = ds_config(NORMUON)
    return run_ranks(1, train, SHAPES, config, 3)[0], run_ranks(1, train_variances, config, 3, 1)[0]


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [{}, {"round_robin_gradients": True}])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_weights_and_variances_are_bit_equal_for_any_cut(
    world_size: int, stage: int, groups: int, zero: dict[str, Any], one_rank: Any
) -> None:
    weights, moments = one_rank
    config = ds_config(NORMUON, stage=stage, zero=zero)
    for found in run_ranks(world_size, train, SHAPES, config, 3, 1.0, groups):
        assert_equal(found, weights)
    for found in run_ranks(world_size, train_variances, config, 3, groups):
        assert_equal(found, moments)
        assert sorted(found) == muon_names(SHAPES)


def apply_muon_update(shapes: list[tuple[int, ...]], steps: int) -> dict[str, Tensor]:
    device = torch.device(get_accelerator().current_device_name())
    model = PrescribedGradients(shapes).to(device)
    state = [(torch.zeros(shape, device=device), torch.zeros(shape[0], device=device)) for shape in shapes]
    for step in range(steps):
        gradients = exact_gradients(shapes, step, device)
        for p, g, (momentum_buffer, row_variance) in zip(model.parameters(), gradients, state, strict=True):
            p.data -= 0.02 * muon_update(g, momentum_buffer, row_variance=row_variance, beta2=0.8)
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.ranks
def test_the_engine_applies_exactly_what_muon_update_returns() -> None:
    (expected,) = run_ranks(1, apply_muon_update, SHAPES[:4], 3)
    config = ds_config({"variant": "normuon", "beta2": 0.8})
    assert_equal(run_ranks(2, train, SHAPES[:4], config, 3)[0], expected)


def checked(config: dict[str, Any], steps: int) -> tuple[list[UpdateRecord], bool]:
    engine = start(PrescribedGradients(SHAPES), config)
    check = UpdateCheck(engine)
    records = []
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(steps):
        gradients = [torch.randn(shape, generator=generator).to(engine.device) for shape in SHAPES]
        train_step(engine, gradients)
        records += check.after_step()
    check.close()
    mine = torch.cat([variances(engine)[name] for name in muon_names(SHAPES)]).to(engine.device)
    everyones = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyones, mine)
    return records, all(torch.equal(mine, other) for other in everyones)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_updates_in_fp32_are_within_1e_5_of_fp64_and_variances_agree(world_size: int, stage: int) -> None:
    config = ds_config({**NORMUON, "weight_decay": 0.0, "lr": 1.0, "ns_dtype": "float32"}, stage=stage)
    for records, agree in run_ranks(world_size, checked, config, 4):
        muon = [record for record in records if record.half == "muon"]
        assert agree and all(record.ok for record in records)
        # Of matrices with a side of 2 or 3 now and then one is ill-conditioned.
        assert max(record.relative_error for record in muon if min(record.shape) > 3) <= 1e-5
        assert world_size == 1 or any(record.straddles for record in muon)


def checked_with_a_small_row(config: dict[str, Any], size: float) -> list[UpdateRecord]:
    engine = start(PrescribedGradients([(24, 40), (40, 24)]), config)
    check = UpdateCheck(engine)
    records = []
    for step in range(3):
        gradients = [gaussian(24, 40, step), gaussian(40, 24, step)]
        for gradient in gradients:
            gradient[3] *= size
        train_step(engine, [gradient.to(engine.device) for gradient in gradients])
        records += check.after_step()
    check.close()
    return records


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-7, 1e-9, 1e-11, 1e-15, 0.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_that_hardly_gets_a_gradient_is_no_false_alarm(dtype: str, size: float) -> None:
    records = run_ranks(2, checked_with_a_small_row, ds_config({**NORMUON, "ns_dtype": dtype}), size)[0]
    assert all(record.ok for record in records), [(r.against_fp64, r.diagnosis) for r in records if not r.ok]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_updates_are_right_in_every_dtype(dtype: str, method: str) -> None:
    config = ds_config({**NORMUON, "ns_dtype": dtype, "ns_method": method}, dtype=dtype)
    for records, agree in run_ranks(2, checked, config, 4):
        assert agree and all(record.ok for record in records), [r for r in records if not r.ok]


def with_a_bad_gradient(config: dict[str, Any], bad: float | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = start(PrescribedGradients(SHAPES), config)
    train_step(engine, exact_gradients(SHAPES, 0, engine.device))
    if bad is not None:
        before = variances(engine)
        gradients = exact_gradients(SHAPES, 1, engine.device)
        gradients[-2][0] = bad  # AdamW's
        train_step(engine, gradients)
        assert engine.skipped_steps == 1
        assert all(torch.equal(before[name], v) for name, v in variances(engine).items())
    train_step(engine, exact_gradients(SHAPES, 2, engine.device))
    return variances(engine), full_weights(engine)


@pytest.mark.ranks
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e9])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_skipped_step_leaves_no_trace_in_variances_and_weights(stage: int, bad: float) -> None:
    config = ds_config({**NORMUON, "grad_norm_skip_threshold": 1e6}, stage=stage)
    clean, skipped = (run_ranks(2, with_a_bad_gradient, config, value) for value in (None, bad))
    for (moments, weights), (other_moments, other_weights) in zip(skipped, clean, strict=True):
        assert_equal(moments, other_moments)
        assert_equal(weights, other_weights)


def linked(config: dict[str, Any]) -> list[str]:
    """The keys of the state that DeepSpeed takes for pieces of p0, whose rows are as many as a partition's elements."""
    engine = start(PrescribedGradients([(8, 2), (3,)]), config)
    train_step(engine, exact_gradients([(8, 2), (3,)], 0, engine.device))
    zero = engine.optimizer
    assert zero.partition_size[0] == 8
    return sorted(engine.module.p0._hp_mapping.optim_fragment)


@pytest.mark.ranks
def test_deepspeed_does_not_take_the_variance_for_a_piece_of_a_parameter() -> None:
    assert run_ranks(2, linked, ds_config(NORMUON)) == [["momentum_buffer"]] * 2
