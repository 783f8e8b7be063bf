"""The `ort-cuda` profile: com.microsoft operators that ONNX Runtime 1.31 has CUDA kernels for.

What a Gated-DeltaNet layer keeps differs from the other profiles: S is [Hv, dv, dk], and instead of
a rank-1 log the inputs of the last call's rows are kept. Their kept prefix is replayed by a second
GatedDeltaNet node (`cu_seqlens` = [0, kept]): the same kernel over the same rows from the same S,
hence the same bits. Norm weights enter as 1 + w rounded to the compute dtype, because these norms
take their weights in no other.
"""

from __future__ import annotations

from functools import cached_property

import onnx_ir as ir

from eagle_chain.engines.derived import Derived
from eagle_chain.export.lowering import Heads, Rotary, rotary_tables
from eagle_chain.export.standard import Standard
from eagle_chain.export.trunk import TrunkGraph

DOMAIN = "com.microsoft"


class OrtCuda(Standard):
    """Building blocks in com.microsoft operators, the draft's attention as in `standard`."""

    # Captured in a CUDA graph, ScatterND of older versions reads host memory that is gone by the
    # replay (microsoft/onnxruntime #32121); TensorScatter reads none.
    int8_by_index = False

    def join(self, x: ir.Value, *names: str) -> ir.Value:
        """X [R, K] times several weights [N, K] in one product: [R, sum of N]."""
        g = self.g
        if len(names) == 1:
            return g.linear(x, names[0])
        return g.Gemm(x, g.derived(Derived(names, g.dtype)), transB=1)

    def several(self, x: ir.Value, *names: str) -> list[ir.Value]:
        """X [R, K] times each of several weights [N, K]."""
        sizes = [self.g.weight_shape(name)[0] for name in names]
        return self.g.split(self.join(x, *names), -1, *sizes)

    def gamma(self, weight: str, *, centred: bool) -> ir.Value:
        """The weight of a norm in the compute dtype."""
        return self.g.derived(Derived((weight,), self.g.dtype, float(centred)))

    def rms_norm(self, x: ir.Value, weight: str, eps: float, *, centred: bool) -> ir.Value:
        """RMSNormalization, whose statistics are fp32."""
        gamma = self.gamma(weight, centred=centred)
        return self.g.RMSNormalization(x, gamma, axis=-1, epsilon=eps)

    def add_norm(
        self, h: ir.Value, delta: ir.Value, weight: str, eps: float
    ) -> tuple[ir.Value, ir.Value]:
        """SkipSimplifiedLayerNormalization: h + delta, and its norm with 1 + w."""
        gamma = self.gamma(weight, centred=True)
        normed, _, _, total = self.ms(
            "SkipSimplifiedLayerNormalization", [h, delta, gamma], 4, epsilon=eps
        )
        return total, normed

    def swiglu(self, x: ir.Value, prefix: str) -> ir.Value:
        """down(silu(gate(x)) * up(x)) with gate and up in one product."""
        g = self.g
        gate, up = self.several(x, f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        return g.linear(g.Mul(self.silu(gate), up), f"{prefix}.down_proj.weight")

    def silu(self, x: ir.Value) -> ir.Value:
        """QuickGelu with slope 1."""
        return self.ms("QuickGelu", [x], 1, alpha=1.0)[0]

    def ms(
        self, op_type: str, inputs: list[ir.Value | None], outputs: int, **attributes: object
    ) -> list[ir.Value]:
        """A com.microsoft node with `outputs` results, whose shapes ONNX Runtime infers."""
        return self.g.node(DOMAIN, op_type, inputs, [None] * outputs, **attributes)


class OrtCudaTrunk(TrunkGraph):
    """The trunk in com.microsoft operators."""

    low: OrtCuda

    @property
    def own_attention(self) -> bool:
        """Whether the KV rows are such as GroupQueryAttention keeps them."""
        return self.options.kv_type == self.options.dtype

    def rotary(self) -> Rotary:
        """Whole tables in the compute dtype: the attention operator picks the rows."""
        g, config = self.g, self.config
        if not self.own_attention:
            return super().rotary()
        cos, sin = (
            g.constant(table.astype(g.numpy_dtype))
            for table in rotary_tables(self.options.kv_rows, config)
        )
        return Rotary(cos, sin, config.rotary_dim)

    def add_norm(self, h: ir.Value, delta: ir.Value, weight: str) -> tuple[ir.Value, ir.Value]:
        """One node."""
        return self.low.add_norm(h, delta, weight, self.config.norm_eps)

    def full_mixer(self, x: ir.Value, i: int, rotary: Rotary) -> ir.Value:
        """GroupQueryAttention, which rotates and writes the KV rows; `standard`'s for other KV."""
        if not self.own_attention:
            return super().full_mixer(x, i, rotary)
        g, low, config, width = self.g, self.low, self.config, self.width
        prefix = f"layers.{i}.self_attn"
        heads = Heads.of(config)
        wide, narrow = heads.query * heads.dim, heads.kv * heads.dim
        gated, key, value = low.several(x, *(f"{prefix}.{part}_proj.weight" for part in "qkv"))
        gated = g.reshape(gated, width, heads.query, 2 * heads.dim)
        query, gate = g.split(gated, -1, heads.dim, heads.dim)
        query = self.norm(query, f"{prefix}.q_norm.weight")
        key = self.norm(g.reshape(key, width, heads.kv, heads.dim), f"{prefix}.k_norm.weight")
        key, value = self.valid(key), self.valid(value, 1)
        mixed, *cache = low.ms(
            "GroupQueryAttention",
            [
                g.reshape(query, 1, width, wide),
                g.reshape(key, 1, width, narrow),
                g.reshape(value, 1, width, narrow),
                g.input(f"layers.{i}.key"),
                g.input(f"layers.{i}.value"),
                self.counts[0],
                g.int32(self.options.kv_rows),
                rotary.cos,
                rotary.sin,
            ],
            3,
            num_heads=heads.query,
            kv_num_heads=heads.kv,
            do_rotary=1,
            scale=heads.dim**-0.5,
        )
        g.output(f"layers.{i}.key.next", cache[0])
        g.output(f"layers.{i}.value.next", cache[1])
        mixed, gate = g.reshape(mixed, width, wide), g.reshape(gate, width, wide)
        return g.linear(g.Mul(mixed, g.Sigmoid(gate)), f"{prefix}.o_proj.weight")

    @cached_property
    def counts(self) -> tuple[ir.Value, ir.Value]:
        """Where the last row of the call stands, int32 [1]; `cu_seqlens` of the replay, [2]."""
        g = self.g
        last_row = g.Add(self.position, g.int32(self.width - 1))
        return last_row, g.Concat(g.int32(0), g.input("kept"), axis=0)

    def linear_mixer(self, x: ir.Value, i: int) -> ir.Value:
        """GatedDeltaNet twice: over the kept rows of the last call, and over this call's."""
        g, config, width = self.g, self.config, self.width
        prefix, state = f"layers.{i}.linear_attn", f"layers.{i}"
        u, z, beta, decay = self.projected(x, prefix)
        columns = g.Add(g.input("kept"), g.int32(*range(config.conv_kernel - 1)))
        past = g.Gather(g.input(f"{state}.window"), columns, axis=0)  # [3, C]
        g.output(f"{state}.window.next", self.window_columns(g.Concat(past, u, axis=0)))
        qkv = self.convolved(u, past, prefix)
        g.output(f"{state}.log_qkv.next", qkv)
        g.output(f"{state}.log_decay.next", decay)
        g.output(f"{state}.log_beta.next", beta)

        held = tuple(g.input(f"{state}.{part}") for part in ("log_qkv", "log_decay", "log_beta"))
        S = g.Unsqueeze(g.input(f"{state}.S"), g.ints(0))
        S = self.replayed(prefix, held, S)
        g.output(f"{state}.S.next", g.Squeeze(S, g.ints(0)))
        mixed, _ = self.delta(prefix, (qkv, decay, beta), S, self.all_rows)
        if g.wants(f"{state}.S_rows"):
            every = []
            for n in range(1, width + 1):
                first = (g.Slice(t, g.ints(0), g.ints(n), g.ints(0)) for t in (qkv, decay, beta))
                every.append(self.delta(prefix, tuple(first), S, g.int32(0, n))[1])
            g.output(f"{state}.S_rows", g.Concat(*every, axis=0))
        return self.normed(mixed, z, prefix)

    def projected(self, x: ir.Value, prefix: str) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """The conv's input and the gate, and beta and decay before their activations, fp32."""
        names = [f"{prefix}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
        u, z, beta, decay = self.low.several(x, *names)
        return u, z, self.g.fp32(beta), self.g.fp32(decay)

    def convolved(self, u: ir.Value, past: ir.Value, prefix: str) -> ir.Value:
        """The causal convolution and silu over u [W, C] behind `past` [3, C]."""
        g = self.g
        qkv, _ = self.low.ms(
            "CausalConvWithState",
            [
                g.Unsqueeze(u, g.ints(0)),
                g.weight(f"{prefix}.conv1d.weight"),
                None,
                g.Unsqueeze(past, g.ints(0)),
            ],
            2,
            activation="silu",
            channels_last=1,
        )
        return g.reshape(qkv, self.width, self.config.conv_channels)

    def normed(self, mixed: ir.Value, z: ir.Value, prefix: str) -> ir.Value:
        """What the delta rule gave through the gated norm and out_proj, [W, H]."""
        g, config = self.g, self.config
        wide = config.linear_value_heads * config.linear_value_dim
        normed, *_ = self.low.ms(
            "GatedRMSNorm",
            [
                g.reshape(mixed, self.width, wide),
                g.derived(Derived((f"{prefix}.norm.weight",), g.dtype)),
                z,
            ],
            1,
            epsilon=config.norm_eps,
            activation="silu",
        )
        return g.linear(normed, f"{prefix}.out_proj.weight")

    def replayed(self, prefix: str, held: tuple[ir.Value, ...], S: ir.Value) -> ir.Value:
        """S after the kept rows of the last call; the CUDA kernel reads no row behind them."""
        return self.delta(prefix, held, S, self.counts[1])[1]

    @property
    def all_rows(self) -> ir.Value:
        """`cu_seqlens` of a whole call."""
        return self.g.int32(0, self.width)

    def delta(
        self,
        prefix: str,
        rows: tuple[ir.Value, ...],
        S: ir.Value,
        lengths: ir.Value,
    ) -> tuple[ir.Value, ir.Value]:
        """Outputs and state after the first rows of (packed qkv, raw decay, raw beta)."""
        qkv, decay, beta = rows
        g = self.g
        vectors = [g.weight(f"{prefix}.{name}", "fp32") for name in ("A_log", "dt_bias")]
        output, state = self.low.ms(
            "GatedDeltaNet",
            [qkv, None, None, lengths, decay, beta, S, *vectors],
            2,
            gate_activation="qwen",
            beta_activation="sigmoid",
            qk_l2_norm=1,
            update_rule="gated_delta",
        )
        return output, state
