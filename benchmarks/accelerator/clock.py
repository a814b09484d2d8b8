"""Times, peaks and kernels on the device of whichever backend runs."""

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerator.pieces import SMALL

Run = Callable[[], Any]
# The parts of a table's result, as they come: the file of a piece that is cut holds those before.
Parts = Generator[dict[str, Any], None, Any]
MIB = 2**20
PACKAGES = (
    *("keras", "numpy", "jax", "jaxlib", "torch", "triton", "transformers", "timm", "flax", "peft"),
    *("optax", "liger-kernel", "cut-cross-entropy", "flash-attn"),
)


def backend() -> str:
    return os.environ["KERAS_BACKEND"]


def on_gpu() -> bool:
    """Whether the backend computes on an accelerator."""
    if backend() == "torch":
        import torch

        return torch.cuda.is_available()
    import jax

    return jax.default_backend() != "cpu"


def place() -> str:
    """torch's name of the device."""
    return "cuda" if on_gpu() else "cpu"


def wait(result: Any = None) -> None:
    """Returns when everything is computed."""
    if backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
    else:
        import jax

        jax.block_until_ready(result)


def hardware() -> dict[str, Any]:
    """The device, its driver and the versions of all packages."""
    from kmodels.core import runtime

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    found = {"device": runtime.device_name(), "processor": platform.processor() or "unknown"}
    found |= {"cpus": os.cpu_count(), "python": platform.python_version(), "versions": versions}
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        found["driver"] = driver.read_text().splitlines()[0]
    return found


def absent(**modules: str) -> list[str]:
    """Returns the peers whose module is not installed."""
    return [name for name, module in modules.items() if not find_spec(module)]


def held_bytes() -> int | None:
    """Bytes that the allocator of the device has given out; None on a CPU."""
    if not on_gpu():
        return None
    if backend() == "torch":
        import torch

        return torch.cuda.memory_allocated()
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("bytes_in_use")


def peak_bytes(reset: bool = False) -> int | None:
    """Peak of the allocator; JAX cannot reset its own."""
    if not on_gpu():
        return None
    if backend() == "torch":
        import torch

        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def one_line(error: BaseException) -> str:
    """An error's kind and the first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def optional(name: str, make: Callable[[], dict[str, Run]]) -> dict[str, Run]:
    """Returns peers by name; where they cannot be built, one that tells why when it is called."""
    try:
        return make()
    except Exception as error:
        text = one_line(error)

    def raises(*_: Any) -> None:
        raise RuntimeError(text)

    return {name: raises}


def compiled(function: Any) -> Any:
    """`torch.compile`; small runs trace alone, since a C++ compiler takes half a minute."""
    import torch

    return torch.compile(function, backend="eager" if SMALL else "inductor")


def _first(run: Run) -> tuple[dict[str, Any], float]:
    """The first call, which compiles, and the memory and the seconds of the second."""
    begun = time.perf_counter()
    wait(run())
    row: dict[str, Any] = {"first_s": round(time.perf_counter() - begun, 3)}
    before, earlier = held_bytes(), peak_bytes(reset=True)
    begun = time.perf_counter()
    wait(run())
    seconds = time.perf_counter() - begun
    peak = peak_bytes()
    if before is not None and peak is not None:
        # JAX's peak is that of the process: it tells of this system only where it is a new one.
        known = backend() == "torch" or peak > (earlier or 0)
        row["peak_above_held_mib"] = round((peak - before) / MIB) if known else None
    return row, seconds


def _times(seconds: list[float], count: int) -> dict[str, Any]:
    taken = [1e3 * x / count for x in seconds]
    extremes = [round(min(taken), 4), round(max(taken), 4)]
    median = round(statistics.median(taken), 4)
    return {"median_ms": median, "range_ms": extremes, "calls": len(taken)}


def measure(
    case: str,
    systems: dict[str, Run],
    rounds: int,
    count: int = 1,
    derive: Callable[[dict[str, Any]], dict[str, Any]] = lambda row: {},
) -> Generator[dict[str, Any], None, list[dict[str, Any]]]:
    """Times systems in turns after a first call of each, which compiles, and a second one.

    Args:
        case: what all systems do.
        systems: name to what makes `count` steps and returns what `wait` waits for.
        rounds: calls of each.
        count: steps in a call.
        derive: returns more fields of a row that has `median_ms`.

    Yields:
        The row of each system after its second call, whose time stands in it until the rounds are
        over, and then all rows: `median_ms`, `range_ms`, `calls`, `first_s`, peak; or `failed` with
        an error.

    Returns:
        All rows.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, run in systems.items():
        rows[name] = {"case": case, "system": name}
        try:
            first, seconds = _first(run)
            rows[name] |= first | _times([seconds], count)
            rows[name] |= derive(rows[name])
        except Exception as error:
            rows[name]["failed"] = one_line(error)
        yield {"rows": [rows[name]]}
    ready = {name: run for name, run in systems.items() if "failed" not in rows[name]}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, run in ready.items():
            begun = time.perf_counter()
            wait(run())
            times[name].append(time.perf_counter() - begun)
    for name, taken in times.items():
        rows[name] |= _times(taken, count)
        rows[name] |= derive(rows[name])
    yield {"rows": list(rows.values())}
    return list(rows.values())


def kernels(run: Run, most: int = 6) -> list[str]:
    """Names of the kernels of torch that took longest in one call."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]
    with profile(activities=kinds) as found:
        wait(run())
    name = "device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    events = sorted(found.key_averages(), key=lambda event: -getattr(event, name))
    return [event.key[:120] for event in events[:most]]


def build(task: Any, preset: str, dtype: str, **changes: Any) -> Any:
    """A task of random weights that are drawn on the device."""
    import keras

    from kmodels.core import keras_internals

    with keras_internals.without_values() as made:
        model = task.from_preset(preset, dtype=dtype, **changes)
    seed = keras.random.SeedGenerator(0)
    for variable in model.weights:
        if len(variable.shape) > 1:
            value = keras.random.normal(variable.shape, 0.0, 0.02, variable.dtype, seed)
        elif variable.path.endswith("scale") and "vit" in preset:
            value = keras.ops.ones(variable.shape, variable.dtype)
        else:
            value = keras.ops.zeros(variable.shape, variable.dtype)
        keras_internals.give_value(variable, value)
    keras_internals.draw_values(made)
    return model


def matmul_rate(size: int, dtype: str = "bfloat16", rounds: int = 5) -> float:
    """Measured rate of a square product in operations a second."""
    import keras

    a = keras.random.normal((size, size), 0.0, size**-0.5, dtype, seed=1)
    product = keras.ops.matmul
    if backend() == "jax":
        import jax

        product = jax.jit(product)

    def chain() -> Any:
        x = a
        for _ in range(4):
            x = product(a, x)
        return x

    *_, last = measure("matmul", {"matmul": chain}, rounds, 4)
    (row,) = last["rows"]
    if "failed" in row:
        raise RuntimeError(row["failed"])
    return 2 * size**3 / (row["median_ms"] / 1e3)
