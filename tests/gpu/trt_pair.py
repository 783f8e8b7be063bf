"""Writes the four-layer pair at the 9B's widths that the GPU scripts compare on.

    python tests/gpu/trt_pair.py FOLDER

Random weights, stored as fp16 so that a plan may also have them baked in; a vocabulary of 32,768
keeps the files near 3 GB.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.toy_pair import write_pair

SIZES = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
DRAFT_SIZES = {
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "draft_vocab_size": 8192,
}

if __name__ == "__main__":
    pair = write_pair(
        Path(sys.argv[1]),
        layers=4,
        dtype="fp16",
        aux=[0, 1, 3],
        extras=False,
        sizes=SIZES,
        draft_sizes=DRAFT_SIZES,
    )
    print("wrote", *pair)
