"""One process, eight devices: the losses of one device, in an eighth of its memory."""

import itertools
import math
import re

import keras
import numpy as np
import pytest
import small_models

from kmodels import models
from kmodels.checkpoint.state import slots
from kmodels.core.dispatch import generic_only
from kmodels.core.errors import InputError
from kmodels.distribution import current, distribute, layout, parse_mesh
from kmodels.models.two_towers.weights import PRESETS as TWO_TOWERS
from kmodels.training import AdamW
from tolerances import tolerance

if keras.backend.backend() != "jax":
    pytest.skip("needs JAX", allow_module_level=True)

from compiled_step_jax import compiled_step

from refusals import refused

STEPS, BATCH = 40, 16
rng = np.random.default_rng(0)
ROWS = 10 * BATCH
IMAGES = rng.normal(size=(ROWS, 16, 16, 3)).astype("float32")
LABELS = rng.integers(0, 10, ROWS)
IDS = rng.integers(3, 64, (ROWS, 9)).astype("int32")
TEXTS = {"token_ids": IDS[:, :-1], "padding_mask": np.ones_like(IDS[:, :-1])}, IDS[:, 1:]
WEIGHTS = np.ones((ROWS, 8), "float32")
WEIGHTS[::3, 5:] = 0.0


def in_force():
    plan = current()
    assert plan is not None
    return plan


def make_vit(dtype="float32", lora=False):
    rates = {"dropout_rate": 0.1, "attention_dropout": 0.1}
    model = small_models.vit(16, 10, dtype=dtype, **rates)
    if lora:
        model.enable_lora(4, dropout=0.1, targets="all-linear")
    return model, (IMAGES, LABELS), {}


def make_rows():
    """A ViT on rows of patches, in each of which two images of different grids stand."""
    sizes = {"image_shape": (16, 16, 3), "patch_size": 4, **small_models.VIT}
    backbone = models.NaFlexViTBackbone(dropout_rate=0.1, **sizes)
    draw = np.random.default_rng(1)
    grids = np.array([[[2, 3], [1, 4]], [[3, 3], [0, 0]]])[np.arange(ROWS) % 2]
    patches = draw.normal(size=(ROWS, 12, 48)).astype("float32")
    there = grids.prod(-1) > 0
    labels = np.where(there, draw.integers(0, 10, (ROWS, 2)), 0)
    given = {"pixel_values": patches, "spatial_shapes": grids.astype("int32")}
    weights = {"sample_weight": there.astype("float32")}
    return models.NaFlexViTImageClassifier(backbone, 10), (given, labels), weights


def make_gemma(dtype="float32", lora=True):
    dropout = 0.0 if lora else 0.1
    sizes = {"vocabulary_size": 64, "num_query_heads": 4, "head_dim": 8}
    model = small_models.gemma(dropout=dropout, dtype=dtype, **sizes)
    if lora:
        rows = {"trainable_token_indices": range(3, 11)}
        model.enable_lora(4, dropout=0.1, targets="all-linear", **rows)
    return model, TEXTS, {"sample_weight": WEIGHTS}


