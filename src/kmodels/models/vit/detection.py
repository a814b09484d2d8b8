"""Object detection: a DETR decoder reads the patches of a ViT, and each query is one object."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.arguments import check_fields
from kmodels.core.errors import InputError, check_number, check_whole
from kmodels.core.types import Data, DTypeLike, Tensor, Tree
from kmodels.data.images.boxes import BEYOND, KEYS, corners_in_pixels, padded
from kmodels.data.pipeline.arrays import to_numpy
from kmodels.layers import MLP, Attention, Dense, Dropout, Layer, LayerNorm
from kmodels.layers.base import Shape
from kmodels.layers.placement import of_family
from kmodels.models.blocks.class_names import check_class_names
from kmodels.models.blocks.preprocessing import ObjectDetectorPreprocessor
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.image_task import ObjectDetector
from kmodels.models.vit.mae import sines
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.preprocessor import ViTImageClassifierPreprocessor
from kmodels.models.vit.segmentation.mask_transformer import Queries
from kmodels.models.vit.segmentation.masks import of_each
from kmodels.task import Compiled
from kmodels.training.losses import InsideStep, StepsWithOwnLoss
from kmodels.training.set_criterion import SetCriterion, Targets, linear_sum_assignment, rows_of

# What transformers' labels of an image have beside its objects.
_FACTS = ("image_id", "area", "iscrowd", "size", "orig_size")


# === Layers ===


@keras.saving.register_keras_serializable(package="kmodels")
class PatchMemory(Layer):
    """Projects and normalizes the patches of a ViT, and adds positions, for the decoder to read.

    Args:
        units: width of the decoder, a multiple of four.

    Call:
        tokens (B, prefix + P, E) -> (B, P, D).

    Weights:
        projection: kernel (E, D) and bias (D,); norm.
    """

    def __init__(self, config: ViTConfig | Mapping[str, Any], units: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.config = ViTConfig.of(config)
        self.units = units
        self.positions = sines(self.config.grid, units)
        self.projection = Dense(units, name="projection", dtype=self.dtype_policy)
        self.norm = LayerNorm(1e-5, name="norm", dtype=self.dtype_policy)

    def build(self, input_shape: Shape) -> None:
        """Builds the projection for the width of the backbone."""
        self.projection.build(input_shape)
        self.norm.build((*input_shape[:-1], self.units))

    def call(self, tokens: Tensor) -> Any:
        """(B, prefix + P, E) -> (B, P, D)."""
        x = self.norm(self.projection(tokens[:, self.config.num_prefix_tokens :]))
        return x + keras.ops.cast(self.positions, x.dtype)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """(B, P, D)."""
        return input_shape[0], len(self.positions), self.units


@keras.saving.register_keras_serializable(package="kmodels")
class ObjectQueries(Queries):
    """The first state of each query, the same for all images.

    Call:
        memory (B, P, D), of which only the shape is read -> (B, Q, D).

    Weights:
        embedding (Q, D).
    """

    def call(self, memory: Tensor) -> Any:
        """(B, P, D) -> (B, Q, D)."""
        return self.repeated(memory)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """(B, Q, D)."""
        return input_shape[0], self.num_queries, input_shape[-1]


@keras.saving.register_keras_serializable(package="kmodels")
class DetectionBlock(Layer):
    """Queries attend to each other and to the patches, then an MLP; norms come first.

    Args:
        num_heads: heads of both attentions.
        mlp_dim: width of the hidden layer of the MLP.
        dropout: rate behind each part and within the MLP, in training.

    Call:
        queries (B, Q, D), memory (B, P, D) -> (B, Q, D).

    Source:
        Carion et al. 2020 (arXiv:2005.12872), section A.3.
    """

    def __init__(self, num_heads: int, mlp_dim: int, dropout: float = 0.0, **kwargs: Any):
        super().__init__(**kwargs)
        policy = self.dtype_policy
        self.num_heads, self.mlp_dim, self.rate = num_heads, mlp_dim, dropout
        self.attention_norm = LayerNorm(1e-5, name="attention_norm", dtype=policy)
        self.attention = Attention(num_heads, dropout=dropout, name="attention", dtype=policy)
        self.cross_norm = LayerNorm(1e-5, name="cross_norm", dtype=policy)
        self.cross_attention = Attention(
            num_heads, dropout=dropout, name="cross_attention", dtype=policy
        )
        self.mlp_norm = LayerNorm(1e-5, name="mlp_norm", dtype=policy)
        self.mlp = MLP(mlp_dim, dropout=dropout, name="mlp", dtype=policy)
        self.dropout = Dropout(dropout, name="dropout", dtype=policy)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this block again."""
        return {**super().get_config(), "dropout": self.rate}

    def build(self, queries_shape: Shape, memory_shape: Shape | None = None) -> None:
        """Builds every part for the width of the queries."""
        parts = (self.attention_norm, self.attention, self.cross_norm, self.cross_attention)
        for part in (*parts, self.mlp_norm, self.mlp, self.dropout):
            part.build(queries_shape)

    def call(self, queries: Tensor, memory: Tensor, training: bool = False) -> Any:
        """(B, Q, D), (B, P, D) -> (B, Q, D)."""
        y = self.attention(self.attention_norm(queries), training=training)
        x = queries + self.dropout(y, training=training)
        y = self.cross_attention(self.cross_norm(x), memory, training=training)
        x = x + self.dropout(y, training=training)
        y = self.mlp(self.mlp_norm(x), training=training)
        return x + self.dropout(y, training=training)

    def compute_output_shape(self, queries_shape: Shape, memory_shape: Shape) -> Shape:
        """Returns the queries' shape."""
        return queries_shape


