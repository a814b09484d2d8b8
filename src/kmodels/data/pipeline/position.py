"""Position: the position of data in a running `fit`, and how a resumed `fit` returns to it.

The state of a loader is restored, or a pass begins at the batch, or the batches before are made
again.
"""

import copy
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

from kmodels.core.errors import InputError
from kmodels.core.types import Tree


@runtime_checkable
class StatefulLoader(Protocol):
    """Protocol for loaders that can save and restore their position, such as `ImageLoader`.

    `kmodels.callbacks.Checkpoint` reads the state after each batch, since batches are prefetched,
    and saves that of the last batch which was trained on. torchdata's `StatefulDataLoader` has
    these methods too.

    Your loader counts the batches it has yielded in a pass. A pass begins with the first batch,
    except for the one after `load_state_dict`:

        def __iter__(self):
            first, self.first = self.first, 0
            for number in range(first, len(self)):
                self.yielded = number + 1
                yield self.batch(number)

        def state_dict(self):
            return {"yielded": self.yielded}

        def load_state_dict(self, state_dict):
            self.first = state_dict["yielded"]
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: numbers, strings, bytes, arrays, and nests of them."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next pass yield the batches that were left when this state was read.

        After the last batch of a pass, these are none or those of the next pass.
        """
        ...


Read = Callable[[], Any]
Load = Callable[[Any], object]
# The state of a loader with its own random generator, such as torch's `generator=`: the state of
# the loader or None, and those of the generator after the batch and before the pass.
WITH_GENERATOR = ("loader", "generator", "generator_before_pass")


class Source:
    """Batches on the host, one pass after another.

    Attributes:
        data: the loader.
        stateful: the loader, if its state is that of the batch which it yielded last; else None.
        faster: how to make it faster, if not by workers.
        seekable: True if a pass may begin at any batch.
        draws: True if making a batch may use the random generators of Python and NumPy.
        num_batches: number of batches in a pass, or None if it is not known.
        as_batch: returns an item of a pass as (x,), (x, y) or (x, y, sample_weight).
    """

    data: Any
    stateful: Any
    faster: str | None = None
    seekable: Any
    draws: Any
    num_batches: Any
    as_batch: Callable[[Any], tuple]

    def begin(self, first: int = 0) -> Iterator[Any]:
        """Begins a pass; if the source is seekable, at any batch."""
        raise NotImplementedError

    def start(self) -> None:
        """Called as training starts."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch."""

    def on_epoch_begin(self) -> None:
        """Called as an epoch begins."""

    def on_epoch_end(self, taken: int, wanted: int | None) -> None:
        """Called at the end of an epoch, of whose `wanted` batches `taken` were used."""


class Continued(NamedTuple):
    """The position at which an interrupted epoch continues: the number of its first batch.

    `place` moves the data there, and returns True if the batches before have to be made again;
    `build` is called with the first of those. `log_names` are the names of the logs of a step.
    """

    batch: int
    log_names: Sequence[str]
    place: Callable[[], bool]
    build: Callable[[Any], object]


