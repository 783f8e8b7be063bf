"""Draft engines that guess from a table instead of a model: every accepted count, on any device.

The encoder passes on the first columns of the features, the draft and its single step look the
guess up by position. So rounds that run from device buffers alone can be told how many of their
drafts to have right, and the trunk that judges them is the real one.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto, helper

from eagle_chain.engines.spec import EngineSpec, TensorSpec

ELEMENT = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
}


def told_specs(specs: Mapping[str, EngineSpec]) -> dict[str, EngineSpec]:
    """Encoder, draft and draft_step of a pair as these graphs have them: without states."""
    plain = ("token", "g_next", "next_position")
    found = {"encoder": specs["encoder"]}
    for name in ("draft", "draft_step"):
        spec = specs[name]
        outputs = tuple(t for t in spec.outputs if t.name in plain)
        found[name] = dataclasses.replace(spec, outputs=outputs, states=())
    return found


def table_spec(capacity: int, width: int) -> TensorSpec:
    """The weight `table`: guess by index in the sequence, also those of a round past the end."""
    return TensorSpec("table", "int32", (capacity + 3 * width,))


def told_graphs(specs: Mapping[str, EngineSpec], capacity: int, width: int) -> dict[str, bytes]:
    """The three graphs; `table` is an input of draft and draft_step."""
    table = table_spec(capacity, width)
    graphs = {}
    for name, spec in told_specs(specs).items():
        if name == "encoder":
            columns = spec.outputs[0].shape[1]
            split = helper.make_tensor(
                "split", TensorProto.INT64, (2,), [columns, spec.inputs[0].shape[1] - columns]
            )
            nodes = [helper.make_node("Split", ["features", "split"], ["g", "rest"], axis=1)]
            graphs[name] = _model(spec, nodes, [split], ())
            continue
        one = helper.make_tensor("one", TensorProto.INT32, (1,), [1])
        nodes = [
            helper.make_node("Add", ["position", "row"], ["at"]),
            helper.make_node("Add", ["at", "one"], ["next_position"]),
            helper.make_node("Add", ["next_position", "one"], ["guess"]),
            helper.make_node("Gather", ["table", "guess"], ["token"]),
            helper.make_node("Gather", ["g", "row"], ["g_next"], axis=0),
        ]
        graphs[name] = _model(spec, nodes, [one], (table,))
    return graphs


def _model(
    spec: EngineSpec,
    nodes: Sequence[onnx.NodeProto],
    constants: Sequence[onnx.TensorProto],
    weights: Sequence[TensorSpec],
) -> bytes:
    def values(specs: Sequence[TensorSpec]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(t.name, ELEMENT[t.dtype], t.shape) for t in specs]

    graph = helper.make_graph(
        list(nodes),
        spec.name,
        values((*spec.inputs, *weights)),
        values(spec.outputs),
        list(constants),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data


class Plan:
    """Spoils plain's tokens so that rounds accept each count 0..k equally often, in any order."""

    def __init__(self, k: int, vocab_size: int, seed: int = 0) -> None:
        self.k, self.vocab_size = k, vocab_size
        self._used = dict.fromkeys(range(k + 1), 0)
        self._random = random.Random(seed)

    def table(self, prompt: int, truth: Sequence[int], length: int) -> tuple[list[int], list[int]]:
        """Guesses by index for one request, and the counts that its rounds will accept.

        Args:
            prompt: Tokens of the prompt; the one behind it is the first pending token.
            truth: Prompt and continuation as plain decoding gives them.
            length: Of the table.
        """
        guesses = [*truth, *[0] * (length - len(truth))]
        counts, pending = [], prompt
        while pending + self.k + 1 < len(truth):
            fewest = min(self._used.values())
            right = self._random.choice([c for c, n in self._used.items() if n == fewest])
            self._used[right] += 1
            if right < self.k:
                wrong = pending + right + 1
                guesses[wrong] = (guesses[wrong] + 1) % self.vocab_size
            counts.append(right)
            pending += right + 1
        return guesses, counts
