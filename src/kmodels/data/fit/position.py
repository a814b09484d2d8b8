"""The position of the data in a running `fit`, and the way of a resumed one to it."""

import copy
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain, islice
from typing import Any, NamedTuple

import keras

from kmodels.core.errors import InputError
from kmodels.core.keras_internals import data
from kmodels.core.types import Tree
from kmodels.data.fit.feed import DatasetAdapter, batches_ahead
from kmodels.data.stateful import StatefulLoader

Read = Callable[[], Any]
Load = Callable[[Any], object]
# The state of a loader that has a random generator of its own, as torch's `generator=`: what the
# loader says of itself, or None; the generator after the batch; the generator before the pass.
WITH_GENERATOR = ("loader", "generator", "generator_before_pass")


class TrackedLoader:
    """A loader, and where it stood after each batch that is not trained on yet.

    The state is that of the loader, or of its iterator where only that has one, as grain's do. A
    random generator of the loader's own is kept with it: torchdata knows what its sampler has drawn
    from it in the pass, and not what the next passes will draw.

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
        self._generator = _accessors(getattr(loader, "generator", None))

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

    def now(self) -> Any:
        """Returns the state of the loader itself; None where only its iterators have one."""
        return self._loader.state_dict() if isinstance(self._loader, StatefulLoader) else None

    def load(self, state: Any, over: bool, undo: Callable[[], object]) -> bool:
        """Has the next pass continue from a state, and makes its iterator.

        Args:
            state: that `state` gave.
            over: the pass of the state was over, so that the next one begins.
            undo: puts random generators back, where an iterator was made that nothing comes from.

        Returns:
            Whether the loader, or its iterator, takes a state.
        """
        state, after, _ = _parts(state)
        if isinstance(self._loader, StatefulLoader):
            self._loader.load_state_dict(state)
            if not over:
                self._begun = [self._with_generator(self._begin(self._loader), after)]
            elif not self._numbered:
                # At its end a loader gives nothing once, or begins the next pass.
                iterator = self._begin(self._loader)
                first = list(islice(iterator, 1))
                self._begun = [chain(first, iterator)] if first else []
                if not first:
                    undo()
                    self._put_generator(after)
            return True
        if over:
            return True  # An iterator's state is of one pass.
        iterator = self._begin(self._loader)
        if (accessors := _accessors(iterator)) is None:
            return False
        accessors[1](state)
        self._begun = [iterator]
        return True

    def tells(self, state: Tree) -> bool:
        """Returns whether a state says where the loader stood, and not its generator alone."""
        return _parts(state)[0] is not None

    def rewind_generator(self, state: Tree, over: bool) -> None:
        """Puts the loader's own generator where it was before the pass of a state, or after it."""
        _, after, before = _parts(state)
        self._put_generator(after if over else before)

    @property
    def is_sequence(self) -> bool:
        """Whether the loader holds its batches by number."""
        return isinstance(self._loader, Sequence)

    def seek(self, batch: int) -> None:
        """Has the next pass over a sequence begin with the batch of this number."""
        loader = self._loader
        self._begun = [(loader[number] for number in range(batch, len(loader)))]

    def __iter__(self) -> Iterator[Any]:
        generator = self._generator
        before = None if generator is None else generator[0]()
        iterator = self._begun.pop() if self._begun else self._begin(self._loader)
        accessors = _accessors(self._loader) or _accessors(iterator)
        if self._trained is None or (accessors is None and generator is None):
            return iterator

        def read() -> Any:
            state = None if accessors is None else copy.deepcopy(accessors[0]())
            if generator is None:
                return state
            return dict(zip(WITH_GENERATOR, (state, generator[0](), before), strict=True))

        return self._recorded(iterator, read, self._trained)

    def _recorded(
        self, batches: Iterable[Any], read: Read, trained: Callable[[], int]
    ) -> Iterator[Any]:
        first = trained()
        self._states = {first: read()}
        for number, batch in enumerate(batches, first + 1):
            for former in [n for n in self._states if n < trained()]:
                del self._states[former]
            self._states[number] = read()
            yield batch

    def _put_generator(self, state: Tree) -> None:
        if self._generator is not None and state is not None:
            self._generator[1](state)

    def _with_generator(self, batches: Iterator[Any], after: Tree) -> Iterator[Any]:
        # A sampler draws the pass again when it is asked for its first batch.
        for batch in islice(batches, 1):
            self._put_generator(after)
            yield batch
        yield from batches


def _parts(state: Tree) -> tuple[Any, Any, Any]:
    """Returns the values of `WITH_GENERATOR`; the generator's are None where none was kept."""
    if isinstance(state, dict) and tuple(state) == WITH_GENERATOR:
        return tuple(state.values())
    return state, None, None


