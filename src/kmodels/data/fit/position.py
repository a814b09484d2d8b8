"""The position of the data in a running `fit`, and the way of a resumed one to it."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain, islice
from typing import Any

import keras

from kmodels.core.keras_internals import epoch
from kmodels.data.fit.feed import DatasetAdapter, InstrumentedData, batches_ahead
from kmodels.data.stateful import StatefulLoader

Read = Callable[[], Any]
Load = Callable[[Any], object]


class TrackedLoader:
    """A loader, and where it stood after each batch that is not trained on yet.

    The state is that of the loader, or of its iterator where only that has one, as grain's do.

    Args:
        loader: gives batches, one pass after another.
        begin: makes the iterator of a pass.
        numbered: batches are asked for by their number, from 0 in each pass.
    """

    def __init__(
        self, loader: Any, begin: Callable[[Any], Iterator[Any]] = iter, numbered: bool = False
    ):
        self._loader, self._begin, self._numbered = loader, begin, numbered
        self._trained: Callable[[], int] | None = None
        self._states: dict[int, Any] = {}
        self._begun: list[Iterator[Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def watch(self, trained: Callable[[], int]) -> None:
        """Remembers states from here on.

        Args:
            trained: says after how many batches of all passes the training is.
        """
        self._trained, self._states = trained, {}

    def state(self) -> Any:
        """Returns where the loader stood after what is trained on; None where it has no state."""
        return None if self._trained is None else self._states.get(self._trained())

    def load(self, state: Any, over: bool, undo: Callable[[], object]) -> bool:
        """Has the next pass go on from a state, and makes its iterator.

        Args:
            state: that `state` gave.
            over: the pass of the state was over, so that the next one begins.
            undo: puts random generators back, where an iterator was made that nothing comes from.

        Returns:
            Whether the loader, or its iterator, takes a state.
        """
        if isinstance(self._loader, StatefulLoader):
            self._loader.load_state_dict(state)
            if not over:
                self._begun = [self._begin(self._loader)]
            elif not self._numbered:
                # At its end a loader gives nothing once, or begins the next pass.
                iterator = self._begin(self._loader)
                first = list(islice(iterator, 1))
                self._begun = [chain(first, iterator)] if first else []
                if not first:
                    undo()
            return True
        if over:
            return True  # An iterator's state is of one pass.
        iterator = self._begin(self._loader)
        if (accessors := _accessors(iterator)) is None:
            return False
        accessors[1](state)
        self._begun = [iterator]
        return True

    @property
    def is_sequence(self) -> bool:
        """Whether the loader holds its batches by number."""
        return isinstance(self._loader, Sequence)

    def seek(self, batch: int) -> None:
        """Has the next pass over a sequence begin with the batch of this number."""
        loader = self._loader
        self._begun = [(loader[number] for number in range(batch, len(loader)))]

    def __iter__(self) -> Iterator[Any]:
        iterator = self._begun.pop() if self._begun else self._begin(self._loader)
        accessors = _accessors(self._loader) or _accessors(iterator)
        if self._trained is None or accessors is None:
            return iterator
        return self._recorded(iterator, accessors[0], self._trained)

    def _recorded(
        self, batches: Iterable[Any], read: Read, trained: Callable[[], int]
    ) -> Iterator[Any]:
        first = trained()
        self._states = {first: copy.deepcopy(read())}
        for number, batch in enumerate(batches, first + 1):
            for former in [n for n in self._states if n < trained()]:
                del self._states[former]
            self._states[number] = copy.deepcopy(read())
            yield batch


def _accessors(thing: Any) -> tuple[Read, Load] | None:
    if isinstance(thing, StatefulLoader):
        return thing.state_dict, thing.load_state_dict
    read, load = getattr(thing, "get_state", None), getattr(thing, "set_state", None)
    return (read, load) if callable(read) and callable(load) else None


class Way(Enum):
    """The ways to bring data to the next batch."""

    STATE = "the loader is given the state that it had"
    NUMBER = "batches are asked for by their number"
    SLICES = "arrays are cut into the batches before, which costs nothing"
    REPLAY = "the batches before are made again"


class FitData:
    """The data of one `fit`.

    Args:
        iterator: that counts the steps of the `fit`, see `keras_internals.epoch.epoch_iterator`.
        trained: says after how many batches of all epochs the training is.
    """

    def __init__(self, iterator: Any, trained: Callable[[], int]):
        self.iterator = iterator
        outer = getattr(iterator, "data_adapter", None)
        while isinstance(inner := getattr(outer, "adapter", None), InstrumentedData):
            outer = inner
        self._ours = isinstance(outer, InstrumentedData)
        self._outer = outer
        self._adapter = getattr(outer, "adapter", outer)
        self._tracked = self._track()
        if self._tracked is not None:
            self._tracked.watch(trained)

    def _track(self) -> TrackedLoader | None:
        if epoch.makes_ahead(self._adapter):
            return None  # Keras' workers ask for batches long before they are handed out.
        if isinstance(self._adapter, DatasetAdapter):
            return self._adapter.track(TrackedLoader)
        if isinstance(epoch.given_data(self._adapter), keras.utils.PyDataset):
            return epoch.wrap_numbered(self._adapter, TrackedLoader)
        return epoch.wrap_data_loader(self._adapter, TrackedLoader)

    @property
    def ahead(self) -> bool:
        """Whether batches are made before the step that takes them."""
        return not self._ours or batches_ahead() > 0

    @property
    def spans_epochs(self) -> bool:
        """Whether a pass over the data goes on in the next epoch, by `steps_per_epoch`."""
        return bool(getattr(self.iterator, "steps_per_epoch", None))

    def state(self) -> Any:
        """Returns the state of the loader after what is trained on; None where it has none."""
        return None if self._tracked is None else self._tracked.state()

    def way(self, state: Any) -> Way:
        """Returns how this data goes on from a checkpoint with such a state, or None."""
        if state is not None and self._tracked is not None:
            return Way.STATE
        if self._tracked is not None and self._tracked.is_sequence:
            return Way.NUMBER
        if self._numbered:
            return Way.REPLAY if epoch.makes_ahead(self._adapter) else Way.NUMBER
        return Way.SLICES if self._given is None else Way.REPLAY

    @property
    def _numbered(self) -> bool:
        return isinstance(self._given, keras.utils.PyDataset)

    @property
    def _given(self) -> Any:
        """The data that `fit` was given; None for arrays, which Keras slices."""
        return getattr(self._adapter, "batches", None) or epoch.given_data(self._adapter)

    def go_to(
        self,
        state: Any,
        batch: int,
        over: bool,
        undo: Callable[[], object],
        alone: Callable[[], bool],
    ) -> bool:
        """Brings the next pass to a batch.

        Args:
            state: of the loader, or None.
            batch: of the epoch.
            over: the epoch of the state was over.
            undo: puts the random generators back to the begin of the epoch.
            alone: whether the generators of Python and NumPy are as they were when the checkpoint
                was made, or batches were not made ahead of the steps then.

        Returns:
            Whether the batches before still have to be gone through.
        """
        way = self.way(state)
        if way is Way.STATE and self._tracked is not None:
            if self._tracked.load(state, over, undo):
                return False
            way = Way.REPLAY
        if not batch:
            return False
        if way is Way.NUMBER and self._tracked is not None and self._tracked.is_sequence:
            self._tracked.seek(batch)
            return False
        if way is Way.NUMBER:
            undo_seek = epoch.seek(self._adapter, batch)
            if alone():
                return False
            undo_seek()
            undo()
            self._warn(
                batch,
                "{name} draws from the random generators of Python or NumPy; give it a generator "
                "of its own, with state_dict() and load_state_dict()",
            )
        elif way is Way.REPLAY:
            self._warn(
                batch,
                "Keras asks workers for the batches of {name}; give it workers=1"
                if self._numbered
                else "{name} cannot be sought; give it state_dict() and load_state_dict()",
            )
        return True

    def example(self) -> Any:
        """Returns a batch, or what tells its shapes and dtypes; nothing is made ahead for it."""
        if isinstance(self._outer, DatasetAdapter):
            return next(iter(self._outer.raw()))
        return epoch.example(self.iterator)

    def look(self) -> None:
        """See `InstrumentedData.look`, for a pass that does not begin with the first step."""
        if isinstance(self._outer, InstrumentedData):
            self._outer.look()

    def _warn(self, batch: int, since: str) -> None:
        name = getattr(self._given, "name", None) or type(self._given).__name__
        several = "batch" if batch == 1 else f"{batch} batches"
        warnings.warn(
            f"this fit goes through the first {several} of its epoch again, "
            f"without training on them, since {since.format(name=name)}",
            stacklevel=2,
        )
