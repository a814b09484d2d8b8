"""The loss of a set of masks, matched with those of the image (Cheng et al. 2022)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import keras

from kmodels.core import seeds
from kmodels.core.arguments import check_fields
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError, check_number, check_whole
from kmodels.core.types import Tensor, Tree


def corners(points: Tensor, size: tuple[int, int]) -> list[tuple[Any, Any]]:
    """Returns the four pixels around each point, and the weight of each.

    Pixels are centered, and pixels outside of the map count as zero: `grid_sample` with
    `align_corners=False` and its padding of zeros.

    Args:
        points: (..., 2), (x, y) from 0 to 1.
        size: (height, width) of the map.

    Returns:
        Four pairs of int32 numbers of pixels, row by row, and weights, both (...).
    """
    ops, (height, width) = keras.ops, size
    points = ops.convert_to_tensor(points)
    x, y = points[..., 0] * width - 0.5, points[..., 1] * height - 0.5
    left, top = ops.floor(x), ops.floor(y)
    pixels = []
    for down in (0, 1):
        for along in (0, 1):
            column, row = left + along, top + down
            weight = (1 - ops.abs(x - column)) * (1 - ops.abs(y - row))
            inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
            index = ops.clip(row, 0, height - 1) * width + ops.clip(column, 0, width - 1)
            pixels.append((ops.cast(index, "int32"), ops.where(inside, weight, 0.0)))
    return pixels


def rows_of(x: Tensor, index: Tensor) -> Any:
    """Returns rows of each example, by number.

    Args:
        x: (B, N, ...).
        index: int32 (B, K).

    Returns:
        (B, K, ...).
    """
    ops = keras.ops
    batch, length, *rest = ops.shape(x)
    start = ops.expand_dims(ops.arange(batch, dtype="int32") * length, 1)
    flat = ops.reshape(x, (-1, *rest))
    rows = ops.take(flat, ops.reshape(ops.cast(index, "int32") + start, (-1,)), axis=0)
    return ops.reshape(rows, (batch, ops.shape(index)[1], *rest))


def at_shared_points(maps: Tensor, points: Tensor) -> Any:
    """Returns the values of all maps of an example at the same points.

    Args:
        maps: floating (B, N, H, W).
        points: (B, P, 2).

    Returns:
        (B, N, P).
    """
    ops = keras.ops
    number, (height, width) = ops.shape(maps)[1], maps.shape[2:]
    pixels = ops.reshape(ops.transpose(maps, (0, 2, 3, 1)), (-1, height * width, number))
    values = sum(
        rows_of(pixels, index) * ops.expand_dims(weight, 2)
        for index, weight in corners(points, (height, width))
    )
    return ops.transpose(values, (0, 2, 1))


def at_own_points(maps: Tensor, points: Tensor) -> Any:
    """Returns the values of each map at its own points.

    Args:
        maps: floating (B, N, H, W).
        points: (B, N, P, 2).

    Returns:
        (B, N, P).
    """
    ops = keras.ops
    number, (height, width) = ops.shape(maps)[1], maps.shape[2:]
    pixels = ops.reshape(maps, (-1, number, height * width))
    return sum(
        ops.take_along_axis(pixels, index, axis=2) * weight
        for index, weight in corners(points, (height, width))
    )


# Of segments that are given as masks with classes.
KEYS = ("mask_labels", "class_labels")


class Targets:
    """Masks of each image, at most T, with their classes.

    Args:
        classes: int32 (B, T), padded with -1.

    Attributes:
        valid: bool (B, T), whether there is a mask.
    """

    def __init__(self, classes: Tensor):
        self.classes = keras.ops.cast(classes, "int32")
        self.valid = self.classes >= 0

    def at_shared_points(self, points: Tensor) -> Any:
        """Returns how far each mask covers points (B, P, 2) of its image: float32 (B, T, P)."""
        raise NotImplementedError

    def at_own_points(self, points: Tensor) -> Any:
        """Returns how far each mask covers its own points (B, T, P, 2): float32 (B, T, P)."""
        raise NotImplementedError


class MaskTargets(Targets):
    """Masks as they are; they may overlap.

    Args:
        masks: (B, T, H, W), zeros and ones.
        classes: see `Targets`.
    """

    def __init__(self, masks: Tensor, classes: Tensor):
        super().__init__(classes)
        self.masks = keras.ops.cast(masks, "float32")

    def at_shared_points(self, points: Tensor) -> Any:
        """See `Targets`."""
        return at_shared_points(self.masks, points)

    def at_own_points(self, points: Tensor) -> Any:
        """See `Targets`."""
        return at_own_points(self.masks, points)


class LabelTargets(Targets):
    """The classes that are in a mask of labels, each with all of its pixels.

    The masks are never computed: only the pixels around the points are looked up.

    Args:
        labels: whole numbers (B, H, W); those that are no class count for nothing.
        num_classes: number of classes.
        most: classes of an image that are kept, those with the most pixels.
    """

    def __init__(self, labels: Tensor, num_classes: int, most: int):
        ops = keras.ops
        labels = ops.cast(labels, "int32")
        self.size = tuple(labels.shape)[1:]
        self.labels = ops.reshape(labels, (-1, self.size[0] * self.size[1]))
        counts = _counts(self.labels, num_classes)
        amounts, order = ops.top_k(counts, min(most, num_classes))
        super().__init__(ops.where(amounts > 0, ops.cast(order, "int32"), -1))

    def at_shared_points(self, points: Tensor) -> Any:
        """See `Targets`."""
        ops, covered = keras.ops, 0.0
        own = ops.expand_dims(self.classes, 2)
        for index, weight in corners(points, self.size):
            labels = ops.take_along_axis(self.labels, index, axis=1)
            covered += ops.where(ops.expand_dims(labels, 1) == own, ops.expand_dims(weight, 1), 0.0)
        return covered

    def at_own_points(self, points: Tensor) -> Any:
        """See `Targets`."""
        ops, covered = keras.ops, 0.0
        own = ops.expand_dims(self.classes, 2)
        for index, weight in corners(points, self.size):
            flat = ops.reshape(index, (-1, index.shape[1] * index.shape[2]))
            labels = ops.take_along_axis(self.labels, flat, axis=1)
            labels = ops.reshape(labels, (-1, *index.shape[1:]))
            covered += ops.where(labels == own, weight, 0.0)
        return covered


def _counts(labels: Tensor, num_classes: int) -> Any:
    """Returns the pixels of each class, int32 (B, num_classes)."""
    ops = keras.ops
    batch = ops.shape(labels)[0]
    there = ops.logical_and(labels >= 0, labels < num_classes)
    start = ops.expand_dims(ops.arange(batch, dtype="int32") * num_classes, 1)
    cells = ops.where(there, labels, 0) + start
    added = ops.zeros((batch * num_classes,), "int32")
    counts = ops.scatter_update(
        added,
        ops.reshape(cells, (-1, 1)),
        ops.reshape(ops.cast(there, "int32"), (-1,)),
        reduction="add",
    )
    return ops.reshape(counts, (-1, num_classes))


def targets_of(y: Tree, num_classes: int, most: int, ignore_class: int | None = None) -> Targets:
    """Returns the targets in the labels of a step.

    Args:
        y: masks of labels (B, H, W) or (B, H, W, 1), or a dictionary of "mask_labels"
            (B, T, H, W) and "class_labels" (B, T).
        num_classes: number of classes.
        most: masks of an image that can be predicted.
        ignore_class: label of pixels that belong to no target, or None.

    Raises:
        InputError: for labels in another form.
    """
    if isinstance(y, Mapping):
        return MaskTargets(*parts_of(y))
    labels = labels_of(y)
    if ignore_class is not None:
        labels = keras.ops.where(labels == ignore_class, -1, labels)
    return LabelTargets(labels, num_classes, most)


def labels_of(y: Tree, none: int = -1) -> Any:
    """Returns the label of each pixel; of masks that overlap the first one's.

    Args:
        y: as of `targets_of`.
        none: label of pixels that no mask has.

    Returns:
        int32 (B, H, W).

    Raises:
        InputError: for labels in another form.
    """
    ops = keras.ops
    if isinstance(y, Mapping):
        masks, classes = parts_of(y)
        classes = ops.cast(classes, "int32")
        there = ops.cast(masks, "bool") & ops.expand_dims(classes >= 0, (2, 3))
        first = ops.argmax(ops.cast(there, "int32"), axis=1)
        shape = ops.shape(first)
        label = ops.take_along_axis(classes, ops.reshape(first, (shape[0], -1)), axis=1)
        return ops.where(ops.any(there, axis=1), ops.reshape(label, shape), none)
    labels: Any = y
    if labels is None:
        raise InputError("there are no labels; give (B, H, W), or mask_labels and class_labels")
    shape = tuple(labels.shape)
    if len(shape) == 4 and shape[-1] == 1:
        labels, shape = labels[..., 0], shape[:-1]
    if len(shape) != 3:
        raise InputError(
            f"labels have shape {shape}; give (B, H, W), or mask_labels and class_labels"
        )
    return ops.cast(labels, "int32")


def parts_of(y: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns masks and classes of labels by name; raises `InputError` for other names."""
    if set(y) != set(KEYS):
        raise InputError(
            f"labels have the keys {', '.join(map(str, y))}; give {' and '.join(KEYS)}"
        )
    return y[KEYS[0]], y[KEYS[1]]


