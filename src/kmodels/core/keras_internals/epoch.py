"""The batches of a running `fit`: what gives them, and an epoch that begins within them."""

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import keras
import numpy as np

from kmodels.core.keras_internals.callbacks import local_of_fit
from kmodels.core.keras_internals.data import set_epoch
from kmodels.core.keras_internals.trainer import forget_step

# Where Keras' adapters of loaders hold what they were given; one of arrays has none of them.
_HELD = ("py_dataset", "_dataloader", "_dataset", "generator")


def epoch_iterator(callback: Any) -> Any:
    """Returns what counts the steps of the running `fit`; call it in a hook of the callback."""
    return local_of_fit(callback, "epoch_iterator")


def set_epoch_of(iterator: Any, epoch: int) -> None:
    """Tells the data of a running `fit` which epoch comes next, before its first one."""
    set_epoch(getattr(iterator, "data_adapter", None), epoch)


def example(iterator: Any) -> Any:
    """Returns a batch of a running `fit`, or what tells its shapes and dtypes."""
    batches = iterator._get_iterator()
    spec = getattr(batches, "element_spec", None)
    return next(iter(batches)) if spec is None else spec


def given_data(adapter: Any) -> Any:
    """Returns the loader that Keras' adapter was made of; None for arrays."""
    return next(
        (held for name in _HELD if (held := getattr(adapter, name, None)) is not None), None
    )


def wrap_data_loader(adapter: Any, wrap: Callable[[Any], Any]) -> Any:
    """Has Keras' adapter of a DataLoader go through another object.

    Returns:
        That object; None for any other adapter.
    """
    if (loader := getattr(adapter, "_dataloader", None)) is None:
        return None
    adapter._dataloader = wrap(loader)
    return adapter._dataloader


def wrap_numbered(adapter: Any, wrap: Callable[[Any, Callable[[Any], Any], bool], Any]) -> Any:
    """Has Keras' adapter of a PyDataset go through another object.

    Args:
        adapter: whose batches Keras does not shuffle, nor ask for in workers.
        wrap: called with the dataset, what gives one pass over its batches, and True.

    Returns:
        That object; None for any other adapter.
    """
    if not is_py_dataset(adapter) or makes_ahead(adapter) or adapter.shuffle:
        return None
    own = adapter._finite_generator
    wrapped = wrap(adapter.py_dataset, lambda _: own(), True)
    adapter._finite_generator = lambda: iter(wrapped)
    return wrapped


def is_py_dataset(adapter: Any) -> bool:
    """Returns whether it is Keras' adapter of a PyDataset, or one of ours."""
    return isinstance(getattr(adapter, "py_dataset", None), keras.utils.PyDataset)


def makes_ahead(adapter: Any) -> bool:
    """Returns whether Keras' own workers ask a PyDataset for its batches."""
    return getattr(adapter, "enqueuer", None) is not None


def seek(adapter: Any, batch: int) -> Callable[[], None]:
    """Has the next pass over a PyDataset begin with its batch of this number.

    Args:
        adapter: whose batches Keras does not ask for in workers. The random numbers of the pass'
            order are drawn here.
        batch: from 0, in the order of the pass.

    Returns:
        What undoes it, which also the end of the pass does.
    """
    dataset, shuffle = adapter.py_dataset, adapter.shuffle
    numbers = None
    if (count := dataset.num_batches) is not None:
        numbers = list(range(count))
        if shuffle:
            adapter.py_dataset = _Numbers(count)
            numbers = [int(number) for (number,) in adapter._finite_generator()]

    def undo() -> None:
        adapter.py_dataset, adapter.shuffle = dataset, shuffle

    adapter.py_dataset, adapter.shuffle = _Rest(dataset, numbers, batch, undo), False
    return undo


class _Numbers(keras.utils.PyDataset):
    """Batches that are nothing but their numbers, so that Keras tells their order."""

    def __init__(self, count: int):
        super().__init__()
        self._count = count

    @property
    def num_batches(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return np.array(index)


class _Rest(keras.utils.PyDataset):
    """The last batches of one pass over a PyDataset."""

    def __init__(
        self, dataset: Any, numbers: list[int] | None, first: int, over: Callable[[], None]
    ):
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._numbers, self._first, self._over = dataset, numbers, first, over

    @property
    def num_batches(self) -> int | None:
        return None if self._numbers is None else len(self._numbers) - self._first

    def __getitem__(self, index: int) -> Any:
        number = index + self._first
        return self._dataset[number if self._numbers is None else self._numbers[number]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._over()
        self._dataset.on_epoch_end()


def begin_within(
    iterator: Any,
    model: Any,
    done: int,
    log_names: tuple[str, ...],
    place: Callable[[], bool],
    build: Callable[[Any], object],
    after: Callable[[], object],
) -> None:
    """Has the epoch that comes next begin within its steps, or `place` its data before the first.

    Keras tells callbacks of the last step that is done once more, with logs of zeros and nothing
    trained, and of the steps after it as ever.

    Args:
        iterator: see `epoch_iterator`.
        model: inside `fit`, its step made.
        done: steps of the epoch that are done.
        log_names: of the logs of a step.
        place: brings the data to the step that comes next, after all hooks of the epoch's begin;
            returns True where the batches of those that are done still have to be gone through.
        build: called with the first batch that is gone through.
        after: called before the first step that is trained.
    """
    whole = iterator._enumerate_iterator

    def steps() -> Iterator[Any]:
        del iterator._enumerate_iterator
        replayed = place()
        rest = whole()
        if not done:
            yield from rest
            return
        for begin, end, batches in rest:
            for number in range(iterator.steps_per_execution if replayed else 0):
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                if begin + number == 0:
                    build(batch)
            if end + 1 >= done:
                LastStep.again(model, log_names)
                yield begin, end, repeat(None)
                after()
                break
        yield from rest

    iterator._enumerate_iterator = steps


class LastStep:
    """Takes the place of a model's step once, so that callbacks hear of a step that is done.

    Args:
        model: inside `fit`, its step made.
        log_names: of the logs of a step.
    """

    def __init__(self, model: Any, log_names: tuple[str, ...]):
        self._model, self._names, self._step = model, log_names, model.train_function

    @classmethod
    def again(cls, model: Any, log_names: tuple[str, ...]) -> None:
        """Has the next step of the model be such a one."""
        forget_step(model)
        model.train_function = cls(model, log_names)

    @staticmethod
    def forget(model: Any) -> None:
        """Gives the model its step back, where a `fit` was left before it came to that."""
        if isinstance(step := model.train_function, LastStep):
            model.train_function = step._step

    def __call__(self, *arguments: Any) -> Any:
        """Takes what Keras gives a step: batches or an iterator, on JAX a state in front of it."""
        self.forget(self._model)
        logs = dict.fromkeys(self._names, 0.0)
        return (logs, arguments[0]) if len(arguments) == 2 else logs
