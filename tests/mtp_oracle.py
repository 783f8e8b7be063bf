"""The MTP head in float64 NumPy, token by token, from the fact sheet of Qwen3.5.

    e = RMS(embedding[token], pre_fc_norm_embedding);  n = RMS(h, pre_fc_norm_hidden)
    x = fc @ [e ; n]
    x += o_proj @ (attention(RMS(x, input_layernorm)) * sigmoid(gate))
    x += down @ (silu(gate z) * up z),  z = RMS(x, post_attention_layernorm)
    out = RMS(x, norm);  logits = head @ out;  next h = out

RMS multiplies by 1 + w. q_proj holds per head the query rows, then the gate rows; q and k are
normed per head before the rotation of their first dims. Loops over heads and slots, to share
nothing with the code it judges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.draft_oracle import turned

Vector = NDArray[np.float64]


class MtpOracle:
    """One head with its KV: slot p holds what was last written at position p."""

    def __init__(
        self,
        weights: Mapping[str, NDArray[Any]],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        theta: float,
        eps: float,
    ) -> None:
        self.w = {name: np.asarray(w, np.float64) for name, w in weights.items()}
        self.table = self.w["embed_tokens.weight"]
        self.head = self.w.get("lm_head.weight", self.table)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rotary_dim, self.theta, self.eps = rotary_dim, theta, eps
        self.keys: dict[int, list[Vector]] = {}
        self.values: dict[int, list[Vector]] = {}

    def step(self, token: int, hidden: Vector, position: int) -> tuple[Vector, Vector]:
        """Write slot `position` and return the logits and the next hidden."""
        e = self.norm(self.table[token], "mtp.pre_fc_norm_embedding.weight")
        n = self.norm(hidden, "mtp.pre_fc_norm_hidden.weight")
        x = self.w["mtp.fc.weight"] @ np.concatenate([e, n])
        x = x + self.attention(self.norm(x, "mtp.layers.0.input_layernorm.weight"), position)
        z = self.norm(x, "mtp.layers.0.post_attention_layernorm.weight")
        gate = self.w["mtp.layers.0.mlp.gate_proj.weight"] @ z
        inner = gate / (1 + np.exp(-gate)) * (self.w["mtp.layers.0.mlp.up_proj.weight"] @ z)
        x = x + self.w["mtp.layers.0.mlp.down_proj.weight"] @ inner
        out = self.norm(x, "mtp.norm.weight")
        return self.head @ out, out

    def attention(self, x: Vector, position: int) -> Vector:
        """Gated attention over slots 0..position."""
        layer, dim = "mtp.layers.0.self_attn.", self.head_dim
        both = self.w[layer + "q_proj.weight"] @ x
        key = self.w[layer + "k_proj.weight"] @ x
        value = self.w[layer + "v_proj.weight"] @ x
        self.keys[position], self.values[position] = [], []
        for h in range(self.kv_heads):
            k = self.norm(key[h * dim : (h + 1) * dim], layer + "k_norm.weight")
            self.keys[position].append(self.turn(k, position))
            self.values[position].append(value[h * dim : (h + 1) * dim])
        out = []
        for h in range(self.heads):
            query = both[2 * h * dim : (2 * h + 1) * dim]
            gate = both[(2 * h + 1) * dim : (2 * h + 2) * dim]
            q = self.turn(self.norm(query, layer + "q_norm.weight"), position)
            shared = h * self.kv_heads // self.heads
            scores = [
                float(q @ self.keys[slot][shared]) / math.sqrt(dim) for slot in range(position + 1)
            ]
            shares = [math.exp(s - max(scores)) for s in scores]
            mixed = np.zeros(dim)
            for slot, share in enumerate(shares):
                mixed += share / sum(shares) * self.values[slot][shared]
            out.append(mixed / (1 + np.exp(-gate)))
        y: Vector = self.w[layer + "o_proj.weight"] @ np.concatenate(out)
        return y

    def norm(self, x: Vector, name: str) -> Vector:
        """RMSNorm with a weight stored around zero."""
        size = math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + self.eps)
        return x / size * (1 + self.w[name])

    def turn(self, x: Vector, position: int) -> Vector:
        """Rotate a query or key."""
        return turned(x, position, self.rotary_dim, self.theta)
