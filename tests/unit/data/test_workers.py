"""A data worker that fails is reported as a data worker, never as a device without memory."""

import os
import signal

import pytest

from kmodels.core.errors import InputError, is_out_of_memory
from kmodels.data.workers import WorkerPool


class Maker:
    def __init__(self, fail):
        self.fail = fail

    def make(self):
        return FAILURES[self.fail][0]()


class Unreadable:
    """Its pickle raises the error where it is loaded."""

    def __init__(self, error, text):
        self.state = error, text

    def __reduce__(self):
        return throw, self.state


def throw(error, text):
    raise error(text)


# What a worker does, and a part of the message.
FAILURES = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    "exits": (lambda: os._exit(3), "exited with code 3"),
    "MemoryError": (lambda: throw(MemoryError, "no room"), "has too little memory on the host"),
    "said by text": (
        lambda: throw(RuntimeError, "out of memory"),
        "has too little memory on the host",
    ),
    "answer cannot be loaded": (lambda: Unreadable(ValueError, "odd"), "cannot be read (odd)"),
    "answer cannot be sent": (lambda: lambda: None, "cannot send its batch"),
}


@pytest.mark.parametrize("fail", FAILURES)
def test_a_worker_that_fails(fail):
    check(Maker(fail), FAILURES[fail][1])


def test_data_that_cannot_be_loaded():
    check(Unreadable(OSError, "out of memory"), "a data worker cannot load the data")


def check(maker, message):
    pool = WorkerPool(maker, 1)
    try:
        with pytest.raises(InputError) as raised:
            pool.submit().result(60)
    finally:
        pool.close()
    assert message in str(raised.value)
    assert not is_out_of_memory(raised.value)
    # As TensorFlow passes it on.
    assert not is_out_of_memory(RuntimeError(f"UnknownError: {raised.value} out of memory"))
