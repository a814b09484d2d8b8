"""CUDA on a machine without it, and blocks in which nothing may wait for the device.

`pretend`: the thin functions that ask where a tensor lies say CUDA, and kernels that only CUDA has
are replaced by a recorder and by a body for CPUs. Tensors lie on the CPU all the same, so a copy to
the device shows as what torch calls where it makes a tensor of numbers.

`fake_cuda`: tensors have no numbers and lie on CUDA. The code takes the kernels of CUDA, of which
torch knows shapes, dtypes and devices; a tensor of the CPU among them raises, and so does a read of
numbers.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import keras
import pytest
import torch
import torch.distributed as collectives
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import flex_attention as flexible
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kmodels.core import keras_internals, processes, runtime_torch
from kmodels.distribution import distribute
from kmodels.distribution.engines import fsdp_torch
from kmodels.distribution.engines.ddp_torch import DDPTrainer
from kmodels.overrides import _attention_cuda_torch as cuda
from kmodels.overrides import (
    _tensors_torch,
    attention_torch,
    dropout_torch,
    grouped_dense_torch,
    linear_cross_entropy_torch,
    norms_torch,
)

# What reads a number, or asks for a size that depends on numbers; `lift_fresh` begins a tensor that
# is made of numbers or of an array of the host.
KERNELS = frozenset(
    [
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "nonzero_numpy",
        "masked_select",
        "equal",
        "bincount",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "lift_fresh",
    ]
)
INDEXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"))
# Methods that reach the numbers of a CPU's tensor without a kernel.
METHODS = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
        "__contains__",
        "__complex__",
    ]
)
_paused = [0]


class WaitsForDevice(AssertionError):
    """Something would wait for the device."""


def _refuse(name: str) -> None:
    if not _paused[0]:
        raise WaitsForDevice(f"{name} waits for the device")


class _Kernels(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in KERNELS:
            _refuse(name)
        if name in INDEXED and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            _refuse(f"{name} by a mask")
        return function(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in METHODS:
            _refuse(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def without_waiting() -> Iterator[None]:
    """Raises `WaitsForDevice` where the block would wait for a device that holds its tensors."""
    with _Methods(), _Kernels():
        yield


@contextmanager
def paused() -> Iterator[None]:
    """Lets the block do on the host what it likes."""
    _paused[0] += 1
    try:
        yield
    finally:
        _paused[0] -= 1


def pausing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose calls are `paused`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with paused():
            return function(*args, **kwargs)

    return call


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    capped: Callable[..., torch.Tensor] | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention with all weights, (B, T, N, H)."""
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    scores = torch.einsum("btnh,bsnh->bnts", query.float(), key.float())
    scores = scores * (query.shape[3] ** -0.5 if scale is None else scale)
    scores = scores if capped is None else capped(scores)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return torch.einsum("bnts,bsnh->btnh", scores.softmax(-1).to(value.dtype), value)


def attention_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Puts bodies for CPUs in the place of CUDA's kernels; returns what they were given."""
    given: list[Any] = []
    monkeypatch.setattr(_tensors_torch, "LACKING", frozenset())

    def varlen(query: Any, key: Any, value: Any, window: int, scale: Any) -> torch.Tensor:
        given.append(("varlen", tuple(query.shape), tuple(key.shape), window, scale))
        place = torch.arange(query.shape[1])
        behind = place[:, None] - place
        return dense(query, key, value, (behind >= 0) & (behind < window), None, scale)

    def flex(query: Any, key: Any, value: Any, mask: Any, cap: Any, scale: Any) -> torch.Tensor:
        given.append(("flex", tuple(query.shape), tuple(key.shape), mask, cap, scale))
        lengths = query.shape[1], key.shape[1]
        allowed = None
        if mask is not None:
            allowed = flexible.create_mask(mask.mask_mod, len(query), 1, *lengths, device="cpu")
        return dense(query, key, value, allowed, cuda._cap(cap), scale)

    monkeypatch.setattr(attention_torch, "on_cuda", lambda query: True)
    monkeypatch.setattr(cuda, "varlen", varlen)
    monkeypatch.setattr(cuda, "flex", flex)
    monkeypatch.setattr(cuda, "_compiled", lambda function: function)
    monkeypatch.setattr("kmodels.overrides._attention_cuda_torch.PAIRS", 0)
    cuda._last.clear()
    return given


