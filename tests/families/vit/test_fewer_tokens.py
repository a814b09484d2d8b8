"""Patches that are dropped in training, and tokens that are merged."""

import json
from math import erf

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels import InputError, transforms
from kmodels.models import ViTBackbone, ViTImageClassifier
from kmodels.models.vit import fewer_tokens
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.fewer_tokens import PatchDropout
from tolerances import tolerance

TINY = {
    "image_shape": (16, 20, 3), "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16,
    "mlp_dim": 24,
}  # fmt: skip
PATCHES = 20
IMAGES = np.random.default_rng(0).normal(size=(2, 16, 20, 3)).astype("float32")


def randomized(model, seed=0):
    """Weights at which tokens differ, and keys of one set are near to several of the other."""
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        scale = variable.shape[0] ** -0.5 if len(variable.shape) == 2 else 0.3
        value = rng.normal(0, scale, variable.shape)
        variable.assign(value + 1 if variable.path.endswith("norm/scale") else value)
    return model


# === Merging, against NumPy in float64 ===


def norm(x, weights, name):
    centered = x - x.mean(-1, keepdims=True)
    x = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
    return x * weights[f"{name}/scale"] + weights[f"{name}/bias"]


def dense(x, weights, name):
    return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(erf)(x / 2**0.5))


def paired(keys, number, protected):
    """Bipartite soft matching as in the paper's appendix D, over all tokens of one image."""
    metric = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    one, other = np.arange(0, len(keys), 2), np.arange(1, len(keys), 2)
    scores = metric[one] @ metric[other].T
    scores[one < protected] = -np.inf
    scores[:, other < protected] = -np.inf
    order = np.argsort(-scores.max(1), kind="stable")
    return [(one[i], other[scores[i].argmax()]) for i in order[:number]]


def merged(tokens, keys, number, protected):
    """`tokens` are (vector, the patches that it stands for, is of the first set) of one image."""
    found, gone = [(x, set(held)) for x, held in tokens], set()
    for source, target in paired(keys, number, protected):
        (x, held), (y, other) = found[source], found[target]
        mean = (x * len(held) + y * len(other)) / (len(held) + len(other))
        found[target] = (mean, held | other)
        gone.add(source)
    even = [i for i in range(0, len(found), 2) if i not in gone and i >= protected]
    odd = [i for i in range(1, len(found), 2) if i >= protected]
    return [found[i] for i in (*range(protected), *even, *odd)]


