"""A small byte-level GPT in plain torch: the model of the demo and of `ds-muon verify`.

It has one of everything that Muon's routing must tell apart: square, wide and tall matrices, vectors, an embedding,
and an output head (tied to the embedding, or not).

Shapes: B sequences, T tokens, D = `n_embd`, H = `n_head`, K = D / H, V = `vocab_size`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`.

    Raises ValueError where `n_embd` does not split into heads of an even size (rotary positions turn pairs).
    """

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 128
    vocab_size: int = 256
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.n_embd % (2 * self.n_head) != 0:
            raise ValueError(f"n_embd is {self.n_embd}: it must be a multiple of 2 * n_head = {2 * self.n_head}")


class Attention(nn.Module):
    """Causal self-attention with rotary positions; q, k, v and o are four D x D matrices."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.k = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.v = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.o = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """(B, T, D), (T, K/2) -> (B, T, D)"""
        q, k, v = (proj(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)  # (B, H, T, K)
        out: Tensor = self.o(y.transpose(1, 2).flatten(-2))
        return out


class MLP(nn.Module):
    """D -> 4D -> D with a squared ReLU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        out: Tensor = self.down(F.relu(self.up(x)).square())
        return out


class Block(nn.Module):
    """Attention and MLP, each normalized before and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """(B, T, D), (T, K/2) -> (B, T, D)"""
        x = x + self.attn(self.attn_norm(x), angles)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """A decoder-only transformer that returns its loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.reset_parameters()
        if config.tied:
            self.lm_head.weight = self.embed.weight

    def reset_parameters(self) -> None:
        """Draw every matrix from N(0, 0.02^2), as GPT-2 does; norms start at 1.

        The 2 * n_layer matrices that write to the residual stream start smaller, so that its variance does not grow
        with depth.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                nn.init.ones_(parameter)
                continue
            residual = name.endswith(("attn.o.weight", "mlp.down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of `targets` in nats per token, a fp32 scalar.

        tokens, targets: (B, T) int64, T <= `block_size`; targets[:, t] is what follows tokens[:, :t+1].
        Raises ValueError for longer sequences.
        """
        length = tokens.shape[1]
        if length > self.config.block_size:
            raise ValueError(f"{length} tokens in a row: block_size is {self.config.block_size}")
        angles = rotary_angles(length, self.config.n_embd // self.config.n_head, tokens.device)
        x = self.embed(tokens)  # (B, T, D)
        for block in self.blocks:
            x = block(x, angles)
        logits = self.lm_head(self.norm(x))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotary_angles(length: int, head_size: int, device: torch.device) -> Tensor:
    """Angles (length, head_size / 2) in fp32 of rotary positions (Su et al. 2021, RoFormer, eq. 15).

    Computed anew in every forward: a buffer would follow the module to bf16, too coarse for positions above 256.
    """
    frequencies = 10000.0 ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    return torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + K/2]) of every head by its position's angles; (B, H, T, K), (T, K/2) -> like x."""
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