def _accessors(thing: object) -> tuple[Read, Load] | None:
    if isinstance(thing, StatefulLoader):
        return thing.state_dict, thing.load_state_dict
    read, load = getattr(thing, "get_state", None), getattr(thing, "set_state", None)
    return (read, load) if callable(read) and callable(load) else None


class Continued(NamedTuple):
    """The position at which an interrupted epoch continues.

    Attributes:
        batch: the first that is not trained on.
        log_names: names of the logs of a step.
        place: brings the data there; True if the batches before still have to be gone through.
        build: called with the first of those.
    """

    batch: int
    log_names: Sequence[str]
    place: Callable[[], bool]
    build: Callable[[Any], object]


class Way(Enum):
    """The ways to bring data to the next batch."""

    STATE = "the loader is given the state that it had"
    NUMBER = "batches are asked for by their number"
    SLICES = "arrays are cut into the batches before, which costs nothing"
    REPLAY = "the batches before are made again"


class FitData:
    """The data of one `fit`.

    Args:
        iterator: the batches of its epochs, those of a `RunningFit`; None in Keras' own `fit`.
        trained: says after how many batches of all epochs the training is.
    """

    def __init__(self, iterator: Any, trained: Callable[[], int]):
        self.iterator = iterator
        self._adapter = getattr(iterator, "data_adapter", None)
        # Within one that has Keras' own; Keras' workers ask for batches long before they are taken.
        self._adapter = getattr(self._adapter, "adapter", self._adapter)
        self._tracked: TrackedLoader | None = None
        if isinstance(self._adapter, DatasetAdapter) and not data.makes_ahead(self._adapter):
            tracked = self._tracked = self._adapter.track(TrackedLoader)
            tracked.watch(trained)

    @property
    def ahead(self) -> bool:
        """Whether batches are made before the step that takes them."""
        return self.iterator is None or batches_ahead() > 0

    @property
    def spans_epochs(self) -> bool:
        """Whether a pass over the data continues in the next epoch, by `steps_per_epoch`."""
        return bool(getattr(self.iterator, "steps_per_epoch", None))

    def state(self) -> Any:
        """Returns the state of the loader after what is trained on; None where it has none."""
        return None if self._tracked is None else self._tracked.state()

    def check(self, hold: Callable[[Any], object]) -> None:
        """Refuses a loader whose state cannot be kept, before the first step of a run.

        Args:
            hold: takes a state, and raises `InputError` for one that cannot be kept.

        Raises:
            InputError: names the loader, and what it returned.
        """
        if self._tracked is None or (state := self._tracked.now()) is None:
            return
        try:
            hold(state)
        except InputError as error:
            shown = " ".join(reprlib.repr(state).split())
            raise InputError(f"{self._name}.state_dict() returned {shown}: {error}") from None

    def way(self, state: Any) -> Way:
        """Returns how this data continues from a checkpoint with such a state, or None."""
        if self._tracked is not None and self._tracked.tells(state):
            return Way.STATE
        if self._tracked is not None and self._tracked.is_sequence:
            return Way.NUMBER
        if self._numbered:
            return Way.REPLAY if data.makes_ahead(self._adapter) else Way.NUMBER
        return Way.SLICES if self._given is None else Way.REPLAY

    @property
    def _numbered(self) -> bool:
        return isinstance(self._given, keras.utils.PyDataset)

    @property
    def _given(self) -> Any:
        """The data that `fit` was given; None for arrays, which Keras slices."""
        return getattr(self._adapter, "batches", None) or data.given_data(self._adapter)

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
            state: state of the loader, or None.
            batch: a batch of the epoch.
            over: the epoch of the state was over.
            undo: puts the random generators back to the beginning of the epoch.
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
        if self._tracked is not None:
            self._tracked.rewind_generator(state, over)
        if not batch:
            return False
        if way is Way.NUMBER and self._tracked is not None and self._tracked.is_sequence:
            self._tracked.seek(batch)
            return False
        if way is Way.NUMBER:
            undo_seek = data.seek(self._adapter, batch)
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
        if isinstance(self._adapter, DatasetAdapter):
            return next(iter(self._adapter.raw()))
        spec = getattr(self.iterator.passes, "element_spec", None)
        return self.iterator.example() if spec is None else spec

    @property
    def _name(self) -> str:
        return getattr(self._given, "name", None) or type(self._given).__name__

    def _warn(self, batch: int, since: str) -> None:
        several = "batch" if batch == 1 else f"{batch} batches"
        warnings.warn(
            f"this fit repeats the first {several} of its epoch, "
            f"without training on them, since {since.format(name=self._name)}",
            stacklevel=2,
        )
