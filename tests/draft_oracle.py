"""The EAGLE-3 draft layer in float64 NumPy, token by token, from the published op sequence.

    encode:  g = fc @ concat(features)
    step:    e = embedding[token];  eN = RMSNorm(e, input_layernorm)
             gN = RMSNorm(g, hidden_norm);  cat = [eN ; gN]
             attn = o_proj @ attention(q, k, v = {q, k, v}_proj @ cat; partial rotary)
             x1 = attn + g;  z = RMSNorm(x1, post_attention_layernorm)
             gsum = down @ (silu(gate @ z) * (up @ z)) + x1
             logits = lm_head @ RMSNorm(gsum, norm);  next g = gsum

Written as loops over heads and slots, to share nothing with the code it judges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    ) -> None:
        floats = {n: w for n, w in weights.items() if n not in ("d2t", "t2d")}
        self.w = {name: np.asarray(w, np.float64) for name, w in floats.items()}
        self.d2t = weights.get("d2t")
        self.embedding = np.asarray(embedding, np.float64)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rotary_dim, self.theta, self.eps = rotary_dim, theta, eps
        self.keys: dict[int, list[Vector]] = {}
        self.values: dict[int, list[Vector]] = {}

    def encode(self, feature: Vector) -> Vector:
        """The `g` of one trunk row."""
        g: Vector = self.w["fc.weight"] @ feature
        return g

    def step(self, token: int, g: Vector, position: int) -> tuple[Vector, Vector]:
        """Write slot `position` and return the logits and the next g."""
        layer = "midlayer.self_attn."
        e = self.norm(self.embedding[token], "midlayer.input_layernorm.weight")
        cat = np.concatenate([e, self.norm(g, "midlayer.hidden_norm.weight")])
        query = self.split(self.w[layer + "q_proj.weight"] @ cat, self.heads)
        key = self.split(self.w[layer + "k_proj.weight"] @ cat, self.kv_heads)
        value = self.split(self.w[layer + "v_proj.weight"] @ cat, self.kv_heads)
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
        x1 = self.w[layer + "o_proj.weight"] @ np.concatenate(out) + g
        z = self.norm(x1, "midlayer.post_attention_layernorm.weight")
        gate = self.w["midlayer.mlp.gate_proj.weight"] @ z
        inner = gate / (1 + np.exp(-gate)) * (self.w["midlayer.mlp.up_proj.weight"] @ z)
        gsum = self.w["midlayer.mlp.down_proj.weight"] @ inner + x1
        return self.w["lm_head.weight"] @ self.norm(gsum, "norm.weight"), gsum

    def target(self, draft_id: int) -> int:
        """The trunk's id of a draft id."""
        return draft_id if self.d2t is None else draft_id + int(self.d2t[draft_id])

    def split(self, x: Vector, heads: int) -> list[Vector]:
        """Consecutive rows of a projection belong to one head."""
        return [x[h * self.head_dim : (h + 1) * self.head_dim] for h in range(heads)]

    def norm(self, x: Vector, name: str) -> Vector:
        """RMSNorm with a plain weight."""
        size = math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + self.eps)
        return x / size * self.w[name]

    def turn(self, x: Vector, position: int) -> Vector:
        """Rotate dim i against dim i + half, for i below half of the rotary dims."""
        half = self.rotary_dim // 2
        y = x.copy()
        for i in range(half):
            angle = position * self.theta ** (-2 * i / self.rotary_dim)
            cos, sin = math.cos(angle), math.sin(angle)
            y[i] = x[i] * cos - x[i + half] * sin
            y[i + half] = x[i + half] * cos + x[i] * sin
        return y
