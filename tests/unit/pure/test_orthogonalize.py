"""What orthogonalize promises beside accuracy: company, memory, the process's settings, cost."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_muon.orthogonalize as package
from ds_muon import muon_update
from ds_muon.orthogonalize import (
    COEFFICIENTS,
    NewtonSchulz,
    Triple,
    orthogonalize,
    reference_newton_schulz,
)
from ds_muon.orthogonalize.torch_backend import TorchOperations, exact_products
from tests.unit.support.batches import cut_into
from tests.unit.support.cases import pairwise
from tests.unit.support.newton_schulz import CPU, DTYPES, METHODS, ns
from tests.unit.support.spectra import (
    distance,
    gaussian,
    iteration_of,
)

# ---- independence of what shares the call ---------------------------------------------------------------------------


def at_offset(matrix: Tensor, offset: int) -> Tensor:
    """The same matrix as a view into a buffer of other values, ``offset`` elements from its start."""
    buffer = torch.full((offset + matrix.numel() + 3,), 7.25)
    view = buffer.narrow(0, offset, matrix.numel()).view(matrix.shape)
    return view.copy_(matrix)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_a_result_does_not_depend_on_batch_position_or_alignment(method: str, dtype: str) -> None:
    settings = NewtonSchulz.resolve(CPU, ns_dtype=dtype, ns_method=method)
    for rows, cols in [(15, 15), (17, 40), (40, 17), (2, 3), (64, 127)]:
        matrix = gaussian(rows, cols)
        (alone,) = orthogonalize([matrix], settings)
        others = [gaussian(rows, cols, seed=seed) * 10.0**seed for seed in range(1, 6)]
        for position, offset in zip(itertools.cycle((0, 2, 5)), (0, 1, 2, 3, 5, 7, 13), strict=False):
            batch = [*others[:position], at_offset(matrix, offset), *others[position:]]
            assert torch.equal(orthogonalize(batch, settings)[position], alone), (rows, cols, position, offset)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_shapes_come_back_in_order(dtype: str) -> None:
    shapes = [(4, 9), (9, 4), (6, 6), (4, 9), (2, 3), (6, 6), (9, 4), (4, 9), (3, 2), (36, 1)]
    matrices = [gaussian(*shape, seed=index) for index, shape in enumerate(shapes)]
    outputs = orthogonalize(matrices, NewtonSchulz.resolve(CPU, ns_dtype=dtype))
    for matrix, output in zip(matrices, outputs, strict=True):
        assert torch.equal(output, ns(matrix, ns_dtype=dtype))


def test_a_batch_gives_every_matrix_its_own_result(monkeypatch: pytest.MonkeyPatch) -> None:
    # CPU works off one matrix at a time; here the batches of a GPU, whatever the size of a chunk.
    shapes = [(6, 10), (10, 6), (6, 10), (8, 8), (6, 10), (10, 6), (6, 10), (8, 8)]
    matrices = [gaussian(*shape, seed=index) * 10.0**index for index, shape in enumerate(shapes)]
    for size in (1, 2, 3, 100):
        monkeypatch.setattr(package, "batches", cut_into(size))
        for matrix, output in zip(matrices, orthogonalize(matrices, NewtonSchulz.resolve(CPU)), strict=True):
            assert distance(output, reference_newton_schulz(matrix)) <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_matrix_shows_and_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, poison: float, dtype: str
) -> None:
    settings = NewtonSchulz.resolve(CPU, ns_dtype=dtype)
    clean = [gaussian(17, 40, seed=seed) for seed in range(4)]
    sick = [matrix.clone() for matrix in clean]
    sick[1][3, 5] = poison
    for size in (1, 4):
        monkeypatch.setattr(package, "batches", cut_into(size))
        expected, outputs = orthogonalize(clean, settings), orthogonalize(sick, settings)
        assert not outputs[1].isfinite().all()
        assert all(torch.equal(outputs[i], expected[i]) for i in (0, 2, 3))


def test_nothing_in_gives_nothing_out() -> None:
    assert orthogonalize([], NewtonSchulz.resolve(CPU)) == []


# ---- inputs and outputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [1, 5])
def test_no_input_is_modified_and_no_output_shares_its_memory(steps: int, dtype: str) -> None:
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(3))
    before = flat.clone()
    # Views of one buffer, at odd offsets, wide, tall, square, one twice and one transposed.
    views = [flat.narrow(0, 1, 77).view(7, 11), flat.narrow(0, 79, 77).view(11, 7), flat.narrow(0, 157, 81).view(9, 9)]
    views += [views[0], views[0].mT, flat.narrow(0, 501, 640).view(10, 64), flat.view(50, 100)[3:20:2, 5:40:3]]
    settings = NewtonSchulz.resolve(CPU, ns_dtype=dtype, ns_steps=steps)
    outputs = orthogonalize(views, settings)
    for view, output in zip(views, outputs, strict=True):
        assert output.shape == view.shape and output.dtype == getattr(torch, dtype)
        assert output.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
        assert torch.equal(output, orthogonalize([view.clone(memory_format=torch.contiguous_format)], settings)[0])
    for output in outputs:
        output.fill_(float("nan"))
    assert torch.equal(flat, before)
    # Overwriting one output has left the others alone.
    first, second = orthogonalize([views[0], views[3]], settings)
    first.zero_()
    assert second.count_nonzero() > 0


def test_a_matrix_that_requires_a_gradient_gives_a_result_that_does_not() -> None:
    assert not ns(gaussian(4, 6).requires_grad_()).requires_grad


# ---- settings of the process ----------------------------------------------------------------------------------------


@pytest.fixture
def precision_of_products() -> Iterator[None]:
    """Gives back torch's default precision of fp32 products, whatever the test chose."""
    yield
    torch.set_float32_matmul_precision("highest")
    if hasattr(torch.backends, "fp32_precision"):
        for backend in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            backend.fp32_precision = "none"


