"""The EAGLE-3 draft layer in float64 NumPy, token by token, from the published op sequence.

    encode:  g = fc @ concat(features)
    step:    e = embedding[token];  eN = RMSNorm(e, input_layernorm)
             gN = RMSNorm(g, hidden_norm);  cat = [eN ; gN]
             attn = o_proj @ attention(q, k, v = {q, k, v}_proj @ cat; partial rotary)
             x1 = attn + g;  z = RMSNorm(x1, post_attention_layernorm)
             gsum = down @ (silu(gate @ z) * (up @ z)) + x1
             logits = lm_head @ RMSNorm(gsum, norm);  next g = gsum

with what the variants of EAGLE-3 change, each an argument that is off unless it is given: norms in
front of fc (one over all features, or one per aux layer), RMSNorm(g) as the residual, the normed
sum as the next g, norms on the heads of queries and keys, biases wherever there is one.

Written as loops over heads and slots, to share nothing with the code it judges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_chain.engines.config import DraftConfig

Vector = NDArray[np.float64]


class DraftOracle:
    """One draft with its KV: slot p holds what was last written at position p."""

    def __init__(
        self,
        weights: Mapping[str, NDArray[Any]],
        embedding: NDArray[Any],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        theta: float,
        eps: float,
        aux_layers: int = 3,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_before_residual: bool = False,
        norm_output: bool = False,
        qk_norm: bool = False,
        absolute_d2t: bool = False,
        logit_scale: float = 1.0,
    ) -> None:
        floats = {n: w for n, w in weights.items() if n not in ("d2t", "t2d")}
        self.w = {name: np.asarray(w, np.float64) for name, w in floats.items()}
        self.d2t = weights.get("d2t")
        self.embedding = np.asarray(embedding, np.float64)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rotary_dim, self.theta, self.eps = rotary_dim, theta, eps
        self.aux_layers, self.norm_before_fc, self.fc_norm = aux_layers, norm_before_fc, fc_norm
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.qk_norm, self.absolute_d2t = qk_norm, absolute_d2t
        self.logit_scale = logit_scale
        self.keys: dict[int, list[Vector]] = {}
        self.values: dict[int, list[Vector]] = {}

    @staticmethod
    def of(
        config: DraftConfig, weights: Mapping[str, NDArray[Any]], embedding: NDArray[Any]
    ) -> DraftOracle:
        """The oracle of a config; `lm_head.weight` must be among the weights."""
        return DraftOracle(
            weights,
            embedding,
            heads=config.attention_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            theta=config.rope_theta,
            eps=config.norm_eps,
            aux_layers=len(config.aux_layers),
            norm_before_fc=config.norm_before_fc,
            fc_norm=config.fc_norm,
            norm_before_residual=config.norm_before_residual,
            norm_output=config.norm_output,
            qk_norm=config.qk_norm,
            absolute_d2t=config.absolute_d2t,
            logit_scale=config.logit_scale,
        )

    def encode(self, feature: Vector) -> Vector:
        """The `g` of one trunk row."""
        if self.norm_before_fc:
            feature = self.norm(feature, "input_norm.weight")
        if self.fc_norm:
            width, parts = len(feature) // self.aux_layers, []
            for i in range(self.aux_layers):
                chunk = feature[i * width : (i + 1) * width]
                parts.append(self.norm(chunk, f"fc_norm.{i}.weight"))
            feature = np.concatenate(parts)
        return self.times("fc", feature) if "fc.weight" in self.w else feature

    def step(self, token: int, g: Vector, position: int) -> tuple[Vector, Vector]:
        """Write slot `position` and return the logits and the next g."""
        layer = "midlayer.self_attn."
        e = self.norm(self.embedding[token], "midlayer.input_layernorm.weight")
        g_normed = self.norm(g, "midlayer.hidden_norm.weight")
        cat = np.concatenate([e, g_normed])
        query = self.split(self.times(layer + "q_proj", cat), self.heads)
        key = self.split(self.times(layer + "k_proj", cat), self.kv_heads)
        value = self.split(self.times(layer + "v_proj", cat), self.kv_heads)
        if self.qk_norm:
            query = [self.norm(q, layer + "q_norm.weight") for q in query]
            key = [self.norm(k, layer + "k_norm.weight") for k in key]
        self.keys[position] = [self.turn(k, position) for k in key]
        self.values[position] = value
        out = []
        for h in range(self.heads):
            shared = h * self.kv_heads // self.heads
            q = self.turn(query[h], position)
            scores = []
            for slot in range(position + 1):
                scores.append(float(q @ self.keys[slot][shared]) / math.sqrt(self.head_dim))
            top = max(scores)
            shares = [math.exp(s - top) for s in scores]
            mixed = np.zeros(self.head_dim)
            for slot, share in enumerate(shares):
                mixed += share / sum(shares) * self.values[slot][shared]
            out.append(mixed)
        residual = g_normed if self.norm_before_residual else g
        x1 = self.times(layer + "o_proj", np.concatenate(out)) + residual
        z = self.norm(x1, "midlayer.post_attention_layernorm.weight")
        gate = self.times("midlayer.mlp.gate_proj", z)
        inner = gate / (1 + np.exp(-gate)) * self.times("midlayer.mlp.up_proj", z)
        gsum = self.times("midlayer.mlp.down_proj", inner) + x1
        last = self.norm(gsum, "norm.weight")
        logits = self.times("lm_head", last) * self.logit_scale
        return logits, last if self.norm_output else gsum

    def target(self, draft_id: int) -> int:
        """The trunk's id of a draft id."""
        if self.d2t is None:
            return draft_id
        return int(self.d2t[draft_id]) + (0 if self.absolute_d2t else draft_id)

    def times(self, name: str, x: Vector) -> Vector:
        """A product, with its bias if there is one."""
        y: Vector = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def split(self, x: Vector, heads: int) -> list[Vector]:
        """Consecutive rows of a projection belong to one head."""
        return [x[h * self.head_dim : (h + 1) * self.head_dim] for h in range(heads)]

    def norm(self, x: Vector, name: str) -> Vector:
        """RMSNorm with a plain weight."""
        size = math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + self.eps)
        return x / size * self.w[name]

    def turn(self, x: Vector, position: int) -> Vector:
        """Rotate a query or key."""
        return turned(x, position, self.rotary_dim, self.theta)


def turned(x: Vector, position: int, rotary_dim: int, theta: float) -> Vector:
    """Rotate dim i against dim i + half, for i below half of the rotary dims."""
    half = rotary_dim // 2
    y = x.copy()
    for i in range(half):
        angle = position * theta ** (-2 * i / rotary_dim)
        cos, sin = math.cos(angle), math.sin(angle)
        y[i] = x[i] * cos - x[i + half] * sin
        y[i + half] = x[i + half] * cos + x[i] * sin
    return y
