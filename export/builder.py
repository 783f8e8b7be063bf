"""A recorder for one ONNX graph whose inputs and outputs are an engine's spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from eagle_chain.engines.bound import ONNX_NUMBERS
from eagle_chain.engines.derived import Derived
from eagle_chain.engines.manifest import Weight
from eagle_chain.engines.spec import EngineSpec, TensorSpec

IR_VERSION = 9  # what TensorRT 8.6's parser and every ONNX Runtime since 1.16 read
ONNX_DTYPE = {name: ir.DataType(number) for name, number in ONNX_NUMBERS.items()}
NUMPY_DTYPE = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
STORED_DTYPE = {  # safetensors' names
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "I64": ir.DataType.INT64,
    "I32": ir.DataType.INT32,
}


class GraphBuilder:
    """Records nodes; `g.MatMul(x, w)` adds a node of that type and returns its output.

    Weights stay where they are: a weight is an initialiser whose external data is a stretch of the
    checkpoint's own safetensors file. `dtype` is the dtype activations are computed in.
    """

    def __init__(
        self, spec: EngineSpec, weights: Mapping[str, Weight], dtype: str, opset: int
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.numpy_dtype: Any = NUMPY_DTYPE[dtype]
        self._weights = weights
        self._tape = ir.tape.Tape()
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._used: dict[tuple[str, str], ir.Value] = {}
        self._inputs = {t.name: _value(t) for t in spec.all_inputs}
        self._outputs: dict[str, ir.Value] = {}
        self._domains = {"": opset}
        self._derived: dict[str, ir.Value] = {}

    def input(self, name: str) -> ir.Value:
        """The graph input called `name` in the spec."""
        return self._inputs[name]

    def output(self, name: str, value: ir.Value) -> None:
        """Make `value` the graph output called `name` in the spec."""
        if name in self._outputs:
            raise ValueError(f"{self.spec.name}: output {name} set twice")
        self._outputs[name] = value

    def wants(self, name: str) -> bool:
        """Whether the spec asks for the optional output `name`."""
        return any(t.name == name for t in self.spec.outputs)

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self._tape.op(op_type, inputs, attributes)

    def node(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[str, tuple[int, ...]] | None],
        **attributes: Any,
    ) -> list[ir.Value]:
        """Record a node of another operator domain.

        Args:
            domain: Of the operator.
            op_type: Its name.
            inputs: None where an optional input is left out.
            outputs: Dtype and shape of each result, None where the graph's reader infers them.
            **attributes: Of the node.
        """
        self._domains[domain] = 1
        results = [
            ir.Value() if known is None else ir.val(None, ONNX_DTYPE[known[0]], known[1])
            for known in outputs
        ]
        self._tape.op_multi_out(op_type, inputs, attributes, outputs=results, domain=domain)
        return results

    def split(self, x: ir.Value, axis: int, *sizes: int) -> list[ir.Value]:
        """Cut `x` along `axis` into pieces of the given sizes."""
        if len(sizes) == 1:
            return [x]
        pieces = self._tape.op_multi_out(
            "Split", (x, self.ints(*sizes)), {"axis": axis}, num_outputs=len(sizes)
        )
        return list(pieces)

    def reshape(self, x: ir.Value, *shape: int) -> ir.Value:
        """`x` viewed as `shape`."""
        return self.Reshape(x, self.ints(*shape))

    def cast(self, x: ir.Value, dtype: str) -> ir.Value:
        """`x` as fp32, fp16, bf16, int32 or int8."""
        return self.Cast(x, to=ONNX_DTYPE[dtype].value)

    def fp32(self, x: ir.Value) -> ir.Value:
        """A value of the compute dtype, raised to fp32."""
        return x if self.dtype == "fp32" else self.cast(x, "fp32")

    def lower(self, x: ir.Value) -> ir.Value:
        """An fp32 value, rounded to the compute dtype."""
        return x if self.dtype == "fp32" else self.cast(x, self.dtype)

    def to_compute(self, rows: ir.Value, weight: str) -> ir.Value:
        """Rows gathered from the stored `weight`, in the compute dtype."""
        same = self.stored(weight).dtype == ONNX_DTYPE[self.dtype]
        return rows if same else self.cast(rows, self.dtype)

    def has_weight(self, name: str) -> bool:
        """Whether the checkpoints hold a weight `name`."""
        return name in self._weights

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the weight `name` in the checkpoint."""
        return self._weights[name].shape

    def constant(self, array: npt.NDArray[Any]) -> ir.Value:
        """A small initialiser stored inside the graph; equal ones are shared."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.tensor(array, name=f"const.{len(self._constants)}")
            self._constants[key] = self._tape.initializer(tensor)
        return self._constants[key]

    def ints(self, *values: int) -> ir.Value:
        """A 1-D int64 constant, for shapes and axes."""
        return self.constant(np.array(values, dtype=np.int64))

    def int32(self, *values: int) -> ir.Value:
        """A 1-D int32 constant, for ids and counters."""
        return self.constant(np.array(values, dtype=np.int32))

    def scalar(self, value: float) -> ir.Value:
        """An fp32 scalar constant."""
        return self.constant(np.array(value, dtype=np.float32))

    def compute_scalar(self, value: float) -> ir.Value:
        """A scalar constant of the compute dtype."""
        return self.constant(np.array(value, dtype=NUMPY_DTYPE[self.dtype]))

    def stored(self, name: str) -> ir.Value:
        """The weight `name` as it lies in the checkpoint."""
        weight = self._weights[name]
        key = (name, weight.dtype)
        if key not in self._used:
            dtype = STORED_DTYPE[weight.dtype]
            tensor = ir.ExternalTensor(
                weight.file,
                weight.offset,
                weight.nbytes,
                dtype,
                shape=ir.Shape(weight.shape),
                name=name,
            )
            self._used[key] = self._tape.initializer(tensor)
        return self._used[key]

    def weight(self, name: str, dtype: str | None = None) -> ir.Value:
        """The weight `name` in `dtype` (the compute dtype if None)."""
        dtype = dtype or self.dtype
        value = self.stored(name)
        if value.dtype == ONNX_DTYPE[dtype]:
            return value
        key = (name, dtype)
        if key not in self._used:
            self._used[key] = self.cast(value, dtype)
        return self._used[key]

    def derived(self, form: Derived) -> ir.Value:
        """A weight in another form: a further input of the graph, made when weights are loaded."""
        key = (form.name, form.dtype)
        if key not in self._used:
            shapes = [self.weight_shape(name) for name in form.sources]
            shape = (sum(s[0] for s in shapes), *shapes[0][1:])
            tensor = TensorSpec(form.name, form.dtype, shape)
            self._used[key] = self._derived[form.name] = _value(tensor)
        return self._used[key]

    def linear(self, x: ir.Value, name: str, bias: str | None = None) -> ir.Value:
        """`x` [R, in] times the transposed weight [out, in], plus a bias [out] -> [R, out]."""
        added = [] if bias is None else [self.weight(bias)]
        return self.Gemm(x, self.weight(name), *added, transB=1)

    def model(self) -> onnx.ModelProto:
        """The finished model; every output of the spec must have been set."""
        missing = [t.name for t in self.spec.all_outputs if t.name not in self._outputs]
        if missing:
            raise ValueError(f"{self.spec.name}: outputs never set: {', '.join(missing)}")
        taken: set[ir.Value] = set()
        outputs = [self._named(tensor, taken) for tensor in self.spec.all_outputs]
        graph = ir.Graph(
            [*self._inputs.values(), *self._derived.values()],
            outputs,
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports=self._domains,
            name=self.spec.name,
        )
        model = ir.Model(graph, ir_version=IR_VERSION, producer_name="eagle-chain")
        return ir.to_proto(model)

    def _named(self, tensor: TensorSpec, taken: set[ir.Value]) -> ir.Value:
        """The output value under the spec's name; a node's own output where that is possible.

        TensorRT updates a KV cache in place only if the scatter's output is a graph output itself.
        """
        value = self._outputs[tensor.name]
        if value.producer() is None or value in taken:
            output = _value(tensor)
            self._tape.op("Identity", (value,), output=output)
            return output
        taken.add(value)
        value.name = tensor.name
        value.dtype, value.shape = ONNX_DTYPE[tensor.dtype], ir.Shape(tensor.shape)
        return value


def _value(tensor: TensorSpec) -> ir.Value:
    return ir.val(tensor.name, dtype=ONNX_DTYPE[tensor.dtype], shape=tensor.shape)
