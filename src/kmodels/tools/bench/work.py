"""The process of one row: it builds the model and makes steps as it is asked to."""

import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import keras

from kmodels.core import dispatch
from kmodels.core.dispatch import backend_module
from kmodels.core.hardware import device_name, peak_memory_mb
from kmodels.core.out_of_memory import is_out_of_memory
from kmodels.core.types import Logs, Tensor
from kmodels.layers import block_compile as compiling
from kmodels.memory import estimate
from kmodels.tools.bench import setting
from kmodels.tools.bench.device import DeviceBackend
from kmodels.tools.children import LeftOut, Link, OutOfMemory
from kmodels.training import StepCallbacks, track_step_loss

OPENXLA = "openxla"
# Epochs of a run that its parent ends.
_ENDLESS = 1_000_000
JIT = {"auto": "auto", "none": False, "inductor": True, "xla": True, OPENXLA: False}


class OpenXLABackend(Protocol):
    """Training as one program of OpenXLA, on a backend that does not do so by itself."""

    def train(self, model: keras.Model, data: Iterable[Any], count: Callable[[Any], None]) -> None:
        """Trains a compiled model on batches of arrays; `count` gets the loss of each step."""
        ...


class Turns(keras.callbacks.Callback):
    """Steps at the parent's pace: after the last one that was asked for, it waits for more.

    Args:
        link: to the parent.
        begun: when the process began to build the model, on the clock of `time.perf_counter`.
    """

    def __init__(self, link: Link, begun: float):
        super().__init__()
        self._link, self._begun = link, begun
        self._left = 0
        self._losses: list[float] = []
        self._seconds: list[float] = []

    def ready(self, facts: dict[str, Any]) -> None:
        """The model stands; what follows is the first step."""
        self._wait({"facts": facts, "build_s": time.perf_counter() - self._begun})

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Counts a step of `fit`."""
        self.step(logs["step_loss"])  # type: ignore[index]

    def step(self, loss: Tensor) -> None:
        """Counts a step; reading its loss waits for it."""
        self._losses.append(float(keras.ops.convert_to_numpy(loss)))
        now = time.perf_counter()
        self._seconds.append(now - self._begun)
        self._begun = now
        self._left -= 1
        if not self._left:
            answer = {"losses": self._losses, "seconds": self._seconds}
            peak = {"peak_memory_mb": peak_memory_mb(), "host_bytes": estimate.host_bytes()}
            self._wait({**answer, **peak, "ops": dispatch.summary()})

    def _wait(self, answer: dict[str, Any]) -> None:
        self._link.send(**answer)
        request = self._link.receive()
        if request is None:
            os._exit(0)
        self._left = request["steps"]
        self._losses, self._seconds = [], []
        self._begun = time.perf_counter()


def work(job: dict[str, Any], link: Link) -> None:
    """Trains one row, see `Case` and `Options` for the keys of the job.

    Raises:
        LeftOut: for TF32 where there is none.
        OutOfMemory: where the device has no more.
        InputError: for settings that the preset does not have.
    """
    device = backend_module("kmodels.tools.bench.device", DeviceBackend)
    if job["precision"] == "tf32" and not device.has_tf32():
        raise LeftOut(f"{device_name()} has no TF32")
    try:
        _train(job, Turns(link, time.perf_counter()), device)
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(" ".join(str(error).split())[:200]) from None
        raise


def _train(job: dict[str, Any], turns: Turns, device: DeviceBackend) -> None:
    dispatch.load_environment(strict=True)
    policy = setting.prepare(job["precision"], job["seed"])
    names = ("image_size", "num_classes", "lora", "rank")
    model = setting.make_model(job["preset"], policy, **{name: job[name] for name in names})
    shape = (job["batch_size"], job["sequence_length"], job["seed"])
    data = setting.batches(model, *shape, job["workers"], job["ready"])
    model.compile(
        optimizer=setting.make_optimizer(job["optimizer"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **({"weighted_metrics": None} if setting.is_text(model) else {}),
        jit_compile=JIT[job["compile"]],
    )
    track_step_loss(model)
    facts = setting.facts(model, device)
    facts |= {"compile": _mode(model, job["compile"]), "device": device_name()}
    facts |= {"cpu": device.is_cpu(), "text": setting.is_text(model)}
    facts |= {"host_bytes": estimate.host_bytes()}
    if facts["dropout"] and job["compile"] == OPENXLA:
        raise LeftOut("torchax traces no random generator of torch; use a model without dropout")
    if facts["dropout"]:
        # Each backend drops other values, so what can be compared is the loss without.
        x, y, weights = setting.batch(model, *shape)
        options: dict[str, Any] = {"batch_size": len(y), "verbose": 0, "return_dict": True}
        found = model.evaluate(x, y, sample_weight=weights, **options)
        facts["evaluated"] = float(found["loss"])
    turns.ready(facts)
    if job["compile"] == OPENXLA:
        engine = backend_module("kmodels.tools.bench.openxla", OpenXLABackend, optional=True)
        assert engine is not None  # an option of torch alone
        engine.train(model, data, turns.step)
        return
    callbacks = StepCallbacks([turns], model, epochs=_ENDLESS, steps=len(data))
    model.fit(data, epochs=_ENDLESS, verbose=0, shuffle=False, callbacks=callbacks)


def _mode(model: keras.Model, asked: str) -> str:
    """Returns what compiles the step, in the words of `MODES`."""
    if asked == OPENXLA:
        return asked
    if compiling.compiled(model):
        return "inductor"
    return "xla" if model.jit_compile else "none"
