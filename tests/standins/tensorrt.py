"""A stand-in for TensorRT: a plan is the ONNX file, and an engine runs it on ONNX Runtime.

It has the classes and calls that the project uses, in the form of TensorRT 10, or of 8.6 if
STANDIN_VERSION says so. Other environment variables make it fail where the real one may:
STANDIN_BUILD "none" (the builder gives nothing), "no precision" (nothing if a layer has one),
"abort" (it ends the process) or "hang"; STANDIN_CONVERTS: pinned plans need much scratch;
STANDIN_LOAD and STANDIN_CONTEXT "none".
"""
# ruff: noqa: D101, D102

import ctypes
import enum
import json
import os
import signal
import time

import numpy as np
import onnx
import onnxruntime
from cuda.bindings import runtime as cuda

__version__ = os.environ.get("STANDIN_VERSION", "10.9.0.34")
HEADER = b"stand-in plan "
OLD = __version__.startswith("8.")


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT32 = 3
    BOOL = 4
    INT64 = 8
    BF16 = 7


class TensorFormat(enum.IntEnum):
    LINEAR = 0
    CHW32 = 5


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class BuilderFlag(enum.IntEnum):
    FP16 = 0
    TF32 = 7
    OBEY_PRECISION_CONSTRAINTS = 11


class MemoryPoolType(enum.Enum):
    WORKSPACE = 0


class ProfilingVerbosity(enum.Enum):
    LAYER_NAMES_ONLY = 0
    DETAILED = 2


class LayerInformationFormat(enum.Enum):
    ONELINE = 0
    JSON = 1


class TacticSource(enum.IntEnum):
    EDGE_MASK_CONVOLUTIONS = 3
    JIT_CONVOLUTIONS = 4


class NetworkDefinitionCreationFlag(enum.IntEnum):
    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    USER_MANAGED = 2


class Severity(enum.Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING = Severity

    def __init__(self):
        pass


class IProgressMonitor:
    def __init__(self):
        pass


_DTYPES = {
    1: DataType.FLOAT,
    10: DataType.HALF,
    6: DataType.INT32,
    16: DataType.BF16,
    7: DataType.INT64,
}
_NUMPY = {DataType.FLOAT: np.float32, DataType.HALF: np.float16, DataType.INT32: np.int32}


class Tensor:
    def __init__(self, value):
        self.name = value.name
        self.dtype = _DTYPES[value.type.tensor_type.elem_type]
        self.shape = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        self.allowed_formats = 8191


class LayerType(enum.Enum):
    MATRIX_MULTIPLY = 5
    OTHER = 3


class Name:
    def __init__(self, name):
        self.name, self.dtype = name, DataType.INT32


class Layer:
    """A node as a layer; what is pinned on it is kept for the plan."""

    def __init__(self, node):
        product = node.op_type in ("Gemm", "MatMul")
        self.type = LayerType.MATRIX_MULTIPLY if product else LayerType.OTHER
        self.read, self.written = [Name(n) for n in node.input], [Name(n) for n in node.output]
        self.num_inputs, self.num_outputs = len(self.read), len(self.written)
        self.types, self.precision = {}, None

    def get_input(self, i):
        return self.read[i]

    def get_output(self, i):
        return self.written[i]

    def set_output_type(self, i, dtype):
        self.types[i] = dtype


class Network:
    def __init__(self, flags):
        self.flags = flags
        self.inputs, self.outputs, self.layers, self.model = [], [], [], None

    def get_layer(self, i):
        return self.layers[i]

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))
    num_layers = property(lambda self: len(self.model.graph.node))

    def get_input(self, i):
        return self.inputs[i]

    def get_output(self, i):
        return self.outputs[i]


class ParserError:
    def __init__(self, text, index):
        self.text, self.index = text, index

    def node(self):
        return self.index

    def desc(self):
        return self.text


class OnnxParser:
    def __init__(self, network, log):
        self.network, self.errors = network, []

    num_errors = property(lambda self: len(self.errors))

    def get_error(self, i):
        return self.errors[i]

    def parse_from_file(self, path):
        return self.read(onnx.load(path, load_external_data=False), path)

    def parse(self, content, path=None):
        return self.read(onnx.load_from_string(content), path)

    def read(self, model, path):
        for i, node in enumerate(model.graph.node):
            if node.op_type == "NoSuchOperator":
                self.errors.append(ParserError("no importer", i))
        for tensor in model.graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                where = {entry.key: entry.value for entry in tensor.external_data}
                with open(os.path.join(os.path.dirname(path), where["location"]), "rb") as file:
                    file.seek(int(where["offset"]))
                    tensor.raw_data = file.read(int(where["length"]))
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
        network = self.network
        network.model = model
        network.layers = [Layer(node) for node in model.graph.node]
        stored = {t.name for t in model.graph.initializer}
        network.inputs = [Tensor(v) for v in model.graph.input if v.name not in stored]
        network.outputs = [Tensor(v) for v in model.graph.output]
        return not self.errors


class TimingCache:
    def __init__(self, data):
        self.data = data

    def serialize(self):
        return self.data


class BuilderConfig:
    def __init__(self):
        self.flags = {BuilderFlag.TF32}
        self.cache = None
        self.pools = {}
        self.builder_optimization_level = 3
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        self.progress_monitor = None

    def set_flag(self, flag):
        self.flags.add(flag)

    def clear_flag(self, flag):
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool, size):
        self.pools[pool] = size

    def set_tactic_sources(self, sources):
        self.sources = sources

    def create_timing_cache(self, data):
        return TimingCache(data or b"timing") if data in (b"", b"timing") else None

    def set_timing_cache(self, cache, ignore_mismatch):
        self.cache = cache
        return True

    def get_timing_cache(self):
        return self.cache


