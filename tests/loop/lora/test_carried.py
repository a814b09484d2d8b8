"""Frozen weights, adapters and kernels in few bits travel wherever Keras carries a model."""

import copy
import pickle
from typing import Any

import keras
import numpy as np
import pytest

from arrays import assert_equal, to_numpy
from kmodels.layers import changes
from kmodels.layers.changes import adapters
from kmodels.models import GemmaBackbone, GemmaCausalLM, ViTBackbone, ViTImageClassifier
from refusals import refused
from tolerances import tolerance

VIT: Any = {"image_shape": (8, 8, 1), "patch_size": 4, "num_layers": 2, "num_heads": 2}
VIT |= {"hidden_dim": 16, "mlp_dim": 24}
GEMMA: Any = {
    "vocabulary_size": 50,
    "num_layers": 2,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
}
GEMMA |= {"hidden_dim": 16, "intermediate_dim": 32, "head_dim": 8}
IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype("float32")
TOKENS = {
    "token_ids": np.arange(10, dtype="int32").reshape(2, 5),
    "padding_mask": np.ones((2, 5), "int32"),
}


def classifier(dtype=None):
    return ViTImageClassifier(ViTBackbone(**VIT, dtype=dtype), num_classes=3)


def causal_lm(dtype="mixed_bfloat16"):
    return GemmaCausalLM(GemmaBackbone(**GEMMA, dtype=dtype))


def frozen(model):
    model.backbone.trainable = False


def frozen_in_parts(model):
    first, second = model.backbone.blocks
    first.trainable = False
    second.mlp.trainable = False
    second.mlp.down.trainable = True
    second.attention.query_dense.kernel.trainable = False


def with_lora(model, **settings):
    model.enable_lora(2, alpha=3.0, targets=("query", "down"), **settings)
    for adapter in adapters(model).values():
        for variable in (adapter.a, adapter.b):
            rng = np.random.default_rng(len(variable.path))
            variable.assign(rng.normal(size=variable.shape).astype("float32") * 0.3)


def with_dora(model):
    with_lora(model, dora=True, dropout=0.1)


def in_few_bits(model):
    model.quantize("int8")
    with_lora(model)


def in_four_bits(model):
    model.quantize("int4")


def by_a_table(model):
    model.quantize("nf4")
    with_lora(model)


def with_whole_scales(model):
    model.quantize("fp4", block=32, double=False)


def merged(model):
    with_lora(model)
    model.merge_lora()


CHANGES = (
    *(frozen_in_parts, with_dora, in_four_bits, by_a_table, with_whole_scales),
    *(merged, frozen, with_lora, in_few_bits),
)
# Files are alike on all backends: one of each kind; the last three changes are parts of others.
ON_EACH_BACKEND = {
    (frozen_in_parts, classifier),
    (with_dora, causal_lm),
    (in_four_bits, causal_lm),
    (by_a_table, causal_lm),
    (merged, classifier),
}
FILES = [
    pytest.param(change, make, marks=() if (change, make) in ON_EACH_BACKEND else pytest.mark.once)
    for change in CHANGES
    for make in (classifier, causal_lm)
]


def names(variables):
    return [variable.path for variable in variables]


def check_outputs(again, wanted, x):
    atol = tolerance("logits_across")
    np.testing.assert_allclose(to_numpy(again(x)), wanted, rtol=0, atol=atol)


def check_bits(again, model):
    assert_equal(again.weights, model.weights)


def check_same(again, model, x, wanted):
    check_outputs(again, wanted, x)
    check_bits(again, model)
    assert names(again.trainable_weights) == names(model.trainable_weights)
    assert names(again.weights) == names(model.weights)
    parts = [(x.backbone, changes.describe(x, without=x.backbone)) for x in (again, model)]
    assert parts[0][1] == parts[1][1]
    assert changes.describe(parts[0][0]) == changes.describe(parts[1][0])


@pytest.mark.each_time("by_a_table-causal_lm", "merged-classifier", on=("jax", "tensorflow"))
@pytest.mark.parametrize(("change", "make"), FILES)
def test_what_was_done_to_a_model_is_in_its_file(change, make, tmp_path):
    model, x = make(), IMAGES if make is classifier else TOKENS
    change(model)
    wanted = to_numpy(model(x))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    check_same(loaded, model, x, wanted)
    model.save_to_preset(tmp_path / "preset")
    again = type(model).from_preset(tmp_path / "preset", dtype=model.dtype_policy)
    if change is not merged:
        check_same(again, model, x, wanted)
        model.backbone.save_to_preset(tmp_path / "bare")
        bare = type(model.backbone).from_preset(tmp_path / "bare", dtype=model.dtype_policy)
        check_bits(bare, model.backbone)
        assert changes.describe(bare) == changes.describe(model.backbone)
        return
    check_bits(again, model)
    # A model of its own, which others may train.
    assert len(again.trainable_weights) == len(make().trainable_weights)
    for each in (loaded, again):
        refused("a file holds the merged kernels alone; load wh", each.unmerge_lora)
        check_outputs(each, wanted, x)


@pytest.mark.nightly("tensorflow")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_the_same_and_are_not_tied(copied):
    model = classifier("mixed_bfloat16")
    in_few_bits(model)
    again = copied(model)
    before = to_numpy(model(IMAGES))
    check_same(again, model, IMAGES, before)
    for variable in again.trainable_weights:
        variable.assign(np.ones(variable.shape))
    np.testing.assert_array_equal(to_numpy(model(IMAGES)), before)


