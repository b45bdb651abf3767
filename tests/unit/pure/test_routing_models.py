"""Models of transformers and PEFT as they are made: every kind of parameter goes to the half that a reader expects.

``routing_tables/NAME.txt`` holds what a model's parameters are routed to, a line for each pattern of names, shape and
reason, vectors apart. Each line is meant to be read: is this a matrix that maps one feature space onto another? Where a
line is wrong, mend the rule in ``ds_muon/roles.py``, then write the tables anew and read what has changed:

    python -m tests.unit.pure.test_routing_models && git diff tests/unit/support/routing_tables
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_muon.routing import Routing, route

TABLES = Path(__file__).parents[1] / "support" / "routing_tables"
# The tables are of the version that is pinned: with another one in the pin they are compared with that one's models.
CONSTRAINTS = Path(__file__).parents[3] / "scripts" / "constraints.txt"
(VERSION,) = re.findall(r'^transformers==(.+); python_version >= "3.11"$', CONSTRAINTS.read_text(), re.MULTILINE)
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[integrations]'")
if transformers.__version__ != VERSION:
    pytest.skip(f"the tables are of transformers {VERSION}, not {transformers.__version__}", allow_module_level=True)
transformers.logging.set_verbosity_error()

TWO = {"num_hidden_layers": 2}
TWO_EACH = {"encoder_layers": 2, "decoder_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    # decoders
    "GPT2LMHeadModel": {"n_layer": 2},
    "GPT2ForSequenceClassification": {"n_layer": 2},
    "GPTNeoXForCausalLM": TWO,
    "GPTJForQuestionAnswering": {"n_layer": 2},
    "LlamaForCausalLM": TWO,
    "MistralForTokenClassification": TWO,
    "MixtralForCausalLM": TWO,
    "Qwen2ForCausalLM": TWO,
    "Qwen3ForSequenceClassification": TWO,
    "Qwen3MoeForCausalLM": TWO,
    "Qwen3NextForCausalLM": TWO,
    "GemmaForCausalLM": TWO,
    "PhiForCausalLM": TWO,
    "OPTForCausalLM": TWO,
    "BloomForTokenClassification": {"n_layer": 2},
    "FalconForQuestionAnswering": TWO,
    "MptForCausalLM": {"n_layers": 2},
    "DeepseekV3ForCausalLM": {"num_hidden_layers": 2, "first_k_dense_replace": 1},
    "DeepseekV4ForCausalLM": TWO,
    "GptOssForCausalLM": TWO,
    "Llama4ForCausalLM": {"num_hidden_layers": 2, "interleave_moe_layer_step": 1},
    "Olmo2ForCausalLM": TWO,
    "MambaForCausalLM": TWO,
    "Mamba2ForCausalLM": TWO,
    "RwkvForCausalLM": TWO,
    "JambaForCausalLM": TWO,
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "CpmAntForCausalLM": TWO,
    # encoders
    "BertForPreTraining": TWO,
    "BertForNextSentencePrediction": TWO,
    "BertForMultipleChoice": TWO,
    "RobertaForMaskedLM": TWO,
    "RobertaForSequenceClassification": TWO,
    "DebertaV2ForTokenClassification": {"num_hidden_layers": 2, "relative_attention": True, "pos_att_type": ["p2c"]},
    "AlbertForPreTraining": TWO,
    "ElectraForPreTraining": TWO,
    "ElectraForSequenceClassification": TWO,
    "XLNetForSequenceClassification": {"n_layer": 2},
    "XLMForQuestionAnswering": {"n_layers": 2},
    "LongformerForQuestionAnswering": TWO,
    "ModernBertForSequenceClassification": TWO,
    "DistilBertForMaskedLM": {"n_layers": 2},
    "DistilBertForSequenceClassification": {"n_layers": 2},
    "VisualBertForQuestionAnswering": TWO,
    "EsmForMaskedLM": {"vocab_size": 33, **TWO},
    "TapasForQuestionAnswering": {"num_aggregation_labels": 4, **TWO},
    "PerceiverForSequenceClassification": {"num_self_attends_per_block": 2},
    # encoders with decoders
    "T5ForConditionalGeneration": {"num_layers": 2, "num_decoder_layers": 2},
    "SwitchTransformersForConditionalGeneration": {"num_layers": 2, "num_sparse_encoder_layers": 1},
    "BartForSequenceClassification": TWO_EACH,
    "WhisperForConditionalGeneration": TWO_EACH,
    "MarianMTModel": TWO_EACH,
    "PegasusForConditionalGeneration": TWO_EACH,
    "FSMTForConditionalGeneration": TWO_EACH,
    # images
    "ViTForImageClassification": TWO,
    "SwinForImageClassification": {"depths": [1, 1], "num_heads": [3, 6]},
    "BeitForImageClassification": {"use_relative_position_bias": True, **TWO},
    "CLIPModel": {"text_config": TWO, "vision_config": TWO},
    "Dinov2ForImageClassification": TWO,
    "ConvNextForImageClassification": {"depths": [1, 1, 1, 1]},
    "DeiTForImageClassificationWithTeacher": TWO,
    "SamModel": {"vision_config": {"num_hidden_layers": 3}},
    "SegformerForSemanticSegmentation": {"depths": [1, 1, 1, 1]},
    "LevitForImageClassification": {"depths": [1, 1, 1]},
    # sound
    "Wav2Vec2ForCTC": TWO,
    "Wav2Vec2ForPreTraining": TWO,
    "Wav2Vec2ForXVector": TWO,
    "Wav2Vec2ConformerForSequenceClassification": TWO,
    "Wav2Vec2BertForCTC": {"vocab_size": 32, **TWO},
    "ASTForAudioClassification": TWO,
}


def build(name: str) -> nn.Module:
    """A model of its usual widths and few layers, without storage."""
    made = getattr(transformers, name)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model: nn.Module = made(made.config_class(**MODELS[name]))
    return model


def build_lora() -> nn.Module:
    peft = pytest.importorskip("peft", reason="needs peft: pip install '.[integrations]'")
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, target_modules=["wte", "c_attn", "c_fc"], fan_in_fan_out=True, use_dora=False
    )
    model = build("GPT2ForSequenceClassification")
    with torch.device("meta"):
        wrapped: nn.Module = peft.get_peft_model(model, config)
    return wrapped


def table(routing: Routing) -> str:
    """The summary, what is warned of, and a line for each pattern of names, shape, half and reason."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for each in routing.routes:
        if each.reason in ("vector", "scalar", "frozen"):
            counts["", "", each.half, each.reason] += 1
        else:
            pattern = " = ".join(re.sub(r"\b\d+\b", "*", name) for name in each.names[:2])
            counts[pattern, each.shown_shape, each.half, each.explained] += 1
    rows = [(str(count), *row) for row, count in counts.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = routing.summary()[:2] + [f"warns: {line.split(' of the ')[0]}" for line in routing.warnings()]
    for count, *cells in rows:
        lines.append("  ".join([count.rjust(widths[0]), *map(str.ljust, cells, [*widths[1:], 0])]))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_is_routed_as_its_table_says(name: str) -> None:
    assert table(route(build(name))) == (TABLES / f"{name}.txt").read_text()


def test_a_model_with_lora_is_routed_as_its_table_says() -> None:
    assert table(route(build_lora())) == (TABLES / "LoRA.txt").read_text()


def test_every_table_is_of_a_model() -> None:
    assert {path.stem for path in TABLES.iterdir()} == {*MODELS, "LoRA"}


if __name__ == "__main__":
    for path in TABLES.glob("*.txt"):
        path.unlink()
    for name in MODELS:
        (TABLES / f"{name}.txt").write_text(table(route(build(name))))
    (TABLES / "LoRA.txt").write_text(table(route(build_lora())))
