"""Host buffers: what goes in comes out, at an address that stays."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import ALIGNMENT, EngineSpec, StatePair, TensorSpec
from eagle_chain.runtime.buffers import HostMemory
from eagle_chain.runtime.session import check_tensors

MEMORY = HostMemory()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int32"])
@pytest.mark.parametrize("shape", [(1,), (5, 3), (1, 2, 7, 4), (5, 0)])
def test_new_buffers_are_zero_and_aligned(dtype: str, shape: tuple[int, ...]) -> None:
    buffer = MEMORY.allocate(TensorSpec("x", dtype, shape))
    assert buffer.address % ALIGNMENT == 0
    assert buffer.read().shape == shape and not buffer.read().any()
    assert buffer.read().nbytes == buffer.spec.nbytes


def test_bf16_is_its_bits() -> None:
    buffer = MEMORY.allocate(TensorSpec("x", "bf16", (3,)))
    bits = np.array([0x3F80, 0xBF00, 0x7FC0], np.uint16)  # 1.0, -0.5, NaN
    buffer.write(bits)
    assert buffer.read().dtype == np.uint16 and buffer.read().tolist() == bits.tolist()


def test_write_and_zero_keep_the_address_and_read_is_a_copy() -> None:
    buffer = MEMORY.allocate(TensorSpec("x", "int32", (4,)))
    address = buffer.address
    buffer.write([1, 2, 3, -1])
    before = buffer.read()
    buffer.write(7)
    assert before.tolist() == [1, 2, 3, -1] and buffer.read().tolist() == [7] * 4
    buffer.zero()
    assert buffer.read().tolist() == [0] * 4 and buffer.address == address
    with pytest.raises(ValueError):
        buffer.write([1, 2, 3])


def test_rows_are_copied_along_their_axis_and_nothing_else() -> None:
    long = MEMORY.allocate(TensorSpec("kv", "fp32", (1, 2, 6, 3)))
    short = MEMORY.allocate(TensorSpec("kv", "fp32", (1, 2, 4, 3)))
    values = np.arange(36, dtype=np.float32).reshape(1, 2, 6, 3)
    long.write(values)
    short.write(-1)
    short.copy_from(long, 3, axis=2, start=2)
    assert np.array_equal(short.read()[:, :, :3], values[:, :, 2:5])
    assert (short.read()[:, :, 3:] == -1).all()


def test_a_whole_copy_is_the_same_bits() -> None:
    a, b = (MEMORY.allocate(TensorSpec("x", "fp32", (2, 2))) for _ in range(2))
    a.write([[np.nan, -0.0], [np.inf, 1e-45]])
    b.copy_from(a)
    assert a.read().tobytes() == b.read().tobytes()


SPEC = EngineSpec(
    "engine",
    (TensorSpec("ids", "int32", (5,)),),
    (TensorSpec("token", "int32", (1,)),),
    (StatePair("S", "S.next", "fp32", (2, 2)), StatePair("K", "K.next", "fp32", (3,), True, 0)),
)


def test_all_faults_of_a_binding_are_in_one_message() -> None:
    tensors = {t.name: MEMORY.allocate(t) for t in (*SPEC.all_inputs, *SPEC.all_outputs)}
    check_tensors(SPEC, MEMORY, tensors)
    check_tensors(SPEC, MEMORY, {**tensors, "K.next": tensors["K"]})  # in place: may be shared
    wrong = {
        **tensors,
        "ids": MEMORY.allocate(TensorSpec("ids", "fp32", (4,))),
        "S.next": tensors["S"],
        "extra": tensors["ids"],
    }
    del wrong["token"]
    with pytest.raises(InputError) as caught:
        check_tensors(SPEC, MEMORY, wrong)
    assert str(caught.value) == (
        "engine: S and S.next share a buffer but are not in place; extra is not a tensor of this "
        "engine; ids is fp32 [4], expected int32 [5]; no buffer for token"
    )
