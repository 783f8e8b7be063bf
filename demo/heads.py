"""The two draft heads: EAGLE-3 (a separate draft) and MTP (part of the trunk's checkpoint).

Row i of a head takes the embedding of token i + 1 and a vector g that stands for token i, sits at
position i, and predicts token i + 2. At the first step of a chain g comes from the trunk; at later
steps it is what the head itself returned one step before:

    EAGLE-3   g = fc(features);  next g = output before the final norm (plain norms, own lm_head)
    MTP       g = hidden state;  next g = output after the final norm ((1 + w) norms, trunk's head)

`unroll` runs all rows of a window through such a chain at once. Row i then attends to the
first-step keys of rows 0..i, and to its own keys of the later steps: what a decoder does that
keeps draft keys of true features only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from decode import TrunkText
from torch import Tensor, nn
from trunk_model import (
    Layer,
    Mlp,
    TrunkConfig,
    ZeroCentredNorm,
    linear,
    rotary_table,
    rotate,
    split_heads,
)


@dataclass(frozen=True)
class EagleConfig:
    """The fields of the draft's config that shape it."""

    vocab: int
    draft_vocab: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rotary_dim: int
    eps: float
    aux_layers: tuple[int, ...]  # features are the residual stream after these trunk layers

    @classmethod
    def from_json(cls, config: dict[str, object]) -> EagleConfig:
        """Read the flat config of a draft folder."""
        c: dict[str, object] = config
        rope, eagle = c["rope_parameters"], c["eagle_config"]
        assert isinstance(rope, dict) and isinstance(eagle, dict), "two nested blocks"

        def number(name: str) -> int:
            value = c[name]
            assert isinstance(value, int), f"{name}: {value!r} is not a whole number"
            return value

        return cls(
            vocab=number("vocab_size"),
            draft_vocab=number("draft_vocab_size"),
            hidden=number("hidden_size"),
            ffn=number("intermediate_size"),
            heads=number("num_attention_heads"),
            kv_heads=number("num_key_value_heads"),
            head_dim=number("head_dim"),
            rope_theta=rope["rope_theta"],
            rotary_dim=int(number("head_dim") * rope["partial_rotary_factor"]),
            eps=float(str(c["rms_norm_eps"])),
            aux_layers=tuple(eagle["eagle_aux_hidden_state_layer_ids"]),
        )


class DraftHead(Protocol):
    """What training and evaluation need of a head."""

    def start(self, text: TrunkText, rows: int) -> Tensor:
        """Return the trunk's g for the first rows, [B, rows, H]."""

    def step(
        self, embedded: Tensor, g: Tensor, offset: int, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """One step of all rows, at positions i + offset: normed output and next g."""

    def logits(self, normed: Tensor, embedding: Tensor) -> Tensor:
        """Scores over the head's vocabulary."""

    def targets(self) -> Tensor | None:
        """Target ids of the head's vocabulary; None if it has the trunk's."""


class PlainNorm(nn.Module):
    """RMSNorm whose stored weight is the factor itself."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis, in float32."""
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * self.weight).to(x.dtype)


def chain_attention(
    q: Tensor,  # [B, heads, T, head_dim]
    keys: list[Tensor],  # [B, kv_heads, T, head_dim] for each step so far
    values: list[Tensor],
) -> Tensor:
    """Row i over the first-step keys of rows 0..i and its own key of each later step."""
    batch, heads, rows, dim = q.shape
    groups = (batch, keys[0].shape[1], -1, rows)
    q = q.reshape(batch, keys[0].shape[1], -1, dim) * dim**-0.5  # [B, kv, group * T, head_dim]
    row = torch.arange(rows, device=q.device)
    first = (q @ keys[0].mT).reshape(*groups, rows)
    first = first.masked_fill(row[None, :] > row[:, None], -torch.inf)
    grouped = q.reshape(*groups, dim)
    own = [(grouped * k[:, :, None]).sum(-1, keepdim=True) for k in keys[1:]]
    weight = torch.cat([first, *own], -1).float().softmax(-1).to(q.dtype)
    mixed = weight[..., :rows].flatten(2, 3) @ values[0]
    mixed = mixed.reshape(*groups, dim)
    for j, value in enumerate(values[1:]):
        mixed = mixed + weight[..., rows + j, None] * value[:, :, None]
    return mixed.reshape(batch, heads, rows, dim)


