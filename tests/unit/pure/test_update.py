"""The update rule of one matrix against a reference of its own, and its momentum on slices of a flat buffer."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_muon import muon_update
from ds_muon.config import LARGEST_BF16_MOMENTUM
from ds_muon.passes import advance_momentum_, torch_passes
from ds_muon.update import update_scale

QUINTIC = (3.4445, -4.7750, 2.0315)
SHAPES = [(16, 16), (7, 13), (13, 7), (17, 40)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(a: Any, b: Any) -> float:
    a, b = (np.asarray(x, dtype=np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


class Rule:
    """The formulas of the module's docstring in fp64 numpy."""

    def __init__(self, shape: tuple[int, int], momentum: float, nesterov: bool, adjust_lr_fn: str) -> None:
        self.m = np.zeros(shape)
        self.momentum, self.nesterov, self.adjust_lr_fn = momentum, nesterov, adjust_lr_fn

    def update(self, g: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.m = self.momentum * self.m + (1 - self.momentum) * g
        x = (1 - self.momentum) * g + self.momentum * self.m if self.nesterov else self.m
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a, b, c = QUINTIC
            r = x @ x.T
            x = a * x + b * r @ x + c * r @ r @ x
        rows, cols = x.shape
        s = {"original": max(1, rows / cols) ** 0.5, "match_rms_adamw": 0.2 * max(rows, cols) ** 0.5, "none": 1.0}
        return s[self.adjust_lr_fn] * x


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw", "none"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_follows_the_rule(
    shape: tuple[int, int], momentum: float, nesterov: bool, adjust_lr_fn: str
) -> None:
    rule = Rule(shape, momentum, nesterov, adjust_lr_fn)
    buffer = torch.zeros(shape)
    for step in range(6):
        gradient = 10.0 ** (step % 3) * gaussian(*shape, seed=step)
        update = muon_update(gradient, buffer, momentum=momentum, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn)
        assert update.dtype == torch.float32 and update.shape == shape
        assert distance(update, rule.update(gradient.double().numpy())) <= 1e-5
        assert distance(buffer, rule.m) <= 1e-6


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_bf16_buffer_costs_one_rounding_of_the_momentum_per_step(shape: tuple[int, int], nesterov: bool) -> None:
    rule = Rule(shape, 0.95, nesterov, "none")
    buffer = torch.zeros(shape, dtype=torch.bfloat16)
    for step in range(4):
        gradient = gaussian(*shape, seed=step)
        rule.m = buffer.double().numpy()
        # Within a step the momentum is fp32: the update has an fp32 error, only what is kept is rounded.
        update = muon_update(gradient, buffer, nesterov=nesterov, adjust_lr_fn="none")
        assert distance(update, rule.update(gradient.double().numpy())) <= 1e-5
        np.testing.assert_allclose(buffer.double().numpy(), rule.m, rtol=2.0**-8 * 1.001)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_of_the_gradient_does_not_matter_once_it_is_rounded(dtype: torch.dtype) -> None:
    gradient = gaussian(9, 14).to(dtype)
    one, other = torch.zeros(9, 14), torch.zeros(9, 14)
    assert torch.equal(muon_update(gradient, one), muon_update(gradient.float(), other))
    assert torch.equal(one, other)


