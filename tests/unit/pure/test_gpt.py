import math

import pytest
import torch
from torch import nn

from ds_muon.sample.gpt import GPT, GPTConfig, rotary_angles, rotate

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16)


def batch(config: GPTConfig, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (3, (length or config.block_size) + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def model(config: GPTConfig = SMALL) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    loss = model()(*batch(SMALL))
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert abs(loss.item() - math.log(256)) < 0.1


def test_loss_is_fp32_and_close_for_a_bf16_model() -> None:
    exact = model()(*batch(SMALL))
    rounded = model().bfloat16()(*batch(SMALL))
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=2**-7, atol=0)


def test_every_parameter_gets_a_gradient() -> None:
    gpt = model()
    gpt(*batch(SMALL)).backward()
    for name, parameter in gpt.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_separate_matrices_without_biases() -> None:
    gpt = model()
    shapes = {name: tuple(p.shape) for name, p in gpt.named_parameters()}
    assert shapes["blocks.1.attn.q.weight"] == shapes["blocks.1.attn.o.weight"] == (32, 32)
    assert shapes["blocks.0.mlp.up.weight"] == (128, 32) and shapes["blocks.0.mlp.down.weight"] == (32, 128)
    assert shapes["embed.weight"] == shapes["lm_head.weight"] == (256, 32)
    assert not any(name.endswith("bias") for name in shapes)
    assert not list(gpt.buffers())


def test_tied_head_shares_the_embedding() -> None:
    gpt = model(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, tied=True))
    assert gpt.lm_head.weight is gpt.embed.weight
    assert "lm_head.weight" not in dict(gpt.named_parameters())


def test_residual_projections_start_smaller() -> None:
    gpt = model(GPTConfig(n_layer=8, n_head=2, n_embd=64))
    weight = dict(gpt.named_parameters())
    assert weight["blocks.3.attn.q.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert weight["blocks.3.mlp.down.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert all(torch.equal(m.weight, torch.ones_like(m.weight)) for m in gpt.modules() if isinstance(m, nn.RMSNorm))


def test_later_tokens_do_not_reach_earlier_predictions() -> None:
    gpt = model()
    tokens, targets = batch(SMALL)
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 256
    # Targets of -100 are left out of the loss: only the predictions before the change count.
    targets = targets.clone()
    targets[:, 8:] = -100
    torch.testing.assert_close(gpt(tokens, targets), gpt(changed, targets), rtol=0, atol=1e-6)


def test_rotary_scores_depend_on_distance_only() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator).expand(2, 1, 1, 12, 16)
    angles = rotary_angles(12, 16, torch.device("cpu"))
    scores = (rotate(q, angles) @ rotate(k, angles).mT)[0, 0]
    for distance in range(12):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 16"):
        model()(*batch(SMALL, length=17))


@pytest.mark.parametrize("sizes", [{"n_head": 3}, {"n_embd": 12, "n_head": 4}, {"n_layer": 0}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(sizes)) if "n_layer" in sizes else "n_embd"):
        GPTConfig(**sizes)
