"""Every tensor goes to the right half for a stated reason, whatever the order of registration."""

from __future__ import annotations

from types import SimpleNamespace

import deepspeed
import pytest
import torch
from torch import nn

from ds_muon.routing import RoutingError, route
from tests.unit.support.modules import GPT, VOCAB, WIDTH, Holder, decision, decisions, linear, raw

# route: types, shapes, names


def test_a_gpt_is_split_into_body_and_rest():
    assert decisions(GPT()) == {
        "wte.weight": ("adamw", "embedding"),
        "wpe.weight": ("adamw", "embedding"),
        "h.0.attn.weight": ("muon", "matrix"),
        "h.0.attn.bias": ("adamw", "vector"),
        "h.0.mlp.weight": ("muon", "matrix"),
        "h.0.ln.weight": ("adamw", "vector"),
        "h.0.ln.bias": ("adamw", "vector"),
        "h.1.attn.weight": ("muon", "matrix"),
        "h.1.attn.bias": ("adamw", "vector"),
        "h.1.mlp.weight": ("muon", "matrix"),
        "h.1.ln.weight": ("adamw", "vector"),
        "h.1.ln.bias": ("adamw", "vector"),
        "lm_head.weight": ("adamw", "output head"),
    }


@pytest.mark.parametrize(("head_first", "reason"), [(False, "embedding"), (True, "tied to an embedding")])
def test_a_tied_weight_is_an_embedding_in_either_order(head_first, reason):
    routes = route(GPT(tied=True, head_first=head_first)).routes
    (tied,) = [r for r in routes if len(r.names) == 2]
    assert set(tied.names) == {"wte.weight", "lm_head.weight"}
    assert tied.name == tied.names[0] == ("lm_head.weight" if head_first else "wte.weight")
    assert (tied.half, tied.reason) == ("adamw", reason)
    assert sum("lm_head.weight" in r.names for r in routes) == 1


@pytest.mark.parametrize("head_first", [False, True])
def test_a_weight_tied_under_a_plain_name_is_an_embedding(head_first):
    embedding, out = nn.Embedding(VOCAB, WIDTH), linear(VOCAB)
    out.weight = embedding.weight
    ordered = {"out": out, "tokens": embedding} if head_first else {"tokens": embedding, "out": out}
    assert route(Holder(**ordered, body=linear())).routes[0].half == "adamw"


@pytest.mark.parametrize("linear_first", [False, True])
def test_a_raw_embedding_tied_to_a_linear_is_an_embedding_in_either_order(linear_first):
    out = linear(VOCAB)
    model = Holder(out=out, embed=out.weight) if linear_first else Holder(embed=out.weight, out=out)
    model.body = linear()
    assert route(model).routes[0].reason == "embedding by name"


def test_a_shared_module_is_routed_once_with_all_names():
    shared = linear()
    (only,) = route(Holder(a=shared, b=shared)).routes
    assert only.names == ("a.weight", "b.weight") and only.half == "muon" and only.numel == WIDTH * WIDTH


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Embedding(5, 4), "embedding"),
        (nn.EmbeddingBag(5, 4), "embedding"),
        (nn.Embedding(5, 4, sparse=True), "embedding"),
        (nn.Conv1d(4, 4, 3), "convolution"),
        (nn.Conv2d(4, 4, 3), "convolution"),
        (nn.ConvTranspose2d(4, 4, 3), "convolution"),
        (nn.Bilinear(4, 4, 4), "3-D tensor"),
        (nn.LayerNorm(4), "vector"),
        (nn.LayerNorm((4, 4)), "normalization"),
        (nn.RMSNorm((4, 4)), "normalization"),
        (linear(1, 8), "a side of 1"),
        (linear(8, 1), "a side of 1"),
    ],
)
def test_adamw_by_type_and_shape(module, reason):
    assert decision(module) == ("adamw", reason)