class Position:
    """A source, and its states after the batches that are not trained on yet.

    The state is that of the loader, or of its iterator if only that has one, as in grain. A random
    generator of the loader is saved with it: torchdata restores the numbers that its sampler drew
    for this pass, but not those that the next passes will draw. After `go_to`, `skipped` is the
    number of batches that the pass skipped.
    """

    def __init__(self, source: Source):
        self._source, self._loader = source, source.stateful
        self.skipped = 0
        self._trained: Callable[[], int] | None = None
        self._states: dict[int, Any] = {}
        self._begun: list[Iterator[Any]] = []
        self._generator = _accessors(getattr(self._loader, "generator", None))

    def watch(self, trained: Callable[[], int]) -> None:
        """Records states from now on; `trained` returns the number of batches trained on so far."""
        self._trained, self._states = trained, {}

    def state(self) -> Any:
        """Returns the state after the last batch that was trained on; None if there is none."""
        return None if self._trained is None else self._states.get(self._trained())

    def check(self, hold: Callable[[Any], object]) -> None:
        """Checks before the first step of a run that the state of the loader can be saved.

        `hold` raises `InputError` for one that cannot; the error names the loader and its state.
        """
        if not _is_stateful(self._loader):
            return
        state = self._loader.state_dict()
        try:
            hold(state)
        except InputError as error:
            shown = " ".join(reprlib.repr(state).split())
            raise InputError(f"{self._name}.state_dict() returned {shown}: {error}") from None

    def begin(self) -> Iterator[Any]:
        """Begins a pass over the source at the position of `go_to`, else at its beginning."""
        generator = self._generator
        before = None if generator is None else generator[0]()
        iterator = self._begun.pop() if self._begun else self._source.begin()
        accessors = _accessors(self._loader) or _accessors(iterator)
        if self._trained is None or (accessors is None and generator is None):
            return iterator

        def read() -> Any:
            state = None if accessors is None else copy.deepcopy(accessors[0]())
            if generator is None:
                return state
            return dict(zip(WITH_GENERATOR, (state, generator[0](), before), strict=True))

        return self._recorded(iterator, read, self._trained)

    @property
    def sought(self) -> bool:
        """True if the next pass begins at the position of `go_to`."""
        return bool(self._begun)

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

    def replays(self, state: Tree) -> bool:
        """Returns True if the batches before a position with this state have to be made again."""
        return _parts(state)[0] is None and not self._source.seekable

    def go_to(
        self,
        state: Any,
        batch: int,
        over: bool,
        undo: Callable[[], object],
        alone: Callable[[], bool],
    ) -> bool:
        """Moves the next pass to a batch of an epoch, by the state of the loader if there is one.

        Args:
            state: state of the loader, or None.
            batch: number of the batch in the epoch.
            over: True if the epoch of the state was over.
            undo: restores the random generators to the beginning of the epoch.
            alone: returns True if the generators of Python and NumPy have the states of the
                checkpoint, or if batches were not prefetched then.

        Returns:
            True if the batches before have to be made again.
        """
        if _parts(state)[0] is not None and self._load(state, over, undo):
            return False
        _, after, before = _parts(state)
        self._put_generator(after if over else before)
        if not batch:
            return False
        why = "{name} cannot be sought; give it state_dict() and load_state_dict()"
        if self._source.seekable:
            if not self._source.draws or alone():
                self._begun, self.skipped = [self._source.begin(batch)], batch
                return False
            undo()
            why = (
                "{name} draws from the random generators of Python or NumPy; give it a generator "
                "of its own, with state_dict() and load_state_dict()"
            )
        several = "batch" if batch == 1 else f"{batch} batches"
        warnings.warn(
            f"this fit repeats the first {several} of its epoch, "
            f"without training on them, since {why.format(name=self._name)}",
            stacklevel=2,
        )
        return True

    def _load(self, state: Any, over: bool, undo: Callable[[], object]) -> bool:
        """Makes the iterator of the next pass from a state; False if nothing here can load one.

        If the pass of the state was over, a new one begins; `undo` restores random generators if an
        iterator was made in vain.
        """
        state, after, _ = _parts(state)
        if _is_stateful(self._loader):
            self._loader.load_state_dict(state)
            if not over:
                self._begun = [self._with_generator(self._source.begin(), after)]
            elif not self._source.seekable:
                # At its end a loader yields nothing once, or begins the next pass.
                iterator = self._source.begin()
                first = list(islice(iterator, 1))
                self._begun = [chain(first, iterator)] if first else []
                if not first:
                    undo()
                    self._put_generator(after)
            return True
        if over:
            return True  # An iterator's state is of one pass.
        iterator = self._source.begin()
        if (accessors := _accessors(iterator)) is None:
            return False
        accessors[1](state)
        self._begun = [iterator]
        return True

    def _put_generator(self, state: Tree) -> None:
        if self._generator is not None and state is not None:
            self._generator[1](state)

    def _with_generator(self, batches: Iterator[Any], after: Tree) -> Iterator[Any]:
        # A sampler draws the pass again with its first batch.
        for batch in islice(batches, 1):
            self._put_generator(after)
            yield batch
        yield from batches

    @property
    def _name(self) -> str:
        data = self._source.data
        return getattr(data, "name", None) or type(data).__name__


def _parts(state: Tree) -> tuple[Any, Any, Any]:
    """Returns the values of `WITH_GENERATOR`; None for a generator that was not saved."""
    if isinstance(state, dict) and tuple(state) == WITH_GENERATOR:
        return tuple(state.values())
    return state, None, None


def _is_stateful(thing: object) -> TypeGuard[StatefulLoader]:
    # From Python 3.12 on `isinstance` does not find methods that a wrapper passes on.
    return callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    )


def _accessors(thing: object) -> tuple[Read, Load] | None:
    if _is_stateful(thing):
        return thing.state_dict, thing.load_state_dict
    read, load = getattr(thing, "get_state", None), getattr(thing, "set_state", None)
    return (read, load) if callable(read) and callable(load) else None
