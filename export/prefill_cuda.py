"""The prefill graphs of the profiles for ONNX Runtime's CUDA provider, in its own operators.

The kernels of `ort-fused` take a few rows; for P rows its products go to cuBLAS, attention to
GroupQueryAttention and the delta rule to GatedDeltaNet. Only its norms stay.
"""

from __future__ import annotations

import onnx_ir as ir

from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.fused import Fused
from eagle_chain.export.ort_cuda import OrtCuda, OrtCudaTrunk
from eagle_chain.export.prefill import PrefillRows

SHUT = -1e30  # a gate or a decay before its activation: beta 0, decay 1


class OrtCudaPrefill(PrefillRows, OrtCudaTrunk):
    """As the trunk of `ort-cuda`; S [Hv, dv, dk]."""

    def linear_mixer(self, x: ir.Value, i: int) -> ir.Value:
        """GatedDeltaNet twice: over the kept rows of the last call, and over this call's."""
        g, config = self.g, self.config
        prefix, state = f"layers.{i}.linear_attn", f"layers.{i}"
        u, z, beta, decay = self.projected(x, prefix)
        columns = g.Add(g.input("kept"), g.int32(*range(config.conv_kernel - 1)))
        past = self.past(f"{state}.window", columns)
        self.window(f"{state}.window.next", g.Concat(past, u, axis=0))
        rows = (
            self.valid(self.convolved(u, past, prefix), 1),
            *(self.masked(gate, 1, g.scalar(SHUT)) for gate in (decay, beta)),
        )
        mixed, S = self.delta(prefix, rows, self.state_before(i), self.all_rows)
        self.state_after(i, S)
        self.blank_log(i)
        return self.normed(mixed, z, prefix)

    def past(self, window: str, columns: ir.Value) -> ir.Value:
        """The conv's inputs before row 0, [3, C]."""
        return self.g.Gather(self.g.input(window), columns, axis=0)

    def window(self, name: str, inputs: ir.Value) -> None:
        """The conv's inputs [3 + P, C] that the next call may read."""
        self.g.output(name, self.window_columns(inputs))

    def state_before(self, i: int) -> ir.Value:
        """S with the kept rows of the last call folded in, [1, Hv, dv, dk]."""
        g, state, width = self.g, f"layers.{i}", self.options.width
        kept = g.reshape(self.was_kept, width, 1)
        rows = tuple(
            g.Where(kept, g.input(f"{state}.{part}"), otherwise)
            for part, otherwise in (
                ("log_qkv", g.compute_scalar(0.0)),
                ("log_decay", g.scalar(SHUT)),
                ("log_beta", g.scalar(SHUT)),
            )
        )
        S = g.Unsqueeze(g.input(f"{state}.S"), g.ints(0))
        return self.delta(f"{state}.linear_attn", rows, S, g.int32(0, width))[1]

    def state_after(self, i: int, S: ir.Value) -> None:
        """S [1, Hv, dv, dk] as it leaves."""
        self.g.output(f"layers.{i}.S.next", self.g.Squeeze(S, self.g.ints(0)))


class StockFused(OrtCuda):
    """The norms of `ort-fused` among stock operators; weights as the checkpoint holds them."""

    def __init__(self, g: GraphBuilder) -> None:
        super().__init__(g)
        self.fused = Fused(g)

    def several(self, x: ir.Value, *names: str) -> list[ir.Value]:
        """X [R, K] times each of several weights [N, K]."""
        return [self.g.linear(x, name) for name in names]

    def shaped(self, x: ir.Value, *shape: int) -> ir.Value:
        """`x`, of the compute dtype, with its shape noted."""
        return self.fused.shaped(x, *shape)

    def rms_norm(self, x: ir.Value, weight: str, eps: float, *, centred: bool) -> ir.Value:
        """RMSNorm of x [R, H], whose shape is known."""
        width = self.g.weight_shape(weight)[0]
        if width > self.fused.norm_width:
            return super().rms_norm(x, weight, eps, centred=centred)
        return self.fused.rms_norm(x, weight, eps, centred=centred)

    def add_norm(
        self, h: ir.Value, delta: ir.Value, weight: str, eps: float
    ) -> tuple[ir.Value, ir.Value]:
        """H + delta, and its norm with 1 + w."""
        return self.fused.add_norm(h, delta, weight, eps, centred=True)

    def embed(self, ids: ir.Value, table: str) -> ir.Value:
        """Rows of the embedding, with their shape."""
        return self.fused.embed(ids, table)


class FusedPrefill(OrtCudaPrefill):
    """The trunk of `ort-fused` over P rows; S and log as its decode engine has them."""

    low: StockFused

    def norm(self, x: ir.Value, weight: str) -> ir.Value:
        """RMSNorm over the last axis of x [P, H], or of [P, heads, head_dim] for a head's norm."""
        config, dim = self.config, self.g.weight_shape(weight)[0]
        heads = {"q_norm.weight": config.attention_heads, "k_norm.weight": config.kv_heads}
        middle = [count for name, count in heads.items() if weight.endswith(name)]
        return super().norm(self.low.shaped(x, self.width, *middle, dim), weight)

    def add_norm(self, h: ir.Value, delta: ir.Value, weight: str) -> tuple[ir.Value, ir.Value]:
        """One node."""
        delta = self.low.shaped(delta, self.width, self.config.hidden_size)
        return super().add_norm(h, delta, weight)

    def past(self, window: str, columns: ir.Value) -> ir.Value:
        """The conv's inputs before row 0, [3, C]; the window is [C, 3 + W] here."""
        g = self.g
        return g.Transpose(g.Gather(g.input(window), columns, axis=1), perm=[1, 0])

    def window(self, name: str, inputs: ir.Value) -> None:
        """The conv's inputs [3 + P, C] that the next call may read."""
        self.g.output(name, self.g.Transpose(self.window_columns(inputs), perm=[1, 0]))

    def state_before(self, i: int) -> ir.Value:
        """S with the log of the last call folded in, transposed for the operator."""
        S = self.g.reshape(self.committed_state(i), 1, *self.state_shape())
        return self.g.Transpose(S, perm=[0, 1, 3, 2])

    def state_after(self, i: int, S: ir.Value) -> None:
        """S [1, Hv, dv, dk] as it leaves, transposed back."""
        S = self.g.Transpose(S, perm=[0, 1, 3, 2])
        self.g.output(f"layers.{i}.S.next", self.g.reshape(S, *self.state_shape()))
