"""How much of published models of experts goes to Muon, their experts included or not: the table of docs/blocks.md.

The models are made on the meta device from transformers' classes, with the sizes of their published configs, so nothing
is downloaded and no memory is used. Prints markdown.

    python scripts/muon_share.py
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ds_muon.routing import Routing, route

# Of each: the class, and where the published config differs from the class' defaults or states a size of it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral-8x7B": (
        "MixtralForCausalLM",
        {
            **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8},
        },
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeForCausalLM",
        {
            **{"vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128},
            **{"intermediate_size": 6144, "tie_word_embeddings": False},
        },
    ),
    "Qwen3-235B-A22B": (
        "Qwen3MoeForCausalLM",
        {
            **{"vocab_size": 151936, "hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94},
            **{"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128},
            **{"intermediate_size": 12288, "tie_word_embeddings": False},
        },
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        {
            **{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048},
            **{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128},
            **{"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536},
            **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        },
    ),
    "gpt-oss-20b": (
        "GptOssForCausalLM",
        {
            **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24},
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32},
        },
    ),
    "gpt-oss-120b": (
        "GptOssForCausalLM",
        {
            **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36},
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128},
        },
    ),
}


def routings(name: str) -> tuple[Routing, Routing]:
    """Of a model: with its stacks of experts in Muon, as by default, and with all of them in AdamW."""
    made = getattr(transformers, MODELS[name][0])
    with torch.device("meta"):
        model = made(made.config_class(**MODELS[name][1]))
    return route(model), route(model, adamw_params=["*.experts.*"])


def share(routing: Routing) -> float:
    """Of the trained elements, the percentage in Muon."""
    muon, adamw = (sum(each.numel for each in routing.of_half(half)) for half in ("muon", "adamw"))
    return 100 * muon / (muon + adamw)


def main() -> None:
    """Print a row for each model."""
    print("| model | elements | matrices in Muon | of the elements in Muon | with the experts in AdamW |")
    print("| --- | --- | --- | --- | --- |")
    for name in MODELS:
        routing, without = routings(name)
        elements = sum(each.numel for each in routing.routes)
        count = sum(len(piece.shapes()) for made in routing.pieces().values() for piece in made)
        print(f"| {name} | {elements / 1e9:.1f}e9 | {count:,} | {share(routing):.1f} % | {share(without):.1f} % |")


if __name__ == "__main__":
    main()
