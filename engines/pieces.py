"""Cuts a graph into pieces of one float type, for a TensorRT that chooses types of layers itself.

TensorRT 8.6 is told which precisions it may use for a whole network, not what each layer has. A
piece that touches fp32 alone is compiled without fp16 and is fp32 because it cannot be anything
else; a piece around fp16 may use it everywhere. Equal layers of a model give equal pieces, which
are compiled once and run over other tensors.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from eagle_chain.engines.bound import ONNX_NUMBERS, tensor_spec
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import ATTENTION_SCORES, ITEM_BYTES, TensorSpec

if TYPE_CHECKING:
    import onnx

HALF, SINGLE, NEITHER = "fp16", "fp32", ""
PRODUCTS = ("Gemm", "MatMul")
# Of all that makes a plan in pieces: the cut, the pins and settings of its pieces, its file. It is
# part of the key of such a plan; raised with any change of these, so that `build` makes it again.
VERSION = 2
_FLOAT, _FLOAT16 = ONNX_NUMBERS[SINGLE], ONNX_NUMBERS[HALF]
_PRELUDE = -1  # the layer of what no layer's name stands before
LARGE = ATTENTION_SCORES // 4  # elements; a chunk of the scores of a long prompt has more


@dataclass(frozen=True)
class Form:
    """A distinct piece as a graph of its own: inputs i0, i1, ..., outputs o0, o1, ..."""

    type: str  # HALF or SINGLE
    model: bytes  # ONNX
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def title(self) -> str:
        """Its type and its operators, the most frequent first."""
        counts = self._operators.most_common()
        return f"{self.type}: {', '.join(f'{count} {kind}' for kind, count in counts)}"

    @property
    def half_products(self) -> bool:
        """Whether it multiplies matrices of fp16."""
        return self.type == HALF and bool(self._operators.keys() & set(PRODUCTS))

    @cached_property
    def _operators(self) -> Counter[str]:
        import onnx

        return Counter(node.op_type for node in onnx.load_from_string(self.model).graph.node)


@dataclass(frozen=True)
class Piece:
    """One run of a form: the tensors of the graph that stand for its inputs and outputs."""

    form: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def names(self) -> dict[str, str]:
        """The graph's tensor for each of the form's."""
        named = {f"i{k}": name for k, name in enumerate(self.inputs)}
        return named | {f"o{k}": name for k, name in enumerate(self.outputs)}


@dataclass(frozen=True)
class Cut:
    """A graph in pieces, to be run in their order."""

    forms: tuple[Form, ...]
    pieces: tuple[Piece, ...]
    crossing: tuple[TensorSpec, ...]  # written by one piece for others, no output of the graph


def cut(model: onnx.ModelProto) -> Cut:
    """Cut a graph where it changes between fp16 and fp32, and between layers.

    A node that touches fp16 belongs to a half piece, a cast between the two included; one that
    touches fp32 alone to a single piece. What depends on weights, whole numbers and constants alone
    (masks, positions, norms' weights) is computed in every piece that wants it. Nodes keep the
    order of the graph but for those of the other type in the same layer, so that a layer has as few
    pieces as it changes types; of a prompt's scores it has one chunk after the other, or all would
    be there at once. A graph of one type is cut between its layers.

    Args:
        model: A graph with static shapes.

    Raises:
        InputError: A tensor between two pieces would be of a dtype that no engine has.
    """
    graph = _Graph(model)
    plans = [_schedule(graph, first) for first in (HALF, SINGLE)]
    groups = min(plans, key=len)
    made = [graph.piece(group, members) for group, members in _with_readers(graph, groups)]
    forms: dict[Form, int] = {}
    pieces = []
    for form, inputs, outputs in made:
        pieces.append(Piece(forms.setdefault(form, len(forms)), inputs, outputs))
    written = [name for piece in pieces for name in piece.outputs if name not in graph.outputs]
    return Cut(tuple(forms), tuple(pieces), tuple(graph.spec(name) for name in written))


@dataclass(frozen=True)
class _Group:
    """Nodes that run together, in their order; those that are computed anywhere left out."""

    type: str  # HALF or SINGLE
    nodes: tuple[int, ...]


class _Graph:
    """What the cut wants to know of a graph, node by node."""

    def __init__(self, model: onnx.ModelProto) -> None:
        import onnx

        plain = onnx.ModelProto()
        plain.CopyFrom(model)
        del plain.graph.value_info[:]  # of before the weights were bound
        inferred = onnx.shape_inference.infer_shapes(plain, strict_mode=True).graph
        self.model = plain
        self.nodes: Sequence[onnx.NodeProto] = plain.graph.node
        self.values = {v.name: v for v in (*inferred.value_info, *inferred.output, *inferred.input)}
        self.constants = {t.name: t for t in plain.graph.initializer}
        self.outputs = {v.name for v in plain.graph.output}
        self.producer = {name: i for i, node in enumerate(self.nodes) for name in node.output}
        self.readers: dict[str, list[int]] = defaultdict(list)
        for i, node in enumerate(self.nodes):
            for name in filter(None, node.input):
                self.readers[name].append(i)
        self.types = [self._type(node) for node in self.nodes]
        self.pure = self._pure()
        self.free = self._free()
        self.several = {HALF, SINGLE} <= {
            t for t, free in zip(self.types, self.free, strict=True) if not free
        }
        self.windows = self._windows()

    def elements(self, name: str) -> int:
        """Number of a tensor's dtype in ONNX."""
        if name in self.constants:
            return int(self.constants[name].data_type)
        return int(self.values[name].type.tensor_type.elem_type)

    def spec(self, name: str) -> TensorSpec:
        """A tensor that must be one of an engine's dtypes."""
        spec = tensor_spec(self.values[name])
        if spec.dtype not in ITEM_BYTES or 0 in spec.shape:
            raise InputError(
                f"{name} is {spec.dtype} {list(spec.shape)} where the graph is cut into pieces, "
                f"expected one of {', '.join(ITEM_BYTES)}: export with --profile portable"
            )
        return spec

    def sources(self, node: int) -> list[int]:
        """The nodes that one node reads from."""
        names = self.nodes[node].input
        return [self.producer[name] for name in names if name in self.producer]

    def scheduled_sources(self, node: int) -> list[int]:
        """Those of them that are not computed wherever they are wanted."""
        return [s for s in self.sources(node) if not self.free[s]]

    def scheduled_readers(self, node: int) -> list[int]:
        """The nodes that read from one node."""
        return [r for name in self.nodes[node].output for r in self.readers[name]]

    def _type(self, node: onnx.NodeProto) -> str:
        elements = {self.elements(name) for name in (*node.input, *node.output) if name}
        return HALF if _FLOAT16 in elements else SINGLE if _FLOAT in elements else NEITHER

    def _pure(self) -> list[bool]:
        """Whether nodes depend on no activation: on weights alone, or on whole numbers alone.

        A weight is an input whose name has a dot, as all names of checkpoints have; states have
        one too, and leave under the same name.
        """
        states = {name.removesuffix(".next") for name in self.outputs if name.endswith(".next")}
        kinds: list[set[str]] = []
        for node in self.nodes:
            found: set[str] = set()
            for name in filter(None, node.input):
                if name in self.producer:
                    found |= kinds[self.producer[name]]
                elif name not in self.constants:
                    floats = self.elements(name) in (_FLOAT, _FLOAT16)
                    known = "." in name and name not in states
                    found.add("numbers" if not floats else "weights" if known else "activations")
                elif self.constants[name].external_data:
                    found.add("weights")
            kinds.append(found)
        return [kind <= {"weights"} or kind == {"numbers"} for kind in kinds]

    def _free(self) -> list[bool]:
        """Whether nodes are computed wherever they are wanted: pure, and of use to one type."""
        free: list[bool] = []
        for i, node in enumerate(self.nodes):
            fine = self.pure[i] and not self.outputs.intersection(node.output)
            readers = {self.types[r] for name in node.output for r in self.readers[name]}
            if self.types[i] != NEITHER:
                fine = fine and readers <= {self.types[i]}
            free.append(fine and all(free[s] for s in self.sources(i)))
        return free

    def _windows(self) -> list[tuple[int, int]]:
        """The layer in which each node stands, the largest that was named up to it; its part.

        In a graph of several types a layer has a part for each of its large products.
        """
        windows: list[tuple[int, int]] = []
        current, large = _PRELUDE, 0
        named = [_PRELUDE] * len(self.nodes)
        for i, node in enumerate(self.nodes):
            own = [_layer(name) for name in (*node.input, *node.output)]
            named[i] = max([_PRELUDE, *own, *(named[s] for s in self.sources(i))])
            if (layer := max([current, *own])) > current:
                current, large = layer, 0
            large += self.several and self._is_large(i)
            windows.append((current, max(0, large - 1)))
        return [(named[i], 0) if self.pure[i] else window for i, window in enumerate(windows)]

    def _is_large(self, node: int) -> bool:
        """Whether it is a product of fp16 activations with a large result, as scores are."""
        if self.types[node] != HALF or self.nodes[node].op_type != "MatMul":
            return False
        return math.prod(tensor_spec(self.values[self.nodes[node].output[0]]).shape) > LARGE

    def piece(
        self, group: _Group, wanted: Collection[str]
    ) -> tuple[Form, tuple[str, ...], tuple[str, ...]]:
        """The form of a group, its inputs and outputs; `wanted` are read outside of it."""
        import onnx

        names: dict[str, str] = {"": ""}
        inputs: list[str] = []
        outputs: list[str] = []
        constants: list[onnx.TensorProto] = []
        nodes: list[onnx.NodeProto] = []

        def read(name: str) -> str:
            if name not in names and name in self.constants:
                tensor = onnx.TensorProto()
                tensor.CopyFrom(self.constants[name])
                tensor.ClearField("doc_string")
                names[name] = tensor.name = f"c{len(constants)}"
                constants.append(tensor)
            elif name not in names:
                names[name] = f"i{len(inputs)}"
                inputs.append(name)
            return names[name]

        def write(name: str) -> str:
            if name in wanted:
                names[name] = f"o{len(outputs)}"
                outputs.append(name)
            elif name:
                names[name] = f"t{len(names)}"
            return names[name]

        def add(i: int) -> None:
            for source in self.sources(i):
                if self.free[source] and self.nodes[source].output[0] not in names:
                    add(source)
            node = onnx.NodeProto(op_type=self.nodes[i].op_type, domain=self.nodes[i].domain)
            node.attribute.extend(self.nodes[i].attribute)
            node.input.extend([read(name) for name in self.nodes[i].input])
            node.output.extend([write(name) for name in self.nodes[i].output])
            nodes.append(node)
            if group.type == HALF and node.op_type in PRODUCTS and node.output[0][0] == "o":
                # what leaves a plan has its type settled, and sums must be free to be fp32
                leaving, node.output[0] = node.output[0], f"s{len(nodes)}"
                nodes.append(onnx.helper.make_node("Identity", [node.output[0]], [leaving]))

        for i in group.nodes:
            add(i)

        def specs(found: Iterable[str]) -> tuple[TensorSpec, ...]:
            return tuple(replace(self.spec(name), name=names[name]) for name in found)

        def infos(found: Iterable[str]) -> list[onnx.ValueInfoProto]:
            return [
                onnx.helper.make_tensor_value_info(
                    names[name], self.elements(name), self.spec(name).shape
                )
                for name in found
            ]

        graph = onnx.helper.make_graph(nodes, "piece", infos(inputs), infos(outputs), constants)
        model = onnx.helper.make_model(
            graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version
        )
        content = model.SerializeToString(deterministic=True)
        form = Form(group.type, content, specs(inputs), specs(outputs))
        return form, tuple(inputs), tuple(outputs)


def _layer(name: str) -> int:
    """The N of `layers.N.` at the beginning of a name."""
    head, _, rest = name.partition(".")
    number, dot, _ = rest.partition(".")
    return int(number) if head == "layers" and dot and number.isdecimal() else _PRELUDE


def _schedule(graph: _Graph, first: str) -> list[_Group]:
    """Put the nodes in groups of one type, as few as their order within a layer allows."""
    several = graph.several
    waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, free in enumerate(graph.free):
        if not free:
            waiting[graph.windows[i]].append(i)
    home: dict[int, int] = {}
    types: list[str] = []  # of the groups
    ends: dict[tuple[int, int], int] = {}  # the last group of a window
    current = first
    for window in sorted(waiting):
        left, idle = waiting[window], 0
        if not several:
            kinds = {graph.types[i] for i in left} - {NEITHER}
            current = kinds.pop() if kinds else SINGLE
        if not types or not several:
            types.append(current)
        while left:
            for i in left:
                fits = graph.types[i] in (current, NEITHER)
                if fits and all(source in home for source in graph.scheduled_sources(i)):
                    home[i] = len(types) - 1
            still = [i for i in left if i not in home]
            idle = 0 if len(still) < len(left) else idle + 1
            assert idle < 2, "the nodes of a graph stand in an order that can be run"
            left = still
            if left:
                current = SINGLE if current == HALF else HALF
                types.append(current)
        ends[window] = len(types) - 1
    _sink(graph, home, types, ends)
    groups: list[_Group] = []
    for number, kind in enumerate(types):
        members = tuple(sorted(i for i, where in home.items() if where == number))
        if several and groups and groups[-1].type == kind:  # nothing is left of one between them
            members = groups.pop().nodes + members
        if members:
            groups.append(_Group(kind, members))
    return groups


def _sink(
    graph: _Graph, home: dict[int, int], types: list[str], ends: Mapping[tuple[int, int], int]
) -> None:
    """Move nodes to the last group of their type and layer from which their readers can read.

    So a tensor crosses few borders, and the first groups of a layer do not depend on what else is
    in it. What only leaves the graph stays where it was made, or goes to the end of its layer.
    """
    last: dict[int, bool] = {}  # nodes whose readers, if any, are like that too and of their type
    for i in sorted(home, reverse=True):
        readers = graph.scheduled_readers(i)
        same = all(last[r] and graph.types[r] == graph.types[i] for r in readers)
        last[i] = same and graph.types[i] != NEITHER
    for i in sorted(home, reverse=True):
        if graph.types[i] != NEITHER and not last[i]:
            limit = min(
                [
                    ends[graph.windows[i]],
                    *(home[r] for r in graph.scheduled_readers(i) if not last[r]),
                ]
            )
            home[i] = max(g for g in range(home[i], limit + 1) if types[g] == graph.types[i])
    for i in sorted(home):
        if last[i]:
            sources = graph.scheduled_sources(i)
            earliest = max([0, *(home[s] for s in sources)])
            near = any(
                home[s] == earliest
                and graph.windows[s] == graph.windows[i]
                and graph.types[s] == graph.types[i]
                for s in sources
            )
            end = ends[graph.windows[i]]
            home[i] = (
                earliest if near else max(g for g in range(end + 1) if types[g] == graph.types[i])
            )


def _with_readers(graph: _Graph, groups: list[_Group]) -> Iterable[tuple[_Group, set[str]]]:
    """Every group with what must leave it: outputs of the graph, and what other groups read."""
    home = {i: number for number, group in enumerate(groups) for i in group.nodes}
    for number, group in enumerate(groups):
        wanted = set()
        for i in group.nodes:
            for name in graph.nodes[i].output:
                outside = any(home.get(reader, number) != number for reader in graph.readers[name])
                if name in graph.outputs or outside:
                    wanted.add(name)
        yield group, wanted
