"""KV rows in ggml's q8_0 and q5_1, in PyTorch: what the graphs' planes are compared with.

Written with integer bit operations from ggml's own code (`quantize_row_*_ref`), and not from the
graphs. Planes are dicts by the suffix of their name, see `engines.kv`; a float
cache is one plane, "".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle_chain.engines.kv import BLOCK

Planes = dict[str, Tensor]
f32 = torch.float32


def planes_of(states: Mapping[str, Tensor], cache: str) -> Planes:
    """The planes of the keys or values called `cache` ("layers.3.key")."""
    found = {n.removeprefix(cache): t for n, t in states.items() if n.startswith(f"{cache}.")}
    return {"": states[cache]} if cache in states else found


def encoded(x: Tensor, like: Planes) -> Planes:
    """The planes of x [..., dim], stored as the cache `like` is."""
    if "" in like:
        return {"": x.to(like[""].dtype)}
    blocks = split(x.to(f32), BLOCK)
    if ".codes" in like:
        scale = blocks.abs().amax(-1) / 127
        scaled = blocks * inverse(scale)[..., None]
        # half away from zero; torch.round takes halves to the even neighbour
        away = scaled.trunc() + (2 * scaled.frac()).trunc()
        return {".codes": away.to(torch.int8).flatten(-2), ".scale": scale.half()}
    least, most = blocks.amin(-1), blocks.amax(-1)
    scale = (most - least) / 31
    codes = ((blocks - least[..., None]) * inverse(scale)[..., None] + 0.5).to(torch.int32)
    codes = codes.clamp(max=31)
    low = codes & 15
    bytes_ = low[..., : BLOCK // 2] | low[..., BLOCK // 2 :] << 4
    bits = split(codes >> 4, 8) << torch.arange(8)
    return {
        ".nibbles": bytes_.to(torch.uint8).view(torch.int8).flatten(-2),
        ".high": bits.sum(-1).to(torch.uint8).view(torch.int8).flatten(-2),
        ".scale": scale.half(),
        ".min": least.half(),
    }


def decoded(planes: Planes, dtype: torch.dtype) -> Tensor:
    """The rows of a cache [..., dim] in the dtype of the computation."""
    if "" in planes:
        return planes[""].to(dtype)
    scale = planes[".scale"].to(f32)[..., None]
    if ".codes" in planes:
        codes = split(planes[".codes"].to(f32), BLOCK)
        return (codes * scale).flatten(-2).to(dtype)
    bytes_ = split(planes[".nibbles"].to(torch.int32), BLOCK // 2)
    low = torch.cat([bytes_ & 15, bytes_ >> 4 & 15], -1)
    bits = planes[".high"].to(torch.int32)[..., None] >> torch.arange(8) & 1
    codes = low | split(bits.flatten(-2), BLOCK) << 4
    return (codes * scale + planes[".min"].to(f32)[..., None]).flatten(-2).to(dtype)


def split(x: Tensor, size: int) -> Tensor:
    """The last axis in pieces [..., n, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, 1 / scale)