class EagleAttention(nn.Module):
    """Projections of the draft layer; the input is [embedding ; g]."""

    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = linear(2 * c.hidden, c.heads * c.head_dim)
        self.k_proj = linear(2 * c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = linear(2 * c.hidden, c.kv_heads * c.head_dim)
        self.o_proj = linear(c.heads * c.head_dim, c.hidden)

    def forward(
        self,
        x: Tensor,  # [B, T, 2H]
        offset: int,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """One step of all rows, at positions i + offset; keeps its keys and values."""
        c = self.c
        positions = torch.arange(offset, offset + x.shape[1], device=x.device)
        table = rotary_table(positions, c.rope_theta, c.rotary_dim)
        q = split_heads(self.q_proj(x), c.heads).transpose(1, 2)
        k = split_heads(self.k_proj(x), c.kv_heads).transpose(1, 2)
        v = split_heads(self.v_proj(x), c.kv_heads).transpose(1, 2)
        keys.append(rotate(k, table))
        values.append(v)
        mixed = chain_attention(rotate(q, table), keys, values)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out


class EagleLayer(nn.Module):
    """The one decoder layer of the draft."""

    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.input_layernorm = PlainNorm(c.hidden, c.eps)
        self.hidden_norm = PlainNorm(c.hidden, c.eps)
        self.post_attention_layernorm = PlainNorm(c.hidden, c.eps)
        self.self_attn = EagleAttention(c)
        self.mlp = Mlp(c.hidden, c.ffn)

    def forward(
        self, embedded: Tensor, g: Tensor, offset: int, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """One step of all rows: the next g."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], -1)
        x = g + self.self_attn(both, offset, keys, values)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class EagleHead(nn.Module):
    """EAGLE-3: its state dict is the draft's checkpoint, `d2t` and `t2d` included."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, c: EagleConfig, draft_ids: Tensor) -> None:
        super().__init__()
        self.fc = linear(len(c.aux_layers) * c.hidden, c.hidden)
        self.midlayer = EagleLayer(c)
        self.norm = PlainNorm(c.hidden, c.eps)
        self.lm_head = linear(c.hidden, c.draft_vocab)
        self.register_buffer("d2t", draft_ids - torch.arange(c.draft_vocab))
        self.register_buffer("t2d", torch.zeros(c.vocab, dtype=torch.bool))
        self.t2d[draft_ids] = True

    def start(self, text: TrunkText, rows: int) -> Tensor:
        """Fuse the features of the first rows."""
        g: Tensor = self.fc(text.features[:, :rows])
        return g

    def step(
        self, embedded: Tensor, g: Tensor, offset: int, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """One step of all rows."""
        g = self.midlayer(embedded, g, offset, keys, values)
        return self.norm(g), g

    def logits(self, normed: Tensor, embedding: Tensor) -> Tensor:
        """Scores over the draft vocabulary."""
        out: Tensor = self.lm_head(normed)
        return out

    def targets(self) -> Tensor:
        """Target ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


class MtpHead(nn.Module):
    """Qwen3.5's own next-n head: its state dict is the checkpoint below `mtp.`."""

    def __init__(self, c: TrunkConfig) -> None:
        super().__init__()
        self.c = c
        self.fc = linear(2 * c.hidden, c.hidden)
        self.pre_fc_norm_embedding = ZeroCentredNorm(c.hidden, c.eps)
        self.pre_fc_norm_hidden = ZeroCentredNorm(c.hidden, c.eps)
        self.layers = nn.ModuleList([Layer(c, "full_attention")])
        self.norm = ZeroCentredNorm(c.hidden, c.eps)

    def start(self, text: TrunkText, rows: int) -> Tensor:
        """Take the trunk's hidden state after its final norm."""
        return text.hidden[:, :rows]

    def step(
        self, embedded: Tensor, g: Tensor, offset: int, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """One step of all rows."""
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(g)], -1)
        x = self.fc(both)
        layer = self.layers[0]
        assert isinstance(layer, Layer), "an MTP head has one layer"
        positions = torch.arange(offset, offset + x.shape[1], device=x.device)
        table = rotary_table(positions, self.c.rope_theta, self.c.rotary_dim)
        q, k, v, gate = layer.self_attn.project(layer.input_layernorm(x), table)
        keys.append(k)
        values.append(v)
        x = x + layer.self_attn.finish(chain_attention(q, keys, values), gate)
        normed = self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))
        return normed, normed

    def logits(self, normed: Tensor, embedding: Tensor) -> Tensor:
        """Scores over the trunk's vocabulary."""
        return F.linear(normed, embedding)

    def targets(self) -> None:
        """The vocabulary is the trunk's."""


def unroll(
    head: DraftHead,
    embedding: Tensor,  # [V, H]
    text: TrunkText,
    rows: int,
    depth: int,
    tokens_at: Callable[[int, Tensor | None], Tensor],
) -> list[Tensor]:
    """Run a chain from every row; the logits of each step, [B, rows, vocabulary of the head].

    `tokens_at(step, logits of the step before)` names the token that each row takes in.
    """
    g = head.start(text, rows)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    scores: list[Tensor] = []
    for step in range(depth):
        tokens = tokens_at(step, scores[-1] if scores else None)
        normed, g = head.step(F.embedding(tokens, embedding), g, step, keys, values)
        scores.append(head.logits(normed, embedding))
    return scores


def unrolled_loss(head: DraftHead, embedding: Tensor, text: TrunkText, depth: int) -> Tensor:
    """Cross-entropy to the trunk's distribution at each step of a chain on the text, [depth].

    The distribution is restricted to the head's vocabulary; rows where the trunk's first choice
    lies outside of it are left out, since the head cannot be right there.
    """
    rows = text.tokens.shape[1] - depth
    targets = head.targets()
    choices = embedding if targets is None else embedding[targets]
    with torch.no_grad():
        teacher = F.linear(text.hidden[:, 1:].to(embedding.dtype), choices)
        counted = torch.ones_like(text.greedy[:, 1:], dtype=torch.bool)
        if targets is not None:
            inside = torch.zeros(len(embedding), dtype=torch.bool, device=embedding.device)
            inside[targets] = True
            counted = inside[text.greedy[:, 1:]]

    def tokens_at(step: int, _: Tensor | None) -> Tensor:
        return text.tokens[:, 1 + step : 1 + step + rows]

    losses = []
    for step, logits in enumerate(unroll(head, embedding, text, rows, depth, tokens_at)):
        want = teacher[:, step : step + rows].float().softmax(-1)
        logits = logits.float()
        loss = logits.logsumexp(-1) - (want * logits).sum(-1)
        weight = counted[:, step : step + rows].float()
        losses.append((loss * weight).sum() / weight.sum().clamp(min=1))
    return torch.stack(losses)
