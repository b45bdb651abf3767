"""Small models of transformers, split into heads, gates and experts: every update is right; a wrong split is found."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from ds_muon.verify import UpdateCheck, UpdateRecord
from ds_muon.verify.inject import found, plant
from tests.unit.support.cases import full
from tests.unit.support.models import ds_config, full_weights, start
from tests.unit.support.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[integrations]'")
pytestmark = pytest.mark.ranks

VOCAB, WIDTH = 40, 24
BASE = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 20, "num_hidden_layers": 2}
BASE |= {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**BASE, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
OUTPUTS = {"*.o_proj.weight": {"split": "heads"}}
GATE_UP = {"*.experts.gate_up_proj": {"split": 2}}
ALTERNATING = {"*.experts.gate_up_proj": {"split": 2, "interleaved": True}}
# Class, config, params of the optimizer, and matrices that are blocks.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], set[str]]] = {
    "Mixtral": (
        "MixtralForCausalLM",
        {**GROUPED, **EXPERTS},
        {"per_head_muon": True, "muon_blocks": GATE_UP},
        {"model.layers.1.mlp.experts.gate_up_proj[3,1]", "model.layers.0.self_attn.k_proj.weight[1]"},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**GROUPED, **EXPERTS},
        {"muon_blocks": {**ALTERNATING, **OUTPUTS}},
        {"model.layers.1.mlp.experts.gate_up_proj[2,1]", "model.layers.0.self_attn.o_proj.weight[3]"},
    ),
    "GPT-2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": WIDTH, "n_head": 4, "n_layer": 2, "n_positions": 16},
        {"muon_blocks": {"*.c_attn.weight": {"split": "heads"}, "*.attn.c_proj.weight": {"split": "heads"}}},
        {"transformer.h.1.attn.c_attn.weight[11]", "transformer.h.0.attn.c_proj.weight[3]"},
    ),
    "GPT-NeoX": (
        "GPTNeoXForCausalLM",
        BASE,
        {"muon_blocks": {"*.query_key_value.weight": {"split": "heads"}}},
        {"gpt_neox.layers.1.attention.query_key_value.weight[11]"},
    ),
    "Llama": (
        "LlamaForCausalLM",
        GROUPED,
        {"per_head_muon": True, "muon_blocks": OUTPUTS},
        {"model.layers.1.self_attn.q_proj.weight[3]", "model.layers.0.self_attn.o_proj.weight[3]"},
    ),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        {**GROUPED, **EXPERTS},
        {"per_head_muon": True, "muon_blocks": {**GATE_UP, **OUTPUTS}},
        {"model.layers.1.mlp.experts.gate_up_proj[3,1]", "model.layers.0.self_attn.v_proj.weight[1]"},
    ),
}


def build(name: str) -> nn.Module:
    made = getattr(transformers, MODELS[name][0])
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = made.config_class(**MODELS[name][1])
        config._attn_implementation = "eager"
        model: nn.Module = made(config)
    return model


def config_of(name: str) -> dict[str, Any]:
    return ds_config({**MODELS[name][2], "ns_dtype": "float32", "weight_decay": 0.1})


def train(engine: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
    tokens = torch.randint(3, VOCAB, (2, 12), generator=generator).to(engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def check(name: str, fault: str | None) -> list[UpdateRecord]:
    engine = start(build(name), config_of(name))
    records = []
    with nullcontext() if fault is None else plant(fault, engine):
        check = UpdateCheck(engine)
        for step in range(2):
            train(engine, step)
            records += check.after_step()
        check.close()
    engine.destroy()
    return records


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss", "GPT-2", full("GPT-NeoX"), full("Llama"), full("Qwen3-MoE")])
def test_every_update_of_a_split_model_is_right(name: str) -> None:
    for records in run_ranks(2, check, name, None):
        assert all(record.ok for record in records), next(record for record in records if not record.ok)
        muon = {record.name for record in records if record.half == "muon"}
        assert MODELS[name][3] <= muon, sorted(muon)


@pytest.mark.parametrize("name", ["Mixtral", full("gpt-oss"), full("Llama")])
def test_a_wrong_split_of_a_model_is_found(name: str) -> None:
    for records in run_ranks(2, check, name, "unsplit"):
        assert found("unsplit", records), {record.diagnosis for record in records}


def without_tokens(name: str, expert: int) -> dict[str, torch.Tensor]:
    """Weights after minus weights before two steps, in which the routers of all layers send an expert nothing."""
    model = build(name)
    for path, param in model.named_parameters():
        if path.endswith("router.bias"):
            param.data[expert] = -1e4
    engine = start(model, config_of(name))
    before = full_weights(engine)
    for step in range(2):
        train(engine, step)
    after = full_weights(engine)
    engine.destroy()
    return {path: after[path] - before[path] for path in before}


def test_an_expert_without_tokens_stays_where_it_is() -> None:
    (moved, same) = run_ranks(2, without_tokens, "gpt-oss", 2)
    stacks = [path for path in moved if path.endswith("_proj") and ".experts." in path]
    assert len(stacks) == 4
    for path in stacks:
        assert torch.equal(moved[path], same[path])
        assert [bool(expert.any()) for expert in moved[path]] == [True, True, False, True], path
