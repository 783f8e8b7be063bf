"""The Qwen3.5 text trunk in plain PyTorch: whole windows to train, token by token to generate.

Parameter names are those of the published checkpoints below `model.language_model.`, so a state
dict is a checkpoint. The parallel form is compiled layer by layer on a GPU; transformers'
Qwen3_5ForCausalLM with the same weights gives the same logits (`tests/test_demo_pair.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64  # rows of the gated delta rule that are solved together


@dataclass(frozen=True)
class TrunkConfig:
    """The fields of `text_config` that shape the trunk."""

    vocab: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    rope_theta: float
    rotary_dim: int
    eps: float
    layer_types: tuple[str, ...]

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> TrunkConfig:
        """Read the nested config of a published Qwen3.5 folder."""
        text = config["text_config"]
        if not config.get("tie_word_embeddings", text.get("tie_word_embeddings")):
            raise ValueError("tie_word_embeddings is false: only trunks with a tied head are read")
        rope = text["rope_parameters"]
        return cls(
            vocab=text["vocab_size"],
            hidden=text["hidden_size"],
            ffn=text["intermediate_size"],
            heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_dim=text["head_dim"],
            key_heads=text["linear_num_key_heads"],
            value_heads=text["linear_num_value_heads"],
            key_dim=text["linear_key_head_dim"],
            value_dim=text["linear_value_head_dim"],
            conv=text["linear_conv_kernel_dim"],
            rope_theta=rope["rope_theta"],
            rotary_dim=int(text["head_dim"] * rope["partial_rotary_factor"]),
            eps=text["rms_norm_eps"],
            layer_types=tuple(text["layer_types"]),
        )


def rotary_table(positions: Tensor, theta: float, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the half-split rotation, each [T, rotary_dim / 2], float32."""
    exponent = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[:, None] * theta ** (-exponent / rotary_dim)
    return angle.cos(), angle.sin()


def rotate(
    x: Tensor,  # [B, heads, T, head_dim]
    table: tuple[Tensor, Tensor],
) -> Tensor:
    """Rotate the leading dimensions of each head; the others pass."""
    cos, sin = table
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., heads * dim] to [..., heads, dim]."""
    return x.reshape(*x.shape[:-1], heads, -1)


def split_chunks(x: Tensor) -> Tensor:
    """[B, heads, T, ...] to [B, heads, T / CHUNK, CHUNK, ...]."""
    return x.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:])


class ZeroCentredNorm(nn.Module):
    """RMSNorm whose stored weight is the distance from one."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis, in float32."""
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * (1 + self.weight)).to(x.dtype)