def compiled(make, mesh, **options):
    """A compiled model, on a mesh or on one device, its data and more arguments of fit."""
    plan = distribute(mesh)
    keras.utils.set_random_seed(3)
    model, data, more = make(**options)
    if plan is not None:
        model = plan.prepare(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(AdamW(3e-3, clip_norm=1.0), loss)
    return model, data, more


def train(make, mesh, **options):
    """Mean losses of the epochs of 40 steps, and the model.

    The attention that is made for a CPU declines where heads are cut, and draws in another order.
    """
    settings = {"epochs": STEPS * BATCH // ROWS, "batch_size": BATCH, "shuffle": False}
    with generic_only("attention"):
        model, data, more = compiled(make, mesh, **options)
        history = model.fit(*data, **more, **settings, verbose=0).history
    return np.array(history["loss"]), model


def make_in_few_bits():
    """Adapters on kernels of several groups of rows."""
    sizes = {"num_layers": 2, "num_query_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    sizes |= {"vocabulary_size": 64, "hidden_dim": 128, "intermediate_dim": 256}
    model = small_models.in_few_bits(small_models.gemma(dtype="float32", **sizes))
    model.enable_lora(2, targets="all-linear")
    return model, TEXTS, {"sample_weight": WEIGHTS}


def make_experts(dtype="float32", lora=False):
    """Two experts of eight for each token, of which a device of the axis `model` has some."""
    backbone = models.GemmaBackbone.from_preset(
        "gemma4_moe_debug", vocabulary_size=64, num_layers=1, num_experts=8, dtype=dtype
    )
    model = models.GemmaCausalLM(backbone)
    if lora:
        parameters = ("experts/gate_up", "experts/down")
        model.enable_lora(4, targets="all-linear", target_parameters=parameters)
    return model, TEXTS, {"sample_weight": WEIGHTS}


def make_untied(dtype="float32"):
    """A Gemma with an output layer of its own, and adapters of both tables."""
    sizes = {"vocabulary_size": 64, "num_query_heads": 4, "head_dim": 8}
    model = small_models.gemma(tie_word_embeddings=False, dtype=dtype, **sizes)
    model.enable_lora(4, dropout=0.1, targets=["query", "token_embedding", "reverse_embeddings"])
    return model, TEXTS, {"sample_weight": WEIGHTS}


CASES = {
    "vit": (make_vit, {}, ("data=4,model=2",)),
    "rows of patches": (make_rows, {}, ("data=2,fsdp=2,model=2",)),
    "experts": (make_experts, {}, ("data=2,fsdp=2,model=2",)),
    "gemma with lora": (make_gemma, {}, ("fsdp=8",)),
    "untied gemma with lora of tables": (make_untied, {}, ("data=2,fsdp=2,model=2",)),
    "gemma with lora in bfloat16": (make_gemma, {"dtype": "bfloat16"}, ("data=4,model=2",)),
}


# A case compiles for 5 s, and these mix what others have.
EACH_TIME = ("vit", "experts", "gemma with lora")
KINDS = (("float32", False), ("float32", True), ("mixed_bfloat16", False), ("bfloat16", True))
MESHES = ("data=8", "fsdp=8", "data=4,model=2", "data=2,fsdp=4", "data=2,fsdp=2,model=2")
CASES |= {"experts with lora": (make_experts, {"lora": True}, ("model=8",))} | {
    f"{make.__name__}, {dtype}, lora={lora}": (make, {"dtype": dtype, "lora": lora}, MESHES)
    for make, (dtype, lora) in itertools.product((make_vit, make_gemma), KINDS)
}


@pytest.mark.each_time(*EACH_TIME)
@pytest.mark.parametrize("case", CASES)
def test_losses_do_not_depend_on_the_mesh(case):
    make, options, meshes = CASES[case]
    alone, _ = train(make, None, **options)
    assert alone[-1] < alone[0] - 0.1
    dtype = "bfloat16" if "bfloat16" in case else "float32"
    for mesh in meshes:
        losses, model = train(make, mesh, **options)
        atol = tolerance("losses_of_ranks", dtype)
        np.testing.assert_allclose(losses, alone, rtol=0, atol=atol, err_msg=mesh)
        check_bytes(model)


@pytest.mark.nightly
def test_steps_on_kernels_of_few_bits_do_not_depend_on_the_mesh():
    def losses(mesh):
        model, (x, y), more = compiled(make_in_few_bits, mesh)
        x, y, weights = keras.tree.map_structure(
            lambda rows: rows[:BATCH], (x, y, more["sample_weight"])
        )
        settings = {"batch_size": BATCH, "epochs": 3, "verbose": 0}
        history = model.fit(x, y, sample_weight=weights, **settings).history
        return np.array(history["loss"]), model

    alone, _ = losses(None)
    assert alone[2] < alone[0] - 1e-2
    for mesh in ("data=8", "fsdp=8", "fsdp=2,model=4"):
        found, model = losses(mesh)
        atol = tolerance("losses_of_ranks")
        np.testing.assert_allclose(found, alone, rtol=0, atol=atol, err_msg=mesh)
        check_bytes(model)


def check_bytes(model):
    """Device 0 holds what the rules say of the weights, and as much of their slots."""
    mesh = in_force().mesh
    cut = {None: 1, "fsdp": mesh.fsdp, "model": mesh.model}
    placed = {variable.path: variable.value.sharding for variable in model.variables}
    planned = sum(
        variable.value.nbytes // math.prod(cut[axis] for axis in layout.axes_of(variable, mesh))
        for variable in model.variables
    )
    held = {name: slot for name, slot in slots(model.optimizer).items() if ":" in name}
    assert len(held) == 2 * len(model.trainable_variables)
    for name, slot in held.items():
        path = name.rpartition(":")[0]
        assert slot.value.sharding.is_equivalent_to(placed[path], len(slot.shape)), name
    assert sum(map(on_first_device, model.variables)) == planned
    if mesh.fsdp == 8:
        assert planned < 0.3 * sum(variable.value.nbytes for variable in model.variables)


def on_first_device(variable):
    """Bytes of a variable that lies on all eight devices."""
    assert len(variable.value.sharding.device_set) == 8, variable.path
    return variable.value.addressable_shards[0].data.nbytes


def program(mesh):
    model, (images, labels), _ = compiled(make_vit, mesh)
    return compiled_step(model, (images[:BATCH], labels[:BATCH])).as_text() or ""


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=2,model=2"])
def test_weights_travel_and_activations_stay(mesh):
    """Rows are cut over data and fsdp together; a device never has those of another."""
    text, mesh = program(mesh), parse_mesh(mesh)
    tokens = 5
    rows = {int(found) for found in re.findall(rf"f32\[(\d+),{tokens},", text)}
    assert max(rows) == BATCH // mesh.replicas, rows
    # XLA names an operation by its result: the kernel of a query, whole except for its heads.
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    assert f"32,{32 // mesh.model}" in gathered
    assert {shape for shape in gathered if f",{tokens}," in shape} == {f"1,{tokens},32"}, gathered
    assert re.search(r" (all-reduce|reduce-scatter)\(", text)
    summed = re.findall(r"= f32\[([\d,]+)\]\S* all-reduce\(", text)
    # In the last block XLA drops the tokens that nobody reads.
    partial = [s for s in summed if re.fullmatch(rf"{BATCH // mesh.replicas},\d,32", s)]
    assert bool(partial) == (mesh.model > 1), summed


def make_functional():
    """A model of Keras' own layers, with a norm over the batch."""
    inputs = keras.Input((16, 16, 3))
    x = keras.layers.Conv2D(32, 4, strides=4, name="conv")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Activation("gelu")(x))
    outputs = keras.layers.Dense(10, name="head")(keras.layers.Dropout(0.1)(x))
    return keras.Model(inputs, outputs), (IMAGES, LABELS), {}


def test_a_model_of_ones_own():
    alone, _ = train(make_functional, None)
    for mesh, kernel in (("data=8", (4, 4, 3, 32)), ("fsdp=8", (4, 4, 3, 4))):
        losses, model = train(make_functional, mesh)
        np.testing.assert_allclose(losses, alone, rtol=0, atol=tolerance("losses_of_ranks"))
        shard = model.get_layer("conv").kernel.value.addressable_shards[0]
        assert shard.data.shape == kernel
        check_bytes(model)
        with pytest.raises(InputError, match="batch of 12 rows does not split over the 8 devices"):
            model.fit(IMAGES[:12], LABELS[:12], batch_size=12, verbose=0)


def test_what_would_be_lost_is_said():
    early, _, _ = make_functional()
    plan = distribute("fsdp=8")
    refused("not on the mesh fsdp=8, the first conv/kernel: they wer", plan.prepare, early)
    model, data, _ = compiled(make_vit, "data=4,model=2")
    keras.utils.clear_session()
    for check in (in_force().prepare, lambda model: model.fit(*data, verbose=0)):
        refused("mesh data=4,model=2 was dropped; call distr", check, model)
    distribute(None)
    assert current() is None
    model, _, _ = make_vit(lora=True)
    plan = distribute("data=8")
    refused("then build or load the model, then enable_lora", plan.prepare, model)


def test_a_short_last_batch_and_predictions():
    """Tasks fill it up with rows that weigh nothing, and give the rows that were asked for."""
    alone, _, _ = compiled(make_vit, None)
    images, labels = IMAGES[:21], LABELS[:21]
    wanted = alone.evaluate(images, labels, batch_size=BATCH, verbose=0)
    logits = alone.predict(images, batch_size=BATCH, verbose=0)
    model, _, _ = compiled(make_vit, "fsdp=4,model=2")
    found = model.evaluate(images, labels, batch_size=BATCH, verbose=0)
    assert abs(found - wanted) < tolerance("losses_of_ranks")
    np.testing.assert_allclose(
        model.predict(images, batch_size=BATCH, verbose=0), logits, rtol=0, atol=tolerance("logits")
    )


def test_a_dataset_of_ones_own_is_preprocessed_once():
    seen = []

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.ones((BATCH, 16, 16, 3), "float32"), LABELS[:BATCH]

    def halved(x, y=None, sample_weight=None):
        seen.append(x.max())
        return (x / 2, y)

    model, _, _ = compiled(make_vit, "data=8")
    model.preprocessor = halved
    model.fit(Batches(), validation_data=Batches(), verbose=0)
    assert len(seen) >= 4 and set(seen) == {1.0}


@pytest.mark.each_time("siglip_debug")
@pytest.mark.parametrize(
    "name",
    [
        "embedding_gemma_debug",
        pytest.param("clip_debug", marks=pytest.mark.nightly),  # softmax, as the one above
        "siglip_debug",
    ],
)
def test_negatives_and_pairs_of_the_whole_batch(name):
    """The loss of all pairs does not depend on the mesh, nor does a short last batch."""
    rng = np.random.default_rng(0)
    if name == "embedding_gemma_debug":
        task, layers = models.GemmaTextEmbedder, {"num_layers": 1}
        ids = rng.integers(3, 300, (16, 2, 9)).astype("int32")
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    else:
        task = models.ImageTextSimilarity
        images = rng.normal(size=(16, 16, 16, 3)).astype("float32")
        inputs = {"images": images, "token_ids": rng.integers(3, 300, (16, 9)).astype("int32")}
        layers = {k: {**x, "num_layers": 1} for k, x in TWO_TOWERS[name].items() if "encoder" in k}
    labels = np.zeros(16, "int32")

    def losses(mesh):
        plan = distribute(mesh)
        keras.utils.set_random_seed(0)
        model = task.from_preset(name, **layers)
        model = model if plan is None else plan.prepare(model)
        model.compile(keras.optimizers.SGD(1e-2))
        history = model.fit(inputs, labels, batch_size=8, epochs=3, shuffle=False, verbose=0)
        # Evaluation fills its last batch, of 4 rows.
        short = {name: x[:12] for name, x in inputs.items()}
        last = model.evaluate(short, labels[:12], batch_size=8, verbose=0)
        return [*history.history["loss"], last]

    alone, wide = losses(None), losses("data=4,fsdp=2")
    np.testing.assert_allclose(wide, alone, rtol=0, atol=tolerance("losses"))


def test_too_few_devices():
    refused("needs 64 devices and there are 8", distribute, "data=64")
    assert current() is None


@pytest.mark.parametrize(
    ("mesh", "rows", "split"),
    [("data=8", 8, 8), ("data=2,model=4", 4, 2), ("fsdp=8", 8, 8), ("data=8", 3, 1)],
)
def test_devices_generate_rows_of_their_own(mesh, rows, split, monkeypatch):
    """Tokens are those of one device, and each device has the cache of its rows alone."""
    from kmodels.generation import loop_jax

    shares, finish = [], loop_jax.Loop.finish

    def finish_after_a_look(loop):
        ring = next(iter(loop.rings.values()))
        shares.append(ring.shape[0] // ring.addressable_shards[0].data.shape[0])
        finish(loop)

    monkeypatch.setattr(loop_jax.Loop, "finish", finish_after_a_look)
    prompts = {"token_ids": IDS[:rows, :5], "padding_mask": np.ones((rows, 5))}
    settings = {"max_new_tokens": 4, "stop_token_ids": None, "temperature": 1.0, "seed": 2}
    made = []
    for name in (None, mesh):
        plan = distribute(name)
        keras.utils.set_random_seed(3)
        model, _, _ = make_gemma(lora=False)
        model = model if plan is None else plan.prepare(model)
        made.append(model.generate(prompts, **settings)["token_ids"])
    np.testing.assert_array_equal(*made)
    assert shares == [1, split]