def test_the_strides_and_alignment_of_the_gradient_do_not_matter() -> None:
    gradient = gaussian(9, 14)
    expected = muon_update(gradient, torch.zeros(9, 14))
    wide = torch.full((20, 45), float("nan"))
    wide[1:19:2, 2:44:3] = gradient
    flat = torch.full((127,), float("nan"))
    flat[1:] = gradient.flatten()
    for view in (gradient.mT.contiguous().mT, wide[1:19:2, 2:44:3], flat[1:].view(9, 14)):
        assert torch.equal(muon_update(view, torch.zeros(9, 14)), expected)
    row = torch.ones(1, 14)
    expected = muon_update(torch.ones(9, 14), torch.zeros(9, 14))
    assert torch.equal(muon_update(row.expand(9, 14), torch.zeros(9, 14)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_not_modified_and_shares_nothing_with_the_result(dtype: torch.dtype) -> None:
    flat = gaussian(200).to(dtype)
    before = flat.clone()
    # Gradient and momentum in one buffer, as slices of a flat partition are.
    buffer = torch.zeros(200)
    update = muon_update(flat[3:130][1:].view(9, 14), buffer[1:127].view(9, 14))
    assert torch.equal(flat, before)
    assert torch.count_nonzero(buffer[:1]) == torch.count_nonzero(buffer[127:]) == 0
    kept = buffer.clone()
    update.fill_(float("nan"))
    assert torch.equal(flat, before) and torch.equal(buffer, kept)


def test_gradient_and_momentum_may_lie_in_one_buffer() -> None:
    flat = gaussian(300)
    flat[150:] = 0
    gradient, buffer = flat[1:127].view(9, 14), flat[151:277].view(9, 14)
    before, own = gradient.clone(), torch.zeros(9, 14)
    assert torch.equal(muon_update(gradient, buffer), muon_update(before, own))
    assert torch.equal(gradient, before) and torch.equal(buffer, own)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_buffer_advances_exactly_once(nesterov: bool) -> None:
    gradient, buffer = gaussian(9, 14), torch.zeros(9, 14)
    muon_update(gradient, buffer, momentum=0.75, nesterov=nesterov)
    assert torch.equal(buffer, 0.25 * gradient)
    muon_update(gradient, buffer, momentum=0.75, nesterov=nesterov)
    torch.testing.assert_close(buffer, 0.4375 * gradient, rtol=3e-7, atol=0)


def test_autograd_sees_nothing() -> None:
    weight = gaussian(4, 6).requires_grad_()
    assert not muon_update(weight, torch.zeros(4, 6)).requires_grad


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("factor", [1e-30, 1e-20, 1e-8, 1e-3, 7.0, 1e10, 1e20, 1e25])
def test_the_scale_of_the_gradient_does_not_matter(factor: float, shape: tuple[int, int], nesterov: bool) -> None:
    gradient = gaussian(*shape)
    expected = muon_update(gradient, torch.zeros(shape), nesterov=nesterov)
    buffer = torch.zeros(shape)
    assert distance(muon_update(factor * gradient, buffer, nesterov=nesterov), expected) <= 1e-5
    # What is kept is in the units of the gradient.
    assert distance(buffer.double() / factor, 0.05 * gradient) <= 1e-6


@pytest.mark.parametrize("ns_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("ns_eps", [0.0, 1e-15])
@pytest.mark.parametrize("momentum_dtype", [torch.float32, torch.bfloat16])
def test_zero_gradients_give_exactly_zero(ns_dtype: str, ns_eps: float, momentum_dtype: torch.dtype) -> None:
    for shape in SHAPES:
        buffer = torch.zeros(shape, dtype=momentum_dtype)
        update = muon_update(torch.zeros(shape), buffer, ns_dtype=ns_dtype, ns_eps=ns_eps)
        assert torch.equal(update, torch.zeros(shape))
        assert torch.count_nonzero(buffer) == 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_gradient_shows_in_the_result(poison: float) -> None:
    gradient = gaussian(9, 14)
    gradient[2, 3] = poison
    assert not muon_update(gradient, torch.zeros(9, 14)).isfinite().all()


# ---- momentum -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
def test_without_momentum_nothing_of_the_past_is_left(nesterov: bool) -> None:
    # Whatever the past was: M + (1 - momentum) (G - M) loses the digits of G where M is large.
    for past in (0.0, 1.0, 1e10, -1e20):
        gradient, buffer = gaussian(50), torch.full((50,), past)
        u = gradient.clone()
        advance_momentum_(u, buffer, momentum=0.0, nesterov=nesterov)
        assert torch.equal(u, gradient)
        assert torch.equal(buffer, gradient)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.49, 0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("ratio", [1e-6, 1e-3, 1.0, 1e3, 1e6])
def test_momentum_rounds_by_what_it_adds(momentum: float, ratio: float, nesterov: bool) -> None:
    gradient, buffer = gaussian(200), ratio * gaussian(200, seed=1)
    past = buffer.double()
    u = gradient.clone()
    advance_momentum_(u, buffer, momentum=momentum, nesterov=nesterov)
    kept, taken = momentum * past, (1 - momentum) * gradient.double()
    # A few roundings, each relative to the terms that are added up.
    size = kept.abs() + taken.abs()
    eps = 2.0**-24
    assert ((buffer - (kept + taken)).abs() <= 4 * eps * size).all()
    if nesterov:
        expected = momentum * (kept + taken) + taken
        assert ((u - expected).abs() <= 8 * eps * (size + taken.abs())).all()
    else:
        assert torch.equal(u, buffer)


@pytest.mark.parametrize(
    ("momentum", "error", "left"),
    [(0.95, 0.005, 0.05), (0.99, 0.012, 0.06), (LARGEST_BF16_MOMENTUM, 0.017, 0.04), (0.999, 0.35, 1.0)],
)
def test_bf16_momentum_forgets_up_to_the_largest_that_is_allowed(momentum: float, error: float, left: float) -> None:
    """The table of `docs/options.md`: with gradients whose mean is as large as their noise, and once they are gone."""
    generator = torch.Generator().manual_seed(0)
    constant = round(1 / (1 - momentum))
    mean, exact, rounded = torch.randn(2000, generator=generator), torch.zeros(2000), torch.zeros(2000).bfloat16()

    def advance(steps: int, size: float) -> None:
        for _ in range(steps):
            gradient = size * (mean + torch.randn(2000, generator=generator))
            for buffer in (exact, rounded):
                advance_momentum_(gradient.clone(), buffer, momentum=momentum, nesterov=True)

    advance(4 * constant, 1.0)
    assert float((rounded.float() - exact).norm() / exact.norm()) == pytest.approx(error, rel=0.1)
    before, before_rounded = exact.norm(), rounded.float().norm()
    advance(3 * constant, 1e-6)
    assert float(exact.norm() / before) == pytest.approx(0.05, abs=0.005)
    assert float(rounded.float().norm() / before_rounded) == pytest.approx(left, abs=0.02)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.95, 0.999])
def test_a_steady_gradient_is_a_fixed_point(momentum: float) -> None:
    gradient = gaussian(100)
    buffer = gradient.clone()
    for _ in range(5):
        advance_momentum_(gradient.clone(), buffer, momentum=momentum, nesterov=True)
    assert torch.equal(buffer, gradient)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    numel=st.integers(1, 400),
    cuts=st.lists(st.integers(0, 400), max_size=5),
    shift=st.integers(0, 17),
    nesterov=st.booleans(),
    momentum=st.sampled_from([0.0, 0.3, 0.9, 0.95]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    chunk=st.sampled_from([1, 7, 64, 1 << 24]),
)
def test_any_cut_of_a_buffer_gives_the_bits_of_the_whole(
    numel: int, cuts: list[int], shift: int, nesterov: bool, momentum: float, dtype: torch.dtype, chunk: int
) -> None:
    gradient = gaussian(numel)
    buffer = gaussian(numel, seed=1).to(dtype)
    whole_u, whole_m = gradient.clone(), buffer.clone()
    advance_momentum_(whole_u, whole_m, momentum=momentum, nesterov=nesterov)

    bounds = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_passes, "_CHUNK", chunk)
        for start, end in itertools.pairwise(bounds):
            # A rank has its slice at another alignment than the whole matrix has.
            u, m = (torch.zeros(end - start + shift, dtype=t.dtype)[shift:] for t in (gradient, buffer))
            u.copy_(gradient[start:end])
            m.copy_(buffer[start:end])
            advance_momentum_(u, m, momentum=momentum, nesterov=nesterov)
            assert torch.equal(u, whole_u[start:end])
            assert torch.equal(m, whole_m[start:end])