# Stands for a cost that is not a number: such a pair is taken where there is no other.
_WORST = 1e6


class AssignmentBackend(Protocol):
    """A backend whose steps run in Python, and can ask SciPy on the host."""

    def on_host(self, cost: Any, valid: Any) -> Any:
        """Returns the result of `linear_sum_assignment`, or None without SciPy."""
        ...


_backend = backend_module("kmodels.training.set_criterion", AssignmentBackend, optional=True)


def linear_sum_assignment(cost: Tensor, valid: Tensor) -> Any:
    """Assigns a different column to each valid row of every example, at the least total cost.

    A compiled step cannot call SciPy, so this is the method of shortest augmenting paths in
    `keras.ops`: each row in turn finds the cheapest path to a column that is free, all examples of
    a batch at a time. On torch, whose steps run in Python, SciPy does it on the host.

    Args:
        cost: floating (B, T, Q).
        valid: bool (B, T); of more than Q valid rows the first Q are assigned.

    Returns:
        int32 (B, T), the column of each row; -1 for rows that have none.

    Source:
        Jonker and Volgenant 1987; Crouse 2016, which SciPy's function follows.
    """
    ops = keras.ops
    cost = ops.convert_to_tensor(cost)
    cost = ops.where(ops.isfinite(cost), ops.clip(cost, -_WORST, _WORST), _WORST)
    valid = ops.cast(valid, "bool")
    columns = cost.shape[2]
    first = ops.cumsum(ops.cast(valid, "int32"), axis=1) <= columns
    valid = ops.logical_and(valid, first)
    if _backend is not None and (columns_of_rows := _backend.on_host(cost, valid)) is not None:
        return columns_of_rows
    return by_paths(cost, valid)


