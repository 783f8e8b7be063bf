"""Turn a graph's weights into inputs, so that one engine serves every checkpoint of its shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import TensorSpec

if TYPE_CHECKING:
    import onnx

# Our dtypes by the numbers of onnx.TensorProto.
ONNX_NUMBERS = {"fp32": 1, "int8": 3, "int32": 6, "fp16": 10, "bf16": 16}


def with_bound_weights(
    model: onnx.ModelProto, *, converted: str = "", stored: Collection[str] = ()
) -> onnx.ModelProto:
    """A copy of `model` whose external initialisers are inputs of the same name and shape.

    Constants stored inside the graph stay where they are. The copy has no tie to any file, which
    also lets `onnx.checker` see it whole where it would refuse the path of the weights.

    Args:
        model: A graph as it was exported.
        converted: The compute dtype ("bf16"), to do without casts: a weight that the graph only
            ever uses after one and the same cast enters in the dtype of that cast, and whoever
            uploads it converts it, once. Empty: every weight enters as it is stored.
        stored: Weights that enter as they are stored all the same.
    """
    import onnx

    bound = onnx.ModelProto()
    bound.CopyFrom(model)
    graph = bound.graph
    weights = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    dtypes = {name: tensor.data_type for name, tensor in weights.items()}
    if converted:
        users = _users(graph.node)
        for name in [name for name in weights if name not in stored]:
            casts, wanted = _casts(name, dtypes[name], users, ONNX_NUMBERS[converted])
            if len(wanted) == 1:
                dtypes[name] = wanted.pop()
                _bypass(graph, casts, users)
    for name, tensor in weights.items():
        graph.initializer.remove(tensor)
        graph.input.append(onnx.helper.make_tensor_value_info(name, dtypes[name], tensor.dims))
    return bound


def read_bound(path: Path, dtype: str, stored: Collection[str] = ()) -> bytes:
    """The graph in a file with its weights as inputs, for the compute dtype `dtype`.

    Those in `stored` are inputs as they are stored.
    """
    import onnx

    with as_exported(path):
        model = onnx.load(path, load_external_data=False)
        bound = with_bound_weights(model, converted=dtype, stored=stored)
        content: bytes = bound.SerializeToString()
    return content


@contextmanager
def as_exported(graph: Path | str) -> Iterator[None]:
    """What a graph does to code that reads it, when it is none that export writes, as a sentence.

    Its hash was right, so somebody has made it up: names may be no text, nodes have no outputs,
    casts no type.
    """
    try:
        yield
    except (InputError, OSError, MemoryError):
        raise
    except Exception as error:  # protobuf has an exception of its own in every version
        raise InputError(
            f"{graph}: not a graph that export writes ({type(error).__name__}: {error}); "
            "export the bundle again"
        ) from error


def bound_weights(model: onnx.ModelProto) -> list[str]:
    """Names of the weights that `with_bound_weights` makes inputs."""
    import onnx

    external = onnx.TensorProto.EXTERNAL
    return [t.name for t in model.graph.initializer if t.data_location == external]


def tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    """An input or output of a graph; a dtype that no engine has goes by its number."""
    kind = value.type.tensor_type
    names = {number: name for name, number in ONNX_NUMBERS.items()}
    dtype = names.get(kind.elem_type, f"ONNX's dtype {kind.elem_type}")
    return TensorSpec(value.name, dtype, tuple(axis.dim_value for axis in kind.shape.dim))


def _users(nodes: Iterable[onnx.NodeProto]) -> dict[str, list[onnx.NodeProto]]:
    users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in nodes:
        for name in set(node.input):
            users[name].append(node)
    return users


def _casts(
    name: str, stored: int, users: dict[str, list[onnx.NodeProto]], compute: int
) -> tuple[list[onnx.NodeProto], set[int]]:
    """The casts of one weight, and every dtype in which it is used.

    Rows gathered from a table and then cast to the compute dtype or to int32 count as a cast of the
    table; a norm's cast of such rows to fp32 does not, or the largest weight would double.
    """
    casts: list[onnx.NodeProto] = []
    dtypes: set[int] = set()
    for node in users[name]:
        is_table = node.op_type == "Gather" and node.input[0] == name
        for user in users[node.output[0]] if is_table else [node]:
            if user.op_type == "Cast" and (
                not is_table or user.attribute[0].i in (compute, ONNX_NUMBERS["int32"])
            ):
                casts.append(user)
                dtypes.add(user.attribute[0].i)
            else:
                dtypes.add(stored)
    return casts, dtypes


def _bypass(
    graph: onnx.GraphProto, casts: list[onnx.NodeProto], users: dict[str, list[onnx.NodeProto]]
) -> None:
    """Remove casts; their users read what the cast read."""
    for cast in casts:
        source, result = cast.input[0], cast.output[0]
        for user in users.pop(result, []):
            for i, read in enumerate(user.input):
                if read == result:
                    user.input[i] = source
            users[source].append(user)
        users[source].remove(cast)
        graph.node.remove(cast)