def test_an_empty_partition_has_no_momentum_to_advance() -> None:
    advance_momentum_(torch.zeros(0), torch.zeros(0), momentum=0.9, nesterov=True)


# ---- scales and refusals --------------------------------------------------------------------------------------------


def test_scales_are_those_of_torch_optim_muon() -> None:
    assert update_scale("original", 64, 16) == 2.0
    assert update_scale("original", 16, 64) == update_scale("original", 16, 16) == 1.0
    assert update_scale("match_rms_adamw", 25, 100) == update_scale("match_rms_adamw", 100, 25) == pytest.approx(2.0)
    assert update_scale("none", 3, 7) == update_scale("none", 7, 3) == 1.0


def test_the_scale_agrees_with_torchs_own_muon() -> None:
    adjust = pytest.importorskip("torch.optim._muon")._adjust_lr
    for name, rows, cols in [("original", 48, 16), ("original", 16, 48), ("match_rms_adamw", 16, 48)]:
        assert update_scale(name, rows, cols) == pytest.approx(adjust(1.0, name, torch.Size((rows, cols))))


REFUSED = [
    {"adjust_lr_fn": "rms"},
    {"ns_method": "gramm"},
    {"ns_dtype": "half"},
    {"ns_coefficients": "quint"},
    {"ns_steps": 0},
    *({"momentum": momentum} for momentum in (1.0, 2.0, -0.1, float("nan"), float("inf"))),
    *({"ns_eps": ns_eps} for ns_eps in (-1e-15, 1.0, float("nan"))),
]