class GatedNorm(nn.Module):
    """RMSNorm with a plain weight, gated by silu(z) after the norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Normalise the last axis of x, then multiply by the weight and by silu(z), in float32."""
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return h * self.weight * F.silu(z.float())


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Build a linear map without bias."""
    return nn.Linear(inputs, outputs, bias=False)


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, ffn)
        self.up_proj = linear(hidden, ffn)
        self.down_proj = linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows [..., H] to [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    """Grouped-query attention with q/k norms, partial rotation and an output gate."""

    def __init__(self, c: TrunkConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = linear(c.hidden, 2 * c.heads * c.head_dim)  # per head: query, then gate
        self.k_proj = linear(c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = linear(c.hidden, c.kv_heads * c.head_dim)
        self.o_proj = linear(c.heads * c.head_dim, c.hidden)
        self.q_norm = ZeroCentredNorm(c.head_dim, c.eps)
        self.k_norm = ZeroCentredNorm(c.head_dim, c.eps)

    def project(
        self,
        x: Tensor,  # [B, T, H]
        table: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value as [B, heads, T, head_dim] and the gate as [B, T, heads * head_dim]."""
        c = self.c
        q, gate = split_heads(self.q_proj(x), c.heads).chunk(2, -1)
        k = split_heads(self.k_proj(x), c.kv_heads)
        v = split_heads(self.v_proj(x), c.kv_heads).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), table)
        k = rotate(self.k_norm(k).transpose(1, 2), table)
        return q, k, v, gate.flatten(-2)

    def finish(
        self,
        mixed: Tensor,  # [B, heads, T, head_dim]
        gate: Tensor,
    ) -> Tensor:
        """Gate the mixed values and project them back to the residual width."""
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2) * gate.sigmoid())
        return out

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """All rows [B, T, H] of a window at once."""
        q, k, v, gate = self.project(x, table)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.finish(mixed, gate)

    def step(
        self, x: Tensor, table: tuple[Tensor, Tensor], state: dict[str, Tensor], t: int
    ) -> Tensor:
        """One row [B, 1, H] at position t; writes its key and value into the state."""
        q, k, v, gate = self.project(x, table)
        state["k"][:, :, t : t + 1] = k
        state["v"][:, :, t : t + 1] = v
        past_k, past_v = state["k"][:, :, : t + 1], state["v"][:, :, : t + 1]
        q = q.reshape(len(q), self.c.kv_heads, -1, self.c.head_dim)  # [B, kv, group, head_dim]
        weight = (q @ past_k.mT * self.c.head_dim**-0.5).softmax(-1)
        return self.finish((weight @ past_v).flatten(1, 2).unsqueeze(2), gate)

    def empty_state(self, batch: int, capacity: int) -> dict[str, Tensor]:
        """Keys and values for `capacity` rows."""
        shape = (batch, self.c.kv_heads, capacity, self.c.head_dim)
        like = self.k_proj.weight
        return {"k": like.new_zeros(shape), "v": like.new_zeros(shape)}


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Invert I + a for strictly lower triangular a [..., C, C], C a power of two.

    Blocks of 1, 2, 4, ... rows are joined in pairs:
    [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]].
    """
    size = a.shape[-1]
    row = torch.arange(size, device=a.device)
    inverse = torch.eye(size, device=a.device, dtype=a.dtype).expand_as(a)
    block = 1
    while block < size:
        lower, upper = row[:, None] // block, row[None, :] // block
        joint = a * ((lower % 2 == 1) & (lower == upper + 1))
        inverse = inverse - (joint if block == 1 else inverse @ joint @ inverse)
        block *= 2
    return inverse


def chunked_delta_rule(
    q: Tensor,  # [B, heads, T, dk], normalised and scaled
    k: Tensor,  # [B, heads, T, dk], normalised
    v: Tensor,  # [B, heads, T, dv]
    log_decay: Tensor,  # [B, heads, T]
    beta: Tensor,  # [B, heads, T]
) -> Tensor:
    """Read out o = S^T q after every S <- decay S; S <- S + k (beta (v - S^T k))^T, by chunks."""
    length = q.shape[2]
    pad = -length % CHUNK
    q, k, v = (split_chunks(F.pad(x, (0, 0, 0, pad))) for x in (q, k, v))
    log_decay, beta = (split_chunks(F.pad(x, (0, pad))) for x in (log_decay, beta))

    total = log_decay.cumsum(-1)
    row = torch.arange(CHUNK, device=q.device)
    causal = row[:, None] >= row[None, :]
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    k_beta = k * beta[..., None]
    inverse = unit_lower_inverse(((k_beta @ k.mT) * between).tril(-1))
    written = inverse @ (v * beta[..., None])
    erased = inverse @ (k_beta * total.exp()[..., None])
    inside = (q @ k.mT) * between
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    carry = total[..., -1].exp()[..., None, None]

    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    out = []
    for n in range(q.shape[2]):
        delta = written[:, :, n] - erased[:, :, n] @ state
        out.append(q[:, :, n] @ state + inside[:, :, n] @ delta)
        state = state * carry[:, :, n] + k[:, :, n].mT @ delta
    return torch.cat(out, 2)[:, :, :length]


class GatedDeltaNet(nn.Module):
    """The linear layer: causal conv, gated delta rule, gated norm."""

    def __init__(self, c: TrunkConfig) -> None:
        super().__init__()
        self.c = c
        keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
        self.splits = [keys, keys, values]
        self.in_proj_qkv = linear(c.hidden, 2 * keys + values)
        self.in_proj_z = linear(c.hidden, values)
        self.in_proj_b = linear(c.hidden, c.value_heads)
        self.in_proj_a = linear(c.hidden, c.value_heads)
        width = 2 * keys + values
        self.conv1d = nn.Conv1d(width, width, c.conv, groups=width, bias=False)
        self.A_log = nn.Parameter(torch.empty(c.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(c.value_heads))
        self.norm = GatedNorm(c.value_dim, c.eps)
        self.out_proj = linear(values, c.hidden)

    def conv(self, window: Tensor) -> Tensor:
        """Four taps and silu over a window [B, conv - 1 + T, width], the newest row last."""
        # Shifted multiply-adds: the backward of a depthwise Conv1d is slow on a GPU.
        taps, rows = self.conv1d.weight[:, 0], window.shape[1] - self.c.conv + 1
        parts = [window[:, j : j + rows] * taps[:, j] for j in range(self.c.conv)]
        return F.silu(sum(parts[1:], parts[0]))

    def project(
        self,
        x: Tensor,  # [B, T, H]
        mixed: Tensor,  # [B, T, width], after the conv
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v [B, heads, T, dim], log decay and beta [B, heads, T], float32."""
        c = self.c
        q, k, v = torch.split(mixed.float(), self.splits, -1)
        q, k = (split_heads(t, c.key_heads).transpose(1, 2) for t in (q, k))
        v = split_heads(v, c.value_heads).transpose(1, 2)
        q, k = (t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k = (t.repeat_interleave(c.value_heads // c.key_heads, 1) for t in (q, k))
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        rate = F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        log_decay = (-self.A_log.exp() * rate).transpose(1, 2)
        return q * c.key_dim**-0.5, k, v, log_decay, beta

    def finish(self, x: Tensor, read: Tensor) -> Tensor:
        """Norm and gate the read-out [B, heads, T, dv], project it to the residual width."""
        z = split_heads(self.in_proj_z(x), self.c.value_heads)
        out: Tensor = self.out_proj(self.norm(read.transpose(1, 2), z).flatten(-2))
        return out

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """All rows [B, T, H] of a window at once."""
        window = F.pad(self.in_proj_qkv(x), (0, 0, self.c.conv - 1, 0))
        parts = self.project(x, self.conv(window))
        with torch.autocast(x.device.type, enabled=False):
            read = chunked_delta_rule(*parts)
        return self.finish(x, read)

    def step(
        self, x: Tensor, table: tuple[Tensor, Tensor], state: dict[str, Tensor], t: int
    ) -> Tensor:
        """One row [B, 1, H]; updates the conv window and S in place."""
        window = torch.cat([state["conv"], self.in_proj_qkv(x)], 1)
        state["conv"] = window[:, 1:]
        q, k, v, log_decay, beta = (p.squeeze(2) for p in self.project(x, self.conv(window)))
        memory, decay = state["S"], log_decay.exp()[..., None]
        # Both reads of the old S in one pass over it; S itself is the traffic that counts.
        old_k, old_q = (torch.stack([k, q], -2) @ memory).unbind(-2)
        delta = beta[..., None] * (v - decay * old_k)
        memory.mul_(decay[..., None]).addcmul_(k[..., None], delta[..., None, :])
        read = decay * old_q + (q * k).sum(-1, keepdim=True) * delta
        return self.finish(x, read.unsqueeze(2))

    def empty_state(self, batch: int, capacity: int) -> dict[str, Tensor]:
        """The conv window of raw projections and S."""
        c, like = self.c, self.A_log
        return {
            "conv": like.new_zeros(batch, c.conv - 1, sum(self.splits)),
            "S": like.new_zeros(batch, c.value_heads, c.key_dim, c.value_dim),
        }


class Layer(nn.Module):
    """One block: mixer and MLP, each behind its norm."""

    def __init__(self, c: TrunkConfig, kind: str) -> None:
        super().__init__()
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = Attention(c)
        self.kind = kind
        self.input_layernorm = ZeroCentredNorm(c.hidden, c.eps)
        self.post_attention_layernorm = ZeroCentredNorm(c.hidden, c.eps)
        self.mlp = Mlp(c.hidden, c.ffn)

    @property
    def mixer(self) -> GatedDeltaNet | Attention:
        """The mixer of this layer, of either kind."""
        return self.linear_attn if self.kind == "linear_attention" else self.self_attn

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """All rows [B, T, H] of a window at once."""
        x = x + self.mixer(self.input_layernorm(x), table)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def step(
        self, x: Tensor, table: tuple[Tensor, Tensor], state: dict[str, Tensor], t: int
    ) -> Tensor:
        """One row [B, 1, H] at position t."""
        x = x + self.mixer.step(self.input_layernorm(x), table, state, t)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


@dataclass
class DecodeState:
    """What a batch of sequences carries from one token to the next."""

    layers: list[dict[str, Tensor]]
    length: int = 0


class Trunk(nn.Module):
    """Embedding, layers, final norm; the head is the embedding."""

    def __init__(self, config: TrunkConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = ZeroCentredNorm(config.hidden, config.eps)

    @property
    def blocks(self) -> list[Layer]:
        """The layers, with their type."""
        return cast("list[Layer]", list(self.layers))

    def table(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Rotary table for `length` positions from `start`."""
        c = self.config
        positions = torch.arange(start, start + length, device=self.embed_tokens.weight.device)
        return rotary_table(positions, c.rope_theta, c.rotary_dim)

    def forward(
        self,
        ids: Tensor,  # [B, T]
        aux_layers: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden state after the final norm, stream after each aux layer, [B, T, H] each."""
        table = self.table(0, ids.shape[1])
        x, features = self.embed_tokens(ids), list[Tensor]()
        for i, layer in enumerate(self.layers):
            x = layer(x, table)
            if i in aux_layers:
                features.append(x)
        return self.norm(x), features

    def step(
        self,
        ids: Tensor,  # [B]
        state: DecodeState,
        aux_layers: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Same as `forward` for the next token of each sequence: [B, H] each."""
        table = self.table(state.length, 1)
        x, features = self.embed_tokens(ids)[:, None], list[Tensor]()
        for i, layer in enumerate(self.blocks):
            x = layer.step(x, table, state.layers[i], state.length)
            if i in aux_layers:
                features.append(x[:, 0])
        state.length += 1
        return self.norm(x)[:, 0], features

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary for hidden states after the final norm."""
        return F.linear(hidden, self.embed_tokens.weight)

    def empty_state(self, batch: int, capacity: int) -> DecodeState:
        """State of `batch` sequences before their first token."""
        return DecodeState([layer.mixer.empty_state(batch, capacity) for layer in self.blocks])


@torch.no_grad()
def initialise(trunk: Trunk) -> None:
    """Give a new trunk its starting weights."""
    nn.init.normal_(trunk.embed_tokens.weight, std=0.02)
    for module in trunk.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.6 * module.in_features**-0.5)
        if isinstance(module, GatedDeltaNet):
            nn.init.normal_(module.conv1d.weight, std=0.3)
            heads = module.c.value_heads
            # From slow to fast forgetting: rates 1..16, steps 0.1..0.001 (as in Mamba 2).
            module.A_log.copy_(torch.linspace(1, 16, heads).log())
            step = torch.logspace(-1, -3, heads)
            module.dt_bias.copy_(step.expm1().log())
    for layer in trunk.blocks:  # blocks start as the identity
        mixer = layer.mixer
        out = mixer.out_proj if isinstance(mixer, GatedDeltaNet) else mixer.o_proj
        nn.init.zeros_(out.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
