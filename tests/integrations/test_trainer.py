"""Hugging Face's Trainer: what it fills in, its schedules, and what it saves, resumes and brings back; LoRA and SFT."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_muon import DSMuon, cli
from ds_muon.zero import MuonZeroOptimizer
from tests.unit.support.checkpoints import assert_same, by_name
from tests.unit.support.frameworks import BATCH, accelerate_anew, counting, goes_on, tiny, tiny_llama
from tests.unit.support.models import ds_config
from tests.unit.support.ranks import DEVICE, run_ranks

pytestmark = pytest.mark.ranks

STEPS = 6
AUTO_BATCH = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
MUONS_RATE = {"lr": "auto", "muon_lr": 0.02, "weight_decay": "auto"}


def config_for(params: dict[str, Any], **top: Any) -> dict[str, Any]:
    config = ds_config(**{**AUTO_BATCH, **top})
    config["optimizer"] = {"type": "DSMuon", "params": params}
    return config


def arguments_for(folder: str, config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {
        **{"output_dir": folder, "max_steps": STEPS, "save_steps": STEPS // 2, "logging_steps": 1},
        **{"learning_rate": 1e-3, "weight_decay": 0.1, "deepspeed": config, "report_to": [], "disable_tqdm": True},
        **{"per_device_train_batch_size": BATCH // dist.get_world_size(), "use_cpu": DEVICE == "cpu"},
        **settings,
    }


def train(
    model: nn.Module, data: Any, config: dict[str, Any], folder: str, resume: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Losses by step, what the run was when it began, when it saved and at the end, and what the engine was given."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    seen: dict[str, Any] = {}

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["began"] = by_name(trainer.model_wrapped)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            groups = trainer.model_wrapped.optimizer.param_groups
            seen.setdefault("rates", []).append({group["use_muon"]: group["lr"] for group in groups})

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen[state.global_step] = by_name(trainer.model_wrapped)

    with accelerate_anew():
        arguments = TrainingArguments(**arguments_for(folder, config, **settings))
        trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:6], callbacks=[Look()])
        trainer.train(resume_from_checkpoint=resume)
        engine, history = trainer.model_wrapped, trainer.state.log_history
        assert isinstance(engine.optimizer, MuonZeroOptimizer)
        return {
            **seen,
            "losses": {entry["step"]: entry["loss"] for entry in history if "loss" in entry},
            "evaluated": {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry},
            "logged rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
            "end": by_name(engine),
            "best": trainer.state.best_model_checkpoint,
            "engine": {
                "steps": [engine.global_steps, engine.skipped_steps],
                "micro-steps": engine.gradient_accumulation_steps(),
                "clipping": engine.gradient_clipping(),
                "adamw": [(g["betas"], g["eps"]) for g in engine.optimizer.param_groups if not g["use_muon"]],
                "decay": {group["weight_decay"] for group in engine.optimizer.param_groups},
            },
        }


def train_tiny(lora: bool, folder: str, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    data = [{"x": torch.randn(8, generator=torch.Generator().manual_seed(i))} for i in range(4 * BATCH)]
    return train(tiny(lora=lora), data, config_for(MUONS_RATE), folder, resume, **settings)


# ---- what it fills in -----------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, dict[str, Any]] = {
    "Trainer's": {},
    "WarmupLR": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"},
    "WarmupDecayLR": {
        **dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
        "warmup_type": "linear",
    },
    "WarmupCosineLR": {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_min_ratio": 0.0},
}


def train_with_auto(scheduler: str, folder: str) -> dict[str, Any]:
    params = {**MUONS_RATE, "betas": "auto", "eps": "auto"}
    top: dict[str, Any] = {"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    if SCHEDULERS[scheduler]:
        top["scheduler"] = {"type": scheduler, "params": SCHEDULERS[scheduler]}
    return train(
        tiny_llama(), counting(48), config_for(params, **top), folder,
        per_device_train_batch_size=3, gradient_accumulation_steps=2, max_grad_norm=0.25, warmup_steps=2,
        eval_strategy="steps", eval_steps=2, save_strategy="no", adam_beta2=0.98, adam_epsilon=1e-7,
        lr_scheduler_type="cosine",
    )  # fmt: skip


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_trainer_fills_in_every_auto_and_both_halves_follow_the_schedule(tmp_path: Path, scheduler: str) -> None:
    for rank, found in enumerate(run_ranks(2, train_with_auto, scheduler, str(tmp_path))):
        engine = found["engine"]
        assert engine["steps"] == [STEPS, 0] and engine["micro-steps"] == 2
        assert engine["clipping"] == 0.25
        assert engine["adamw"] == [((0.9, 0.98), 1e-7)] or engine["adamw"] == [([0.9, 0.98], 1e-7)]
        assert engine["decay"] == {0.1}
        assert max(rates[False] for rates in found["rates"]) == pytest.approx(1e-3)
        for rates in found["rates"]:
            assert rates[True] == pytest.approx(20 * rates[False])
        if rank == 0:
            assert found["losses"][STEPS] < found["losses"][1] - 0.1
            assert [*found["evaluated"]] == [2, 4, 6] and found["evaluated"][6] < found["evaluated"][2]


def train_by_one_rate(folder: str) -> dict[str, Any]:
    params = {"lr": "auto", "weight_decay": "auto", "adjust_lr_fn": "match_rms_adamw"}
    return train(tiny_llama(), counting(48), config_for(params), folder, save_strategy="no", learning_rate=5e-3)


def test_one_rate_of_trainer_serves_both_halves_and_is_what_it_logs(tmp_path: Path) -> None:
    found = run_ranks(2, train_by_one_rate, str(tmp_path))[0]
    assert [rates[True] for rates in found["rates"]] == [rates[False] for rates in found["rates"]]
    # It logs the rate of the step that comes.
    assert found["logged rates"][:2] == pytest.approx([5e-3 * 5 / 6, 5e-3 * 4 / 6])
    assert found["losses"][STEPS] < found["losses"][1] - 0.1


# ---- what it saves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "LoRA"])
def test_trainer_resumes_at_any_number_of_ranks(tmp_path: Path, lora: bool) -> None:
    stayed = run_ranks(2, train_tiny, lora, str(tmp_path))[0]
    for ranks in (2, 1, 3):
        folder = str(tmp_path / f"checkpoint-{STEPS // 2}")
        for rank, resumed in enumerate(run_ranks(ranks, train_tiny, lora, f"{tmp_path}/{ranks}", folder)):
            assert_same(resumed["began"], stayed[STEPS // 2])
            goes_on(resumed, stayed, of_losses=rank == 0)
            if ranks == 2:
                assert_same(resumed["end"], stayed["end"])


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "LoRA"])
def test_trainer_loads_the_best_model_at_the_end(tmp_path: Path, lora: bool) -> None:
    # The largest loss is called best, so that the first checkpoint is, which the run has left behind.
    settings = {
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "eval_strategy": "steps",
        "label_names": ["x"],
    }
    best = {"load_best_model_at_end": True, "eval_steps": STEPS // 2, **settings}
    for found in run_ranks(2, functools.partial(train_tiny, **best), lora, str(tmp_path)):
        assert found["best"] == str(tmp_path / f"checkpoint-{STEPS // 2}")
        assert_same(found["end"], found[STEPS // 2])


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "LoRA"])
def test_trainer_saves_the_model_only(tmp_path: Path, lora: bool) -> None:
    from safetensors.torch import load_file

    found = run_ranks(2, functools.partial(train_tiny, save_only_model=True), lora, str(tmp_path))[0]
    for step in (STEPS // 2, STEPS):
        folder = tmp_path / f"checkpoint-{step}"
        assert not [*folder.glob("global_step*")]
        saved = load_file(folder / ("adapter_model.safetensors" if lora else "model.safetensors"))
        model = {name.replace(".default", ""): weight for name, weight in found[step]["model"].items()}
        assert saved and (lora or saved.keys() == model.keys())
        for name, weight in saved.items():
            assert torch.equal(weight, model[name]), name


def train_with_adamw(folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    config = ds_config(**AUTO_BATCH, optimizer={"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}})
    data = [{"x": torch.randn(8, generator=torch.Generator().manual_seed(i))} for i in range(4 * BATCH)]
    with accelerate_anew():
        arguments = TrainingArguments(**arguments_for(folder, config, max_steps=2, save_steps=2, weight_decay=0.0))
        Trainer(model=tiny(), args=arguments, train_dataset=data).train()


def test_trainer_resumes_from_a_migrated_checkpoint(tmp_path: Path) -> None:
    run_ranks(1, train_with_adamw, str(tmp_path))
    assert cli.main(["migrate", str(tmp_path / "checkpoint-2"), str(tmp_path / "out" / "checkpoint-2")]) == 0
    resume = str(tmp_path / "out" / "checkpoint-2")
    settings = {"max_steps": 4, "warmup_steps": 1, "save_strategy": "no"}
    (found,) = run_ranks(1, functools.partial(train_tiny, **settings), False, str(tmp_path / "more"), resume)
    began = found["began"]
    assert [*found["losses"]] == [1, 2, 3, 4]
    assert began["counters"] == [2, 0] and not any(bool(m.any()) for m in began["momentum_buffer"].values())
    assert all(bool(moments.any()) for moments in began["exp_avg_sq"].values()) and began["step"]["first.bias"] == 2
    # A linear decay from step 1 to 4 has come to 2 of 3 parts.
    assert began["rates"]["first.weight"]["lr"] == pytest.approx(0.02 * 2 / 3)
    assert began["rates"]["first.bias"]["lr"] == pytest.approx(1e-3 * 2 / 3)


# ---- TRL ------------------------------------------------------------------------------------------------------------


def fine_tune_by_trl(folder: str, lora: bool) -> tuple[list[float], list[str], dict[str, Any]]:
    """Losses, the weights that Muon has, and the first weights of the run that are not."""
    import datasets
    import peft
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(62)} | {"<pad>": 62, "<eos>": 63}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = config_for({"lr": "auto", "weight_decay": "auto", "adjust_lr_fn": "match_rms_adamw"})
    with accelerate_anew():
        arguments = arguments_for(folder, config, learning_rate=1e-2, max_length=16, save_strategy="no")
        trainer = trl.SFTTrainer(
            model=tiny_llama(),
            args=trl.SFTConfig(**arguments),
            train_dataset=datasets.Dataset.from_list(
                [{"text": " ".join(f"w{(i + start) % 62}" for i in range(12))} for start in range(48)]
            ),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
            peft_config=peft.LoraConfig(r=4, task_type="CAUSAL_LM") if lora else None,
        )
        trainer.train()
        engine = trainer.model_wrapped
        optimizer = engine.optimizer.optimizer
        assert isinstance(optimizer, DSMuon) and engine.global_steps == STEPS
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return (
            losses,
            [*optimizer.routing.pieces()],
            {name: p.requires_grad for name, p in engine.module.named_parameters()},
        )


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "LoRA"])
def test_trl_fine_tunes(tmp_path: Path, lora: bool) -> None:
    losses, of_muon, trained = run_ranks(2, fine_tune_by_trl, str(tmp_path), lora)[0]
    assert losses[-1] < losses[0]
    assert {trained[name] for name in of_muon} == {True}
    if lora:
        assert len(of_muon) == 4 and all("lora_" in name for name in of_muon)
    else:
        assert len(of_muon) == 7