@pytest.mark.parametrize("setting", REFUSED, ids=str)
def test_a_setting_that_is_unknown_or_out_of_range_is_refused_before_the_momentum_moves(
    setting: dict[str, Any],
) -> None:
    ((key, value),) = setting.items()
    buffer = torch.zeros(4, 6)
    with pytest.raises(ValueError, match=f"{key} = {value!r}"):
        muon_update(gaussian(4, 6), buffer, **setting)
    assert torch.count_nonzero(buffer) == 0


@pytest.mark.parametrize(
    ("grad", "buffer"),
    [((4, 6), (6, 4)), ((4, 6), (24,)), ((24,), (24,)), ((2, 3, 4), (2, 3, 4)), ((), ())],
    ids=str,
)
def test_anything_but_a_matrix_and_a_buffer_of_its_shape_is_refused(
    grad: tuple[int, ...], buffer: tuple[int, ...]
) -> None:
    momentum_buffer = torch.zeros(buffer)
    with pytest.raises(ValueError, match="needs a matrix"):
        muon_update(torch.ones(grad), momentum_buffer)
    assert torch.count_nonzero(momentum_buffer) == 0


@pytest.mark.parametrize(
    ("buffer", "what"),
    [
        *(
            (torch.zeros(4, 6, dtype=dtype), str(dtype)[6:])
            for dtype in (torch.float16, torch.float64, torch.complex64)
        ),
        *((torch.zeros(4, 6, dtype=dtype), str(dtype)[6:]) for dtype in (torch.int32, torch.bool)),
        (torch.zeros(6, 4).mT, r"strides \(1, 4\)"),
        (torch.zeros(6).expand(4, 6), r"strides \(0, 1\)"),
        (torch.zeros(4, 6, device="meta"), "on meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_buffer_that_cannot_hold_the_momentum_is_refused(buffer: Tensor, what: str) -> None:
    gradient = torch.ones(4, 6)
    with pytest.raises(ValueError, match=f"contiguous momentum_buffer in float32 or bfloat16 on cpu, got .*{what}"):
        muon_update(gradient, buffer)
    assert torch.equal(gradient, torch.ones(4, 6)) and (buffer.is_meta or torch.count_nonzero(buffer) == 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_gradient_that_is_not_of_floats_is_refused(dtype: torch.dtype) -> None:
    buffer = torch.zeros(4, 6)
    with pytest.raises(ValueError, match=f"needs a gradient of floats, got {str(dtype)[6:]}"):
        muon_update(torch.ones(4, 6, dtype=dtype), buffer)
    assert torch.count_nonzero(buffer) == 0


def test_the_update_has_the_size_the_scale_promises() -> None:
    # match_rms_adamw: entries of an orthogonal (r, c) matrix have a mean square of 1 / max(r, c).
    update = muon_update(gaussian(64, 256), torch.zeros(64, 256), adjust_lr_fn="match_rms_adamw")
    assert math.isclose(float(update.square().mean().sqrt()), 0.2, rel_tol=0.2)