class Builder:
    def __init__(self, log):
        self.log = log

    def create_network(self, flags):
        return Network(flags)

    def create_builder_config(self):
        return BuilderConfig()

    def build_serialized_network(self, network, config):
        self.log.log(ILogger.WARNING, "a warning of the builder")
        how = os.environ.get("STANDIN_BUILD", "")
        if monitor := config.progress_monitor:
            monitor.phase_start("Building engine", None, 2)
            monitor.step_complete("Building engine", 0)
        if how == "none":
            self.log.log(ILogger.ERROR, "no implementation of node_X obeys")
            return None
        if how == "no precision" and any(layer.precision for layer in network.layers):
            return None
        if how == "abort":
            os.kill(os.getpid(), signal.SIGABRT)
        if how == "hang":
            time.sleep(600)
        settings = {
            "tf32": BuilderFlag.TF32 in config.flags,
            "flags": network.flags,
            "level": config.builder_optimization_level,
            "pools": len(config.pools),
            "fp16": BuilderFlag.FP16 in config.flags,
            "obey": BuilderFlag.OBEY_PRECISION_CONSTRAINTS in config.flags,
            "pinned": [
                [layer.precision.name if layer.precision else "", layer.types[0].name]
                for layer in network.layers
                if layer.types
            ],
        }
        return HEADER + json.dumps(settings).encode() + b"\n" + network.model.SerializeToString()


class Inspector:
    def get_engine_information(self, form):
        written = [{"Format/Datatype": "Row major linear FP32"}]
        return json.dumps({"Layers": [{"Name": "all", "LayerType": "all", "Outputs": written}]})


class Runtime:
    def __init__(self, log):
        self.log = log

    def deserialize_cuda_engine(self, data):
        data = bytes(data)
        if not data.startswith(HEADER) or os.environ.get("STANDIN_LOAD") == "none":
            self.log.log(ILogger.ERROR, "magic tag does not match")
            return None
        try:
            end = data.index(b"\n")
            pinned = json.loads(data[len(HEADER) : end])["pinned"]
            engine = Engine(onnx.load_model_from_string(data[end + 1 :]))
            if pinned and os.environ.get("STANDIN_CONVERTS"):
                engine.device_memory_size = 1 << 24
            return engine
        except Exception as error:
            self.log.log(ILogger.ERROR, f"the plan is damaged: {error}")
            return None


class Engine:
    device_memory_size_v2 = 4096
    num_layers = 1

    def __init__(self, model):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        self.inputs = {v.name: Tensor(v) for v in model.graph.input}
        self.outputs = {v.name: Tensor(v) for v in model.graph.output}
        self.tensors = {**self.inputs, **self.outputs}
        self.contexts = 0

    num_io_tensors = property(lambda self: len(self.tensors))

    def get_tensor_name(self, i):
        return list(self.tensors)[i]

    def get_tensor_dtype(self, name):
        return self.tensors[name].dtype

    def get_tensor_shape(self, name):
        return self.tensors[name].shape

    def get_tensor_format(self, name):
        return TensorFormat.LINEAR

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def create_engine_inspector(self):
        return Inspector()

    def create_execution_context(self, strategy):
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        return self.new_context()

    def create_execution_context_without_device_memory(self):
        assert OLD
        return self.new_context()

    def new_context(self):
        if os.environ.get("STANDIN_CONTEXT") == "none":
            return None
        self.contexts += 1
        return Context(self)


class Context:
    def __init__(self, engine):
        self.engine, self.addresses, self.runs, self.memory = engine, {}, 0, None

    def set_device_memory(self, address, size):
        assert size >= self.engine.device_memory_size_v2
        self.memory = address

    @property
    def device_memory(self):
        return self.memory

    @device_memory.setter
    def device_memory(self, address):
        self.memory = address

    def set_tensor_address(self, name, address):
        if name not in self.engine.tensors or address % 256:
            return False
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        assert self.memory and self.addresses.keys() == self.engine.tensors.keys()
        addresses = dict(self.addresses)  # a graph keeps those of when it was captured
        cuda.queue(stream, lambda: self.work(addresses))
        return True

    def work(self, addresses):
        engine = self.engine
        self.runs += 1
        ctypes.memset(self.memory, 0xFF, getattr(engine, SCRATCH))  # it is for the engine to use
        feeds = {name: self.array(name, addresses).copy() for name in engine.inputs}
        values = engine.session.run(list(engine.outputs), feeds)
        for name, value in zip(engine.outputs, values, strict=True):
            self.array(name, addresses)[...] = value

    def array(self, name, addresses):
        tensor = self.engine.tensors[name]
        dtype = np.dtype(_NUMPY[tensor.dtype])
        size = int(np.prod(tensor.shape)) * dtype.itemsize
        block = (ctypes.c_uint8 * size).from_address(addresses[name])
        return np.frombuffer(block, dtype).reshape(tensor.shape)


SCRATCH = "device_memory_size" if OLD else "device_memory_size_v2"
if OLD:  # what came later
    del ExecutionContextAllocationStrategy, IProgressMonitor
    del Engine.device_memory_size_v2, Context.set_device_memory
    Engine.device_memory_size = 4096