def by_paths(cost: Tensor, valid: Tensor) -> Any:
    """Returns `linear_sum_assignment` by `keras.ops` alone."""
    ops = keras.ops
    (batch, rows), columns = ops.shape(cost)[:2], cost.shape[2]  # On TensorFlow rows may vary.
    dtype = keras.backend.standardize_dtype(cost.dtype)
    numbers = ops.arange(rows, dtype="int32")
    places = ops.arange(columns, dtype="int32")
    none = ops.full((batch, columns), -1, dtype="int32")
    never = ops.zeros((batch, columns), dtype="bool")
    far = ops.full((batch, columns), float("inf"), dtype=dtype)

    def at(x: Tensor, index: Tensor) -> Any:
        """Returns one number of each example, x (B, N) and index (B,)."""
        return ops.take_along_axis(x, ops.expand_dims(index, 1), axis=1)[:, 0]

    def one(index: Tensor, among: Tensor) -> Any:
        return ops.expand_dims(index, 1) == among

    def assign(number: Tensor, row_of: Tensor, u: Tensor, v: Tensor) -> tuple[Any, ...]:
        start = ops.zeros((batch,), "int32") + number
        todo = at(valid, start)

        def search(
            todo: Tensor,
            row: Tensor,
            column: Tensor,
            near: Tensor,
            before: Tensor,
            seen: Tensor,
            passed: Tensor,
            u: Tensor,
            v: Tensor,
        ) -> tuple[Any, ...]:
            """Looks on from one row, and goes to the nearest column that was not seen."""
            going = ops.expand_dims(todo, 1)
            index = ops.expand_dims(ops.expand_dims(row, 1), 2)
            whole = ops.tile(index, (1, 1, columns))
            own = ops.take_along_axis(cost, whole, axis=1)[:, 0]
            reduced = own - ops.expand_dims(at(u, row), 1) - v
            unseen = ops.logical_not(seen)
            better = ops.logical_and(ops.logical_and(unseen, reduced < near), going)
            near = ops.where(better, reduced, near)
            before = ops.where(better, ops.expand_dims(column, 1), before)
            open_ = ops.where(seen, far, near)
            nearest = ops.cast(ops.argmin(open_, axis=1), "int32")
            step = ops.expand_dims(ops.where(todo, ops.min(open_, axis=1), 0.0), 1)
            u = ops.where(passed, u + step, u)
            v = ops.where(seen, v - step, v)
            near = ops.where(seen, near, near - step)
            column = ops.where(todo, nearest, column)
            owner = at(row_of, column)
            todo = ops.logical_and(todo, owner >= 0)
            going = ops.expand_dims(todo, 1)
            seen = ops.logical_or(seen, ops.logical_and(one(column, places), going))
            passed = ops.logical_or(passed, ops.logical_and(one(owner, numbers), going))
            row = ops.where(todo, owner, row)
            return todo, row, column, near, before, seen, passed, u, v

        searched = ops.while_loop(
            lambda todo, *_: ops.any(todo),
            search,
            (todo, start, start * 0 - 1, far, none, never, one(start, numbers), u, v),
        )
        column, before, u, v = searched[2], searched[4], searched[7], searched[8]

        def augment(todo: Tensor, column: Tensor, row_of: Tensor) -> tuple[Any, ...]:
            """Gives a column the row of the one before it on the path."""
            source = at(before, ops.maximum(column, 0))
            row = ops.where(source >= 0, at(row_of, ops.maximum(source, 0)), start)
            hit = ops.logical_and(one(column, places), ops.expand_dims(todo, 1))
            row_of = ops.where(hit, ops.expand_dims(row, 1), row_of)
            todo = ops.logical_and(todo, source >= 0)
            return todo, ops.where(todo, source, column), row_of

        augmented = ops.while_loop(
            lambda todo, *_: ops.any(todo), augment, (at(valid, start), column, row_of)
        )
        return number + 1, augmented[2], u, v

    zeros = ops.zeros((batch, rows), dtype=dtype), ops.zeros((batch, columns), dtype=dtype)
    row_of = ops.while_loop(
        lambda number, *_: number < rows,
        assign,
        (ops.convert_to_tensor(0, dtype="int32"), none, *zeros),
    )[1]
    matched = ops.expand_dims(row_of, 1) == ops.reshape(numbers, (1, rows, 1))  # (B, T, Q)
    column_of = ops.cast(ops.argmax(ops.cast(matched, "int32"), axis=2), "int32")
    return ops.where(ops.any(matched, axis=2), column_of, -1)