def test_adamw_by_shape_of_raw_parameters():
    assert decision(nn.Parameter(torch.tensor(1.0))) == ("adamw", "scalar")
    assert decision(raw(4)) == ("adamw", "vector")
    assert decision(raw(3, 4, 5)) == ("adamw", "3-D tensor")
    assert decision(raw(2, 3, 4, 5)) == ("adamw", "4-D tensor")
    assert decision(raw(1, 1, 4)) == ("adamw", "vector")
    assert decision(raw(2, 2)) == ("muon", "matrix, a raw parameter")


def test_attention_and_recurrent_matrices_go_to_muon():
    model = Holder(attn=nn.MultiheadAttention(WIDTH, 2), rnn=nn.LSTM(WIDTH, WIDTH))
    muon = {name for name, (half, _) in decisions(model).items() if half == "muon"}
    assert muon == {"attn.in_proj_weight", "attn.out_proj.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0"}


def test_a_parametrized_weight_keeps_its_owner():
    model = Holder(table=nn.Embedding(VOCAB, WIDTH), body=linear())
    nn.utils.parametrizations.orthogonal(model.table)
    nn.utils.parametrizations.orthogonal(model.body)
    assert decisions(model) == {
        "table.parametrizations.weight.original": ("adamw", "embedding"),
        "body.parametrizations.weight.original": ("muon", "matrix"),
    }


