"""Output heads and raw parameters go to AdamW by what they are called, and nothing else does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from tests.unit.support.modules import VOCAB, WIDTH, Holder, decision, decisions, linear, raw

# route: output heads


class Causal(nn.Module):
    """Like a Hugging Face model: the head has any name, and a method tells which it is."""

    def __init__(self, answer: object = "head") -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.body = linear()
        self.to_words = linear(VOCAB, bias=True)
        self.answer = answer

    def get_output_embeddings(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"head": self.to_words, "list": [self.to_words]}.get(str(self.answer), self.answer)


@pytest.mark.parametrize("answer", ["head", "list"])
def test_the_declared_output_embeddings_are_a_head(answer):
    assert decisions(Causal(answer))["to_words.weight"] == ("adamw", "output head")
    assert decisions(Causal(answer))["body.weight"] == ("muon", "matrix")


def test_a_submodule_may_declare_the_head():
    assert decisions(Holder(inner=Causal()))["inner.to_words.weight"] == ("adamw", "output head")


@pytest.mark.parametrize("answer", [None, NotImplementedError("no head"), AttributeError("lm_head"), 3])
def test_a_method_without_an_answer_is_ignored(answer):
    assert decisions(Causal(answer))["to_words.weight"] == ("muon", "matrix")


def test_a_declared_head_module_does_not_take_its_submodules_along():
    model = Causal()
    model.to_words = Holder(dense=linear(), bias=raw(VOCAB))
    assert decisions(model)["to_words.dense.weight"] == ("muon", "matrix")


@pytest.mark.parametrize("vocab", [VOCAB, None])
@pytest.mark.parametrize("name", ["lm_head", "embed_out", "unembed", "unembedding", "output_embeddings", "LM_head"])
def test_an_unmistakable_leaf_is_a_head_of_any_size(name, vocab):
    assert decision(linear(31), f"model.{name}", vocab) == ("adamw", "output head")


PATHS = ["head", "output", "predictions.decoder", "generator.proj", "head.2", "mtp.3.head", "logits", "to_logits"]
PATHS += ["decoder.output_projection", "proj_out"]


@pytest.mark.parametrize("path", PATHS)
def test_a_head_word_needs_the_vocabulary(path):
    assert decision(linear(VOCAB), path) == ("adamw", "output head")
    assert decision(linear(VOCAB - 1), path) == ("muon", "matrix")
    assert decision(linear(VOCAB), path, vocab=None) == ("muon", "matrix")


FINE_TUNING = ["classifier", "score", "qa_outputs", "cls.seq_relationship", "logits_proj", "model.class_predictor"]


@pytest.mark.parametrize("path", FINE_TUNING)
def test_the_heads_of_fine_tuning_are_heads_of_any_size(path):
    assert decision(linear(3), path, vocab=None) == ("adamw", "output head")


@pytest.mark.parametrize("name", ["classifier", "lm_head", "classification_head"])
def test_of_a_head_of_several_layers_the_last_one_is_the_head(name):
    head = Holder(dense=linear(), dropout=nn.Dropout(), out_proj=linear(3))
    found = decisions(Holder(body=linear(), **{name: head}))
    assert found[f"{name}.dense.weight"] == ("muon", "matrix")
    assert found[f"{name}.out_proj.weight"] == ("adamw", "output head")


def test_a_convolution_at_the_end_of_a_head_leaves_the_layer_before_it_alone():
    head = nn.Sequential(linear(), nn.Conv1d(WIDTH, 3, 1))
    assert decisions(Holder(body=linear(), classifier=head))["classifier.0.weight"] == ("muon", "matrix")


def test_each_of_a_list_of_heads_is_a_head():
    heads = nn.ModuleList([linear(5), nn.Sequential(linear(), linear(5))])
    found = decisions(Holder(body=linear(), lm_heads=heads))
    assert [name for name, (_, reason) in found.items() if reason == "output head"] == [
        "lm_heads.0.weight",
        "lm_heads.1.1.weight",
    ]


def test_a_router_named_classifier_is_no_head():
    assert decision(linear(4), "block.0.mlp.router.classifier") == ("muon", "matrix")


@pytest.mark.parametrize("name", ["decoder", "generator"])
@pytest.mark.parametrize("width", [VOCAB, WIDTH])
def test_a_list_of_layers_with_a_heads_name_is_no_head(name, width):
    model = Holder(wte=nn.Embedding(VOCAB, WIDTH), body=linear())
    setattr(model, name, nn.ModuleList([linear(width), linear(VOCAB, width)]))
    assert {decisions(model)[f"{name}.{i}.weight"] for i in range(2)} == {("muon", "matrix")}


def test_a_head_word_counts_for_the_last_layer_only():
    model = Holder(wte=nn.Embedding(VOCAB, WIDTH), head=nn.Sequential(linear(VOCAB), linear(3, VOCAB)))
    assert decisions(Holder(model=model, body=linear()))["model.head.0.weight"] == ("muon", "matrix")


def test_a_head_word_may_map_onto_the_labels_of_the_models_config():
    model = Holder(body=linear(), decoder=Holder(final_layer=linear(3)))
    assert decisions(model)["decoder.final_layer.weight"][0] == "muon"
    model.config = SimpleNamespace(num_labels=3)
    assert decisions(model)["decoder.final_layer.weight"] == ("adamw", "output head")


def test_a_head_with_lora_is_its_last_half():
    lora = Holder(base_layer=linear(VOCAB), lora_A=Holder(default=linear(2)), lora_B=Holder(default=linear(VOCAB, 2)))
    lora.base_layer.requires_grad_(False)
    found = decisions(Holder(body=linear(), lm_head=lora))
    assert found["lm_head.lora_A.default.weight"] == ("muon", "matrix")
    assert found["lm_head.lora_B.default.weight"] == ("adamw", "output head")


def test_the_dense_layer_of_a_roberta_head_stays_with_muon():
    model = Holder(
        embeddings=nn.Embedding(VOCAB, WIDTH),
        lm_head=Holder(dense=linear(bias=True), layer_norm=nn.LayerNorm(WIDTH), decoder=linear(VOCAB, bias=True)),
    )
    found = decisions(model)
    assert found["lm_head.dense.weight"] == ("muon", "matrix")
    assert found["lm_head.decoder.weight"] == ("adamw", "output head")


@pytest.mark.parametrize(
    "path",
    [
        "overhead",
        "headroom.proj",
        "my_lm_head2",
        "outputs",
        "pre_classifier",
        "encoder_decoder",
        "embedder_mlp",
        "scores",
    ],
)
def test_part_of_a_segment_is_no_head(path):
    assert decision(linear(VOCAB), path) == ("muon", "matrix")


@pytest.mark.parametrize("path", ["layers.3.attention.output", "decoder.layers.0.fc", "layers.0.output.dense"])
def test_a_vocabulary_as_wide_as_the_model_does_not_make_heads_of_layers(path):
    assert decision(linear(), path, vocab=WIDTH) == ("muon", "matrix")


@pytest.mark.parametrize("path", ["head", "output", "head.0"])
def test_a_vocabulary_as_wide_as_the_model_still_has_its_head(path):
    assert decision(linear(), path, vocab=WIDTH) == ("adamw", "output head")


def test_a_position_table_is_no_vocabulary():
    model = Holder(positions=Holder(wpe=nn.Embedding(31, WIDTH)), decoder=Holder(fc=linear(31)))
    assert decisions(model)["decoder.fc.weight"] == ("muon", "matrix")


def test_a_raw_embedding_counts_as_a_vocabulary():
    assert decisions(Holder(wte=raw(VOCAB, WIDTH), body=linear(), head=linear(VOCAB)))["head.weight"][0] == "adamw"


def test_a_subclass_of_linear_is_a_linear():
    class LoraLinear(nn.Linear):
        pass

    assert decision(LoraLinear(WIDTH, VOCAB), "lm_head") == ("adamw", "output head")
    assert decision(LoraLinear(WIDTH, WIDTH), "embed.proj") == ("muon", "matrix")


def test_a_frozen_embedding_still_gives_the_vocabulary():
    model = Holder(wte=nn.Embedding(VOCAB, WIDTH), body=linear(), head=linear(VOCAB))
    model.wte.requires_grad_(False)
    assert decisions(model)["head.weight"] == ("adamw", "output head")


# route: raw parameters and custom modules, by name


@pytest.mark.parametrize(
    "path", ["wte", "embed_tokens.weight", "tok_embeddings.weight", "model.embedding.table", "W_E"]
)
def test_raw_embeddings_by_name(path):
    assert decision(raw(31, WIDTH), path) == ("adamw", "embedding by name")


@pytest.mark.parametrize("path", ["wpe", "pos_embed", "model.position_embeddings.weight", "positional_embedding"])
def test_raw_position_tables_by_name(path):
    assert decision(raw(31, WIDTH), path) == ("adamw", "position table")


def test_a_raw_head_by_unmistakable_name():
    assert decision(raw(31, WIDTH), "lm_head.weight") == ("adamw", "output head by name")
    assert decision(raw(31, WIDTH), "head.weight") == ("muon", "matrix, a raw parameter")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        *((path, "bias") for path in ("bias", "mlp.experts.gate_up_proj_bias", "m.r_w_bias", "lru.input_gate_bias")),
        *((path, "bias") for path in ("relative_position_bias_table", "pos_bias_u", "attention_biases", "attn.b_Q")),
        *((path, "position table") for path in ("rel_pos_h", "decoder_pos_embed", "image_positions", "kpool_ape")),
        *((path, "embedding by name") for path in ("level_embed", "mask_tokens", "resampler.latents", "codebook")),
        *((path, "gate") for path in ("attn.gate", "s_gate")),
        *((path, "scale") for path in ("gamma", "q_scale")),
        *((path, "state matrix") for path in ("mixer.A_log", "A_b_log")),
        ("mlp.experts.mlp.w1", "experts in one matrix"),
    ],
)
def test_a_raw_parameter_that_is_no_matrix_by_its_name(path, reason):
    assert decision(raw(31, WIDTH), path) == ("adamw", reason)


def test_a_bias_is_one_in_any_module():
    layer = linear()
    layer.head_bias = raw(4, WIDTH)
    assert decisions(Holder(layer=layer))["layer.head_bias"] == ("adamw", "bias")


@pytest.mark.parametrize(
    "path",
    [
        *("bias_proj", "unbiased", "gate_proj", "mlp.gate.weight", "router.weight", "text_projection", "pos_proj"),
        *("log", "scale_proj", "token_mixing", "hc.fn", "experts.3.w1", "mlp.shared_experts.w1"),
    ],
)
def test_a_raw_matrix_is_one_whatever_its_name_begins_with(path):
    assert decision(raw(31, WIDTH), path) == ("muon", "matrix, a raw parameter")


@pytest.mark.parametrize(("name", "reason"), [("lora_embedding_A", "embedding by name"), ("gate_bias", "bias")])
def test_of_a_dict_or_list_of_parameters_the_name_of_it_tells(name, reason):
    model = Holder(body=linear(), adapter=nn.Module(), lists=nn.Module())
    setattr(model.adapter, name, nn.ParameterDict({"default": raw(4, 31)}))
    setattr(model.lists, name, nn.ParameterList([raw(4, 31)]))
    found = decisions(model)
    assert found[f"adapter.{name}.default"] == found[f"lists.{name}.0"] == ("adamw", reason)


def test_a_raw_parameter_may_be_parametrized():
    model = Holder(body=linear(), pos_embed=raw(31, WIDTH))
    nn.utils.parametrize.register_parametrization(model, "pos_embed", nn.Identity())
    assert decisions(model)["parametrizations.pos_embed.original"] == ("adamw", "position table")


def test_a_parameter_marked_as_without_weight_decay_is_no_matrix():
    model = Holder(body=linear(), state=raw(16, 4))
    model.state._no_weight_decay = True
    assert decisions(model)["state"] == ("adamw", "marked _no_weight_decay")


@pytest.mark.parametrize("path", ["mlp.experts.gate_up_proj", "experts.w1.weight"])
def test_a_stack_of_experts_goes_to_muon_unless_its_members_have_a_side_of_1(path):
    assert decision(raw(4, 6, 8), path) == ("muon", "stack of experts")
    assert decision(raw(4, 1, 8), path) == ("adamw", "a side of 1")
    assert decision(raw(2, 4, 6, 8), path) == ("adamw", "4-D tensor")


@pytest.mark.parametrize(
    "path",
    ["embedder_mlp.weight", "unembedded.weight", "wtef", "embed.layers.proj.weight", "positions.weight", "wpe.a.b"],
)
def test_raw_matrices_with_other_segments_go_to_muon(path):
    assert decision(raw(31, WIDTH), path) == ("muon", "matrix, a raw parameter")


@pytest.mark.parametrize("path", ["patch_embed.proj", "embed", "wpe", "word_embeddings", "pos_embed.proj"])
def test_a_linear_under_an_embedding_name_stays_with_muon(path):
    assert decision(linear(), path) == ("muon", "matrix")
