"""The rate of products: bfloat16, and float32 under each matmul precision."""

from typing import Any

import numpy as np

from accelerator import clock


def run(settings: dict[str, Any]) -> clock.Parts:
    """Yields times, and how far float32 products lie from float64."""
    import keras

    import kmodels

    size, rounds = settings["size"], settings["rounds"]
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), "float32") for _ in range(2))
    expected = a[:8].astype("float64") @ b.astype("float64")
    for name in ("bfloat16", "highest", "high", "default"):
        kmodels.set_matmul_precision("default" if name == "bfloat16" else name)
        dtype = "bfloat16" if name == "bfloat16" else "float32"
        x, y = (keras.ops.convert_to_tensor(array, dtype) for array in (a, b))
        product = keras.ops.matmul
        if clock.backend() == "jax":
            import jax

            product = jax.jit(keras.ops.matmul)

        def call(product: Any = product, x: Any = x, y: Any = y) -> Any:
            return product(x, y)

        case = f"{dtype} {size}" + ("" if name == "bfloat16" else f", precision {name}")
        (row,) = yield from clock.measure(case, {"matmul": call}, rounds)
        if "failed" not in row:
            row["tera_operations_per_s"] = round(2 * size**3 / row["median_ms"] / 1e9, 2)
            output = keras.ops.convert_to_numpy(keras.ops.cast(call()[:8], "float32"))
            row["largest_error"] = float(np.abs(output - expected).max() / np.abs(expected).max())
        yield {"rows": [row]}
