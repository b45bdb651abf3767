"""The table of what DeepSpeed's step and load do, beside their source."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed_zero

from tests.unit.support import deepspeed_step

Zero = deepspeed_zero.DeepSpeedZeroOptimizer

METHODS: dict[str, tuple[dict[str, tuple[str, str]], list[Callable[..., Any]]]] = {
    "step": (deepspeed_step.STEP, [Zero.step, Zero._optimizer_step]),
    "load": (deepspeed_step.LOAD, [Zero.load_state_dict, Zero._load_legacy_checkpoint, Zero._load_global_state]),
}


def done_by(method: Callable[..., Any]) -> Iterator[str]:
    """What a method of the ZeRO optimizer calls, of itself and of its module, and what it sets of itself."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and inspect.isfunction(getattr(deepspeed_zero, called.id, None)):
                yield called.id
            elif of_self(called):
                yield called.attr
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute | ast.Subscript) and not of_self(inner):
                inner = inner.value
            if of_self(inner):
                yield inner.attr


def of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


@pytest.mark.parametrize("what", METHODS)
def test_the_table_lists_what_deepspeed_does_and_nothing_else(what: str) -> None:
    table, methods = METHODS[what]
    assert {name for method in methods for name in done_by(method)} == table.keys()


@pytest.mark.parametrize("what", METHODS)
def test_every_place_in_the_table_is_one_of_this_package_and_every_omission_has_a_reason(what: str) -> None:
    for name, (place, remark) in METHODS[what][0].items():
        if place:
            assert pkgutil.resolve_name(f"ds_muon.{place}") is not None
        else:
            assert remark, name


def test_a_method_that_does_more_is_seen() -> None:
    def step(self: Any) -> None:
        self.new_attribute[0].grad = None
        self.new_method()
        deepspeed_zero.see_memory_usage("")
        see_memory_usage("")  # type: ignore[name-defined]  # noqa: F821

    assert list(done_by(step)) == ["new_attribute", "new_method", "see_memory_usage"]
