"""Which form of the recurrence does a TensorRT compile right? Builds the demo trunk in several.

    python tests/gpu/trt_bisect.py OUT [variant ...]

For each variant: export of the demo pair in fp32, build, one call on an empty cache with S_rows as
outputs, and the first tensors that are not those of ONNX Runtime on the CPU or not finite. Needs
TensorRT, onnx and onnx-ir, and onnxruntime or a reference saved by an earlier run (OUT/want.npz).
Why: TensorRT 8.6.0 on an H200 gave NaN from the second row of layer 2 on, at every optimisation
level, where the recurrence lies inside one fused region; layers 0 and 1, whose Softplus keeps the
recurrence outside of such a region, were right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eagle_chain.engines.cli import main as command
from eagle_chain.engines.manifest import Manifest
from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.lowering import DeltaRows, Portable
from eagle_chain.runtime.buffers import HostMemory
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.ort import OrtSession
from eagle_chain.runtime.trt import open_sessions

DEMO = Path(__file__).resolve().parents[2] / "demo"
IDS = (1, 200, 300, 400, 500)
HEADS, GROUP, DIM = 2, 2, 128  # of the demo trunk's linear layers


def flat(g: GraphBuilder, x: Any, *tail: int) -> Any:
    """[1, Hk, 1 or G, ...] -> [Hv, ...]: three axes instead of five."""
    return g.reshape(g.Expand(x, g.ints(1, HEADS, GROUP, *tail)), HEADS * GROUP, *tail)


def flat_rule(products: bool) -> Callable[..., Any]:
    """The delta rule over [Hv, dk, dv]; `products`: sums over dk as matrix products."""

    def rule(self: Portable, S: Any, rows: DeltaRows) -> Any:
        g = self.g
        S = g.reshape(S, HEADS * GROUP, DIM, DIM)
        outputs, deltas, states = [], [], []

        def against(x: Any, state: Any) -> Any:
            if products:
                return g.MatMul(g.Transpose(x, perm=[0, 2, 1]), state)
            return g.ReduceSum(g.Mul(state, x), g.ints(-2), keepdims=1)

        for query, key, value, decay, beta in zip(
            rows.query, rows.key, rows.value, rows.decay, rows.beta, strict=True
        ):
            query, key = flat(g, query, DIM, 1), flat(g, key, DIM, 1)
            value = flat(g, value, 1, DIM)
            decayed = g.Mul(S, flat(g, decay, 1, 1))
            delta = g.Mul(flat(g, beta, 1, 1), g.Sub(value, against(key, decayed)))
            S = g.Add(decayed, g.Mul(key, delta))
            outputs.append(g.reshape(against(query, S), 1, HEADS, GROUP, 1, DIM))
            deltas.append(g.reshape(delta, 1, HEADS, GROUP, 1, DIM))
            states.append(S)
        return outputs, deltas, states

    return rule


def softplus(self: GraphBuilder, x: Any) -> Any:
    """log(1 + exp(x)) from primitives, which stays in the region of its neighbours."""
    tail = self.Log(self.Add(self.scalar(1.0), self.Exp(self.Neg(self.Abs(x)))))
    return self.Add(self.Max(x, self.scalar(0.0)), tail)


VARIANTS: dict[str, dict[tuple[type, str], Any]] = {
    "as-exported": {},
    "softplus": {(GraphBuilder, "Softplus"): softplus},
    "flat": {(Portable, "delta_rule"): flat_rule(products=False)},
    "products": {(Portable, "delta_rule"): flat_rule(products=True)},
    "flat-softplus": {
        (Portable, "delta_rule"): flat_rule(products=False),
        (GraphBuilder, "Softplus"): softplus,
    },
    "products-softplus": {
        (Portable, "delta_rule"): flat_rule(products=True),
        (GraphBuilder, "Softplus"): softplus,
    },
}


def export(folder: Path, patches: dict[tuple[type, str], Any]) -> None:
    """Export the demo pair with some methods replaced."""
    held = {(owner, name): owner.__dict__.get(name) for owner, name in patches}
    for (owner, name), method in patches.items():
        setattr(owner, name, method)
    try:
        words = ["export", str(DEMO / "trunk"), str(DEMO / "draft"), "-o", str(folder)]
        options = ["--dtype", "fp32", "--capacity", "128", "--debug", "logits,S_rows"]
        if command([*words, *options]) != 0:
            raise SystemExit("export failed")
    finally:
        for (owner, name), method in held.items():
            delattr(owner, name) if method is None else setattr(owner, name, method)


def one_call(session: Any, memory: Any, manifest: Manifest) -> dict[str, np.ndarray[Any, Any]]:
    """Every output of a call over IDS on an empty cache."""
    cache = Cache(session.spec, memory, manifest.options.capacity)
    tensors = cache.tensors(0)
    binding = session.bind(tensors)
    cache.feed(IDS)
    binding.run()
    return {t.name: tensors[t.name].read() for t in session.spec.all_outputs}


def wanted(folder: Path, out: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The same call on ONNX Runtime, or what an earlier run saved of it."""
    saved = out / "want.npz"
    if not saved.is_file():
        manifest, memory = Manifest.load(folder), HostMemory()
        spec = manifest.specs["trunk"]
        session = OrtSession(folder / "trunk.onnx", spec, memory, manifest.files, threads=1)
        np.savez(saved, **one_call(session, memory, manifest))
    return dict(np.load(saved))


def compare(got: dict[str, np.ndarray[Any, Any]], want: dict[str, np.ndarray[Any, Any]]) -> None:
    """Print the outputs that differ, in graph order."""
    wrong = 0
    for name, right in want.items():
        here = got[name].astype(np.float64)
        gap = np.abs(here - right).max() / max(float(np.abs(right).max()), 1e-6)
        if not gap < 1e-3:
            rows = np.flatnonzero(~np.isfinite(here.reshape(here.shape[0], -1)).all(1)).tolist()
            print(f"    {name}: off by {gap:.1e}; leading indices not finite: {rows[:8]}")
            wrong += 1
    print(f"    {wrong} of {len(want)} outputs wrong", flush=True)


def main(words: list[str]) -> None:
    """Run the variants asked for, all of them by default."""
    out = Path(words[0]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in words[1:] or VARIANTS:
        folder = out / name
        export(folder, VARIANTS[name])
        print(f"{name}:", flush=True)
        want = wanted(folder, out)
        if command(["build", str(folder), "--level", "0"]) == 0:
            manifest = Manifest.load(folder)
            memory, sessions = open_sessions(folder, manifest, "tensorrt", graphs=False)
            compare(one_call(sessions["trunk"], memory, manifest), want)


if __name__ == "__main__":
    main(sys.argv[1:])
