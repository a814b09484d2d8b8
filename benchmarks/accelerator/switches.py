"""What two switches are worth for a ViT through `fit`: the override of attention, and TF32.

Each row has a model of its own, so that nothing compiled is shared.
"""

from typing import Any

import numpy as np

from accelerator import clock
from accelerator.vit import kmodels_fit, shape_of


def run(settings: dict[str, Any]) -> clock.Parts:
    """Yields two rows per switch: milliseconds a step and images per second."""
    import kmodels
    from kmodels import ops

    preset, batch, steps = settings["preset"], settings["batch"], settings["steps"]
    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch * steps, *shape_of(preset).image_shape), "float32")
    labels = rng.integers(0, 10, batch * steps).astype("int32")

    def fit(dtype: str) -> clock.Run:
        return kmodels_fit(preset, images, labels, batch, dtype=dtype)[1]

    def generic(epoch: clock.Run) -> clock.Run:
        def run() -> Any:
            with kmodels.generic_only(ops.attention):
                return epoch()

        return run

    def under(precision: str, epoch: clock.Run) -> clock.Run:
        def run() -> Any:
            kmodels.set_matmul_precision(precision)
            return epoch()

        return run

    half, single = "mixed_bfloat16", "float32"
    questions = {
        f"attention, {half}": {
            "kmodels": fit(half),
            "kmodels_generic_attention": generic(fit(half)),
        },
        f"TF32, {single}": {
            "kmodels": under("high", fit(single)),
            "kmodels_highest_precision": under("highest", fit(single)),
        },
    }

    def rate(row: dict[str, Any]) -> dict[str, Any]:
        return {"images_per_s": round(1e3 * batch / row["median_ms"], 1)}

    for case, systems in questions.items():
        case = f"{preset} x{batch}, {case}"
        yield from clock.measure(case, systems, settings["rounds"], steps, rate)
