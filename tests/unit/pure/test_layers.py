"""Which module may import which: data flows one way, and the engine knows no instrument."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "ds_muon").rglob("*.py"))
}
INSTRUMENTS = (
    *(
        "verify",
        "bench",
        "sample",
        "plan_cost",
        "plan_command",
        "plan_model",
        "replay",
        "cli",
        "ranks",
        "leash",
        "options",
    ),
    *("conversion", "doctor", "ds_config", "config_command"),
    *("telemetry", "trainer", "run_log", "report_command"),
)
# What may know DeepSpeed, beside the instruments.
BOUND_TO_DEEPSPEED = {
    "command_log",
    "registration",
    "deepspeed_parts",
    "preparation",
    "schedulers",
    "zero",
    "zero_base",
    "zero_offload",
    "zero_plan",
    "checkpoints",
}
# The arrows from the engine to an instrument: taken only in a run that asks to be checked, or observed.
ON_REQUEST = {
    ("ds_muon.registration", "ds_muon.verify.in_training"),
    ("ds_muon.registration", "ds_muon.telemetry"),
}


@cache
def imports(module: str) -> frozenset[str]:
    """What a module imports, anywhere in it, but for annotations only."""
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if name in MODULES else node.module for name in inside}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return frozenset(found)


def is_instrument(module: str) -> bool:
    return module.split(".")[1:2] in [[name] for name in INSTRUMENTS]


def engine() -> list[str]:
    return [name for name in MODULES if not is_instrument(name) and name not in ("ds_muon", "ds_muon.__main__")]


def test_no_arrow_closes_a_circle() -> None:
    graph = {module: imports(module) & MODULES.keys() - {module} for module in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


@pytest.mark.parametrize("module", engine())
def test_the_engine_imports_no_instrument(module: str) -> None:
    arrows = {(module, name) for name in imports(module) if is_instrument(name)}
    assert arrows <= ON_REQUEST


def test_nothing_inside_imports_the_packages_face() -> None:
    inside = MODULES.keys() - {"ds_muon", "ds_muon.__main__"}
    assert not [module for module in inside if "ds_muon" in imports(module)]


@pytest.mark.parametrize("module", engine())
def test_only_what_is_bound_to_deepspeed_imports_it(module: str) -> None:
    knows = any(name.split(".")[0] == "deepspeed" for name in imports(module))
    assert not knows or module.split(".")[1] in BOUND_TO_DEEPSPEED


@pytest.mark.parametrize("module", ["ds_muon.config", "ds_muon.routing"])
def test_nothing_that_config_and_routing_need_knows_deepspeed(module: str) -> None:
    needed, new = set[str](), {module}
    while new:
        needed |= new
        new = {name for one in new for name in imports(one) if name in MODULES} - needed
    assert len(needed) > 1 and not [one for one in needed if "deepspeed" in {n.split(".")[0] for n in imports(one)}]


def test_only_the_packages_face_knows_the_registration() -> None:
    assert [module for module in MODULES if "ds_muon.registration" in imports(module)] == ["ds_muon"]


def test_no_test_imports_another() -> None:
    """What they share lies in tests/unit/support."""
    tests = Path(__file__).parents[2]
    another = re.compile(r"(from|import) tests\.[\w.]*\.test_")
    found = [str(path) for path in tests.rglob("*.py") if another.search(path.read_text())]
    assert not found
