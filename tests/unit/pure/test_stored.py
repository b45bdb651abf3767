"""The matrices of every class of experts in transformers are stored as the routing says, by what their forward does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_muon.blocks import Rule, pieces
from ds_muon.layout import Layout
from ds_muon.roles import named_tensors
from ds_muon.stored import stored
from tests.unit.support.modules import Holder

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[integrations]'")
FILES = sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
# One matrix for all experts, or layers of the usual kind.
NO_STACKS = {"AriaSharedExpertsMLP", "DbrxExpertGLU", "DbrxExperts"}
CLASSES = {
    name: f"transformers.models.{file.parent.name}.{file.stem}"
    for file in FILES
    for name in re.findall(r"^class (\w*Experts?\w*)\(nn\.Module\)", file.read_text(encoding="utf-8"), re.MULTILINE)
    if name not in NO_STACKS
}
# These store a matrix as (in, out); all others as (out, in).
IN_OUT = {"AriaExperts", "GptOssExperts", "Llama4TextExperts", "OpenAIPrivacyFilterExperts"}
EXPERTS, WIDTH, INNER = 4, 6, 10


class Config:
    """A config of any model with few experts."""

    def __getattr__(self, name: str) -> Any:
        for part, value in {
            **{"__": AttributeError, "_implementation": "eager", "_act": "silu", "zero_expert": 0, "latent": None},
            **{"ffn": INNER, "intermediate": INNER, "hidden": WIDTH, "expert": EXPERTS, "limit": 1e9},
        }.items():
            if part in name:
                if value is AttributeError:
                    raise AttributeError(name)
                return value
        return 1


def build(name: str) -> nn.Module:
    made = getattr(importlib.import_module(CLASSES[name]), name)
    torch.manual_seed(0)
    experts: nn.Module = made(EXPERTS, WIDTH, INNER) if name == "JetMoeParallelExperts" else made(Config())
    for param in experts.parameters():
        nn.init.normal_(param)
    if hasattr(experts, "post_expert_norm"):
        experts.post_expert_norm = nn.Identity()
    return experts


def run(experts: nn.Module, tokens: Tensor) -> Tensor:
    """Each expert's output for its token."""
    name = type(experts).__name__
    if name == "JetMoeParallelExperts":
        return experts(tokens, [1] * EXPERTS)
    if name == "Llama4TextExperts":
        return experts(tokens)
    if name == "InklingSharedExperts":  # every token goes through all of them
        return experts(tokens[None], torch.ones(1, EXPERTS, EXPERTS))
    first = torch.arange(EXPERTS)[:, None]
    return experts(tokens, torch.cat([first, (first + 1) % EXPERTS], 1), torch.tensor([[1.0, 0.0]] * EXPERTS))


def weights(experts: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in experts.named_parameters() if param.ndim == 3}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_experts_is_stored_as_its_forward_multiplies(name: str) -> None:
    experts = build(name)
    tokens = torch.randn(1, WIDTH).expand(EXPERTS, WIDTH)  # each expert's
    out = run(experts, tokens)
    pull = torch.randn(out.shape[-1])
    (out * pull).sum().backward()
    found = {each.name: stored(each) for each in named_tensors(experts) if each.param.ndim == 3}
    assert found and set(found) == set(weights(experts))
    for weight, (layout, told_by) in found.items():
        assert (layout, told_by) == ("in_out" if name in IN_OUT else "out_in", name)
        for grad in weights(experts)[weight].grad:
            # A gradient is the sum over tokens of what comes back (x) what came in: of one token, (x) that token.
            turned = grad if layout == "out_in" else grad.T
            known = pull if "down" in weight else tokens[0]
            sides = turned if "down" in weight else turned.T
            assert sides.shape[0] == known.numel() and grad.abs().max() > 0
            rest = sides - torch.outer(known, known @ sides) / (known @ known)
            assert rest.abs().max() < 1e-4 * sides.abs().max()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("MixtralExperts", Rule(2)),
        ("Qwen3MoeExperts", Rule(2)),
        ("DeepseekV3Experts", Rule(2)),
        ("Llama4TextExperts", Rule(2)),
        ("GptOssExperts", Rule(2, interleaved=True)),
    ],
)
def test_the_halves_of_gate_and_up_are_gate_and_up(name: str, rule: Rule) -> None:
    experts = build(name)
    for bias in [param for param in experts.parameters() if param.ndim == 2]:
        nn.init.zeros_(bias)
    weight = experts.gate_up_proj
    layout: Layout = "in_out" if name in IN_OUT else "out_in"
    tokens = torch.randn(EXPERTS, WIDTH)
    with torch.no_grad():
        before = run(experts, tokens)
        for index in range(EXPERTS):
            kept = weight.clone()
            (gate, *_) = [piece for piece in pieces(tuple(weight.shape), rule, layout) if piece.index[0] == index]
            matrix = weight.flatten()[gate.start : gate.start + gate.numel].view(gate.rows, gate.cols)
            if gate.strips:
                gate.strips[0].store(torch.zeros_like(gate.strips[0].of(matrix, gate.axis)), matrix, gate.axis)
            else:
                matrix.zero_()
            after = run(experts, tokens)
            changed = (after - before).abs().amax(1) > 0
            assert changed.nonzero().flatten().tolist() == [index]
            assert torch.equal(after[index], torch.zeros(WIDTH))  # nothing passes a gate that is 0
            weight.copy_(kept)


def test_the_page_lists_the_classes_that_are_checked() -> None:
    page = Path(__file__).parents[3].joinpath("docs", "blocks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \(experts, (in|out), \w+\) \| (.*) \|$", page, re.MULTILINE)
    listed = {first: set(re.findall(r"`(\w+)`", classes)) for first, classes in rows}
    assert listed == {"in": IN_OUT, "out": CLASSES.keys() - IN_OUT}


def test_other_classes_are_not_known_by_the_name_alone() -> None:
    class GptOssExperts(Holder):
        pass

    class Llama4TextExperts(Holder):
        pass

    for made in (GptOssExperts, Llama4TextExperts):
        (tensor,) = named_tensors(made(up=nn.Parameter(torch.ones(2, 3, 4))))
        assert stored(tensor) == ("out_in", "")
