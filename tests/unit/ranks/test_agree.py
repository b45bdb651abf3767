"""Ranks that were given different things all stop, and are told which; ranks that come late are waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ds_muon import agree, refusals
from ds_muon.ranks import held_port
from tests.unit.support.models import PrescribedGradients, ds_config, start
from tests.unit.support.ranks import DEVICE, RankFailure, run_ranks

pytestmark = pytest.mark.ranks


# ---- the same on every rank -----------------------------------------------------------------------------------------


def compare(of_ranks: list[Any]) -> str:
    """What is said where each rank brings one of these; "" if they agree."""
    try:
        agree.agree(
            "settings", {"a": 1, "x": of_ranks[dist.get_rank()]}, "read the same", lambda place: "path" in place
        )
    except refusals.DSMuonRefusal as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "values",
    [
        (1, 1.0),
        (10**5000, 10**5000),
        (float("nan"), float("nan")),
        ([1, (2, 3)], (1, [2.0, 3])),
        ({"b": 1, "c": {}}, {"c": {}, "b": 1}),
        ({"path": "/a"}, {"path": "/b"}),
        ({1, 2, 3}, {3, 2, 1}),
        (torch.bfloat16, torch.bfloat16),
        (object(), object()),
    ],
)
def test_what_means_the_same_is_the_same(values: tuple[Any, Any]) -> None:
    assert run_ranks(2, compare, list(values)) == ["", ""]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((1, 2), "x is 1 on rank 0, 2 on rank 1; read the same on every rank"),
        ((1, True), "x is 1 on rank 0, true on rank 1"),
        (("1", 1), 'x is "1" on rank 0, 1 on rank 1'),
        ((0.1, None), "x is 0.1 on rank 0, null on rank 1"),
        (({"b": 1, "c": 2, "d": 3}, {"d": 4, "c": 5, "b": 1}), "x.c is 2 on rank 0, 5 on rank 1"),
        (({"b": {}}, {"b": {"c": [1]}}), "x.b is {} on rank 0, absent on rank 1"),
        (([1, 2], [1, 2, 3]), "x[2] is absent on rank 0, 3 on rank 1"),
        ((torch.float16, torch.bfloat16), 'x is "torch.float16" on rank 0, "torch.bfloat16" on rank 1'),
        (({"\ud800": 1}, {"\ud800": 2}), "x.\\ud800 is 1 on rank 0, 2 on rank 1"),
        (("a" * 1000, ""), f'x is "{"a" * 119}... on rank 0, "" on rank 1'),
    ],
)
def test_the_first_difference_is_named_with_both_values(values: tuple[Any, Any], said: str) -> None:
    ours, theirs = run_ranks(2, compare, list(values))
    assert ours == theirs and ours.startswith("ranks [1] have other settings than rank 0: ") and said in ours


def test_every_rank_that_differs_is_named_and_those_of_the_first_key_with_their_values() -> None:
    of_ranks = [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 3, "b": 2}]
    said = set(run_ranks(3, compare, of_ranks))
    assert said == {
        "ranks [1, 2] have other settings than rank 0: x.a is 1 on rank 0, 3 on rank 2; read the same on every rank"
    }


def test_what_is_nested_too_deep_does_not_break_the_comparison() -> None:
    assert run_ranks(2, compare_deep) == ["", ""]


def compare_deep() -> str:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    return compare([deep, deep])


def initialize(change: dict[str, Any], config: dict[str, Any]) -> str:
    """Build an engine, on rank 1 with the ``change``; what is said, or "" if it is built."""
    mine = deepcopy(config)
    if dist.get_rank() == 1:
        for section, value in change.items():
            mine[section] = {**mine.get(section, {}), **value} if isinstance(value, dict) else value
    try:
        start(PrescribedGradients([(8, 8), (8,)]), mine)
    except refusals.DSMuonRefusal as error:
        return str(error)
    return ""


SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}


@pytest.mark.parametrize(
    ("dtype", "change", "said"),
    [
        ("float32", {"scheduler": SCHEDULER}, 'scheduler.type is absent on rank 0, "WarmupLR" on rank 1'),
        ("float16", {"fp16": {"loss_scale": 2.0}}, "fp16.loss_scale is 1 on rank 0, 2 on rank 1"),
        ("float16", {"fp16": {"enabled": False}}, "fp16.enabled is true on rank 0, false on rank 1"),
        (
            "float16",
            {"fp16": {"enabled": False}, "bf16": {"enabled": True}},
            "fp16.enabled is true on rank 0, false on rank 1",
        ),
        ("float32", {"bf16": {"enabled": True}}, "bf16.enabled is absent on rank 0, true on rank 1"),
        ("float32", {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is absent on rank 0, 2 on rank 1"),
        ("float32", {"zero_optimization": {"stage": 1}}, "zero_optimization.stage is 2 on rank 0, 1 on rank 1"),
    ],
)
def test_other_settings_on_one_rank_are_refused_before_the_model_is_sent(
    dtype: str, change: dict[str, Any], said: str
) -> None:
    ours, theirs = run_ranks(2, initialize, change, ds_config(dtype=dtype))
    assert ours == theirs and said in ours and "read the same DeepSpeed config on every rank" in ours


def test_paths_ports_and_what_a_rank_prints_may_differ() -> None:
    config = ds_config(steps_per_print=10, master_port=29500)
    config["zero_optimization"]["offload_param"] = {"device": "none", "nvme_path": "/nvme0"}
    change = {
        "tensorboard": {"enabled": False, "output_path": "/tmp/1"},
        "aio": {"queue_depth": 16},
        "zero_optimization": {"offload_param": {"device": "none", "nvme_path": "/nvme1"}},
        "steps_per_print": 100,
        "master_port": 29501,
        "my_cache_dir": "/local/1",
    }
    assert run_ranks(2, initialize, change, config) == ["", ""]


@pytest.mark.parametrize("key", ["profile", "files_per_step", "report", "directory_size"])
def test_words_that_only_look_like_paths_are_compared(key: str) -> None:
    assert not refusals.may_differ(("section", key))


# ---- all ranks are there --------------------------------------------------------------------------------------------


class Meeting:
    """A roll call in a store of its own, on ranks that live on from test to test."""

    def __init__(self, name: str, patience: float = 0.3, timeout: float = 60.0) -> None:
        self.store = dist.PrefixStore(name, agree._get_default_store())
        self.timeout = timedelta(seconds=timeout)
        self.roll_call = agree.RollCall()
        self.patience = patience
        self.warnings: list[str] = []

    def wait(self) -> str:
        """What refuses, or ""."""
        usual = self.store.timeout
        self.store.set_timeout(self.timeout)  # of the whole store
        with (
            patch.object(agree, "_store", lambda: self.store),
            patch.object(agree, "PATIENCE_SECONDS", self.patience),
            patch.object(agree, "log", self.warnings.append),
        ):
            try:
                self.roll_call.wait_for_all()
            except refusals.DSMuonRefusal as error:
                return str(error)
            finally:
                self.store.set_timeout(usual)
        return ""

    def pass_by(self, what: str) -> None:
        with patch.object(agree, "_store", lambda: self.store):
            self.roll_call.pass_by(what)


def come_late() -> tuple[str, list[str]]:
    meeting = Meeting("late")
    if dist.get_rank() == 1:
        time.sleep(1.5)
    return meeting.wait() + meeting.wait(), meeting.warnings


def test_a_rank_that_comes_late_is_waited_for_and_named() -> None:
    (said, warnings), (other, _) = run_ranks(2, come_late)
    assert said == other == ""
    assert len(warnings) == 1 and "ranks [1] have not come" in warnings[0]


def build_without() -> list[str]:
    """Rank 1 builds an engine without DSMuon instead, and comes only then."""
    meeting = Meeting("without")
    said = []
    if dist.get_rank() == 1:
        meeting.pass_by("the optimizer adamw")
        dist.barrier()
    else:
        said.append(meeting.wait())
        meeting.pass_by("the optimizer adamw")
        dist.barrier()
    return [*said, meeting.wait()]


def test_a_rank_that_builds_another_engine_is_named_and_a_second_try_may_succeed() -> None:
    (refused, second), (other,) = run_ranks(2, build_without)
    assert "ranks [1] build an engine with the optimizer adamw where rank 0 builds one with DSMuon" in refused
    assert second == other == ""


def build_a_reference_model_first() -> str:
    meeting = Meeting("reference")
    meeting.pass_by("no optimizer")
    if dist.get_rank() == 1:
        time.sleep(1.5)
    return meeting.wait()


def test_engines_without_dsmuon_that_all_ranks_build_do_not_count() -> None:
    assert run_ranks(2, build_a_reference_model_first) == ["", ""]


def come_from_elsewhere() -> str:
    """Rank 1 has built an engine of its own on the way; rank 2 is late."""
    meeting = Meeting("elsewhere")
    if dist.get_rank() == 1:
        meeting.pass_by("the optimizer adamw")
    if dist.get_rank() == 2:
        time.sleep(1.5)
    return meeting.wait()


def test_a_rank_that_has_come_from_elsewhere_is_no_reason_to_refuse_one_that_is_late() -> None:
    assert run_ranks(3, come_from_elsewhere) == ["", "", ""]


def stay_away() -> str:
    meeting = Meeting("away", timeout=0.6)
    said = meeting.wait() if dist.get_rank() == 0 else ""
    dist.barrier()
    return said


def test_waiting_ends_with_the_time_out_of_the_process_group() -> None:
    said, _ = run_ranks(2, stay_away)
    assert "ranks [1] have not come" in said and "may still be loading" in said


def meet_strangers() -> tuple[str, str]:
    """Rank 1 has left no word that it imported ds_muon; then it has."""
    first, second = Meeting("strangers"), Meeting("acquaintances", timeout=1.0)
    with patch.object(agree, "STRANGER_PATIENCE_SECONDS", 0.5):
        if dist.get_rank() == 1:
            with patch.object(agree, "_store", lambda: second.store):
                agree.leave_word()
        said = first.wait() if dist.get_rank() == 0 else ""
        dist.barrier()
        again = second.wait() if dist.get_rank() == 0 else ""
    dist.barrier()
    return said, again


def test_a_rank_that_has_not_imported_ds_muon_is_not_waited_for() -> None:
    (first, second), _ = run_ranks(2, meet_strangers)
    assert "ranks [1] have not imported ds_muon" in first and "`import ds_muon` at the top of the script" in first
    assert "have not come" in second and "imported" not in second


def test_a_rank_leaves_word_in_any_process_group() -> None:
    assert run_ranks(2, words) == [[True, True]] * 2


def words() -> list[bool]:
    dist.barrier()
    return [agree._store().check([f"ds_muon/imported/{rank}"]) for rank in range(2)]


@pytest.mark.full
@pytest.mark.skipif(DEVICE != "cpu", reason="where NCCL waits, the launcher ends the ranks")
def test_ranks_end_within_a_minute_where_one_of_them_does_not_import_ds_muon(tmp_path: Path) -> None:
    script = """
        import sys, time
        rank = int(sys.argv[1])
        if rank == 0:
            import ds_muon
            from ds_muon import agree
            agree.STRANGER_PATIENCE_SECONDS = 1.0
        import deepspeed, torch
        deepspeed.init_distributed("gloo")
        name, params = ("DSMuon", {}) if rank == 0 else ("AdamW", {"torch_adam": True})
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": name, "params": params},
            "zero_optimization": {"stage": 2, "reduce_scatter": False},
        }
        deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)
    """
    with held_port() as port, ExitStack() as stack:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(script), str(rank)],
                env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"},
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert "ranks [1] have not imported ds_muon" in errors[0]


def initialize_or_leave(optimizer: dict[str, Any] | None, folder: str) -> None:
    """Rank 1 has another optimizer. Rank 0 ends with its error, as a script does."""
    config = ds_config()
    if dist.get_rank() == 1:
        config["optimizer"] = optimizer
        if optimizer is None:
            del config["optimizer"]
    try:
        with patch.object(agree, "PATIENCE_SECONDS", 1.0):
            start(PrescribedGradients([(8, 8), (8,)]), config)
    except refusals.DSMuonRefusal as error:
        Path(folder, "said").write_text(str(error))
        os._exit(1)


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [({"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "the optimizer adamw"), (None, "no optimizer")],
)
def test_ranks_end_where_one_of_them_trains_without_dsmuon(tmp_path: Path, optimizer: Any, named: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, initialize_or_leave, optimizer, str(tmp_path))
    assert failure.value.errors[0] == "the process died"
    if DEVICE == "cpu":  # NCCL only queues the collective in which rank 1 is left alone
        assert "hangs" not in failure.value.errors[1]
    assert f"ranks [1] build an engine with {named}" in (tmp_path / "said").read_text()
