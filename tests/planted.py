"""Faults planted in exported graphs; an edit changes a model in place and says nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from eagle_chain.engines.integrity import file_hash
from eagle_chain.engines.manifest import Manifest

Edit = Callable[[ModelProto], None]


def plant(bundle: Path, graph: str, edit: Edit) -> None:
    """Change a graph of a bundle on disk, and make the manifest agree with the file."""
    path, manifest = bundle / graph, Manifest.load(bundle)
    model = onnx.load(str(path), load_external_data=False)
    edit(model)
    onnx.save(model, str(path))
    replace(manifest, graphs={**manifest.graphs, graph: file_hash(path)}).save(bundle)


def head_rows(order: Sequence[int], dim: int, first: int = 0) -> list[int]:
    """Rows of a projection whose heads come in another order, behind `first` others."""
    return [*range(first), *(first + h * dim + i for h in order for i in range(dim))]


def nodes_before(model: ModelProto, name: str, nodes: Sequence[NodeProto], result: str) -> None:
    """Put `nodes` at the front; whoever read `name` reads `result`, except these nodes."""
    graph = model.graph
    readers = 0
    for node in graph.node:
        for i, read in enumerate(node.input):
            if read == name:
                node.input[i] = result
                readers += 1
    assert readers, f"nothing reads {name}"
    old = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *old])


def constant(model: ModelProto, name: str, values: object, dtype: type = np.int64) -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.array(values, dtype), name))
    return name


def scaled(name: str, factor: float) -> Edit:
    """A weight times a factor."""

    def edit(model: ModelProto) -> None:
        by = constant(model, "planted.factor", factor, np.float32)
        nodes_before(model, name, [helper.make_node("Mul", [name, by], ["planted"])], "planted")

    return edit


def permuted(name: str, order: Sequence[int], axis: int = 0) -> Edit:
    """A weight with its rows in another order."""

    def edit(model: ModelProto) -> None:
        rows = constant(model, "planted.order", order)
        node = helper.make_node("Gather", [name, rows], ["planted"], axis=axis)
        nodes_before(model, name, [node], "planted")

    return edit


def exchanged(one: str, other: str) -> Edit:
    """Two weights that have changed places."""

    def edit(model: ModelProto) -> None:
        for node in model.graph.node:
            for i, read in enumerate(node.input):
                node.input[i] = {one: other, other: one}.get(read, read)

    return edit


def without_plus_one(name: str) -> Edit:
    """A norm that takes w for 1 + w."""

    def edit(model: ModelProto) -> None:
        node = next(n for n in model.graph.node if name in n.input)
        assert node.op_type == "Add"
        del node.input[:]
        node.input.append(name)
        node.op_type = "Identity"

    return edit


def with_plus_one(name: str) -> Edit:
    """A norm that takes 1 + w for w."""

    def edit(model: ModelProto) -> None:
        one = constant(model, "planted.one", 1.0, np.float32)
        nodes_before(model, name, [helper.make_node("Add", [name, one], ["planted"])], "planted")

    return edit


def rounded(name: str, to: int) -> Edit:
    """What is read of an input has been through a narrower dtype."""

    def edit(model: ModelProto) -> None:
        nodes = [
            helper.make_node("Cast", [name], ["planted.narrow"], to=to),
            helper.make_node("Cast", ["planted.narrow"], ["planted"], to=onnx.TensorProto.FLOAT),
        ]
        nodes_before(model, name, nodes, "planted")

    return edit


def kept_off(by: int, reader: str, width: int) -> Edit:
    """The readers of `kept` of one operator type get another count, 0 to `width`."""

    def edit(model: ModelProto) -> None:
        graph = model.graph
        more, least, most = (
            constant(model, f"planted.{i}", [n], np.int32) for i, n in enumerate((by, 0, width))
        )
        found = [n for n in graph.node if "kept" in n.input and n.op_type == reader]
        assert found, f"no {reader} reads kept"
        for node in found:
            node.input[list(node.input).index("kept")] = "planted"
        steps = [
            helper.make_node("Add", ["kept", more], ["planted.sum"]),
            helper.make_node("Max", ["planted.sum", least], ["planted.low"]),
            helper.make_node("Min", ["planted.low", most], ["planted"]),
        ]
        for i, node in enumerate(steps):
            graph.node.insert(i, node)

    return edit


def tf32(model: ModelProto) -> None:
    """The factors of every product rounded to 10 bits behind the point, as TF32 takes them.

    x * (2**13 + 1) minus what that adds leaves the upper 11 bits, rounded to nearest.
    """
    graph = model.graph
    by = constant(model, "planted.tf32", 2.0**13 + 1, np.float32)
    nodes: list[NodeProto] = []
    for node in list(graph.node):
        if node.op_type in ("Gemm", "MatMul"):
            for i, read in enumerate(node.input[:2]):
                base = f"planted.{len(nodes)}"
                names = [f"{base}.{part}" for part in ("wide", "rest", "high")]
                nodes += [
                    helper.make_node("Mul", [read, by], [names[0]]),
                    helper.make_node("Sub", [names[0], read], [names[1]]),
                    helper.make_node("Sub", [names[0], names[1]], [names[2]]),
                ]
                node.input[i] = names[2]
        nodes.append(node)
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