def pretend(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Has all that asks for CUDA find it; returns what attention's kernels are given.

    A block mask's tables are made by compiled code of torch on the device, and what is sent there
    without a wait is made on the host first: both are `paused`.
    """
    given = attention_kernels(monkeypatch)
    monkeypatch.setattr(cuda, "block_mask", pausing(cuda.block_mask))
    monkeypatch.setattr(cuda, "flex", pausing(cuda.flex))
    monkeypatch.setattr(dropout_torch, "on_cuda", lambda device: True)
    monkeypatch.setattr(grouped_dense_torch, "on_cuda", lambda x: True)
    monkeypatch.setattr(grouped_dense_torch, "has_kernel", lambda device: True)
    monkeypatch.setattr(norms_torch, "by_rows", lambda x: False)
    monkeypatch.setattr(linear_cross_entropy_torch, "on_cuda", lambda hidden: True)
    monkeypatch.setattr(runtime_torch, "on_cuda", lambda: True)
    monkeypatch.setattr(runtime_torch, "on_host", pausing(lambda make, x, dtype: make(x, dtype)))
    monkeypatch.setattr(runtime_torch, "pinned", lambda host, device: host)
    monkeypatch.setattr(runtime_torch, "put", pausing(runtime_torch.put))
    runtime_torch.send_without_waiting()
    return given


def stop_pretending() -> None:
    """Gives Keras its own way to send numbers."""
    keras_internals.change_conversion(None)


# === Fake tensors ===

# One mode for a process: tensors of different modes do not mix, and ops keep constants.
_MODE = FakeTensorMode()
_strict = [False]
STREAMS = (
    *((torch.cuda, name) for name in ("Stream", "Event", "stream", "current_stream")),
    *((torch.accelerator, "current_stream"), (torch, "Event")),
)


def _dispatch(function: Any, types: Any, args: Any = (), kwargs: Any = None, **more: Any) -> Any:
    output = _DISPATCH(function, types, args, kwargs, **more)
    name, kwargs = getattr(function, "_opname", ""), kwargs or {}
    if _strict[0] and name in ("_to_copy", "copy_"):
        source, target = (args[0], output) if name == "_to_copy" else (args[1], args[0])
        # From pinned memory; what comes to the host has to be waited for.
        ordered = target.is_cuda and (kwargs.get("non_blocking") or args[2:] == (True,))
        if source.device.type != target.device.type and not ordered:
            _refuse(f"a copy from {source.device.type} to {target.device.type}")
    return output


# Not a subclass: torch has its rules for higher order operators by the class of a mode.
_DISPATCH, _MODE.dispatch = _MODE.dispatch, _dispatch


@contextmanager
def without_copies() -> Iterator[None]:
    """Raises `WaitsForDevice` if the block copies from pageable memory, or to the host."""
    _strict[0] = True
    try:
        yield
    finally:
        _strict[0] = False


class _Generator(torch.Generator):
    """A generator that is made for CUDA, on the CPU."""

    def __new__(cls, device: object = None) -> Any:
        return super().__new__(cls, "cpu")


@cache
def _device() -> ctypes.CDLL:
    """Compiles the device that autograd's engine asks; skips the test without a compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "cuda.so"
        command = [compiler, "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder / 'include'}"]
        command += [str(Path(__file__).with_suffix(".cpp")), f"-L{torch_folder / 'lib'}"]
        command += ["-lc10", "-ltorch_cpu", "-o", str(library)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Puts all tensors of the block on CUDA, without numbers; yields attention's kernels.

    The attention kernels are those that `choose` chose for calls of the block. FlexAttention is not
    compiled.
    """
    library, kernels = _device(), set[str]()
    choose = attention_torch.choose

    def chosen(facts: Any) -> Any:
        choice = choose(facts)
        kernels.add(choice.kernel)
        return choice

    # Without these, torch asks a driver.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self)
    monkeypatch.setattr(torch, "Generator", _Generator)
    monkeypatch.setattr(flexible, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(cuda, "_compiled", lambda function: function)
    monkeypatch.setattr(attention_torch, "choose", chosen)
    # Not a scope: backward passes run in a thread of the device.
    monkeypatch.setattr(keras_internals.CORE, "DEFAULT_DEVICE", "cuda")
    seed = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
    library.exchange()
    try:
        with _MODE:
            yield kernels
    finally:
        library.exchange()
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, seed)
        stop_pretending()


class _Group(collectives.ProcessGroup):
    """The second of two processes; the other one sends nothing."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self.sent: list[tuple[str, torch.dtype, int]] = []

    def _send(self, name: str, tensor: torch.Tensor, outputs: Any) -> Any:
        # Those of the host would go over gloo, for which the device waits.
        assert tensor.is_cuda, f"{name} of a tensor on {tensor.device}"
        self.sent.append((name, tensor.dtype, tensor.numel()))
        done = torch.futures.Future()
        done.set_result(outputs)
        return torch._C._distributed_c10d._create_work_from_future(done)

    def allreduce(self, tensors: list[torch.Tensor], options: object = None) -> Any:
        return self._send("all_reduce", *tensors, tensors)

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, options: Any = None) -> Any:
        return self._send("all_gather", x, [output])

    def reduce_scatter_single(
        self, output: torch.Tensor, x: torch.Tensor, options: Any = None
    ) -> Any:
        return self._send("reduce_scatter", x, [output])

    # Their names in torch 2.11.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def size(self) -> int:
        return 2

    def getBackendName(self) -> str:
        return "recorded"

    @property
    def group_name(self) -> str:
        return collectives.distributed_c10d._world.pg_names[self]


class _Stream:
    """A stream or an event of CUDA, which orders work of the device alone."""

    device = torch.device("cuda", 0)

    def __init__(self, *args: object, **kwargs: object):
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def record_event(self, event: object = None) -> "_Stream":
        return self

    def wait(self, *others: object) -> None:
        pass

    record = wait_event = wait_stream = wait

    def synchronize(self) -> None:
        _refuse("a stream's synchronize")


def _mesh_of_host(make: Callable[..., Any]) -> Callable[..., Any]:
    # A mesh of devices reads its ranks from a tensor on the host.
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return make(*args, **kwargs)

    return call


@contextmanager
def two_processes(
    monkeypatch: pytest.MonkeyPatch, mesh: str
) -> Iterator[tuple[Any, list[tuple[str, torch.dtype, int]]]]:
    """Makes this process the second of two; yields a plan, and a list of what is sent.

    The list has name, dtype and size of each collective's input. Bits of weights are not compared,
    since they have no numbers. DDP measures no times and keeps its first buckets, for both of which
    it would read from the device.
    """
    monkeypatch.setattr(processes._engine, "exchange", lambda key, text, seconds: [text] * 2)
    monkeypatch.setattr(DDPTrainer, "facts", lambda self, model: {})
    monkeypatch.setattr(collectives.Reducer, "prepare_for_forward", lambda self: None)
    monkeypatch.setattr(collectives.Reducer, "_rebuild_buckets", lambda self: False)
    monkeypatch.setattr(fsdp_torch, "init_device_mesh", _mesh_of_host(fsdp_torch.init_device_mesh))
    for owner, name in STREAMS:
        monkeypatch.setattr(owner, name, _Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if "recorded" not in collectives.Backend.backend_list:
        collectives.Backend.register_backend(
            "recorded", lambda store, rank, size, limit: _Group(rank, size), devices=["cpu", "cuda"]
        )
    collectives.init_process_group("recorded", rank=1, world_size=2, store=collectives.HashStore())
    try:
        yield distribute(mesh), collectives.group.WORLD.sent
    finally:
        distribute(None)
        collectives.destroy_process_group()


def outlined(make: Callable[[], Any]) -> Any:
    """Returns a model whose weights are fake: none is drawn, and a large one takes no memory.

    Its seeds are known on the host, as they are after the first draw.
    """
    with keras_internals.without_values() as waiting:
        model = make()
    for variable in waiting:
        dtype = keras_internals.CORE.to_torch_dtype(variable.dtype)
        keras_internals.give_value(
            variable, torch.empty(tuple(variable.shape), dtype=dtype, device="cuda")
        )
    know_seeds(model)
    return model


def know_seeds(model: Any) -> None:
    """Has the host know the words of a model's seeds, as after the first draw."""
    for variable in model.variables:
        if variable.path.endswith("seed_generator_state"):
            runtime_torch.note(keras_internals.value_of(variable, cast=False), (1, 0))


def know_batches(optimizer: Any) -> None:
    """Has the host know the count of batches, as after the first step."""
    runtime_torch.note(keras_internals.batches_seen(optimizer).value, (0,))


def on_device(arrays: Any) -> Any:
    """Returns arrays as fake tensors on CUDA."""
    return keras.tree.map_structure(lambda x: torch.from_numpy(x).to("cuda"), arrays)