def numpy_vit(weights, images, heads, number, special, proportional=True):
    """A ViT that merges tokens, image by image; what it gives has a token for each patch."""
    results = []
    for image in images.astype("float64"):
        rows, columns = image.shape[0] // 4, image.shape[1] // 4
        cut = image.reshape(rows, 4, columns, 4, 3).transpose(0, 2, 1, 3, 4)
        x = dense(cut.reshape(rows * columns, -1), weights, "patch_embedding")
        front = [weights[f"tokens/{name}"][0] for name in special]
        x = np.concatenate([*front, x]) + weights["tokens/position_embedding"][0]
        tokens = [(x[i], {i}) for i in range(len(x))]
        for block in range(2):
            name = f"block_{block}"
            x = np.stack([x for x, _ in tokens])
            size = np.array([len(held) for _, held in tokens])
            y = norm(x, weights, f"{name}/attention_norm")
            query, key, value = (
                dense(y, weights, f"{name}/attention/{part}").reshape(len(x), heads, -1)
                for part in ("query", "key", "value")
            )
            scores = np.einsum("tnh,snh->nts", query, key) / np.sqrt(query.shape[-1])
            scores = scores + (np.log(size) if proportional else 0)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            y = np.einsum("nts,snh->tnh", scores, value).reshape(len(x), -1)
            x = x + dense(y, weights, f"{name}/attention/output")
            tokens = [(x[i], held) for i, (_, held) in enumerate(tokens)]
            fewer = min(number, (len(x) - len(special)) // 2)
            tokens = merged(tokens, key.mean(1), fewer, len(special))
            x = np.stack([x for x, _ in tokens])
            y = norm(x, weights, f"{name}/mlp_norm")
            y = gelu(dense(y, weights, f"{name}/mlp/up"))
            x = x + dense(y, weights, f"{name}/mlp/down")
            tokens = [(x[i], held) for i, (_, held) in enumerate(tokens)]
        found = np.empty((rows * columns + len(special), len(x[0])))
        for vector, held in tokens:
            found[list(held)] = vector
        results.append(norm(found, weights, "final_norm"))
    return np.stack(results)


@pytest.mark.each_time("class token", on=("jax", "tensorflow"))
@pytest.mark.each_backend  # merging
@pytest.mark.parametrize(
    ("fields", "special"),
    [
        ({}, ("class_token",)),
        ({"use_class_token": False}, ()),
        ({"use_distillation_token": True}, ("class_token", "distillation_token")),
    ],
    ids=["class token", "no class token", "distillation token"],
)
def test_tokens_merge_as_in_the_paper(fields, special):
    model = randomized(ViTBackbone(**TINY, **fields))
    plain = model.predict(IMAGES, verbose=0)
    weights = {v.path: to_numpy(v).astype("float64") for v in model.variables}
    limit = tolerance("hidden")
    np.testing.assert_allclose(plain, numpy_vit(weights, IMAGES, 2, 0, special), atol=limit)
    model.token_merging = 4
    found = model.predict(IMAGES, verbose=0)
    np.testing.assert_allclose(found, numpy_vit(weights, IMAGES, 2, 4, special), atol=limit)
    # Each feature bites: the merge itself, and that tokens count by their size.
    assert np.abs(found - plain).max() > 0.1
    even = numpy_vit(weights, IMAGES, 2, 4, special, proportional=False)
    assert np.abs(found - even).max() > 0.05
    distinct = len(np.unique(found[0, len(special) :].round(4), axis=0))
    assert distinct == PATCHES - 2 * 4
    if len(special) == 2:
        for kept in (1, 2, 5):
            call = lambda x, kept=kept: model(x, keep=kept)  # noqa: E731
            # Called as it is, it is on JAX a program for each op.
            call = transforms.jit(call) if keras.backend.backend() == "jax" else call
            alone = to_numpy(call(IMAGES))
            np.testing.assert_allclose(alone, found[:, :kept], atol=limit)
    model.token_merging = 0
    np.testing.assert_array_equal(model.predict(IMAGES, verbose=0), plain)


def test_places_merge_with_their_tokens():
    rng = np.random.default_rng(1)
    x, keys = rng.normal(size=(2, 9, 6)), rng.normal(size=(2, 9, 2, 4))
    places, size = rng.normal(size=(9, 2)), np.tile([1, 1, 3, 1, 1, 2, 1, 1, 4], (2, 1))
    origin = np.tile([0, 1, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 7, 7], (2, 1))  # patches behind a prefix
    tensors = [keras.ops.convert_to_tensor(y, "float32") for y in (x, keys, places)]
    counts = [keras.ops.convert_to_tensor(y, "int32") for y in (size, origin)]
    info = fewer_tokens.Merging(*counts, tensors[2])
    tokens, found = fewer_tokens.merge(tensors[0], info, tensors[1], 3, 1)
    assert tokens.shape == (2, 6, 6) and found.coordinates.shape == (2, 6, 2)
    for image in range(2):
        wide, held = np.concatenate([x[image], places], axis=-1), []
        begin = 0
        for token, count in enumerate(size[image]):
            held.append((wide[token], set(range(begin, begin + count))))
            begin += count
        wanted = merged(held, keys[image].mean(1), 3, 1)
        values = np.stack([value for value, _ in wanted])
        ours = keras.ops.concatenate([tokens, found.coordinates], axis=-1)
        ours = to_numpy(ours)[image]
        np.testing.assert_allclose(ours, values, atol=tolerance("attention"), rtol=0)
        sizes = to_numpy(found.size)[image]
        np.testing.assert_array_equal(sizes, [len(patches) for _, patches in wanted])
        for patch, token in enumerate(to_numpy(found.origin)[image]):
            assert patch + 1 in wanted[token + 1][1]


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 100.0, "num_register_tokens": 2, "use_position_embedding": False},
        {"qk_norm": True, "layer_scale": 0.5, "use_swiglu_ffn": True},
        {"rope_theta": 100.0, "pos_embed_jitter": 1.5, "pre_norm": True},
    ],
)
def test_each_kind_drops_and_merges(fields):
    model = randomized(ViTBackbone(**TINY, **fields, patch_drop_rate=0.5, token_merging=3))
    prefix = model.config.num_prefix_tokens
    found = to_numpy(model(IMAGES))
    distinct = len(np.unique(found[0, prefix:].round(4), axis=0))
    assert found.shape == (2, prefix + PATCHES, 16) and distinct == PATCHES - 6
    trained = to_numpy(model(IMAGES, training=True))
    assert trained.shape == (2, prefix + 10, 16)
    half = ViTBackbone(**TINY, **fields, token_merging=3, dtype="mixed_bfloat16")
    half.set_weights(model.get_weights())
    halved = to_numpy(half(IMAGES)).astype("float32")
    assert np.abs(halved[:, 0] - found[:, 0]).max() < 0.2 * np.abs(found).max()


