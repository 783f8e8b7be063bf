"""The prefill graphs of the profiles for ONNX Runtime's CUDA provider.

The products of P rows go to cuBLAS and attention to GroupQueryAttention. The delta rule is ONNX
Runtime's GatedDeltaNet in `ort-cuda`, and in `ort-fused` a chunked kernel of its own, with all that
stands around it in a layer.
"""

from __future__ import annotations

import onnx_ir as ir

from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.fused import DOMAIN, Fused
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
    """What of `ort-fused` takes many rows, among stock operators; weights as they are stored."""

    def __init__(self, g: GraphBuilder) -> None:
        super().__init__(g)
        self.fused = Fused(g)
        self.rows = g.spec.inputs[0].shape[0]  # of a call over a prompt

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

    def swiglu(self, x: ir.Value, prefix: str) -> ir.Value:
        """down(silu(gate(x)) * up(x))."""
        g, names = self.g, [f"{prefix}.{part}_proj.weight" for part in ("gate", "up")]
        like = (g.dtype, (self.rows, g.weight_shape(names[0])[0]))
        (inner,) = g.node(DOMAIN, "SiluMul", [*self.several(x, *names)], [like])
        return g.linear(inner, f"{prefix}.down_proj.weight")

    def embed(self, ids: ir.Value, table: str) -> ir.Value:
        """Rows of the embedding, with their shape."""
        return self.fused.embed(ids, table)


class FusedPrefill(PrefillRows, OrtCudaTrunk):
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

    def linear_mixer(self, x: ir.Value, i: int) -> ir.Value:
        """Gated DeltaNet in one node between products, from the raw projections to its norm."""
        g, low, config = self.g, self.low, self.config
        prefix, layer = f"layers.{i}.linear_attn", f"layers.{i}"
        parts = [f"{prefix}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
        states = [f"{layer}.{part}" for part in ("S", "log_key", "log_delta", "log_decay")]
        held = {pair.input: (pair.dtype, pair.shape) for pair in g.spec.states}
        vectors = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
        y, *results = g.node(
            DOMAIN,
            "GatedDeltaPrompt",
            [
                *low.several(x, *parts),
                *map(g.input, (f"{layer}.window", *states)),
                *(g.input("kept"), g.input("rows")),
                *(g.weight(f"{prefix}.{name}", "fp32") for name in vectors),
            ],
            [
                (g.dtype, (self.width, config.linear_value_heads * config.linear_value_dim)),
                *(held[name] for name in (*states, f"{layer}.window")),
            ],
            epsilon=config.norm_eps,
        )
        for name, result in zip((*states, f"{layer}.window"), results, strict=True):
            g.output(f"{name}.next", result)
        return g.linear(y, f"{prefix}.out_proj.weight")
