"""Processes that make batches, safe with any framework.

Python's own pools start a process by fork, which can deadlock once JAX or TensorFlow runs threads,
or by spawn and forkserver, which import the user's script again in each process, with the
framework it imports, and crash if it has no `if __name__ == "__main__"`. Each worker is
therefore a fresh `python -m kmodels.data.workers`, which gets a pickled BatchMaker through its
standard input and answers through its standard output. It imports no framework.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

from kmodels.core.environment import SAFE_PATH
from kmodels.core.errors import InputError, is_out_of_memory, one_line

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WorkerPool:
    """Processes that return the batch of (epoch, number) of a BatchMaker.

    Raises:
        InputError: if the maker cannot be sent, for example because it holds a function of the
            running script.
    """

    def __init__(self, maker: object, count: int):
        self._processes: list[subprocess.Popen] = []
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="kmodels-data")
        self._finalizer = weakref.finalize(self, _stop, self._processes, self._threads)
        try:
            for _ in range(count):
                self._processes.append(_start())
                send(self._processes[-1].stdin, maker)  # pyright: ignore[reportArgumentType]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.close()
            raise InputError(
                f"the data cannot be sent to workers ({error}); put what it uses in a module, or "
                "set workers to 0"
            ) from error
        except BrokenPipeError as error:
            ended = _ended(self._processes[-1])
            self.close()
            raise ended from error
        self._idle: queue.SimpleQueue = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def submit(self, *request: object) -> Future:
        """Requests a batch."""
        return self._threads.submit(_ask, self._idle, request)

    def close(self) -> None:
        """Stops the processes."""
        self._finalizer()


def _start() -> subprocess.Popen:
    environment = {
        **os.environ,
        **dict.fromkeys(_ONE_THREAD, "1"),
        **SAFE_PATH,
        # In this order; the working directory is included only if it is in ours.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "kmodels.data.workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _ask(idle: queue.SimpleQueue, request: tuple) -> Any:
    process = idle.get()
    try:
        send(process.stdin, request)
        succeeded, answer = receive(process.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        raise _ended(process) from error
    except Exception as error:
        raise InputError(
            f"the answer of a data worker cannot be read ({one_line(error)}); set workers to 0"
        ) from error
    finally:
        idle.put(process)
    if succeeded:
        return answer
    if is_out_of_memory(answer):
        raise InputError(
            f"a data worker has too little memory on the host ({one_line(answer)}); use fewer "
            "workers or a smaller batch"
        ) from answer
    raise answer


def _ended(process: subprocess.Popen) -> InputError:
    """Returns the error for a worker that has ended unexpectedly."""
    code = process.wait()
    if code < 0:
        return InputError(
            f"a data worker was killed by {signal.Signals(-code).name}; SIGKILL usually means that "
            "the host has too little memory: use fewer workers or a smaller batch"
        )
    return InputError(
        f"a data worker exited with code {code}; its own message is above, and workers=0 shows "
        "where it comes from"
    )


def _stop(processes: list[subprocess.Popen], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    # Pipes are closed after the threads, which have read the end of file.
    threads.shutdown(wait=True)
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            try:
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]
            except BrokenPipeError:
                pass


def send(stream: BinaryIO, thing: object) -> None:
    """Writes an object: a pickle of (sizes of its arrays, its own pickle), then the arrays."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    memory = [buffer.raw() for buffer in buffers]
    pickle.dump(([view.nbytes for view in memory], body), stream)
    for view in memory:
        stream.write(view)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Reads an object that `send` wrote; EOFError if the stream has ended."""
    # The other end of the pipe is a child of this process, or its parent.
    sizes, body = pickle.load(stream)  # nosec B301
    memory = [bytearray(size) for size in sizes]
    for buffer in memory:
        view = memoryview(buffer)
        while view:
            count = stream.readinto(view)  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise EOFError("the other side ended")
            view = view[count:]
    return pickle.loads(body, buffers=memory)  # nosec B301


def main() -> None:
    """Runs a worker: reads a `BatchMaker`, then answers requests until the input ends."""
    # Ctrl-C goes to the whole group; the parent decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    # Prints of user functions must not mix with the answers.
    os.dup2(2, 1)
    maker, failure = None, None
    try:
        maker = receive(sys.stdin.buffer)
    except EOFError:
        return
    except Exception as error:  # of any class in the data
        failure = InputError(
            f"a data worker cannot load the data ({one_line(error)}); put what it uses in a "
            "module, or set workers to 0"
        )
    while True:
        try:
            request = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if failure is not None or maker is None:
                raise failure or InputError("a data worker got no data")
            answer = (True, maker.make(*request))
        except Exception as error:
            answer = (False, _portable(error))
        try:
            send(answers, answer)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            failed = InputError(f"a data worker cannot send its batch ({one_line(error)})")
            send(answers, (False, failed))


def _portable(error: Exception) -> Exception:
    """Returns the error if it can be pickled, else a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))  # nosec B301
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main()