# === Dropping ===


def test_so_many_patches_stay_as_in_timm_and_others_each_time():
    config = ViTConfig(**TINY, num_register_tokens=1, rope_theta=100.0, patch_drop_rate=0.3)
    layer = PatchDropout(config)
    numbers = np.arange(2 + PATCHES, dtype="float32")
    tokens = np.tile(numbers[:, None], (64, 1, 16))
    places = np.stack([numbers, -numbers], axis=-1)
    layer.build(tokens.shape)
    draws = []
    for _ in range(3):
        found, where = layer(tokens, coordinates=places, training=True)
        kept = to_numpy(found)
        # timm: max(1, int(20 * (1 - 0.3))), which is 14; class token and register stay.
        assert kept.shape == (64, 2 + 14, 16)
        assert (kept[:, :2, 0] == [0, 1]).all() and (np.diff(kept[..., 0]) > 0).all()
        np.testing.assert_array_equal(to_numpy(where)[..., 0], kept[..., 0])
        np.testing.assert_array_equal(to_numpy(where)[..., 1], -kept[..., 0])
        draws.append(kept[:, 2:, 0])
    assert (draws[0] != draws[1]).any() and (draws[0][0] != draws[0][1]).any()
    shares = np.bincount(np.concatenate(draws).astype(int).ravel(), minlength=22)[2:] / (3 * 64)
    # Each of 20 patches stays with probability 0.7; the deviation of a mean of 192 is 0.033.
    assert np.abs(shares - 0.7).max() < 0.15
    still, same = layer(tokens, coordinates=places)
    assert still.shape == tokens.shape and same.shape == places.shape


@pytest.mark.nightly("jax", "tensorflow")
@pytest.mark.each_backend  # random patches are dropped in a compiled step
def test_a_classifier_trains_with_both_and_comes_back(tmp_path):
    keras.utils.set_random_seed(0)
    backbone = ViTBackbone(**TINY, patch_drop_rate=0.5, token_merging=2, attention_dropout=0.1)
    model = ViTImageClassifier(backbone, 2, pooling="gap")
    model.compile(keras.optimizers.SGD(0.1))
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 64)
    images = rng.normal(size=(64, 16, 20, 3)).astype("float32") + labels[:, None, None, None]
    losses = model.fit(images, labels, batch_size=16, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    found = model.predict(images[:2], verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert (again.backbone.token_merging, again.backbone.patch_drop_rate) == (2, 0.5)
    np.testing.assert_array_equal(again.predict(images[:2], verbose=0), found)
    # A compiled prediction follows the number.
    model.backbone.token_merging = 0
    plain = model.predict(images[:2], verbose=0)
    assert np.abs(plain - found).max() > 1e-4


def test_they_are_arguments_of_a_preset_and_of_other_heads(tmp_path):
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=2, patch_size=4)
    model.save_to_preset(tmp_path / "plain")
    images = IMAGES[:, :, :16]
    merging = ViTImageClassifier.from_preset(
        tmp_path / "plain", token_merging=3, patch_drop_rate=0.2
    )
    assert merging.backbone.config.patch_drop_rate == 0.2
    wanted = model.predict(images, verbose=0)
    assert np.abs(merging.predict(images, verbose=0) - wanted).max() > 1e-6
    # What is looked at inside is the model with all its tokens.
    for one, other in zip(
        model.backbone.attention_maps(images), merging.backbone.attention_maps(images), strict=True
    ):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))
    with pytest.raises(InputError, match=r"token_merging is 2\.5; give a whole number"):
        merging.backbone.token_merging = 2.5
    merging.backbone.token_merging = 0
    np.testing.assert_array_equal(merging.predict(images, verbose=0), wanted)
    path = merging.export_to_timm(tmp_path / "timm")
    held = json.loads((path / "config.json").read_text())
    assert held["model_args"]["patch_drop_rate"] == 0.2
    merging.export_to_npz(tmp_path / "model.npz")
