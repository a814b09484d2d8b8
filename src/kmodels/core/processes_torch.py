"""Several torch processes, started by torchrun."""

import atexit
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch

from kmodels.core import internals_torch
from kmodels.core.errors import InputError, one_line

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Rank zero holds the store; this leaves the others time to read why it ends.
_LAST_WORDS = 2.0
_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


def join(seconds: float) -> None:
    """See `processes`; a process that torchrun did not start stays alone."""
    if torch.distributed.is_initialized() or "RANK" not in os.environ:
        return
    if missing := [name for name in _NAMES if name not in os.environ]:
        raise InputError(
            f"RANK is set and {', '.join(missing)} is not; start the run by torchrun, or unset RANK"
        )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if not os.environ.get(name, "0").isdecimal():
            raise InputError(f"{name} is {os.environ[name]!r}; give a whole number from 0")
    if not (rank := int(os.environ["RANK"])) < (size := int(os.environ["WORLD_SIZE"])):
        raise InputError(f"RANK is {rank} and WORLD_SIZE {size}; ranks are 0 to WORLD_SIZE - 1")
    kind = _take_device()
    limit = timedelta(seconds=seconds)
    try:
        store, rank, count = next(torch.distributed.rendezvous("env://", timeout=limit))
        torch.distributed.init_process_group(
            "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{_BACKENDS[kind]}",
            store=torch.distributed.PrefixStore(_attempt(), store),
            rank=rank,
            world_size=count,
            timeout=limit,
        )
    except (torch.distributed.DistError, ValueError) as error:
        reason = one_line(error)[:300]
        raise InputError(
            f"process {os.environ['RANK']} could not join the others: {reason}; see that all "
            "WORLD_SIZE of them run and reach MASTER_ADDR"
        ) from error
    atexit.register(_end)


def index() -> int:
    """See `processes`."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def count() -> int:
    """See `processes`."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def exchange(key: str, text: str, seconds: float) -> list[str]:
    """See `processes`; uses the store, so that no device has to answer."""
    store: Any = internals_torch.default_store()
    end = time.monotonic() + seconds
    keys = [f"kmodels/{key}/{process}" for process in range(count())]
    try:
        store.set(keys[index()], text)
        for process, name in enumerate(keys):
            # store.wait would block other threads that need the store.
            while not store.check([name]):
                if time.monotonic() > end:
                    raise TimeoutError(f"process {process} did not answer")
                time.sleep(0.002)
        return [store.get(name).decode() for name in keys]
    except torch.distributed.DistError as error:
        raise TimeoutError(f"process 0 has gone: {error}") from error


def give_up(code: int) -> None:
    """See `processes`."""
    if index() == 0:
        time.sleep(_LAST_WORDS)
    os._exit(code)


def _attempt() -> str:
    """Returns a prefix for keys of this start; the store still has those of earlier starts.

    Raises:
        InputError: on several machines, since each counts only the restarts that it began.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "start"
    several = os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]
    if several and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise InputError(
            "torchrun restarts on several machines would find what the processes before them left; "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend=c10d, or --max-restarts=0"
        )
    return f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def _end() -> None:
    # Python sets it if an exception ends a script; then waiting for others makes no sense.
    if getattr(sys, "last_value", None) is not None or not torch.distributed.is_initialized():
        return
    try:
        exchange("end", "", _LAST_WORDS)
    except TimeoutError:
        pass
    torch.distributed.destroy_process_group()


def _take_device() -> str:
    """Makes the device of this process the default one, and returns its kind."""
    if not torch.accelerator.is_available():
        return "cpu"
    device: Any = torch.accelerator.current_accelerator()
    if device.type not in _BACKENDS:
        return "cpu"
    local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
    if local >= devices:
        raise InputError(
            f"process {local} of this machine has no device, since there are {devices}; start "
            f"torchrun with --nproc-per-node={devices}"
        )
    torch.accelerator.set_device_index(local)
    return device.type
