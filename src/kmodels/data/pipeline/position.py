"""Position: where data stands in a running `fit`, and how a resumed one comes there.

The state of a loader is put back, or a pass begins at the batch, or the batches before are made
again.
"""

import copy
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from kmodels.core.errors import InputError
from kmodels.core.types import Tree


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that a resumed run can begin in the middle of, such as an `ImageLoader`.

    `kmodels.callbacks.Checkpoint` asks for the state after each batch, since batches are made ahead
    of the steps, and keeps that of the last batch which was trained on. torchdata's
    `StatefulDataLoader` has these methods too.

    Your loader counts the batches it has yielded in a pass. A pass begins with the first batch,
    except for the one after `load_state_dict`:

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


Read = Callable[[], Any]
Load = Callable[[Any], object]
# The state of a loader that has a random generator of its own, as torch's `generator=`: what the
# loader says of itself, or None; the generator after the batch; the generator before the pass.
WITH_GENERATOR = ("loader", "generator", "generator_before_pass")


class Source(Protocol):
    """Batches on the host, one pass after another.

    Attributes:
        data: the loader that has them.
        stateful: the same, if a state of it would be that of the batch which it gave last.
        faster: what to do where steps wait for it, if workers are not the way.
    """

    data: Any
    stateful: Any
    faster: str | None

    @property
    def num_batches(self) -> int | None:
        """Is how many a pass has, or None if that is not known."""
        ...

    @property
    def seekable(self) -> bool:
        """Is whether a pass may begin at any batch."""
        ...

    @property
    def draws(self) -> bool:
        """Is whether a batch of a number may draw from the generators of Python and NumPy."""
        ...

    @property
    def as_batch(self) -> Callable[[Any], tuple]:
        """Is the function from an item of a pass to (x,), (x, y) or (x, y, sample_weight)."""
        ...

    def begin(self, first: int = 0) -> Iterator[Any]:
        """Begins a pass; only one of a source that is seekable at another batch than the first."""
        ...

    def start(self) -> None:
        """Is told that training starts."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Is told which epoch comes next."""
        ...

    def on_epoch_begin(self) -> None:
        """Is told that an epoch begins."""
        ...

    def on_epoch_end(self, taken: int, wanted: int | None) -> None:
        """Is told that an epoch has ended after so many of its batches."""
        ...


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


class Position:
    """A source, and where it stood after each batch that is not trained on yet.

    The state is that of the loader, or of its iterator if only that has one, as grain's do. A
    random generator of the loader's own is kept with it: torchdata knows what its sampler has drawn
    from it in the pass, and not what the next passes will draw.

    Args:
        source: gives batches, one pass after another.

    Attributes:
        skipped: batches that the pass which was sought has left out.
    """

    def __init__(self, source: Source):
        self._source, self._loader = source, source.stateful
        self.skipped = 0
        self._trained: Callable[[], int] | None = None
        self._states: dict[int, Any] = {}
        self._begun: list[Iterator[Any]] = []
        self._generator = _accessors(getattr(self._loader, "generator", None))

    def watch(self, trained: Callable[[], int]) -> None:
        """Remembers states from here on.

        Args:
            trained: says after how many batches of all passes the training is.
        """
        self._trained, self._states = trained, {}

    def state(self) -> Any:
        """Returns where the loader stood after what is trained on; None if it has no state."""
        return None if self._trained is None else self._states.get(self._trained())

    def check(self, hold: Callable[[Any], object]) -> None:
        """Refuses a loader whose state cannot be kept, before the first step of a run.

        Args:
            hold: takes a state, and raises `InputError` for one that cannot be kept.

        Raises:
            InputError: names the loader, and what it returned.
        """
        if not isinstance(self._loader, StatefulLoader):
            return
        state = self._loader.state_dict()
        try:
            hold(state)
        except InputError as error:
            shown = " ".join(reprlib.repr(state).split())
            raise InputError(f"{self._name}.state_dict() returned {shown}: {error}") from None

    def begin(self) -> Iterator[Any]:
        """Begins a pass over the source: where `go_to` has brought it, or at its beginning."""
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
        """Whether the next pass begins where `go_to` has brought it."""
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
        """Returns whether data with such a state makes the batches before the position again."""
        return _parts(state)[0] is None and not self._source.seekable

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
        """Has the next pass continue from a state, and makes its iterator.

        Args:
            state: that `state` gave.
            over: the pass of the state was over, so that the next one begins.
            undo: puts random generators back, if an iterator was made that nothing comes from.

        Returns:
            Whether the loader, or its iterator, takes a state.
        """
        state, after, _ = _parts(state)
        if isinstance(self._loader, StatefulLoader):
            self._loader.load_state_dict(state)
            if not over:
                self._begun = [self._with_generator(self._source.begin(), after)]
            elif not self._source.seekable:
                # At its end a loader gives nothing once, or begins the next pass.
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
        # A sampler draws the pass again when it is asked for its first batch.
        for batch in islice(batches, 1):
            self._put_generator(after)
            yield batch
        yield from batches

    @property
    def _name(self) -> str:
        data = self._source.data
        return getattr(data, "name", None) or type(data).__name__


def _parts(state: Tree) -> tuple[Any, Any, Any]:
    """Returns the values of `WITH_GENERATOR`; the generator's are None if none was kept."""
    if isinstance(state, dict) and tuple(state) == WITH_GENERATOR:
        return tuple(state.values())
    return state, None, None


def _accessors(thing: object) -> tuple[Read, Load] | None:
    if isinstance(thing, StatefulLoader):
        return thing.state_dict, thing.load_state_dict
    read, load = getattr(thing, "get_state", None), getattr(thing, "set_state", None)
    return (read, load) if callable(read) and callable(load) else None
