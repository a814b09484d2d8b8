"""StatefulLoader: what a loader has that a resumed run begins in the middle of."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that a resumed run can begin in the middle of, such as an `ImageLoader`.

    `kmodels.callbacks.Checkpoint` asks for the state after each batch, since batches are made ahead
    of the steps, and keeps that of the last batch which was trained on. torchdata's
    `StatefulDataLoader` has these methods too.

    A loader of your own counts what it has given in a pass, and a pass begins with the first
    batch, except for the one after `load_state_dict`:

        def __iter__(self):
            first, self.first = self.first, 0
            for number in range(first, len(self)):
                self.given = number + 1
                yield self.batch(number)

        def state_dict(self):
            return {"given": self.given}

        def load_state_dict(self, state_dict):
            self.first = state_dict["given"]
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns where the loader stands: numbers, strings, bytes, arrays, and nests of them."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has the next pass give the batches that were left when this state was read.

        After the last batch of a pass there may be none left, or those of the next pass.
        """
        ...