def state_of_products() -> list[str]:
    state = []
    with contextlib.suppress(RuntimeError):  # the older function refuses to answer where the newer one was used
        state.append(torch.get_float32_matmul_precision())
    if hasattr(torch.backends, "fp32_precision"):
        backends = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
        state += [backend.fp32_precision for backend in backends]
    return state


def _set(backend: Callable[[], Any], name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(backend(), name, value)


CHOICES = {
    "default": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "allow_tf32": _set(lambda: torch.backends.cuda.matmul, "allow_tf32", True),
    "cuda": _set(lambda: torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "cpu": _set(lambda: torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "everything": _set(lambda: torch.backends, "fp32_precision", "tf32"),
}


@pytest.mark.usefixtures("precision_of_products")
@pytest.mark.parametrize("choice", CHOICES)
def test_products_are_exact_inside_and_as_the_user_chose_afterwards(
    monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    if choice in ("cuda", "cpu", "everything") and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has no fp32_precision")
    expected = ns(gaussian(17, 40))
    CHOICES[choice]()
    chosen = state_of_products()

    inside: list[str] = []

    class Spy(TorchOperations):
        def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
            # The last two are those of products on GPUs and on CPU.
            inside.extend(state_of_products()[-2:])
            return super().symmetric(a, b)

    monkeypatch.setitem(package.BACKENDS, "torch", Spy)
    assert torch.equal(ns(gaussian(17, 40)), expected)
    assert inside and not {"high", "medium", "tf32", "bf16"} & set(inside)
    assert state_of_products() == chosen


@pytest.mark.usefixtures("precision_of_products")
@pytest.mark.parametrize("choice", ["high", "medium", "allow_tf32"])
def test_the_users_precision_of_products_comes_back_after_an_error(choice: str) -> None:
    CHOICES[choice]()
    chosen = state_of_products()
    with pytest.raises(KeyError), exact_products():
        raise KeyError
    assert state_of_products() == chosen


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_does_not_change_a_result(dtype: str) -> None:
    matrices = [gaussian(17, 40), gaussian(24, 24)]
    settings = NewtonSchulz.resolve(CPU, ns_dtype=dtype)
    expected = orthogonalize(matrices, settings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = orthogonalize(matrices, settings)
        assert torch.is_autocast_enabled("cpu")
    for output, right in zip(outputs, expected, strict=True):
        assert output.dtype == right.dtype and torch.equal(output, right)


def test_the_default_dtype_does_not_change_a_result() -> None:
    expected = ns(gaussian(17, 40))
    torch.set_default_dtype(torch.float64)
    try:
        output = ns(gaussian(17, 40).float())
    finally:
        torch.set_default_dtype(torch.float32)
    assert output.dtype == torch.float32
    assert distance(ns(gaussian(17, 40)), expected) == 0


# ---- settings, cost, workspace --------------------------------------------------------------------------------------


def test_auto_is_fp32_on_cpu_and_fp16_on_accelerators() -> None:
    assert NewtonSchulz.resolve(CPU).dtype == torch.float32
    assert NewtonSchulz.resolve(torch.device("cuda")).dtype == torch.float16


@pytest.mark.parametrize(
    "setting",
    [{"ns_method": "gramm"}, {"ns_dtype": "half"}, {"ns_coefficients": "quint"}, {"ns_steps": 0}]
    + [{"ns_eps": ns_eps} for ns_eps in (-1e-15, 1.0, float("nan"))],
    ids=str,
)
def test_an_unknown_setting_is_refused_with_its_name_and_value(setting: dict[str, Any]) -> None:
    ((key, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{key} = {value!r}"):
        NewtonSchulz.resolve(CPU, **setting)


def test_five_steps_cost_20_m3_for_squares_and_with_one_restart_14_m3_and_6_m2_n_for_wide_ones() -> None:
    settings = NewtonSchulz.resolve(CPU, ns_dtype="float16")
    assert settings.cost(64, 64) == 20 * 64**3
    for m, n in [(64, 128), (17, 1000), (128, 512), (2048, 3072)]:
        assert settings.cost(m, n) == settings.cost(n, m) == 14 * m**3 + 6 * m * m * n
        assert settings.form(m, n) == settings.form(n, m) == "gram"
    for m, n in [(16, 1000), (64, 65), (64, 127), (1024, 2047), (2048, 3071)]:
        assert settings.cost(m, n) == settings.cost(n, m) == 5 * (m**3 + 3 * m * m * n)
        assert settings.form(m, n) == settings.form(n, m) == "standard"
    for m, n in [(64, 128), (7, 1000), (128, 512)]:
        assert NewtonSchulz.resolve(CPU, ns_method="standard").cost(n, m) == 5 * (m**3 + 3 * m * m * n)


def test_the_four_steps_of_minimax_cost_16_m3_for_squares_and_10_m3_and_6_m2_n_for_wide_ones() -> None:
    settings = NewtonSchulz.resolve(CPU, ns_dtype="float16", ns_coefficients="minimax")
    assert settings.cost(64, 64) == 16 * 64**3
    assert settings.cost(64, 65) == 4 * (64**3 + 3 * 64 * 64 * 65)
    for m, n in [(64, 128), (17, 1000), (2048, 3072)]:
        assert settings.cost(m, n) == settings.cost(n, m) == 10 * m**3 + 6 * m * m * n


@pytest.mark.parametrize(
    ("setting", "form"),
    [
        ({"ns_dtype": "float16"}, "gram"),
        ({"ns_dtype": "bfloat16", "ns_coefficients": "polar_express"}, "gram"),
        ({"ns_dtype": "float16", "ns_steps": 1}, "standard"),
        ({"ns_dtype": "float32"}, "standard"),
        ({"ns_dtype": "float32", "ns_coefficients": "cubic", "ns_steps": 9}, "standard"),
    ],
    ids=str,
)
def test_a_gram_form_that_restarts_in_every_step_is_the_standard_form(setting: dict[str, Any], form: str) -> None:
    settings = NewtonSchulz.resolve(CPU, **setting)
    assert settings.form(64, 256) == settings.form(256, 64) == form
    by_name = replace(settings, method="standard")
    assert by_name.form(64, 256) == "standard"
    (found,), (standard,) = (orthogonalize([gaussian(64, 256)], each) for each in (settings, by_name))
    assert torch.equal(found, standard) == (form == "standard")


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_an_empty_matrix_has_an_empty_result(shape: tuple[int, int]) -> None:
    matrices = [torch.zeros(shape), gaussian(3, 5), torch.zeros(shape)]
    empty, other, _ = orthogonalize(matrices, NewtonSchulz.resolve(CPU))
    assert empty.shape == shape and torch.equal(other, ns(matrices[1]))
    assert muon_update(torch.zeros(shape), torch.zeros(shape)).shape == shape


class Recycling(TorchOperations):
    """Destroys a square result before it makes the next for which ``squares`` would give it the same memory."""

    def __init__(self, squares: int) -> None:
        self._squares, self._made = squares, list[Tensor]()

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        self._recycle()
        self._made.append(super().symmetric(a, b))
        return self._made[-1]

    def polynomial(self, r: Tensor, triple: Triple) -> Tensor:
        self._recycle()
        self._made.append(super().polynomial(r, triple))
        return self._made[-1]

    def _recycle(self) -> None:
        for old in self._made[: max(0, len(self._made) + 1 - self._squares)]:
            old.fill_(torch.nan)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("table", COEFFICIENTS)
def test_no_more_squares_are_in_use_than_it_says(table: str, form: str) -> None:
    for dtype, steps in itertools.product((torch.float16, torch.float32), (1, 2, 5, 9)):
        x = (gaussian(24, 64) / 40).to(dtype)[None]
        iteration = iteration_of(form, package.schedule(table, steps), dtype)
        right = iteration.run(x, TorchOperations())
        assert torch.equal(iteration.run(x, Recycling(iteration.buffers)), right)
    if form == "gram":
        x = (gaussian(24, 64) / 40).half()[None]
        iteration = iteration_of(form, package.schedule("quintic", 5), torch.float16)
        assert iteration.run(x, Recycling(iteration.buffers - 1)).isnan().any()


class Counting(TorchOperations):
    """Counts operations: a symmetric product computes one triangle."""

    total = 0

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        self.total += a.shape[-2] * a.shape[-1] * b.shape[-1]
        return super().symmetric(a, b)

    def polynomial(self, r: Tensor, triple: Triple) -> Tensor:
        self.total += r.shape[-1] ** 3 if triple[2] else 0
        return super().polynomial(r, triple)

    def product(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        self.total += 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]
        return super().product(a, b, out)

    def step(self, r: Tensor, triple: Triple, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.dtype != torch.float32:
            return super().step(r, triple, x, out)
        self.total += (r.shape[-1] ** 3 if triple[2] else 0) + 2 * r.shape[-1] ** 2 * x.shape[-1]
        return super().step(r, triple, x, out)


@pairwise(table=[*COEFFICIENTS, "a list"], dtype=DTYPES, method=METHODS)
def test_the_cost_is_the_operations_that_are_done(table: Any, method: str, dtype: str) -> None:
    if table == "a list":
        table = [(3.4, -4.7, 2.0), (1.5, -0.5, 0.0)]
    for steps in range(1 if isinstance(table, str) else 2, 9):
        settings = NewtonSchulz.resolve(CPU, ns_dtype=dtype, ns_method=method, ns_coefficients=table, ns_steps=steps)
        for m, n in [(16, 16), (24, 64)]:
            ops = Counting()
            settings.iteration(m, n).run(torch.empty(1, m, n, dtype=settings.dtype, device="meta"), ops)
            assert ops.total == settings.cost(m, n) == settings.cost(n, m)


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (100, 100)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("workspace", [1, 1 << 20, 1 << 30])
def test_batches_keep_to_the_workspace_and_lose_no_matrix(
    monkeypatch: pytest.MonkeyPatch, workspace: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr(package, "WORKSPACE_BYTES", workspace)
    m, n = sorted(shape)
    # The copies in fp32 and fp64; X before and after; and of (m, m), R and W, or five for Q as well.
    per_matrix = 12 * m * n + dtype.itemsize * (2 * m * n + (2 if m == n else 5) * m * m)
    shapes = [shape if index % 2 else (7, 9) for index in range(100)]
    cut = list(package.batches(shapes, torch.device("meta"), replace(NewtonSchulz.resolve(CPU), dtype=dtype)))
    assert sorted(index for batch in cut for index in batch) == list(range(100))
    odd = [batch for batch in cut if batch[0] % 2]
    assert all(index % 2 for batch in odd for index in batch)
    assert all(len(batch) == 1 or len(batch) * per_matrix <= workspace for batch in odd)
    # As few as the workspace allows.
    assert len(odd) == -(-50 // max(1, workspace // per_matrix))


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.float16), ("meta", torch.float32)])
def test_on_cpu_and_in_fp32_every_matrix_is_a_batch_of_its_own(device: str, dtype: torch.dtype) -> None:
    cut = package.batches([(8, 8)] * 3, torch.device(device), replace(NewtonSchulz.resolve(CPU), dtype=dtype))
    assert [list(batch) for batch in cut] == [[0], [1], [2]]