class Conv1D(nn.Module):
    """As GPT-2 has it in transformers: a Linear stored as (in, out)."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.weight = raw(cols, rows)
        self.bias = raw(rows)


Conv1D.__module__ = "transformers.pytorch_utils"


class RowParallelLinear(nn.Module):
    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.weight = raw(rows, cols)


@pytest.mark.parametrize("layer", [Conv1D(24, WIDTH), RowParallelLinear(24, WIDTH)])
@pytest.mark.parametrize("path", ["attn.c_attn", "patch_embed", "wpe"])
def test_a_layer_that_is_linear_by_the_name_of_its_class_has_a_matrix(layer, path):
    assert decision(layer, path) == ("muon", "matrix")


def test_the_rows_of_a_head_stored_in_by_out_are_its_columns():
    assert decision(Conv1D(VOCAB, WIDTH), "output") == ("adamw", "output head")
    assert decision(Conv1D(WIDTH, VOCAB), "output") == ("muon", "matrix")


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = raw(4, 4)


class GroupRMSNormGated(RMSNorm):
    pass


class ScaleOf(RMSNorm):
    pass


class LayerNormLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = raw(4, 4)


@pytest.mark.parametrize("norm", [RMSNorm(), GroupRMSNormGated(), ScaleOf()])
def test_the_matrix_of_a_norm_of_any_class_scales(norm):
    assert decision(norm) == ("adamw", "normalization")


def test_a_linear_with_a_norm_in_it_is_no_norm():
    assert decision(LayerNormLinear()) == ("muon", "matrix")


class PositionEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latents = raw(31, WIDTH)
        self.projection = raw(WIDTH, WIDTH)


class MarginLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = raw(WIDTH, 5)


def test_the_class_tells_what_a_raw_parameter_is():
    found = decisions(Holder(body=linear(), tables=PositionEmbedding(), loss=MarginLoss()))
    assert found["tables.latents"] == ("adamw", "embedding")
    assert found["tables.projection"] == ("muon", "matrix, a raw parameter")
    assert found["loss.weight"] == ("adamw", "of a loss")


# route: frozen, empty, tags, patterns


def test_frozen_and_empty_tensors_are_left_out():
    model = Holder(body=linear(), frozen=linear(), empty=raw(0, 4))
    model.frozen.requires_grad_(False)
    model.frozen.weight.use_muon = True
    assert decisions(model) == {
        "body.weight": ("muon", "matrix"),
        "frozen.weight": ("none", "frozen"),
        "empty": ("none", "empty"),
    }
    assert decisions(model, muon_params=["*"])["empty"] == ("none", "empty")


def test_a_tensor_without_a_shape_is_refused():
    with pytest.raises(RoutingError, match=r"lazy\.weight has no shape yet"):
        route(Holder(body=linear(), lazy=nn.LazyLinear(4)))


def test_tags_overrule_the_rules():
    model = Holder(body=linear(), wte=nn.Embedding(5, 4), other=linear(), untagged=linear())
    model.wte.weight.use_muon = True
    model.other.weight.use_muon = False
    model.untagged.weight.use_muon = None
    assert decisions(model) == {
        "body.weight": ("muon", "matrix"),
        "wte.weight": ("muon", "use_muon = True"),
        "other.weight": ("adamw", "use_muon = False"),
        "untagged.weight": ("muon", "matrix"),
    }


@pytest.mark.parametrize("param", [raw(4), raw(2, 3, 4), raw(2, 3, 4, 5), raw(1, 8), raw(8, 1)])
def test_a_tag_cannot_send_other_shapes_to_muon(param):
    param.use_muon = True
    with pytest.raises(RoutingError, match=r"odd of shape .*use_muon = True"):
        route(Holder(body=linear(), odd=param))
    param.use_muon = False
    assert decisions(Holder(body=linear(), odd=param))["odd"] == ("adamw", "use_muon = False")


def tagged_by_deepspeed(model: nn.Module) -> nn.Module:
    config = SimpleNamespace(optimizer_name="muon", optimizer_params={})
    deepspeed.set_optimizer_flags(config, model)
    return model


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"conv": nn.Conv2d(3, 4, 3)}, r"use_muon = True on conv\.weight \(4 x 3 x 3 x 3, convolution\)"),
        ({"wte": nn.Embedding(5, 4)}, r"use_muon = True on wte\.weight \(5 x 4, embedding\)"),
        ({"embed_proj": linear()}, r"use_muon = False on embed_proj\.weight \(8 x 8, matrix\)"),
    ],
)
def test_tags_that_deepspeeds_muon_has_left_are_refused_with_how_to_clear_them(odd, why):
    model = tagged_by_deepspeed(Holder(body=linear(bias=True), lm_head=linear(9), **odd))
    with pytest.raises(RoutingError, match=rf"has left use_muon tags.* 1 of them are wrong.*{why}.*p\.use_muon = None"):
        route(model)
    for p in model.parameters():
        p.use_muon = None
    assert route(model).of_half("muon")


def test_tags_of_deepspeeds_muon_that_agree_with_the_rules_or_a_glob_do_no_harm():
    model = tagged_by_deepspeed(Holder(body=linear(bias=True), wte=nn.Embedding(5, 4)))
    assert decisions(model, adamw_params=["wte.*"])["body.weight"] == ("muon", "use_muon = True")


def test_a_tag_on_a_convolution_says_how_to_clear_it():
    model = Holder(body=linear(), conv=nn.Conv2d(3, 4, 3))
    model.conv.weight.use_muon = True
    with pytest.raises(RoutingError, match=r"conv\.weight of shape .*4-D tensors.*p\.use_muon = None"):
        route(model)


def test_a_tag_that_sends_an_embedding_to_muon_is_warned_about():
    model = Holder(body=linear(), wte=nn.Embedding(5, 4), wpe=nn.Embedding(6, 4))
    model.wte.weight.use_muon = model.body.weight.use_muon = True
    (warning,) = route(model, muon_params=["wpe.*"]).warnings()
    assert "1 tensor, 20 elements to Muon" in warning and "wte.weight (5 x 4, embedding)" in warning
    assert "p.use_muon = None" in warning


@pytest.mark.parametrize("tag", [1, "yes", 0])
def test_a_tag_is_a_boolean(tag):
    model = Holder(body=linear())
    model.body.weight.use_muon = tag
    with pytest.raises(RoutingError, match=r"body\.weight\.use_muon = .*; set True, False or None"):
        route(model)


def test_patterns_overrule_tags_and_rules():
    model = Holder(a=linear(), b=linear(), wte=nn.Embedding(5, 4))
    model.a.weight.use_muon = True
    model.b.weight.use_muon = False
    assert decisions(model, muon_params=["b.*", "w?e.weight"], adamw_params=["a*"]) == {
        "a.weight": ("adamw", "adamw_params 'a*'"),
        "b.weight": ("muon", "muon_params 'b.*'"),
        "wte.weight": ("muon", "muon_params 'w?e.weight'"),
    }


@pytest.mark.parametrize("pattern", ["lm_head.*", "wte.*"])
@pytest.mark.parametrize("head_first", [False, True])
def test_patterns_match_any_name_of_a_tied_weight(pattern, head_first):
    routes = route(GPT(tied=True, head_first=head_first), muon_params=[pattern]).routes
    assert [r.half for r in routes if len(r.names) == 2] == ["muon"]


def test_patterns_respect_case():
    with pytest.raises(RoutingError, match="matches no parameter"):
        route(Holder(Body=linear()), muon_params=["body.*"])


def test_patterns_that_contradict_each_other_are_refused():
    with pytest.raises(RoutingError, match=r"b\.weight matches both muon_params 'b\*' and adamw_params '\*\.weight'"):
        route(Holder(b=linear()), muon_params=["b*"], adamw_params=["*.weight"])


@pytest.mark.parametrize("key", ["muon_params", "adamw_params"])
def test_a_pattern_without_a_match_names_near_ones(key):
    with pytest.raises(RoutingError, match=rf"{key}: 'h\.0\.atn\.\*' matches no parameter; .*h\.0\.attn\.weight"):
        route(GPT(), **{key: ["h.0.atn.*"]})


@pytest.mark.parametrize(
    ("param", "why"),
    [
        (raw(4), "matrices only"),
        (nn.Parameter(torch.tensor(1.0)), "matrices only"),
        (raw(2, 1, 4), "a side of 1"),
        (raw(2, 3, 4, 5), "4-D tensors are neither matrices nor stacks"),
        (raw(1, 8), "a side of 1"),
        (raw(8, 1), "a side of 1"),
    ],
)
def test_a_pattern_cannot_send_other_shapes_to_muon(param, why):
    with pytest.raises(RoutingError, match=rf"odd of shape .*muon_params 'od\*'.*{why}"):
        route(Holder(body=linear(), odd=param), muon_params=["od*"])
    assert decisions(Holder(body=linear(), odd=param), adamw_params=["od*"])["odd"][0] == "adamw"


@pytest.mark.parametrize("module", [nn.Embedding(5, 4, sparse=True), nn.EmbeddingBag(5, 4, sparse=True)])
def test_sparse_gradients_cannot_go_to_muon(module):
    with pytest.raises(RoutingError, match=r"wte\.weight .*sparse gradients"):
        route(Holder(body=linear(), wte=module), muon_params=["wte.*"])
    module.weight.use_muon = True
    with pytest.raises(RoutingError, match=r"wte\.weight .*sparse gradients"):
        route(Holder(body=linear(), wte=module))


@pytest.mark.parametrize("model", [nn.LayerNorm(4), nn.Embedding(5, 4), nn.Identity(), Holder(lm_head=linear())])
def test_a_model_without_a_matrix_is_refused(model):
    with pytest.raises(RoutingError, match=r"no trainable matrix for Muon .*use AdamW, or .*muon_params"):
        route(model)


def test_routing_modifies_nothing():
    model = GPT(tied=True)
    before = {name: (param.data.clone(), dict(vars(param))) for name, param in model.named_parameters()}
    route(model, muon_params=["h.*.mlp.weight"], adamw_params=["h.0.attn.*"])
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name][0]) and vars(param) == before[name][1]


# Routing: table, summary


def test_the_table_has_one_aligned_line_per_tensor():
    lines = route(GPT(tied=True)).table().splitlines()
    assert len(lines) == 13
    column = lines[0].index("half")
    assert {line[column:].split()[0] for line in lines} == {"half", "muon", "adamw"}
    assert lines[1].split("  ")[0] == "wte.weight = lm_head.weight"
    assert "97 x 8" in lines[1] and lines[1].endswith("embedding")


def test_the_table_cuts_long_lists_of_names_and_shows_scalars():
    shared = linear()
    model = Holder(a=shared, b=shared, c=shared, gain=nn.Parameter(torch.tensor(1.0)))
    table = route(model).table()
    assert "a.weight = b.weight = ..." in table and "c.weight" not in table and "scalar  adamw  scalar" in table


def test_the_summary_counts_tensors_and_elements():
    big = linear(1000, 2000)
    assert route(Holder(a=big, b=big)).summary() == [
        "Muon: 1 matrix, 2,000,000 elements (100.0 %)",
        "AdamW: 0 tensors, 0 elements (0.0 %)",
    ]
    model = Holder(a=linear(), b=linear(bias=True), e=raw(0), f=raw(3))
    model.f.requires_grad = False
    assert route(model).summary() == [
        "Muon: 2 matrices, 128 elements (94.1 %)",
        "AdamW: 1 tensor, 8 elements (5.9 %)",
        "Not trained: 2 tensors, 3 elements: e (empty), f (frozen)",
    ]


def test_the_summary_names_only_some_of_many_frozen_tensors():
    model = Holder(body=linear(), **{f"f{i}": raw(1) for i in range(9)})
    for i in range(9):
        getattr(model, f"f{i}").requires_grad = False
    assert route(model).summary()[2] == (
        "Not trained: 9 tensors, 9 elements: f0 (frozen), f1 (frozen), f2 (frozen), ..."
    )


def flat_experts(count: int) -> nn.Module:
    return Holder(body=linear(), wte=nn.Embedding(VOCAB, 64), experts=Holder(w1=raw(count * WIDTH, WIDTH)))


def test_a_model_that_muon_hardly_trains_is_warned_about_with_names_and_what_to_do():
    (warning,) = route(flat_experts(3)).warnings()
    assert warning.startswith("only 25.0 % of the elements in matrices and stacks")
    assert "AdamW has the other 192, such as experts.w1 (24 x 8, experts in one matrix)." in warning
    assert all(f'"{key}"' in warning for key in ("muon_params", "muon_blocks", "adam_lr"))


def test_half_of_the_matrices_is_enough_whatever_the_embeddings_and_convolutions():
    assert route(flat_experts(1)).warnings() == []
    assert route(Holder(body=linear(), conv=nn.Conv2d(64, 64, 3), positions=raw(1, 99, 64))).warnings() == []


def test_matrices_that_tags_keep_from_muon_are_warned_about_but_not_those_of_a_glob():
    model = Holder(a=linear(), b=linear(16), c=linear(16))
    assert route(model, adamw_params=["b.*", "c.*"]).warnings() == []
    for layer in (model.b, model.c):
        layer.weight.use_muon = False
    (warning,) = route(model).warnings()
    assert "only 20.0 %" in warning and "b.weight (16 x 8, matrix), c.weight" in warning and '"muon_params"' in warning


def test_what_is_not_given_to_the_optimizer_is_not_trained():
    routing = route(GPT()).given(["wte.weight", "h.0.mlp.weight"])
    assert [r.name for r in routing.routes if r.half != "none"] == ["wte.weight", "h.0.mlp.weight"]
    assert "h.0.attn.weight (not given to deepspeed.initialize)" in routing.given(["h.0.mlp.weight"]).summary()[2]


def test_a_complex_parameter_is_refused():
    model = Holder(body=linear(), phase=nn.Parameter(torch.ones(4, 4, dtype=torch.complex64)))
    with pytest.raises(RoutingError, match=r"phase is torch.complex64"):
        route(model)


def test_a_name_begins_no_line_in_the_table_or_an_error() -> None:
    model = nn.ModuleDict({"a\n[ds_muon] b": nn.Linear(8, 4), "frozen\rc": nn.Linear(8, 4).requires_grad_(False)})
    routing = route(model)
    assert r"a\n[ds_muon] b.weight" in routing.table() and len(routing.table().splitlines()) == 5
    assert r"frozen\rc.weight" in routing.summary()[2]
    with pytest.raises(RoutingError, match=r"names are such as a\\n\[ds_muon\] b\.weight"):
        route(model, muon_params=["a*x"])