# Of what is drawn, as `keras.random` takes it.
Seed: TypeAlias = int | keras.random.SeedGenerator | None


@dataclass(frozen=True)
class SetCriterion:
    """The loss of predicted masks after the cheapest one-to-one matching with those of an image.

    It adds the cross-entropy of each query's class, which is "no object" if a query has no mask,
    and of matched masks the binary cross-entropy and the dice loss at points: most of them at
    the least certain predictions, the others drawn uniformly.

    Args:
        num_classes: number of classes.
        no_object_weight: weight of "no object" in the cross-entropy of classes.
        class_weight: of the cross-entropy of classes, in the loss and in the matching costs.
        mask_weight: of the binary cross-entropy of masks, in both.
        dice_weight: of the dice loss, in both.
        train_num_points: points of each mask.
        oversample_ratio: so many times as many are drawn, of which the least certain are taken.
        importance_sample_ratio: share of the points that are taken so.

    Raises:
        InputError: for invalid settings.

    Source:
        Cheng et al. 2022, section 3.3 (arXiv:2112.01527); transformers' `Mask2FormerLoss`.
    """

    num_classes: int
    no_object_weight: float = 0.1
    class_weight: float = 2.0
    mask_weight: float = 5.0
    dice_weight: float = 5.0
    train_num_points: int = 12544
    oversample_ratio: float = 3.0
    importance_sample_ratio: float = 0.75

    def __post_init__(self) -> None:
        check_fields(self)
        check_whole("num_classes", self.num_classes)
        check_whole("train_num_points", self.train_num_points)
        for name in ("no_object_weight", "class_weight", "mask_weight", "dice_weight"):
            check_number(name, getattr(self, name), least=0)
        check_number("oversample_ratio", self.oversample_ratio, least=1)
        check_number("importance_sample_ratio", self.importance_sample_ratio, least=0, most=1)

    def __call__(
        self,
        y: Tree,
        masks: Tensor,
        classes: Tensor,
        seed: Seed = None,
        sample_weight: Tensor | None = None,
        ignore_class: int | None = None,
    ) -> Any:
        """Returns the loss of one prediction, or the sum over several of the same images.

        Args:
            y: masks of labels (B, H, W), of which each class is a target; or a dictionary of
                "mask_labels" (B, T, H, W) and "class_labels" (B, T), -1 for no mask.
            masks: logits of masks (B, Q, h, w), or (B, L, Q, h, w) of L predictions.
            classes: logits of classes (B, Q, num_classes + 1), or (B, L, Q, num_classes + 1), the
                last for "no object".
            seed: of the points.
            sample_weight: (B,) weights of images, or None.
            ignore_class: label of pixels that belong to no target, or None.

        Returns:
            A scalar, float32.
        """
        ops = keras.ops
        masks, classes = ops.cast(masks, "float32"), ops.cast(classes, "float32")
        if len(masks.shape) == 4:
            masks, classes = ops.expand_dims(masks, 1), ops.expand_dims(classes, 1)
        targets = targets_of(y, self.num_classes, masks.shape[2], ignore_class)
        rows = ops.ones_like(masks[:, 0, 0, 0, 0])
        if sample_weight is not None:
            rows = ops.reshape(ops.cast(sample_weight, "float32"), (-1,))
        several = masks.shape[1]
        points = [self._drawn(rows, seed) for _ in range(several)]
        costs = [self.costs(targets, masks[:, i], classes[:, i], points[i]) for i in range(several)]
        # All predictions are matched at a time: a compiled step then has one loop for them.
        cost = ops.stop_gradient(ops.concatenate(costs, axis=0))
        queries = linear_sum_assignment(cost, ops.tile(targets.valid, (several, 1)))
        queries = ops.reshape(queries, (several, -1, ops.shape(targets.classes)[1]))
        loss = 0.0
        for i in range(several):
            loss += self._matched(targets, masks[:, i], queries[i], seed, rows)
            loss += self.class_weight * self.class_loss(targets, classes[:, i], queries[i], rows)
        return loss

    def _drawn(self, rows: Tensor, seed: Seed) -> Any:
        shape = (keras.ops.shape(rows)[0], self.train_num_points, 2)
        return seeds.uniform(shape, seed)

    def _matched(
        self, targets: Targets, masks: Tensor, queries: Tensor, seed: Seed, rows: Tensor
    ) -> Any:
        """Returns the loss of masks (B, Q, h, w) of the queries (B, T) that match targets."""
        ops = keras.ops
        counted = ops.cast(queries >= 0, "float32") * ops.expand_dims(rows, 1)
        matched = rows_of(masks, ops.maximum(queries, 0))  # (B, T, h, w)
        shape = (ops.shape(masks)[0], ops.shape(targets.classes)[1])
        points = ops.stop_gradient(self._points(matched, shape, seed))
        mask, dice = mask_losses(at_own_points(matched, points), targets.at_own_points(points))
        losses = self.mask_weight * mask + self.dice_weight * dice
        return ops.sum(losses * counted) / ops.maximum(ops.sum(counted), 1.0)

    def costs(self, targets: Targets, masks: Tensor, classes: Tensor, points: Tensor) -> Any:
        """Returns the cost of matching each target with each query.

        Args:
            targets: masks of the images.
            masks: logits (B, Q, h, w).
            classes: logits (B, Q, num_classes + 1).
            points: (B, P, 2) at which masks are compared.

        Returns:
            float32 (B, T, Q).
        """
        ops, number = keras.ops, points.shape[1]
        shares = ops.transpose(ops.softmax(classes, axis=-1), (0, 2, 1))  # (B, classes, Q)
        cost = -self.class_weight * rows_of(shares, ops.maximum(targets.classes, 0))
        said = at_shared_points(masks, points)  # (B, Q, P)
        covered = targets.at_shared_points(points)  # (B, T, P)
        # Cross-entropy is softplus(x) - x * label.
        cross = ops.expand_dims(ops.sum(ops.softplus(said), axis=2), 1)
        cross = cross - ops.einsum("btp,bqp->btq", covered, said)
        cost += self.mask_weight * cross / number
        share = ops.sigmoid(said)
        both = ops.einsum("btp,bqp->btq", covered, share)
        sizes = ops.expand_dims(ops.sum(covered, axis=2), 2) + ops.expand_dims(
            ops.sum(share, axis=2), 1
        )
        return cost + self.dice_weight * (1 - (2 * both + 1) / (sizes + 1))

    def _points(self, masks: Tensor, shape: tuple[Any, int], seed: Seed) -> Any:
        """Returns points (B, T, P, 2), most of them at logits (B, T, h, w) near 0."""
        ops, number = keras.ops, self.train_num_points
        drawn = int(number * self.oversample_ratio)
        uncertain = int(number * self.importance_sample_ratio)
        points = seeds.uniform((*shape, drawn, 2), seed)
        distance = ops.abs(at_own_points(masks, points))
        index = ops.expand_dims(ops.top_k(-distance, uncertain)[1], 3) if uncertain else None
        parts = []
        if index is not None:
            parts.append(ops.take_along_axis(points, ops.tile(index, (1, 1, 1, 2)), axis=2))
        if rest := number - uncertain:
            parts.append(seeds.uniform((*shape, rest, 2), seed))
        return ops.concatenate(parts, axis=2)

    def class_loss(
        self, targets: Targets, classes: Tensor, query_of_target: Tensor, rows: Tensor | None = None
    ) -> Any:
        """Returns the weighted mean of the cross-entropy of all queries, a scalar.

        Args:
            targets: masks of the images.
            classes: logits (B, Q, num_classes + 1).
            query_of_target: int32 (B, T), the query of each target; -1 for none.
            rows: (B,) weights of images, or None.
        """
        ops, last = keras.ops, self.num_classes
        queries = ops.reshape(ops.arange(classes.shape[1], dtype="int32"), (1, 1, -1))
        of_query = ops.expand_dims(query_of_target, 2) == queries  # (B, T, Q)
        wanted = ops.sum(ops.where(of_query, ops.expand_dims(targets.classes, 2), 0), axis=1)
        wanted = ops.where(ops.any(of_query, axis=1), wanted, last)  # (B, Q)
        weight = ops.where(wanted == last, self.no_object_weight, 1.0)
        if rows is not None:
            weight = weight * ops.expand_dims(ops.cast(rows, "float32"), 1)
        shares = ops.log_softmax(classes, axis=-1)
        own = ops.take_along_axis(shares, ops.expand_dims(wanted, 2), axis=2)[..., 0]
        total = ops.sum(weight)
        return -ops.sum(own * weight) / ops.where(total > 0, total, 1.0)


def mask_losses(logits: Tensor, labels: Tensor) -> tuple[Any, Any]:
    """Returns binary cross-entropy and dice loss of each mask, both (B, T).

    Args:
        logits: (B, T, P) at the points of each mask.
        labels: (B, T, P), from 0 to 1.
    """
    ops = keras.ops
    cross = ops.mean(ops.softplus(logits) - logits * labels, axis=2)
    shares = ops.sigmoid(logits)
    both = ops.sum(shares * labels, axis=2)
    sizes = ops.sum(shares, axis=2) + ops.sum(labels, axis=2)
    return cross, 1 - (2 * both + 1) / (sizes + 1)
