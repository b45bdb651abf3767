"""How large the package is, and whether its arrows point one way: counted, not claimed.

python scripts/figures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.unit.pure.test_layers import MODULES, ON_REQUEST, engine, imports, is_instrument  # noqa: E402

# Those of the step in docs/how-it-works.md, in reading order, without what they stand on.
STEP = (
    *("zero", "guard", "optimizer", "update", "normuon", "muon_group", "plan.partition", "plan.owners", "exchange"),
    *("orthogonalize", "orthogonalize.newton_schulz"),
)


def lines(*modules: str) -> int:
    return sum(len(MODULES[module].read_text().splitlines()) for module in modules)


def main() -> None:
    step = [f"ds_muon.{name}" for name in STEP]
    instruments = [module for module in MODULES if is_instrument(module)]
    arrows = [(module, name) for module in MODULES for name in imports(module) & MODULES.keys() - {module}]
    inside = [(a, b) for a, b in arrows if a in step and b in step]
    upward = [(a, b) for a, b in arrows if a in engine() and is_instrument(b) and (a, b) not in ON_REQUEST]
    readme = (ROOT / "README.md").read_text()
    print(f"one step:     {len(step)} files, {lines(*step):,} lines, {len(inside)} arrows between them")
    print(f"the package:  {len(MODULES)} files, {lines(*MODULES):,} lines, {len(arrows)} arrows")
    print(f"  engine:     {lines(*engine()):,} lines")
    print(f"  instrument: {lines(*instruments):,} lines")
    print(f"upward:       {len(upward)} arrows from the engine to an instrument")
    print(f"README:       {len(readme.splitlines())} lines, {len(readme.replace('|', ' ').split()):,} words")
    tests = [path for path in (ROOT / "tests").rglob("*.py")]
    longest = max(tests, key=lambda path: len(path.read_text().splitlines()))
    total = sum(len(path.read_text().splitlines()) for path in tests)
    print(f"tests:        {len(tests)} files, {total:,} lines; the longest is {longest.name}")


if __name__ == "__main__":
    main()
