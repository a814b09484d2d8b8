"""Objects with large arrays through a pipe, without copying the arrays into the pickle."""

import pickle
from typing import Any, BinaryIO


def send(stream: BinaryIO, thing: object) -> None:
    """Writes one object: a pickle of (sizes of its arrays' memory, its pickle), then the memory."""
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
        EOFError: where the stream has ended.
    """
    # The other end is a child of this process, or its parent, over a pipe of their own.
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