@pytest.mark.nightly("tensorflow")
def test_training_goes_on_where_it_stopped(tmp_path):
    labels = np.array([0, 1, 2, 0])
    model = classifier()
    model.backbone.blocks[0].trainable = False
    with_lora(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    model.fit(IMAGES, labels, epochs=2, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, again):
        each.fit(IMAGES, labels, epochs=2, shuffle=False, verbose=0)
    check_outputs(again, to_numpy(model(IMAGES)), IMAGES)


def test_a_backbone_in_a_model_of_the_users(tmp_path):
    backbone = ViTBackbone(**VIT)
    backbone.quantize("int8")
    with_lora(backbone)
    inputs = keras.Input((8, 8, 1))
    outputs = keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(backbone(inputs)))
    model = keras.Model(inputs, outputs)
    wanted = to_numpy(model(IMAGES))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    check_outputs(again, wanted, IMAGES)
    assert names(again.trainable_weights) == names(model.trainable_weights)
    assert len(again.trainable_weights) == 2 * 4 + 2
    copied = keras.models.clone_model(model)
    copied.set_weights(model.get_weights())
    check_outputs(copied, wanted, IMAGES)
    assert names(copied.trainable_weights) == names(model.trainable_weights)


@pytest.mark.nightly("tensorflow")
def test_weights_with_adapters_fill_a_model_without(tmp_path):
    file = tmp_path / "model.weights.h5"
    for change in (with_lora, with_dora):
        model = classifier()
        change(model)
        model.save_weights(file)
        plain = classifier()
        plain.load_weights(file)
        check_outputs(plain, to_numpy(model(IMAGES)), IMAGES)
        # The other way: adapters of which the file says nothing start over.
        plain.save_weights(file)
        model.load_weights(file)
        check_outputs(model, to_numpy(plain(IMAGES)), IMAGES)
        assert adapters(model)


def lora_of_rank_3(model):
    model.enable_lora(3, targets=("query", "down"))


def lora_of_other_alpha(model):
    model.enable_lora(2, targets=("query", "down"))


def in_eight_bits(model):
    model.quantize("int8")


@pytest.mark.once
@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (with_lora, lora_of_rank_3, "query: its adapter has rank 3, the file's 2"),
        (with_lora, lora_of_other_alpha, "counts 1 times, the file's 1.5: give that alpha"),
        (with_dora, with_lora, "has lora_a, lora_b, the file's lora_a, lora_b, lora_magnitude"),
        (in_four_bits, in_eight_bits, "its kernel is int8, the file's int4"),
        (in_four_bits, with_whole_scales, "its kernel is fp4, the file's int4"),
        (
            by_a_table,
            lambda model: model.quantize("nf4", double=False),
            "kernel_nested_scale, kernel_offset too",
        ),
        (frozen, in_eight_bits, "its kernel is int8, the file's not"),
        (in_few_bits, in_eight_bits, "which a quantized kernel cannot take in; call enable_lora"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_a_line(saved, loaded, message, tmp_path):
    model, other = classifier(), classifier()
    saved(model)
    loaded(other)
    model.save_weights(tmp_path / "model.weights.h5")
    before = other.get_weights()
    refused(message, other.load_weights, tmp_path / "model.weights.h5")
    assert_equal(other.get_weights(), before)


OTHERS = {
    "wider": ({"hidden_dim": 32}, {}, r"kernel is \(.*, in the file \(", False),
    "shallow": ({"num_layers": 1}, {}, "file also holds layers/vi_t_backbone/.*_1/.* more", True),
    "deep": ({"num_layers": 3}, {}, "block_2/.*: the file holds nothing for it", False),
    "scaled": ({"layer_scale": 0.1}, {}, r"scale is \(16,\), in the file missing", False),
    "headless": ({}, {"num_classes": 0}, "the file also holds layers/dense/vars/0", True),
    "wordy": ({}, {"num_classes": 5}, r"logits: kernel is \(16, 5\), in the file \(16, 3\)", False),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A classifier, and the files of its weights."""
    model, folder = classifier(), tmp_path_factory.mktemp("written")
    model.save_weights(folder / "m.weights.h5")
    model.save_weights(folder / "m.weights.json", max_shard_size=1e-5)
    model.save(folder / "m.keras")
    return model, [folder / f"m.{kind}" for kind in ("weights.h5", "weights.json", "keras")]


@pytest.mark.once
@pytest.mark.parametrize("case", OTHERS)
def test_weights_of_another_model_are_refused_in_a_line(case, written):
    (model, paths), (sizes, head, message, lacks) = written, OTHERS[case]
    other = ViTImageClassifier(ViTBackbone(**{**VIT, **sizes}), **{"num_classes": 3, **head})
    before = other.get_weights()
    for path in paths:
        refused(f"does not fit the model: .*{message}", other.load_weights, path)
        assert_equal(other.get_weights(), before)
        if lacks:
            other.load_weights(path, skip_mismatch=True)
            assert_equal(other.backbone.blocks[0].weights, model.backbone.blocks[0].weights)
            other.set_weights(before)


@pytest.mark.once
def test_weights_of_the_same_model_are_read_from_each_file(written):
    model, paths = written
    for path in paths:
        again = classifier()
        again.load_weights(path)
        check_bits(again, model)


@pytest.mark.once
def test_the_state_of_another_optimizer_stays_in_the_file(tmp_path):
    model, other = classifier(), classifier()
    model.compile("adam")
    model.optimizer.build(model.trainable_variables)
    other.compile(keras.optimizers.SGD(momentum=0.9))
    other.optimizer.build(other.trainable_variables)
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        other.load_weights(tmp_path / "model.weights.h5")
    assert_equal(other.weights, model.weights)
