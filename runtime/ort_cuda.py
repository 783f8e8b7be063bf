"""ONNX Runtime on a GPU: every address settled, weights shared on the device, runs replayed.

A session computes on the stream of its memory. Nothing of a run touches the host: the runs of
several bindings, captured one after the other, make one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_chain.engines.bound import read_bound
from eagle_chain.engines.derived import Derived
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.kernel_library import build_cuda, cache_folder
from eagle_chain.engines.manifest import Manifest, Weight
from eagle_chain.engines.memory import check_load
from eagle_chain.engines.spec import EngineSpec, Options, TensorSpec
from eagle_chain.runtime.buffers import Buffer
from eagle_chain.runtime.cuda import CudaBuffer, CudaMemory, Replay
from eagle_chain.runtime.ort import onnxruntime, placed, weight_inputs
from eagle_chain.runtime.session import Session, check_tensors
from eagle_chain.runtime.weights import blocks, converted, upload

WARM_UP = 2  # plain runs before a capture: ONNX Runtime allocates and picks algorithms in them


class OrtCudaSession:
    """One engine on ONNX Runtime's CUDA provider.

    Args:
        model: The graph with its weights as inputs (`engines.bound.with_bound_weights`).
        spec: What the bundle says it takes and gives.
        memory: Where buffers live, and the stream that runs the engine.
        library: The operators of the `ort-fused` profile, see `engines.kernel_library`.
        graphs: Replay a binding as a CUDA graph once it is warm, see `replayed`.

    Raises:
        InputError: onnxruntime has no CUDA provider, or cannot load the graph.
    """

    def __init__(
        self,
        model: bytes,
        spec: EngineSpec,
        memory: CudaMemory,
        *,
        library: Path | None = None,
        graphs: bool = True,
    ) -> None:
        ort = onnxruntime()
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            raise InputError(
                "this onnxruntime has no CUDA provider: pip uninstall onnxruntime, then "
                "pip install '.[gpu]' in the clone of eagle-chain"
            )
        if hasattr(ort, "preload_dlls"):
            ort.preload_dlls()  # cuBLAS and cuDNN of the nvidia-* wheels
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if library is not None:
            options.register_custom_ops_library(str(library))
        provider = {
            "device_id": str(memory.info.index),
            "user_compute_stream": str(memory.stream),
            "enable_cuda_graph": "0",  # captured from outside, together with other sessions
            "use_tf32": "0",
        }
        if spec.reads_prompts:  # its values are large: what is alive at once, and that only once
            provider["arena_extend_strategy"] = "kSameAsRequested"
            options.enable_mem_pattern = False
        try:
            self._session = ort.InferenceSession(
                model, options, providers=[("CUDAExecutionProvider", provider)]
            )
        except Exception as error:  # onnxruntime's own types have no common base
            raise InputError(f"{spec.name}: ONNX Runtime cannot load it: {error}") from error
        if self._session.get_providers()[0] != "CUDAExecutionProvider":
            raise InputError(f"{spec.name}: ONNX Runtime could not start its CUDA provider")
        self.spec = spec
        self.memory = memory
        self.graphs = graphs
        self.weights = weight_inputs(self._session, spec)
        self.bound: dict[str, Buffer] = {}  # by name; filled by whoever uploads `weights`
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def bind(self, tensors: Mapping[str, Buffer]) -> OrtCudaBinding:
        """Settle every address, those of the weights included."""
        check_tensors(self.spec, self.memory, tensors)
        missing = [t.name for t in self.weights if t.name not in self.bound]
        if missing:
            raise InputError(f"{self.spec.name}: weights not loaded: {', '.join(missing[:5])}")
        return OrtCudaBinding(self, tensors)

    def run(self, binding: Any) -> None:
        """Queue one run."""
        self._session.run_with_iobinding(binding, self._options)

    def io_binding(self) -> Any:
        """An empty binding."""
        return self._session.io_binding()


class OrtCudaBinding:
    """A session with all its addresses; keeps the buffers alive."""

    def __init__(self, session: OrtCudaSession, tensors: Mapping[str, Buffer]) -> None:
        self._session = session
        self._buffers = (*tensors.values(), *session.bound.values())
        self._binding = session.io_binding()
        for tensor in (*session.spec.all_inputs, *session.weights):
            buffer = tensors.get(tensor.name) or session.bound[tensor.name]
            self._binding.bind_input(tensor.name, *placed(tensor, buffer))
        for tensor in session.spec.all_outputs:
            self._binding.bind_output(tensor.name, *placed(tensor, tensors[tensor.name]))
        optional = session.spec.reads_prompts  # decoding captures it together with others
        self._replay = Replay(session.memory, relaxed=True, warm_up=WARM_UP, optional=optional)

    def run(self) -> None:
        """Queue one run; from a captured graph once the session is warm."""
        if self._session.graphs:
            self._replay.run(None, self._queue)
        else:
            self._queue()

    def _queue(self) -> None:
        self._session.run(self._binding)


def replayed(options: Options, spec: EngineSpec) -> bool:
    """Whether runs of an engine are replayed as CUDA graphs.

    All that decode are. Of those that read prompts, the ones whose graphs were seen to leave the
    same bits: `ort-fused` with KV in the dtype of its engines. Some operators of the others copy
    from host memory that a graph does not keep.
    """
    fused = options.profile == "ort-fused" and options.kv_type == options.dtype
    return fused or not spec.reads_prompts


def without_weights(
    folder: Path, specs: Mapping[str, EngineSpec], options: Options, memory: CudaMemory
) -> dict[str, OrtCudaSession]:
    """Load the graphs of a folder; each session's `bound` is still to be filled.

    Raises:
        InputError: As `OrtCudaSession`, or the kernels of `ort-fused` cannot be compiled.
    """
    library = None
    if options.profile == "ort-fused":
        library = build_cuda(cache_folder(), memory.info.compute_capability)
    return {
        name: OrtCudaSession(
            read_bound(folder / f"{name}.onnx", options.dtype),
            spec,
            memory,
            library=library,
            graphs=replayed(options, spec),
        )
        for name, spec in specs.items()
    }


def open_sessions(folder: Path, manifest: Manifest) -> tuple[CudaMemory, dict[str, Session]]:
    """Load every engine of a bundle on the GPU, over one copy of the weights.

    Raises:
        InputError: There is no GPU, a package is missing, or the bundle does not suit it.
    """
    memory = CudaMemory()
    free = memory.free_bytes()
    sessions = without_weights(folder, manifest.specs, manifest.options, memory)
    wanted = dict.fromkeys(t for session in sessions.values() for t in session.weights)
    uploaded = sum(tensor.nbytes for tensor in wanted)
    check_load(manifest, uploaded, free, memory.info.name, "onnxruntime-cuda")
    forms = {tensor: Derived.parse(tensor.name) for tensor in wanted}
    stored = [tensor for tensor, form in forms.items() if form is None]
    made: dict[TensorSpec, Buffer] = {**upload(folder, manifest.weights, stored, memory)}
    for tensor, form in forms.items():
        if form is not None:
            made[tensor] = derived(folder, manifest.weights, form, tensor, memory)
    for session in sessions.values():
        session.bound = {tensor.name: made[tensor] for tensor in session.weights}
    return memory, dict(sessions)


def derived(
    folder: Path,
    table: Mapping[str, Weight],
    form: Derived,
    tensor: TensorSpec,
    memory: CudaMemory,
) -> CudaBuffer:
    """A weight in the form that a graph asks for, put together on the device."""
    buffer = memory.allocate(tensor)
    start = 0
    for name in form.sources:
        weight = table[name]
        if form.offset:
            raised = TensorSpec(name, "fp32", weight.shape)
            parts = [values for _, values in blocks(folder, weight, raised)]
            values = np.concatenate(parts) + np.float32(form.offset)
            values = converted(values, "F32", TensorSpec(name, form.dtype, weight.shape))
            memory.upload(buffer.address + start, values)
            start += values.nbytes
            continue
        source = TensorSpec(name, form.dtype, weight.shape)
        for at, values in blocks(folder, weight, source):
            memory.upload(buffer.address + start + at, values)
        start += source.nbytes
    return buffer
