"""The main program of a worker process, see `pool`."""

import os
import pickle
import signal
import sys

from kmodels.core.errors import InputError, one_line
from kmodels.data.workers import protocol


def main() -> None:
    """Reads a BatchMaker, then answers requests until the input ends."""
    # Ctrl-C goes to the whole group; the parent decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    # A print in a user's function must not get in between the answers.
    os.dup2(2, 1)
    maker, failure = None, None
    try:
        maker = protocol.receive(sys.stdin.buffer)
    except EOFError:
        return
    except Exception as error:  # of any class that the data holds
        failure = InputError(
            f"a data worker cannot load the data ({one_line(error)}); put what it uses in a "
            "module, or set workers to 0"
        )
    while True:
        try:
            request = protocol.receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if failure is not None or maker is None:
                raise failure or InputError("a data worker got no data")
            answer = (True, maker.make(*request))
        except Exception as error:
            answer = (False, _portable(error))
        try:
            protocol.send(answers, answer)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            failed = InputError(f"a data worker cannot send its batch ({one_line(error)})")
            protocol.send(answers, (False, failed))


def _portable(error: Exception) -> Exception:
    """Returns the error itself where it survives the way to the parent, else one with its text."""
    try:
        pickle.loads(pickle.dumps(error))  # nosec B301
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main()