@keras.saving.register_keras_serializable(package="kmodels")
class BoxHead(Layer):
    """Predicts a box for each query: an MLP moves and resizes the query's reference box.

    The reference boxes are trained. They start spread over the image, with a quarter of its sides.

    Call:
        queries (B, Q, D) -> boxes (B, Q, 4), float32: center x and y, width and height, as parts
        of the sides of the image.

    Weights:
        dense_0 and dense_1, (D, D), dense_2, (D, 4), each with a bias; reference (Q, 4), logits.
    """

    def __init__(self, num_queries: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.num_queries = num_queries

    def build(self, input_shape: Shape) -> None:
        """Makes the dense layers and the boxes of the queries."""
        width, policy = input_shape[-1] or 1, self.dtype_policy
        self.dense_0 = Dense(width, name="dense_0", dtype=policy)
        self.dense_1 = Dense(width, name="dense_1", dtype=policy)
        self.dense_2 = Dense(4, kernel_initializer="zeros", name="dense_2", dtype=policy)
        for layer in (self.dense_0, self.dense_1, self.dense_2):
            layer.build((None, width))

        def spread(shape: Sequence[int], dtype: Any = None) -> Any:
            columns = int(np.ceil(np.sqrt(shape[0])))
            rows = -(-shape[0] // columns)
            row, column = np.divmod(np.arange(shape[0]), columns)
            boxes = np.stack([(column + 0.5) / columns, (row + 0.5) / rows], axis=1)
            boxes = np.pad(boxes, ((0, 0), (0, 2)), constant_values=0.25)
            return keras.ops.convert_to_tensor(np.log(boxes / (1 - boxes)), dtype=dtype)

        self.reference = self.add_parameter("reference", (self.num_queries, 4), spread)

    def call(self, queries: Tensor) -> Any:
        """(B, Q, D) -> (B, Q, 4)."""
        x = keras.ops.relu(self.dense_0(queries))
        x = self.dense_2(keras.ops.relu(self.dense_1(x)))
        moved = keras.ops.cast(x, "float32") + keras.ops.cast(self.reference, "float32")
        return keras.ops.sigmoid(moved)

    def compute_output_spec(self, queries: keras.KerasTensor) -> Any:
        """Returns the shape and dtype of the boxes."""
        return keras.KerasTensor((*queries.shape[:-1], 4), "float32")


# === The loss ===


def corners(boxes: Tensor) -> tuple[Any, Any]:
    """Returns the upper left and the lower right corners (..., 2) of boxes (..., 4).

    Args:
        boxes: center x and y, width and height.
    """
    half = boxes[..., 2:] / 2
    return boxes[..., :2] - half, boxes[..., :2] + half


def generalized_iou(first: Tensor, second: Tensor) -> Any:
    """Returns the generalized intersection over union of boxes (..., 4), from -1 to 1.

    They are as those of `corners`; leading axes are broadcast.

    Source:
        Rezatofighi et al. 2019 (arXiv:1902.09630), algorithm 1.
    """
    ops = keras.ops
    (low, high), (other_low, other_high) = corners(first), corners(second)

    def area(low: Tensor, high: Tensor) -> Any:
        sides = ops.maximum(high - low, 0.0)
        return sides[..., 0] * sides[..., 1]

    both = area(ops.maximum(low, other_low), ops.minimum(high, other_high))
    union = area(low, high) + area(other_low, other_high) - both
    around = area(ops.minimum(low, other_low), ops.maximum(high, other_high))
    tiny = 1e-12  # two boxes without an area
    return both / ops.maximum(union, tiny) - (around - union) / ops.maximum(around, tiny)


@dataclass(frozen=True)
class BoxCriterion:
    """The loss of predicted boxes after the cheapest one-to-one matching with those of an image.

    It adds the cross-entropy of each query's class, which is "no object" if a query has no box,
    and of matched boxes the sum of absolute differences and 1 minus the generalized IoU, both
    divided by the number of boxes of the batch.

    Args:
        num_classes: number of classes.
        no_object_weight: weight of "no object" in the cross-entropy of classes.
        class_weight: of the cross-entropy of classes, in the loss and in the matching costs.
        box_weight: of the absolute differences, in both.
        iou_weight: of the generalized IoU, in both.

    Raises:
        InputError: for invalid settings.

    Source:
        Carion et al. 2020 (arXiv:2005.12872), section 3.1. Parity: transformers'
        `DetrForObjectDetection`.
    """

    num_classes: int
    no_object_weight: float = 0.1
    class_weight: float = 1.0
    box_weight: float = 5.0
    iou_weight: float = 2.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_whole("num_classes", self.num_classes)
        for name in ("no_object_weight", "class_weight", "box_weight", "iou_weight"):
            check_number(name, getattr(self, name), least=0)

    def __call__(
        self, y: Tree, boxes: Tensor, logits: Tensor, sample_weight: Tensor | None = None
    ) -> Any:
        """Returns the sum of the losses of L predictions of the same images, a float32 scalar.

        Args:
            y: "boxes" (B, T, 4), center x and y, width and height as parts of the sides of the
                image, and "class_labels" (B, T), -1 for no box; of more boxes than queries as many
                are matched.
            boxes: (B, L, Q, 4), in the same form.
            logits: (B, L, Q, num_classes + 1), the last for "no object".
            sample_weight: (B,) weights of images, or None.

        Raises:
            InputError: for labels in another form.
        """
        ops = keras.ops
        wanted, classes = labels_of(y)
        shapes = tuple(wanted.shape), tuple(classes.shape)
        # Of a graph of TensorFlow some sizes may be unknown.
        numbers = {shape[1] for shape in shapes if len(shape) > 1} - {None}
        if tuple(map(len, shapes)) != (3, 2) or shapes[0][2] not in (4, None) or len(numbers) > 1:
            raise InputError(
                f"boxes have shape {shapes[0]} and class_labels {shapes[1]}; give (B, T, 4) and "
                "(B, T)"
            )
        wanted, boxes = ops.cast(wanted, "float32"), ops.cast(boxes, "float32")
        logits, targets = ops.cast(logits, "float32"), Targets(classes)
        rows = ops.ones_like(wanted[:, 0, 0])
        if sample_weight is not None:
            rows = ops.reshape(ops.cast(sample_weight, "float32"), (-1,))
        count = ops.sum(ops.cast(targets.valid, "float32") * ops.expand_dims(rows, 1))
        several = boxes.shape[1]
        costs = [self._costs(wanted, targets, boxes[:, i], logits[:, i]) for i in range(several)]
        # All predictions are matched at a time: a compiled step then has one loop for them.
        cost = ops.stop_gradient(ops.concatenate(costs, axis=0))
        queries = linear_sum_assignment(cost, ops.tile(targets.valid, (several, 1)))
        queries = ops.reshape(queries, (several, -1, ops.shape(classes)[1]))
        of_classes = SetCriterion(self.num_classes, self.no_object_weight)
        loss = 0.0
        for i in range(several):
            own = rows_of(boxes[:, i], ops.maximum(queries[i], 0))  # (B, T, 4)
            apart = ops.sum(ops.abs(own - wanted), axis=2)
            each = self.box_weight * apart
            each += self.iou_weight * (1.0 - generalized_iou(own, wanted))
            matched = ops.cast(queries[i] >= 0, "float32") * ops.expand_dims(rows, 1)
            loss += ops.sum(ops.where(queries[i] >= 0, each, 0.0) * matched) / ops.maximum(
                count, 1.0
            )
            loss += self.class_weight * of_classes.class_loss(
                targets, logits[:, i], queries[i], rows
            )
        return loss

    def _costs(self, wanted: Tensor, targets: Targets, boxes: Tensor, logits: Tensor) -> Any:
        """Returns the cost of matching each target with each query, float32 (B, T, Q)."""
        ops = keras.ops
        shares = ops.transpose(ops.softmax(logits, axis=-1), (0, 2, 1))  # (B, classes, Q)
        cost = -self.class_weight * rows_of(shares, ops.maximum(targets.classes, 0))
        wanted, boxes = ops.expand_dims(wanted, 2), ops.expand_dims(boxes, 1)
        cost += self.box_weight * ops.sum(ops.abs(wanted - boxes), axis=3)
        return cost - self.iou_weight * generalized_iou(wanted, boxes)


def labels_of(y: Tree) -> tuple[Any, Any]:
    """Returns "boxes" and "class_labels" of labels.

    Raises:
        InputError: for other labels.
    """
    if not isinstance(y, Mapping) or set(y) != set(KEYS):
        kind = ", ".join(map(str, y)) if isinstance(y, Mapping) else type(y).__name__
        raise InputError(f"labels are {kind}; give a dictionary of {' and '.join(KEYS)}")
    return y[KEYS[0]], y[KEYS[1]]


def objects_of(y: Any) -> list[dict[str, Any]]:
    """Returns the objects of each image, from a list of them or from the labels of all images.

    Raises:
        InputError: for other labels.
    """
    if isinstance(y, list | np.ndarray) and all(isinstance(one, Mapping) for one in y):
        for one in y:
            labels_of({name: value for name, value in one.items() if name not in _FACTS})
        names = (*KEYS, "iscrowd")
        return [{name: to_numpy(one[name]) for name in names if name in one} for one in y]
    boxes, classes = labels_of(y)
    if len(boxes) != len(classes):
        raise InputError(
            f"labels have the boxes of {len(boxes)} images and the classes of {len(classes)}; "
            "give those of each"
        )
    parts = zip(map(to_numpy, boxes), map(to_numpy, classes), strict=True)
    return [dict(zip(KEYS, one, strict=True)) for one in parts]


# === The task ===


@keras.saving.register_keras_serializable(package="kmodels")
class ViTObjectDetectorPreprocessor(ObjectDetectorPreprocessor, ViTImageClassifierPreprocessor):
    """`ViTImageClassifierPreprocessor` for images whose labels are boxes.

    Images are stretched to `image_size` and never cropped, so that boxes, which are parts of the
    sides of their image, stay as they are.

    Args:
        image_size: (height, width) in pixels.
        mean: per channel, of pixels in [0, 1].
        std: per channel, of pixels in [0, 1].
        interpolation: as in `ViTImageClassifierPreprocessor`.
        antialias: as in `ViTImageClassifierPreprocessor`.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        x: as of `ViTImageClassifierPreprocessor`.
        y: "boxes", for each image (T, 4): center x and y, width and height as parts of the sides of
            the image; and "class_labels", for each image (T,). Or a list of such dictionaries, as
            transformers' processors give it.
        sample_weight: handed through.
        -> float32 images (B, height, width, C), and with y "boxes", float32 (B, S, 4), and
        "class_labels", int32 (B, S), -1 for no box. S is a power of two, so that few steps are
        compiled.

    Raises:
        InputError: for invalid boxes, or settings that crop.
    """

    may_crop = False

    def __init__(
        self,
        image_size: Sequence[int] = (224, 224),
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        interpolation: str = "bilinear",
        antialias: bool = True,
        **kwargs: Any,
    ):
        super().__init__(
            image_size, mean, std, interpolation, antialias, resize_mode="stretch", **kwargs
        )

    def call(self, x: Data, y: Data = None, sample_weight: Data = None) -> Any:
        """Returns images to normalised floats, and boxes in one array."""
        images = super().call(x)
        if y is not None:
            y = padded(objects_of(y))
        return keras.utils.pack_x_y_sample_weight(images, y, sample_weight)


@keras.saving.register_keras_serializable(package="kmodels")
class ViTObjectDetector(StepsWithOwnLoss, ObjectDetector):
    """Detects objects: learned queries attend to the patches of a ViT, and each gives one box.

    Args:
        backbone: a `ViTBackbone`, such as that of DINOv2 or DINOv3.
        num_classes: number of classes, "no object" not counted.
        preprocessor: turns raw images and boxes into inputs of the model, or None.
        num_queries: number of queries Q, the most objects that an image can have.
        num_decoder_layers: number of blocks of the decoder.
        decoder_dim: width of the decoder, a multiple of 4 and of `num_decoder_heads`.
        num_decoder_heads: heads of its attentions.
        decoder_mlp_dim: width of the hidden layer of its MLPs; by default four times `decoder_dim`.
        decoder_dropout: rate in the decoder, in training.
        no_object_weight: argument of the loss, `BoxCriterion`.
        class_weight: argument of the loss.
        box_weight: argument of the loss.
        iou_weight: argument of the loss.
        head_dtype: policy of decoder and heads; by default that of the backbone.
        class_names: names of the classes in the order of the outputs, or None; they are saved
            with the model.
        **kwargs: of `keras.Model`, such as `name`.

    Call:
        images (B, height, width, C), preprocessed floats -> "logits", float32
        (B, Q, num_classes + 1), the last for "no object", and "boxes", float32 (B, Q, 4): center x
        and y, width and height as parts of the sides of the image. `detect` gives pixels.

    Raises:
        InputError: for a backbone that gives no token for each patch, or settings that cannot be.

    Source:
        Carion et al. 2020 (arXiv:2005.12872), with norms first, and with boxes relative to one of
        each query as in Zhu et al. 2021 (arXiv:2010.04159).
    """

    backbone_class = ViTBackbone
    preprocessor_class = ViTObjectDetectorPreprocessor
    own_setting = "num_decoder_layers"
    head_name = "decoder of objects"

    @of_family
    def __init__(
        self,
        backbone: ViTBackbone,
        num_classes: int,
        preprocessor: ViTObjectDetectorPreprocessor | None = None,
        num_queries: int = 100,
        num_decoder_layers: int = 6,
        decoder_dim: int = 256,
        num_decoder_heads: int = 8,
        decoder_mlp_dim: int | None = None,
        decoder_dropout: float = 0.1,
        no_object_weight: float = 0.1,
        class_weight: float = 1.0,
        box_weight: float = 5.0,
        iou_weight: float = 2.0,
        head_dtype: DTypeLike = None,
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ):
        config = backbone.config
        check_whole("num_decoder_layers", num_decoder_layers)
        check_whole("num_decoder_heads", num_decoder_heads)
        if decoder_mlp_dim is not None:
            check_whole("decoder_mlp_dim", decoder_mlp_dim)
        if decoder_dim < 1 or decoder_dim % 4 or decoder_dim % num_decoder_heads:
            raise InputError(
                f"decoder_dim is {decoder_dim}; give a multiple of 4 and of num_decoder_heads, "
                f"{num_decoder_heads}"
            )
        if len(backbone.output.shape) != 3 or config.patch_drop_rate or config.token_merging:
            raise InputError(
                f"{type(backbone).__name__} gives no token for each patch; give a ViTBackbone "
                "without patch_drop_rate and token_merging"
            )
        weights = {
            "no_object_weight": no_object_weight,
            "class_weight": class_weight,
            "box_weight": box_weight,
            "iou_weight": iou_weight,
        }
        criterion = BoxCriterion(num_classes, **weights)
        policy = keras.dtype_policies.get(head_dtype or backbone.dtype_policy)

        # === Layers ===
        memory = PatchMemory(config, decoder_dim, name="memory", dtype=policy)
        queries = ObjectQueries(num_queries, name="object_queries", dtype=policy)
        blocks = [
            DetectionBlock(
                num_decoder_heads,
                decoder_mlp_dim or 4 * decoder_dim,
                decoder_dropout,
                name=f"decoder_{i}",
                dtype=policy,
            )
            for i in range(num_decoder_layers)
        ]
        norm = LayerNorm(1e-5, name="decoder_norm", dtype=policy)
        class_head = Dense(num_classes + 1, name="object_logits", dtype=policy)
        box_head = BoxHead(num_queries, name="box_head", dtype=policy)

        def predictions(tokens: Tensor, **mode: bool) -> list[dict[str, Any]]:
            seen = memory(tokens)
            x, outputs = queries(seen), []
            for block in blocks:
                x = block(x, seen, **mode)
                y = norm(x)
                logits = keras.ops.cast(class_head(y), "float32")
                outputs.append({"logits": logits, "boxes": box_head(y)})
            return outputs

        # === Graph ===
        inputs = backbone.inputs[0]
        super().__init__(
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=predictions(backbone(inputs))[-1],
            **kwargs,
        )

        # === Config ===
        self.num_classes = num_classes
        self.num_queries = num_queries
        self.criterion = criterion
        self.settings = {
            "num_classes": num_classes,
            "class_names": check_class_names(class_names, num_classes),
            "num_queries": num_queries,
            "num_decoder_layers": num_decoder_layers,
            "decoder_dim": decoder_dim,
            "num_decoder_heads": num_decoder_heads,
            "decoder_mlp_dim": decoder_mlp_dim,
            "decoder_dropout": decoder_dropout,
            **weights,
        }
        self.head_dtype = policy
        # Around Keras' __setattr__, which would count layers as those of this model again.
        object.__setattr__(self, "_predictions", predictions)
        object.__setattr__(self, "_step", InsideStep())

    def call(self, inputs: Tree, training: bool | None = None, mask: Tree = None) -> Any:
        """Images to logits and boxes; in a step with the model's own loss those of all blocks."""
        if not self._step.active:
            return super().call(inputs, training=training, mask=mask)
        (images,) = keras_internals.standardized(self, inputs)
        mode = {} if training is None else {"training": training}
        outputs = self._predictions(self.backbone(images, **mode), **mode)
        return {
            name: keras.ops.stack([one[name] for one in outputs], axis=1) for name in outputs[0]
        }

    # Training

    def check_labels(self, y: Any) -> None:
        """Raises `InputError` for arrays of classes and boxes that cannot be."""
        super().check_labels(y)
        if not isinstance(y, Mapping) or not all(isinstance(y.get(k), np.ndarray) for k in KEYS):
            return
        boxes, classes = (y[key] for key in KEYS)
        own = boxes[classes >= 0] if boxes.shape[:2] == classes.shape else boxes
        wrong = ~(np.abs(own) <= BEYOND).all(-1) | (own[..., 2:] < 0).any(-1)
        if wrong.any():
            raise InputError(
                f"a box is {own[wrong][0].tolist()}; give center x and y, width and height as "
                "parts of the sides of the image, from 0 to 1"
            )

    def with_defaults(self, arguments: Compiled) -> Compiled:
        """Returns the arguments of `compile`, by default with the loss of matched boxes.

        The optimizer is AdamW with a learning rate and a decay of 1e-4, as DETR's; there is no
        metric: `kmodels.training.average_precision` takes the results of `detect`.

        Raises:
            InputError: for a loss, or a metric: the outputs are sets, which `criterion` matches.
        """
        arguments = arguments.filled(
            optimizer=lambda: keras.optimizers.AdamW(1e-4, weight_decay=1e-4), loss=lambda: None
        )
        arguments = super().with_defaults(arguments)
        if arguments.loss or arguments.metrics or arguments.weighted_metrics:
            raise InputError(
                f"{type(self).__name__} has the loss of matched boxes and no metric by batch; "
                "leave loss and metrics out, and measure what detect gives"
            )
        self._step.chosen = True
        return arguments

    @property
    def gives_logits(self) -> bool:
        """False: the outputs are a dictionary."""
        return False

    def compute_loss(
        self,
        x: Tree = None,
        y: Tree = None,
        y_pred: Tree = None,
        sample_weight: Tensor | None = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of the predictions behind all blocks of the decoder.

        Raises:
            InputError: for labels in another form, or weights that are not one for each image.
        """
        if sample_weight is not None and len(sample_weight.shape) != 1:
            raise InputError(
                f"sample_weight has shape {tuple(sample_weight.shape)}; give one for each image"
            )
        outputs: Any = y_pred
        loss = self.criterion(y, outputs["boxes"], outputs["logits"], sample_weight)
        return keras_internals.with_additional_losses(self, loss)

    # Results

    def detect(self, images: Data, threshold: float = 0.5, batch_size: int = 32) -> Any:
        """Returns the objects in images, in pixels of their own size.

        Args:
            images: inputs of the preprocessor: uint8 (B, H, W, C), one image (H, W, C), or a list
                of images of any size; inputs of the model if there is no preprocessor.
            threshold: least probability of the class.
            batch_size: images per batch.

        Returns:
            For each image, in a list, a dictionary of "scores" (n,), "labels" int (n,) and "boxes"
            (n, 4): x and y of the upper left and of the lower right corner. Of one image (H, W, C)
            the dictionary alone.

        Raises:
            InputError: for a threshold that is no probability, or images of another shape.
        """
        check_number("threshold", threshold, least=0, most=1)

        def objects(pictures: Any, sizes: list[Any]) -> list[dict[str, np.ndarray]]:
            pixels = np.stack(pictures) if self.preprocessor is None else pictures
            outputs = self.predict(pixels, batch_size=batch_size, verbose=0)
            logits, boxes = outputs["logits"], outputs["boxes"]
            powers = np.exp(logits - logits.max(-1, keepdims=True))
            shares = (powers / powers.sum(-1, keepdims=True))[..., :-1]
            results = []
            for share, box, size in zip(shares, boxes, sizes, strict=True):
                scores, labels = share.max(-1), share.argmax(-1)
                places = corners_in_pixels(box, size).astype("float32")
                taken = scores > threshold
                results.append(
                    {"scores": scores[taken], "labels": labels[taken], "boxes": places[taken]}
                )
            return results

        return of_each(images, objects)
