"""A block of "heads" is one head's: changing it changes what that head, or its group, gives, and nothing else."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_muon.blocks import BlocksError, Rule, pieces
from ds_muon.heads import Attentions, Heads
from ds_muon.layout import out_and_in
from ds_muon.roles import NamedTensor, named_tensors
from ds_muon.stored import stored

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[integrations]'")
transformers.logging.set_verbosity_error()

VOCAB, WIDTH, HEADS, KEYS = 30, 24, 4, 2
BASE = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1}
BASE |= {"num_attention_heads": HEADS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**BASE, "num_key_value_heads": KEYS}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
GPT = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_head": HEADS, "n_layer": 1, "n_positions": 16}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
LATENT |= {"first_k_dense_replace": 1, "num_key_value_heads": HEADS}
T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 5, "d_ff": 16, "num_heads": HEADS, "num_layers": 1}
BART = {"vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0}
BART |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 4}
# Class, config, and how often its q, k and v are split.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "Llama": ("LlamaModel", GROUPED, {"q": 4, "k": 2, "v": 2, "o": 4}),
    "Llama of other widths": ("LlamaModel", {**GROUPED, "head_dim": 10}, {"q": 4, "k": 2, "v": 2, "o": 4}),
    "Qwen3": ("Qwen3Model", {**GROUPED, "head_dim": 8}, {"q": 4, "k": 2, "v": 2, "o": 4}),
    "Qwen3-MoE": ("Qwen3MoeModel", {**GROUPED, **EXPERTS, "head_dim": 8}, {"q": 4, "k": 2, "v": 2, "o": 4}),
    "Mixtral": ("MixtralModel", {**GROUPED, **EXPERTS}, {"q": 4, "k": 2, "v": 2, "o": 4}),
    "gpt-oss": ("GptOssModel", {**GROUPED, **EXPERTS, "head_dim": 8}, {"q": 4, "k": 2, "v": 2, "o": 4}),
    "Gemma": ("GemmaModel", {**GROUPED, "num_key_value_heads": 1, "head_dim": 8}, {"q": 4, "k": 1, "v": 1, "o": 4}),
    "GPT-2": ("GPT2Model", GPT, {"fused": 12, "o": 4}),
    "GPT-2 with cross-attention": ("GPT2Model", {**GPT, "add_cross_attention": True}, {"fused": 8, "q": 4, "o": 4}),
    "GPT-J": ("GPTJModel", {**GPT, "rotary_dim": 4}, {"q": 4, "k": 4, "v": 4, "o": 4}),
    "GPT-NeoX": ("GPTNeoXModel", BASE, {"fused": 12, "o": 4}),
    "GPT-BigCode": ("GPTBigCodeModel", {**GPT, "multi_query": True}, {"fused": 6, "o": 4}),
    "GPT-BigCode, all heads": ("GPTBigCodeModel", {**GPT, "multi_query": False}, {"fused": 12, "o": 4}),
    "Bloom": ("BloomModel", {**BASE, "n_head": HEADS, "n_layer": 1}, {"fused": 12, "o": 4}),
    "Falcon": ("FalconModel", {**BASE, "multi_query": True}, {"fused": 6, "o": 4}),
    "Falcon, all heads": ("FalconModel", {**BASE, "multi_query": False}, {"fused": 12, "o": 4}),
    "Falcon, groups": (
        "FalconModel",
        {**BASE, "new_decoder_architecture": True, "num_kv_heads": KEYS},
        {"fused": 8, "o": 4},
    ),
    "MPT": (
        "MptModel",
        {"vocab_size": VOCAB, "d_model": WIDTH, "n_heads": HEADS, "n_layers": 1},
        {"fused": 12, "o": 4},
    ),
    "DBRX": (
        "DbrxModel",
        {
            **{"vocab_size": VOCAB, "d_model": WIDTH, "n_heads": HEADS, "n_layers": 1},
            "attn_config": {"kv_n_heads": KEYS, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": WIDTH},
        },
        {"fused": 8, "o": 4},
    ),
    "Phi-3": ("Phi3Model", GROUPED, {"fused": 8, "o": 4}),
    "ModernBERT": ("ModernBertModel", BASE, {"fused": 12, "o": 4}),
    "DeepSeek-V3": ("DeepseekV3Model", {**BASE, **LATENT, "q_lora_rank": 12}, {"q_b": 4, "kv_b": 4, "o": 4}),
    "DeepSeek-V3 without q_lora_rank": (
        "DeepseekV3Model",
        {**BASE, **LATENT, "q_lora_rank": None},
        {"q": 4, "kv_b": 4, "o": 4},
    ),
    "DeepSeek-V2": ("DeepseekV2Model", {**BASE, **LATENT, "q_lora_rank": None}, {"q": 4, "kv_b": 4, "o": 4}),
    "OPT": ("OPTModel", {**BASE, "ffn_dim": 16, "word_embed_proj_dim": WIDTH}, {"q": 4, "k": 4, "v": 4, "o": 4}),
    "BERT": ("BertModel", BASE, {"q": 4, "k": 4, "v": 4}),
    "DistilBERT": (
        "DistilBertModel",
        {"vocab_size": VOCAB, "dim": WIDTH, "n_heads": HEADS, "n_layers": 1, "hidden_dim": 16},
        {"q": 4, "k": 4, "v": 4, "o": 4},
    ),
    "T5": ("T5Model", T5, {"q": 4, "k": 4, "v": 4, "o": 4}),
    "BART's decoder": ("BartModel", BART, {"q": 4, "k": 4, "v": 4, "o": 4}),
}


def build(name: str) -> nn.Module:
    made = getattr(transformers, MODELS[name][0])
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = made.config_class(**MODELS[name][1])
        config._attn_implementation = "eager"
        model: nn.Module = made(config).eval()
    for param in model.parameters():
        if param.ndim == 2:
            nn.init.normal_(param, std=0.3)
    return model


def attention_of(model: nn.Module) -> tuple[str, nn.Module, dict[str, tuple[NamedTensor, Heads]]]:
    """The last attention module of a model, with its projections."""
    attentions, found = Attentions(model), {}
    for tensor in named_tensors(model):
        if tensor.param.ndim == 2 and attentions.kind(tensor.name):
            heads = attentions.heads(tensor.name, *out_and_in(*tensor.param.shape, stored(tensor)[0]))
            found.setdefault(tensor.name.rsplit(".", 2)[0], {})[heads.kind] = (tensor, heads)
    name = list(found)[-1]
    return name, model.get_submodule(name), found[name]


def run(name: str, model: nn.Module, attention: nn.Module, o: str | None) -> Tensor:
    """What the heads give, side by side, (tokens, features): what comes into o, or out of the module without one."""
    seen: list[Tensor] = []
    if o:
        hook = model.get_submodule(o).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    else:
        hook = attention.register_forward_hook(lambda _, __, outputs: seen.append(outputs[0]))
    ids = torch.arange(3, 11)[None]
    others = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    if name == "GPT-2 with cross-attention":
        others = {"encoder_hidden_states": torch.linspace(-1, 1, 5 * WIDTH).sin().view(1, 5, WIDTH)}
    with torch.no_grad():
        model(input_ids=ids, **others)
    hook.remove()
    return seen[-1].flatten(0, -2)


def blocks_of(tensor: NamedTensor, rule: Rule, count: int | None = None) -> list[tuple[int, Tensor]]:
    """Each block's number and which elements of the weight are in it."""
    made = pieces(tuple(tensor.param.shape), rule, stored(tensor)[0], count)
    masks = []
    for piece in made:
        for i in range(len(piece.strips) or 1):
            mask = torch.zeros(tensor.param.numel(), dtype=torch.bool)
            matrix = mask[piece.start : piece.start + piece.numel].view(piece.rows, piece.cols)
            if piece.strips:
                strip = piece.strips[i]
                strip.store(torch.ones_like(strip.of(matrix, piece.axis)), matrix, piece.axis)
            else:
                matrix.fill_(True)
            masks.append(mask.view(tensor.param.shape))
    return list(enumerate(masks))


