"""Whether the tests notice: plants one small fault after another in a copy of the package, and runs the tests on it.

    python scripts/mutate.py                     # all, two at a time; about twenty minutes on two cores
    python scripts/mutate.py --only clip guard   # those whose file or line contains one of these words
    python scripts/mutate.py --jobs 4

Each fault is one line, changed as a slip of the pen would. First the test files nearest to it run; what these let pass
goes through the whole suite. What fails must pass without the fault. Exit code 1 if a fault is found by nobody. Faults
of a running engine, planted with ``ds-muon verify --inject``, are tests of their own (tests/unit/ranks/test_check.py).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class Fault:
    """``old``, which the file has once, becomes ``new``; ``near`` are the tests that should notice."""

    file: str
    old: str
    new: str
    near: str

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())}  ->  {' '.join(self.new.split())}"


STEP = "ranks/test_step.py ranks/test_engine.py ranks/test_any_cut.py"
GUARD = "ranks/test_nan_guard.py ranks/test_loss_scale.py ranks/test_step.py"
NORMUON = "ranks/test_normuon.py pure/test_update.py ranks/test_any_cut.py"
PARTITION = "pure/test_partition.py ranks/test_any_cut.py"
OWNERS = "ranks/test_owners.py ranks/test_any_cut.py pure/test_plan_owners.py"
GROUP = "pure/test_muon_group.py ranks/test_step.py ranks/test_any_cut.py"
EXCHANGE = "ranks/test_exchange.py ranks/test_any_cut.py"
FAILS = "ranks/test_one_rank_fails.py ranks/test_refused_around_engine.py"
IDLE = "ranks/test_without_gradient.py"
BLOCKS = "ranks/test_blocks.py"
PASSES = "ranks/test_passes.py pure/test_update.py"
ITERATION = "pure/test_newton_schulz.py pure/test_orthogonalize.py"
RATES = "pure/test_learning_rates.py pure/test_far_off_rates.py ranks/test_rates_in_engines.py"
ROUTING = "pure/test_routing.py pure/test_routing_heads.py"

FAULTS = (
    # ---- the step
    Fault("zero_base", "gradient.mul_(1 / self.loss_scale)", "gradient.mul_(self.loss_scale)", GUARD),
    Fault("zero_base", "if self.loss_scale == 1 else gradient.mul_", "if self.loss_scale != 1 else gradient.mul_", GUARD),
    Fault("zero", "if (clip := self._adamw_clip(findings)) < 1:", "if (clip := self._adamw_clip(findings)) < 0:", STEP),
    Fault(
        "zero",
        "for gradient in gradients:\n                gradient.mul_(clip)",
        "for gradient in [*gradients, *(of_group.flat for of_group in staged)]:\n                gradient.mul_(clip)",
        STEP,
    ),
    Fault("zero", "norm = findings.norm if everything else findings.norm_of_adamw", "norm = findings.norm", STEP),
    Fault("zero", "float(self.clip_grad) / (norm + 1e-6)", "float(self.clip_grad) / (norm + 1.0)", STEP),
    Fault("zero", "self._update_scale(not findings.gradients_are_finite)", "self._update_scale(False)", GUARD),
    Fault("zero", "self.overflow = not findings.allow_the_step", "self.overflow = not findings.may_move", GUARD),
    Fault("zero", "            self.update_lp_params()\n", "", STEP),
    Fault(
        "zero_base",
        "        with self.failure.holding(phase):\n            self._bind_model()\n",
        "",
        "ranks/test_around_engine.py",
    ),
    Fault("zero", "                of_group.rows.commit()", "                pass", NORMUON),
    Fault("zero_base", "pad(partition_size)", "pad(0)", STEP),
    Fault("zero_base", "numel = min(param.numel() - start, partition_size - target)", "numel = param.numel() - start", STEP),
    Fault("failure", "raise_together(error, self._process_group, about=about)", "pass", FAILS),
    Fault("making", "raise_together(error, about=_about(error, advice))", "if error is not None:\n                    raise error", FAILS),
    Fault("registration", "with making.together() if _uses_dsmuon(engine) else nullcontext():", "with nullcontext():", FAILS),
    Fault("guard", "byte.fill_(FAILED)", "pass", FAILS),
    Fault("zero", "Exception:\n            self._release_gradients()\n", "Exception:\n            pass\n", FAILS),
    Fault("zero_base", "        self.failure.raise_on_all()\n", "", FAILS),
    Fault("zero_base", "        self.failure.settle()\n", "", FAILS),
    Fault("failure", "if self.torn and self.notice is not None:", "if False:", FAILS),
    Fault("checkpoints/saving", "(whole or prefix", "(prefix", FAILS),
    Fault("checkpoints/saving", "prefix.count(\".\") < 2", "not prefix", FAILS),
    Fault("checkpoints/saving", "_NOTICES[module] = notice, \".\" not in name", "_NOTICES.setdefault(module, (notice, \".\" not in name))", FAILS),
    Fault("zero_offload", "        self._wait()\n", "", "ranks/test_offload.py"),
    Fault("checkpoints/saving", "read_file(Path(path), mapped=False)", "read_file(Path(path), mapped=False, trusted=True)", "ranks/test_saving.py"),
    # ---- the decision
    Fault("guard", "dist.all_reduce(sums, group=self.process_group)", "pass", GUARD),
    Fault("guard", "may_move &= squares[len(muon) :]", "may_move &= squares[:]", GUARD),
    Fault("guard", ".sum().sqrt() <= self.threshold", ".sum() <= self.threshold", GUARD),
    Fault("guard", "of_group.ne(0) & may_move", "of_group.ge(0) & may_move", IDLE),
    Fault("guard", "of_group.ne(0) & may_move", "of_group.ne(0)", GUARD),
    Fault("guard", "squares.sum().isfinite() & (totals[-1] == 0)", "squares.sum().isfinite()", FAILS),
    Fault("guard", "op=dist.ReduceOp.MAX", "op=dist.ReduceOp.MIN", GUARD),
    Fault("guard", "torch.stack(largest).isfinite().all()", "torch.stack(largest).isfinite().any()", GUARD),
    Fault("guard", "self.worst == FINITE and not self.stop", "self.worst == FINITE", "ranks/test_capture_in_a_step.py"),
    # ---- a group's updates
    Fault("muon_group", "for elements, scale in alike if scale != 1.0]", "for elements, scale in alike if scale > 9]", STEP),
    Fault("muon_group", "scale=scale, factors=factors)", "factors=factors)", STEP),
    Fault("muon_group", "update_scale(self._adjust_lr_fn, *matrix.sides)", "update_scale(self._adjust_lr_fn, matrix.rows, matrix.cols)", "ranks/test_conv1d.py"),
    Fault("muon_group", "        returning.wait()\n", "", GROUP),
    Fault("muon_group", "        gathering.wait()\n", "", GROUP),
    Fault("muon_group", "            staged.rows.agree()\n        staged.met = 3", "            pass\n        staged.met = 3", NORMUON),
    Fault("muon_group", "        del gathering, gathered, inputs, results, outputs  # frees the gathered matrices\n", "", GROUP),
    Fault("muon_group", "(newest, newest - 1, newest - 2)", "(newest, newest - 1, newest - 1)", GROUP),
    Fault("strips", "even.copy_(self._stacks[key])", "pass", "pure/test_strips.py"),
    Fault("strips", "matrix.piece.store(copies[matrix.number], unit, matrix.number)", "pass", BLOCKS),
    Fault("layout", "permute(2, 0, 1, 3)", "permute(2, 0, 3, 1)", "pure/test_strips.py"),
    Fault("passes/segments", "table.append((part.start - part.offset,", "table.append((part.start,", BLOCKS),
    Fault("passes/torch_passes", "dim=1 - piece.axis", "dim=piece.axis", BLOCKS),
    # ---- what travels
    Fault("exchange", "flat.narrow(0, part.start, part.numel)", "flat.narrow(0, 0, part.numel)", EXCHANGE),
    Fault("exchange", "partition.narrow(0, part.offset, part.numel)", "partition.narrow(0, part.start, part.numel)", EXCHANGE),
    Fault("exchange", "if part.rank == rank)", "if part.rank != rank)", EXCHANGE),
    Fault("plan/zero_layout", "taken = min(numel - start, partition_size - inside)", "taken = numel - start", PARTITION),
    Fault("plan/partition", "return self.holders != (self.owner,)", "return self.straddles", OWNERS),
    Fault("plan/zero_layout", "end = start + numels[index]", "end = start + numels[index] + 1", PARTITION),
    Fault("layout", 'return (rows, cols) if layout == "out_in" else (cols, rows)', "return (rows, cols)", "ranks/test_conv1d.py"),
    Fault("plan/owners", "return best if after < before", "return owners if after < before", OWNERS),
    Fault("plan/owners", "key=lambda piece: loads[piece[0]])[0]", "key=lambda piece: -piece[1])[0]", OWNERS),
    Fault("plan/owners", "(1 - rates.least_gain)", "1", OWNERS),
    # ---- the rule
    Fault("update", "math.sqrt(max(1.0, rows / max(cols, 1)))", "math.sqrt(rows / max(cols, 1))", "pure/test_update.py"),
    Fault("update", "0.2 * math.sqrt(max(rows, cols))", "0.2 * math.sqrt(min(rows, cols))", "pure/test_update.py"),
    Fault("update", "alpha=1 - beta2", "alpha=beta2", NORMUON),
    Fault("update", "squares / max(cols, 1), alpha", "squares / max(rows, 1), alpha", NORMUON),
    Fault("update", "math.sqrt(min(rows, cols)) / (root * norm)", "math.sqrt(max(rows, cols)) / (root * norm)", NORMUON),
    Fault("update", "return advanced, factors.mT", "return advanced, factors", "ranks/test_conv1d.py"),
    Fault("normuon", "torch.where(self.moves, self.staged, self.current, out=self.current)", "self.current.copy_(self.staged)", IDLE),
    Fault("normuon", "torch.zeros_like(variance)", "torch.ones_like(variance)", NORMUON),
    # ---- elementwise
    Fault("passes/torch_passes", "step.mul_(1 - momentum).add_(before)", "step.mul_(momentum).add_(before)", PASSES),
    Fault("passes/torch_passes", "torch.mul(g, 1 - momentum, out=u).add_(average.mul_(momentum))", "u.copy_(average)", PASSES),
    Fault("passes/torch_passes", "u.masked_fill_(flags.logical_not(), 0)", "pass", f"{IDLE} {PASSES}"),
    Fault("passes/torch_passes", "torch.where(flags, average, before, out=before)", "before.copy_(average)", IDLE),
    Fault("passes/torch_passes", "w.mul_(1 - lr * weight_decay)", "w.mul_(1 - weight_decay)", f"{PASSES} {STEP}"),
    Fault("passes/torch_passes", "w.sub_((u if", "w.add_((u if", PASSES),
    Fault("checkpoints/check", "if group[\"use_muon\"] and (\"row_variance\" in theirs) !=", "if (1 in theirs) !=", "ranks/test_checkpoint.py"),
    Fault("adamw", "own = step.clone() if i else step", "own = step.clone()", STEP),
    Fault("optimizer", 'not in ("params", *ORIGIN)', 'not in ("params",)', "ranks/test_any_size.py"),
    # ---- CPU offload
    Fault("offload", "self._advance(self._offset(matrix), into", "self._advance(0, into", "ranks/test_offload.py"),
    Fault("offload", "= Stretch(offset, place, scale)", "= Stretch(offset, place)", "ranks/test_offload.py"),
    Fault("zero_offload", "                self._show(i, gradient)", "                pass", "ranks/test_offload.py"),
    Fault("offload", "            outputs = outputs * factors", "            pass", "ranks/test_offload.py"),
    # ---- Newton-Schulz
    Fault("orthogonalize/newton_schulz", "growth *= triple[0] ** 2", "growth *= triple[0]", ITERATION),
    Fault("orthogonalize/newton_schulz", "r = ops.symmetric(w, ops.symmetric(w, r))", "r = ops.symmetric(w, r)", ITERATION),
    Fault("orthogonalize/newton_schulz", "q = ops.symmetric(w, q)", "q = w", ITERATION),
    Fault("orthogonalize/newton_schulz", "return m > 16 and", "return m > 0 and", ITERATION),
    Fault("orthogonalize/torch_backend", "batch.div_(magnitude.clamp_min(tiny))", "batch", ITERATION),
    Fault("orthogonalize/torch_backend", "clamp_min(max(eps, tiny))", "add(eps)", ITERATION),
    Fault("orthogonalize/__init__", "yield indices[len(indices) * chunk // chunks :", "yield indices[", ITERATION),
    # ---- settings
    Fault("param_groups", 'undecay = {} if decays else {"weight_decay": 0.0}', "undecay: dict[str, float] = {}", "ranks/test_param_groups.py"),
    Fault("checkpoints/check", "        if tag != seen[0][0]:\n", "        if False:\n", "ranks/test_wrong_shards.py"),
    Fault("agree", "if alike(json.dumps(sorted(ours.items())), None):", "if True:", "ranks/test_agree.py"),
)  # fmt: skip


def copy(folder: Path) -> None:
    """The repository, as far as the tests need it. No links, which tests of the pages would follow out of it."""
    for name in ("ds_muon", "tests", "scripts", "docs", "ds_configs", ".github", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "pyproject.toml", "CHANGELOG.md", "CITATION.cff", "LICENSE"):
        shutil.copy(ROOT / name, folder)


def copy_with(fault: Fault, folder: Path) -> None:
    """The same with the fault."""
    copy(folder)
    path = folder / "ds_muon" / f"{fault.file}.py"
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.file} has {text.count(fault.old)} times: {fault.old}")
    path.write_text(text.replace(fault.old, fault.new))


def failing(folder: Path, *files: str) -> str | None:
    """The file of the first test that fails; None if all pass, and an empty one if they hang."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return ""  # a hang is noticed
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout.decode()[-2000:]}")
    found = re.search(r"^(?:FAILED|ERROR) ([^:\s]+)", done.stdout.decode(), flags=re.MULTILINE)
    return None if done.returncode == 0 else found[1] if found else ""


def judge(fault: Fault) -> str:
    """Who notices the fault: "near", "suite" or "nobody"."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ds-muon-mutate-") as name:
        folder = Path(name)
        copy_with(fault, folder)
        near = [f"tests/unit/{file}" for file in fault.near.split()]
        found, where = "near", failing(folder, *near)
        if where is None:
            found, where = "suite", failing(folder, "tests/unit")
        if where is None:
            found = "nobody"
        elif where:
            shutil.rmtree(folder)
            copy(folder)
            if failing(folder, where) is not None:
                raise SystemExit(f"{where} fails without any fault")
    print(f"{found:8} {time.monotonic() - start:5.0f} s  {fault}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="faults with one of these in their file or line")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if any(word in str(fault) for word in options.only or [""])]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(judge, chosen))
    print(f"\n{len(chosen) - found.count('nobody')} of {len(chosen)} faults are noticed")
    return int("nobody" in found)


if __name__ == "__main__":
    sys.exit(main())
