"""Are the bytes of quantized weights those that llama.cpp's own quantizer writes?

    python benchmarks/gguf_quants.py LIBRARY BUILD [--write]

LIBRARY is a shared library that exports ggml's `ggml_quantize_chunk`, such as the one in the wheel
of xllamacpp. Both quantize the same float32 rows of 256: drawn from several distributions, with
offsets, constant, zero, and from 1e-44 to 1e4 in size; without an importance matrix and with three:
drawn, over ten powers of ten, and zero in half of the columns. Each row of the result counts the
blocks of a type, those in which any byte differs, and those that are other numbers when they are
read.
"""

import ctypes
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import record

os.environ.setdefault("KERAS_BACKEND", "numpy")
TYPES = ("Q4_0", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
WEIGHTED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def inputs() -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and rows, which are rounded to float32 later."""
    draw = np.random.default_rng(0)
    shape = 4096, 256
    normal = draw.normal(size=shape)
    yield "normal", normal * 0.02
    yield "uniform", draw.uniform(-1, 1, shape)
    yield "heavy tails", draw.standard_cauchy(shape).clip(-1e4, 1e4)
    yield "sparse", normal * (draw.random(shape) < 0.05)
    yield "positive", abs(normal)
    yield "negative", -abs(normal)
    for sign, scale in ((-1, 1e-4), (-1, 1e-7), (1, 1e-6)):
        yield f"{sign} and noise of {scale}", normal * scale + sign
    yield "constant", np.repeat(normal[:, :1], 256, axis=1)
    yield "constant groups", np.repeat(normal[:, :16], 16, axis=1)
    yield "zeros", np.zeros((64, 256))
    yield "negative zeros", -np.zeros((64, 256))
    yield "whole numbers", draw.integers(-8, 8, shape)
    yield "two values", draw.choice([-1.0, 1.0], shape)
    yield "powers of two", 2.0 ** draw.integers(-30, 10, shape) * draw.choice([-1, 1], shape)
    yield (
        "groups of other sizes",
        normal * 10.0 ** np.repeat(draw.integers(-12, 3, (4096, 8)), 32, 1),
    )
    yield "single numbers", np.eye(256)
    for power in (-44, -38, -30, -20, -16, -15, -14, -12, -10, -8, -6, 3, 4):
        yield f"of size 1e{power}", normal[:1024] * 10.0**power


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("build", help="name and version of the library's package")
    options = parser.parse_args()
    import gguf

    from kmodels.models.blocks.gguf.quantizing import quantize

    chunk = ctypes.CDLL(str(options.library)).ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    chunk.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
    kinds = [*((kind, "") for kind in TYPES)]
    kinds += [(kind, matrix) for kind in WEIGHTED for matrix in ("drawn", "wide", "half zero")]
    rows = {
        pair: {
            **{"type": pair[0], "importance": pair[1] or None},
            **{"blocks": 0, "differ": 0, "differ_in_value": 0},
        }
        for pair in kinds
    }
    draw = np.random.default_rng(1)
    for name, values in inputs():
        x = np.ascontiguousarray(values, "float32")
        drawn = draw.chisquare(1, 256)
        matrices = {
            **{"drawn": drawn, "wide": 10.0 ** draw.uniform(-6, 4, 256)},
            "half zero": drawn * (draw.random(256) < 0.5),
        }
        for (kind, matrix), row in rows.items():
            number = gguf.GGMLQuantizationType[kind]
            weights = matrices[matrix].astype("float32") if matrix else None
            ours = quantize(x, kind, name, weights)
            theirs = np.zeros_like(ours)
            address = None if weights is None else weights.ctypes.data
            chunk(number, x.ctypes.data, theirs.ctypes.data, 0, *x.shape, address)
            pair = [part.reshape(-1, gguf.GGML_QUANT_SIZES[number][1]) for part in (ours, theirs)]
            values_of = [gguf.quants.dequantize(part, number) for part in pair]
            row["blocks"] += len(pair[0])
            for key, (left, right) in (("differ", pair), ("differ_in_value", values_of)):
                row[key] += int((left != right).any(1).sum())
    print(json.dumps(list(rows.values()), indent=1))
    if options.write:
        question = "Are the bytes of quantized weights those of llama.cpp's own quantizer?"
        packages = ("kmodels", "numpy", "gguf")
        content = {"library": options.build, "rows": list(rows.values())}
        record.write("gguf_quants_cpu", question, packages, **content)


if __name__ == "__main__":
    main()