@pytest.mark.parametrize("name", MODELS)
def test_a_block_of_a_projection_is_one_heads_in_the_forward(name: str) -> None:
    model = build(name)
    _, attention, found = attention_of(model)
    assert {kind: heads.count for kind, (_, heads) in found.items()} == MODELS[name][2]
    o = found["o"][0].name.removesuffix(".weight") if "o" in found else None
    before = run(name, model, attention, o)
    touched = [0] * HEADS
    for kind, (tensor, heads) in found.items():
        if kind == "o":
            weight = tensor.param if stored(tensor)[0] == "out_in" else tensor.param.T
            assert (heads.axis, weight.shape[1]) == ("in", before.shape[1])
            continue
        assert heads.axis == "out"
        for block, mask in blocks_of(tensor, Rule("heads", heads.axis), heads.count):
            kept = tensor.param.detach().clone()
            with torch.no_grad():
                tensor.param[mask] += torch.randn(int(mask.sum()))
                after = run(name, model, attention, o)
                tensor.param.copy_(kept)
            changed = ((after - before).abs().amax(0) > 1e-5).view(HEADS, -1).any(1).nonzero().flatten().tolist()
            group = HEADS // MODELS[name][2].get(kind, HEADS)
            if kind == "fused":  # a query, or a key or value of a group
                assert len(changed) in (1, HEADS // max(1, (heads.count - HEADS * ("q" not in found)) // 2))
            else:
                assert changed == list(range(block * group, (block + 1) * group))
            for head in changed:
                touched[head] += 1
    # A head's query, key and value, once each; of latent attention, its query and what is key and value together.
    assert touched == [2 if "kv_b" in found else 3] * HEADS


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("GPT-2", Rule(3)),
        ("GPT-NeoX", Rule((WIDTH // HEADS,) * 3, interleaved=True)),
        ("Falcon, all heads", Rule((WIDTH // HEADS,) * 3, interleaved=True)),
        ("Phi-3", Rule((24, 12, 12))),
    ],
)
def test_the_rules_for_fused_projections_find_queries_keys_and_values(name: str, rule: Rule) -> None:
    model = build(name)
    _, attention, found = attention_of(model)
    (tensor, _), o = found["fused"], found["o"][0].name.removesuffix(".weight")
    for each in (param for key, param in model.named_parameters() if key.endswith("bias")):
        nn.init.zeros_(each)
    blocks = blocks_of(tensor, rule)
    assert len(blocks) == 3
    outputs = []
    for _, mask in blocks:
        kept = tensor.param.detach().clone()
        with torch.no_grad():
            tensor.param[mask] = 0
            outputs.append(run(name, model, attention, o))
            tensor.param.copy_(kept)
    # Without queries or without keys every token looks at all before it alike; without values nothing is there to see.
    torch.testing.assert_close(outputs[0], outputs[1])
    assert outputs[0].abs().max() > 0.1 and outputs[2].abs().max() == 0


def test_the_fused_projection_of_torchs_attention_is_split_by_heads() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
    model = nn.ModuleDict({"attn": attention})
    (fused, out) = named_tensors(model)
    heads = Attentions(model).heads(fused.name, *fused.param.shape)
    assert (heads.count, heads.axis) == (3 * HEADS, "out")
    assert Attentions(model).heads(out.name, *out.param.shape) == Heads(HEADS, "in", "o")
    tokens = torch.randn(1, 7, WIDTH)
    touched = [0] * HEADS
    with torch.no_grad():
        attention.out_proj.weight.copy_(torch.eye(WIDTH))
        before = attention(tokens, tokens, tokens)[0]
        for block, mask in blocks_of(fused, Rule("heads"), heads.count):
            kept = fused.param.clone()
            fused.param[mask] += torch.randn(int(mask.sum()))
            changed = (attention(tokens, tokens, tokens)[0] - before).abs().amax((0, 1)) > 1e-5
            fused.param.copy_(kept)
            assert changed.view(HEADS, -1).any(1).nonzero().flatten().tolist() == [block % HEADS]
            touched[block % HEADS] += 1
    assert touched == [3] * HEADS


def test_a_fused_projection_of_another_class_of_the_same_name_is_not_known() -> None:
    class GPT2Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.c_attn = HEADS, nn.Linear(WIDTH, 3 * WIDTH)

    attentions = Attentions(nn.ModuleDict({"attn": GPT2Attention()}))
    assert attentions.kind("attn.c_attn.weight") is None
    with pytest.raises(BlocksError, match="not known as a projection of attention"):
        attentions.heads("attn.c_attn.weight", 3 * WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        # Of every head twice the features: its query, and a gate.
        ("Qwen3NextModel", r"4 heads of 8 are not the 64 features"),
        # Inner widths of its own.
        ("SamModel", r"are not the .* features"),
    ],
)
def test_other_projections_are_not_taken_for_heads(name: str, why: str) -> None:
    made = getattr(transformers, name)
    tiny = {**GROUPED, **EXPERTS, "head_dim": 8, "layer_types": ["full_attention"]} if name.startswith("Qwen") else {}
    with torch.device("meta"):
        model = made(made.config_class(**tiny))
    attentions, refused = Attentions(model), []
    for tensor in named_tensors(model):
        if tensor.param.ndim == 2 and attentions.kind(tensor.name) == "q":
            try:
                attentions.heads(tensor.name, *tensor.param.shape)
            except ValueError as error:
                refused.append(str(error))
    assert any(re.search(why, text) for text in refused)
