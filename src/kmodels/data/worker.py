"""The main program of a worker process, see `worker_pool`, and how it exchanges objects."""

import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

from kmodels.core.errors import InputError, one_line


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
    """Reads what `send` wrote.

    Raises:
        EOFError: if the stream has ended.
    """
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
    """Reads a `BatchMaker`, then answers requests until the input ends."""
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
