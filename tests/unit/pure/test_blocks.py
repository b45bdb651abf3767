"""The matrices of a tensor are all of it, each element once, and those that a naive split makes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_muon.blocks import BlocksError, Rule, described, matrices, pieces
from ds_muon.config import DSMuonConfig, DSMuonConfigError
from ds_muon.layout import Layout, order_of_outputs, outputs
from ds_muon.routing import Route, RoutingError, route
from tests.unit.support.modules import VOCAB, Holder, linear, raw


def found(tensor: Tensor, rule: Rule, layout: Layout, heads: int | None = None) -> dict[tuple[int, ...], Tensor]:
    """The matrices by index, as the step is to see them: read from the flattened tensor, piece by piece."""
    flat, read = tensor.flatten(), {}
    for piece in pieces(tuple(tensor.shape), rule, layout, heads):
        matrix = flat[piece.start : piece.start + piece.numel].view(piece.rows, piece.cols)
        assert len(piece.names("w")) == len(piece.shapes()) == (len(piece.strips) or 1)
        for i, strip in enumerate(piece.strips):
            read[(*piece.index, i)] = strip.of(matrix, piece.axis)
        if not piece.strips:
            read[piece.index] = matrix
    return read


def naive(tensor: Tensor, rule: Rule, layout: Layout) -> dict[tuple[int, ...], Tensor]:
    """The same in plain words: turn to (out, in), take the features of each block, turn back."""
    if tensor.ndim == 3:
        return {(i, *index): m for i, one in enumerate(tensor) for index, m in naive(one, rule, layout).items()}
    turned = tensor if layout == "out_in" else tensor.T
    turned = turned if rule.axis != "in" else turned.T
    features = list(range(turned.shape[0]))
    parts = rule.split if isinstance(rule.split, tuple) else None
    if parts is None:
        assert isinstance(rule.split, int)
        if rule.split == 1:
            return {(): tensor}
        parts = (1,) * rule.split if rule.interleaved else (len(features) // rule.split,) * rule.split
    if len(parts) == 1:
        return {(): tensor}
    blocks: list[list[int]] = [[] for _ in parts]
    while features:
        for block, size in zip(blocks, parts, strict=True):
            block += features[:size]
            del features[:size]
    read = [turned[block] for block in blocks]
    read = [block if rule.axis != "in" else block.T for block in read]
    return {(i,): block if layout == "out_in" else block.T for i, block in enumerate(read)}


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Rule, Layout]:
    sizes = tuple(draw(st.lists(st.integers(2, 5), min_size=1, max_size=4)))
    repeats = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["whole", "parts", "turns", "sizes", "sizes in turns"]))
    if kind == "whole":
        rule, features = Rule(), sum(sizes)
    elif kind == "parts":
        rule, features = Rule(len(sizes)), len(sizes) * sizes[0]
    elif kind == "turns":
        rule, features = Rule(len(sizes) + 1, interleaved=True), (len(sizes) + 1) * (repeats + 1)
    else:
        rule = Rule(sizes, interleaved=kind == "sizes in turns")
        features = sum(sizes) * (repeats if rule.interleaved else 1)
    rule = Rule(rule.split, draw(st.sampled_from([None, "out", "in"])), None, rule.interleaved)
    layout: Layout = draw(st.sampled_from(["out_in", "in_out"]))
    sides = (features, draw(st.integers(2, 6)))
    matrix = sides if (rule.axis != "in") == (layout == "out_in") else sides[::-1]
    return (*draw(st.sampled_from([(), (1,), (3,)])), *matrix), rule, layout


@given(cases())
def test_the_matrices_are_those_of_a_naive_split_and_all_of_the_tensor(case):
    shape, rule, layout = case
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    read, expected = found(tensor, rule, layout), naive(tensor, rule, layout)
    assert list(read) == list(expected) == sorted(read)
    assert all(torch.equal(read[index], expected[index]) for index in read)
    assert sorted(torch.cat([m.flatten() for m in read.values()]).tolist()) == list(range(tensor.numel()))
    made = pieces(shape, rule, layout)
    assert [p.start for p in made] == [sum(p.numel for p in made[:i]) for i in range(len(made))]
    assert matrices(made) == len(read) and described(made)


def splits_of_six() -> list[Rule]:
    sizes = [(6,), (2, 4), (4, 2), (3, 3), (2, 2, 2), (1, 2), (2, 1), (1, 1)]
    rules = [Rule(split, axis) for split in (1, 2, 3, *sizes[:5]) for axis in ("out", "in")]
    return rules + [Rule(split, axis, interleaved=True) for split in (2, 3, *sizes[5:]) for axis in ("out", "in")]


@pytest.mark.parametrize("stack", [(), (2,)])
def test_tensors_of_one_shape_and_order_have_the_same_outputs(stack: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size((*stack, 6, 6)).numel()).view(*stack, 6, 6)
    orders: dict[tuple[int, str], list[list[int]]] = {}
    for rule, layout in itertools.product(splits_of_six(), ("out_in", "in_out")):
        made = pieces(tuple(tensor.shape), rule, layout)
        rows = [r for m in naive(tensor, rule, layout).values() for r in (m if layout == "out_in" else m.T).tolist()]
        assert outputs(made, layout) == len(rows)
        same = orders.setdefault((len(rows), order_of_outputs(made, layout)), rows)
        assert same == rows, (rule, layout)


def test_an_order_of_outputs_is_said_in_words() -> None:
    def order(rule: Rule, layout: Layout) -> str:
        return order_of_outputs(pieces((2, 6, 6), rule, layout), layout)

    assert order(Rule(), "out_in") == order(Rule(3), "out_in") == "stored out_in"
    assert order(Rule(), "in_out") == order(Rule((2, 4)), "in_out") == "stored in_out"
    assert order(Rule((2, 4), "in"), "out_in") == "stored out_in; inputs 0:2, 2:6"
    assert order(Rule((2, 4), "in"), "in_out") == "stored in_out; inputs in runs of 2, 4"
    assert order(Rule((1, 2), interleaved=True), "out_in") == "stored out_in; outputs 0:1 of every 3, 1:3 of every 3"


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("axis", ["out", "in"])
def test_blocks_that_lie_together_are_pieces_of_their_own(axis, layout):
    rows = (axis == "out") == (layout == "out_in")
    made = pieces((6, 8, 10), Rule(2, axis), layout)
    assert len(made) == (12 if rows else 6)
    assert [piece.index for piece in made[:2]] == ([(0, 0), (0, 1)] if rows else [(0,), (1,)])
    assert all(piece.strips == () for piece in made) == rows


@pytest.mark.parametrize(
    ("shape", "rule", "why"),
    [
        ((12, 8), Rule(5), r'5 parts, which do not divide the 12 features of axis "out"; such as 3, 4, 6'),
        ((12, 8), Rule(3, "in"), r'3 parts, which do not divide the 8 features of axis "in"; .*2, 4'),
        ((12, 8), Rule((4, 4)), r"sum to 8, not to the 12 features.*give sizes that sum to 12"),
        (
            (12, 8),
            Rule((4, 1, 7)),
            r"a matrix of 1 x 8.*give every part at least 2 features, or leave the tensor whole",
        ),
        ((12, 8), Rule(8, "in"), r"a matrix of 12 x 1"),
        ((12, 8), Rule(12, interleaved=True), r"a matrix of 1 x 8"),
        ((12, 8), Rule(5, interleaved=True), r"5 parts"),
        ((12, 8), Rule((4, 1), interleaved=True), r"repeats every 5 of 12 features.*which 5 does not divide"),
        ((3, 12, 1), Rule(2), r"a matrix of 6 x 1"),
    ],
)
def test_a_rule_that_does_not_fit_says_what_would(shape, rule, why):
    with pytest.raises(BlocksError, match=why):
        pieces(shape, rule, "out_in")


# muon_blocks


def blocks(model: nn.Module, rules: dict[str, Any], **others: Any) -> dict[str, Route]:
    config = DSMuonConfig.parse({"muon_blocks": rules, **others})
    routing = route(
        model,
        muon_params=config.muon_params,
        adamw_params=config.adamw_params,
        muon_blocks=config.muon_blocks,
        per_head_muon=config.per_head_muon,
    )
    return {each.name: each for each in routing.routes}


def shapes(found: Route) -> list[tuple[int, int]]:
    return [shape for piece in found.pieces for shape in piece.shapes()]


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        (3, "muon_blocks = 3: is not a JSON object"),
        (None, "muon_blocks = null: is not a JSON object"),
        ({"a": 3}, 'muon_blocks["a"] = 3: is not a rule; set one, such as {"split": 3}'),
        ({"": {}}, 'muon_blocks[""] = {}: is not under a pattern'),
        ({"a": {"splt": 3}}, 'muon_blocks["a"].splt = 3: is not a key of a rule; did you mean "split"?'),
        ({"a": {"zzzz": 3}}, "use one of split, axis, layout, interleaved"),
        ({"a": {"q\ud800": 3}}, r'muon_blocks["a"].q\ud800 = 3: is not a key of a rule'),
        *[({"a": {"split": v}}, 'muon_blocks["a"].split') for v in (0, -1, True, 2.0, "head", [], None, "auto")],
        *[({"a": {"split": [v]}}, "has an entry that is not a size") for v in (0, True, 2.0, "x", [2])],
        ({"a": {"axis": "rows"}}, 'muon_blocks["a"].axis = "rows": is not one of the choices; set "out" or "in"'),
        ({"a": {"layout": ["in_out"]}}, 'set "out_in" or "in_out"'),
        ({"a": {"split": 2, "interleaved": 1}}, "set true or false"),
        ({"a": {"interleaved": True}}, "has no effect"),
        ({"a": {"split": "heads", "interleaved": True}}, "has no effect"),
    ],
)
def test_a_rule_that_is_wrong_is_one_line(rules, line):
    with pytest.raises(DSMuonConfigError) as caught:
        DSMuonConfig.parse({"muon_blocks": rules})
    assert line in str(caught.value) and str(caught.value).isprintable()


def test_every_problem_of_every_rule_is_a_line_beside_those_of_other_keys():
    rules = {"a": {"split": 0, "axis": 1}, "b": 2, "c": {"split": 2}}
    config, lines = DSMuonConfig.read({"muon_blocks": rules, "lr": -1, "momentum": 0.9})
    keys = sorted(line.split(" = ")[0].removeprefix("optimizer.params.") for line in lines)
    assert keys == ["lr", 'muon_blocks["a"].axis', 'muon_blocks["a"].split', 'muon_blocks["b"]']
    assert config.momentum == 0.9 and config.muon_blocks == ()


def test_a_rule_is_read_and_shown_as_it_stands():
    rule = {"split": [4, 2, 2], "axis": "in", "layout": "in_out", "interleaved": True}
    ((pattern, read),) = DSMuonConfig.parse({"muon_blocks": {"*.w": rule}}).muon_blocks
    assert (pattern, read) == ("*.w", Rule((4, 2, 2), "in", "in_out", True))
    assert eval(str(read), {"true": True}) == rule and str(Rule()) == "{}"


def test_a_model_is_split_as_its_rules_say():
    model = Holder(qkv=linear(24), out=linear(8, 16), wte=nn.Embedding(VOCAB, 8), experts=Holder(up=raw(4, 6, 8)))
    found = blocks(
        model, {"qkv.*": {"split": [16, 4, 4]}, "out.*": {"split": 2, "axis": "in"}, "experts.*": {"split": 2}}
    )
    assert shapes(found["qkv.weight"]) == [(16, 8), (4, 8), (4, 8)]
    assert shapes(found["out.weight"]) == [(8, 8)] * 2 and len(found["out.weight"].pieces) == 1
    assert shapes(found["experts.up"]) == [(3, 8)] * 8
    assert found["wte.weight"].pieces == ()
    assert found["experts.up"].explained == "stack of experts, 8 matrices of 3 x 8"


@pytest.mark.parametrize(
    ("rules", "others", "why"),
    [
        ({"a.*": {"split": 3}}, {}, r"a\.weight of shape \(8, 8\): 'a\.\*': \{\"split\": 3\} has 3 parts.*2, 4"),
        (
            {"a.*": {"split": 2}, "*.weight": {}},
            {},
            r"a\.weight of shape \(8, 8\) matches both 'a\.\*': .*and '\*\.weight'",
        ),
        ({"z.*": {}}, {}, r"muon_blocks: 'z\.\*' matches no parameter"),
        (
            {"wte.*": {"split": 2}},
            {},
            r"'wte\.\*': \{\"split\": 2\} matches wte\.weight \(97 x 8, embedding\).*AdamW.*muon_params",
        ),
        ({"a.*": {}}, {"adamw_params": ["a.*"]}, r"matches a\.weight .*goes to AdamW"),
        ({"a.*": {"layout": "in_out"}}, {}, r'says "in_out", but Linear stores it "out_in"; remove "layout"'),
        ({"e.experts.w": {"split": "heads"}}, {}, r'has "heads", which a stack has not'),
        ({"a.*": {"split": "heads"}}, {}, r'not known as a projection of attention.*\{"split": 16\}'),
        ({"conv.*": {"split": 2, "axis": "in"}}, {"muon_params": ["conv.*"]}, r"is for linear layers"),
    ],
)
def test_a_rule_that_fits_nothing_names_weight_shape_rule_and_remedy(rules, others, why):
    model = Holder(
        a=linear(),
        b=linear(),
        wte=nn.Embedding(VOCAB, 8),
        conv=nn.Conv2d(4, 8, 3),
        e=Holder(experts=Holder(w=raw(2, 4, 6))),
    )
    with pytest.raises(RoutingError, match=why):
        blocks(model, rules, **others)


def test_a_rule_takes_no_notice_of_what_is_frozen():
    model = Holder(a=linear(), b=linear(12))
    model.b.requires_grad_(False)
    assert shapes(blocks(model, {"*.weight": {"split": 4}})["a.weight"]) == [(2, 8)] * 4


def test_all_experts_in_one_matrix_are_split_once_they_are_named():
    """As DBRX has them: of w1 and v1 the rows are outputs, of w2 inputs."""
    experts = Holder(mlp=Holder(w1=raw(16 * 6, 8), v1=raw(16 * 6, 8), w2=raw(16 * 6, 8)))
    rules = {"*.mlp.[wv]1": {"split": 16}, "*.mlp.w2": {"split": 16, "axis": "in", "layout": "in_out"}}
    found = blocks(Holder(body=linear(), experts=experts), rules, muon_params=["*.mlp.*"])
    for name, layout in (("w1", "out_in"), ("v1", "out_in"), ("w2", "in_out")):
        made = found[f"experts.mlp.{name}"]
        assert made.layout == layout and shapes(made) == [(6, 8)] * 16 and len(made.pieces) == 16


# convolutions


@pytest.mark.parametrize(
    ("conv", "matrix"),
    [(nn.Conv1d(4, 8, 3), (8, 12)), (nn.Conv2d(4, 8, (3, 2)), (8, 24)), (nn.Conv3d(2, 8, 2), (8, 16))],
)
def test_a_convolution_that_is_named_is_one_matrix_from_patches_to_channels(conv, matrix):
    found = blocks(Holder(body=linear(), conv=conv), {}, muon_params=["conv.weight"])
    assert shapes(found["conv.weight"]) == [matrix] and found["conv.weight"].layout == "out_in"
    found = blocks(Holder(body=linear(), conv=conv), {"conv.weight": {"split": 2}}, muon_params=["conv.weight"])
    assert shapes(found["conv.weight"]) == [(4, matrix[1])] * 2


@pytest.mark.parametrize(
    ("conv", "why"),
    [
        (nn.Conv2d(4, 8, 3, groups=2), "a grouped convolution is not one matrix"),
        (nn.Conv2d(4, 4, 3, groups=4), "a depthwise convolution is not one matrix"),
        (nn.ConvTranspose2d(4, 8, 3), "a transposed convolution is not one matrix"),
        (nn.Conv1d(4, 1, 3), "a side of 1"),
    ],
)
def test_other_convolutions_are_refused_by_name(conv, why):
    with pytest.raises(RoutingError, match=rf"conv\.weight of shape .*muon_params.*{why}"):
        blocks(Holder(body=linear(), conv=conv), {}, muon_params=["conv.weight"])


# stacks


def test_a_stack_that_is_named_is_a_matrix_for_each_member():
    found = blocks(Holder(body=linear(), pair=nn.Bilinear(4, 6, 8)), {}, muon_params=["pair.weight"])
    assert shapes(found["pair.weight"]) == [(4, 6)] * 8


def test_of_an_unknown_class_the_layout_is_assumed_and_said_until_a_rule_tells():
    model = Holder(body=linear(), experts=Holder(up=raw(4, 6, 8)))
    routing = route(model)
    (warning,) = routing.warnings()
    assert "experts.up (4 x 6 x 8" in warning and ': "in_out" if' in warning
    for layout in ("out_in", "in_out"):
        config = DSMuonConfig.parse({"muon_blocks": {"experts.*": {"layout": layout}}})
        told = route(model, muon_blocks=config.muon_blocks)
        assert told.warnings() == [] and told.layouts()["experts.up"] == layout


@pytest.mark.parametrize("transposed", [False, True])
def test_a_class_that_says_how_it_multiplies_is_believed_over_a_rule(transposed):
    experts = Holder(up=raw(4, 6, 8))
    experts.is_transposed = transposed
    model = Holder(body=linear(), experts=experts)
    stored = "in_out" if transposed else "out_in"
    assert route(model).layouts()["experts.up"] == stored and route(model).warnings() == []
    other = "out_in" if transposed else "in_out"
    with pytest.raises(RoutingError, match=rf'says "{other}", but Holder stores it "{stored}"'):
        blocks(model, {"experts.*": {"layout": other}})


def test_the_summary_counts_matrices_and_the_table_shows_them():
    routing = route(Holder(body=linear(), experts=Holder(up=raw(64, 6, 8))))
    assert routing.summary()[0] == "Muon: 65 matrices in 2 tensors, 3,136 elements (100.0 %)"
    assert "stack of experts, 64 matrices of 6 x 8" in routing.table()
    assert set(routing.pieces()) == {"body.weight", "experts.up"} and len(routing.pieces()["experts.up"]) == 64
    assert routing.given(["body.weight"]).pieces() == {"body.weight": routing.pieces()["body.weight"]}


# per_head_muon


class Attention(nn.Module):
    def __init__(self, heads: int = 4, keys: int = 2, width: int = 6) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_attention_heads=heads, num_key_value_heads=keys, head_dim=width, hidden_size=24
        )
        self.q_proj, self.o_proj = linear(heads * width, 24), linear(24, heads * width)
        self.k_proj, self.v_proj = linear(keys * width, 24), linear(keys * width, 24)


def test_per_head_muon_splits_queries_keys_and_values_and_leaves_the_rest():
    model = Holder(self_attn=Attention(), mlp=Holder(q_proj=linear(24, 24)))
    found = blocks(model, {}, per_head_muon=True)
    counts = {name: len(shapes(route)) for name, route in found.items()}
    assert counts == {
        **{"self_attn.q_proj.weight": 4, "self_attn.k_proj.weight": 2, "self_attn.v_proj.weight": 2},
        **{"self_attn.o_proj.weight": 1, "mlp.q_proj.weight": 1},
    }
    named = blocks(model, {"*.o_proj.*": {"split": "heads"}, "*.k_proj.*": {}}, per_head_muon=True)
    assert (
        shapes(named["self_attn.o_proj.weight"]) == [(24, 6)] * 4 and len(shapes(named["self_attn.k_proj.weight"])) == 1
    )


def test_heads_that_the_shape_does_not_confirm_are_refused_or_left_whole_and_said():
    model = Holder(self_attn=Attention())
    model.self_attn.config.num_key_value_heads = 3
    with pytest.raises(
        RoutingError,
        match=r"k_proj\.weight of shape \(12, 24\): .*Attention .*4 query heads.*3 heads of 6 are not the 12",
    ):
        blocks(model, {"*.k_proj.*": {"split": "heads"}})
    config = DSMuonConfig.parse({"per_head_muon": True})
    (warning,) = route(model, per_head_muon=config.per_head_muon).warnings()
    assert "leaves 2 projections, 576 elements whole: self_attn.k_proj.weight of shape (12, 24)" in warning
    model.self_attn.config.num_attention_heads = 3
    with pytest.raises(
        RoutingError, match=r"per_head_muon = true: no query.*: self_attn\.q_proj\.weight has .*3 heads of 6"
    ):
        blocks(model, {}, per_head_muon=True)


def test_heads_along_another_axis_than_the_rule_says_are_refused():
    with pytest.raises(RoutingError, match=r'says "axis": "out", but its heads lie along "in"; remove "axis"'):
        blocks(Holder(self_attn=Attention()), {"*.o_proj.*": {"split": "heads", "axis": "out"}})
