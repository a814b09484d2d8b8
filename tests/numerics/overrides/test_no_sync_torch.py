"""Nothing on CUDA waits for the device, as far as a CPU can prove it; collects on torch alone.

Code is told that it is on CUDA, and each read of a number on the host, each size that depends on
numbers and each copy of a number to the device raises. `make accelerator` asks a device itself.
"""

import copy
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import op_cases
from gradients import first, value_and_grad
from kmodels import layers, ops, training
from kmodels.models import GemmaCausalLM, ViTImageClassifier
from tolerances import tolerance

if keras.backend.backend() != "torch":
    pytest.skip("needs torch", allow_module_level=True)

import torch

from kmodels.core import keras_internals, runtime_torch, seeds_torch
from kmodels.generation.cache import Passes
from kmodels.generation.loop_torch import Loop
from kmodels.overrides import dropout_torch
from pretended_cuda_torch import WaitsForDevice, pretend, stop_pretending, without_waiting

X = torch.tensor([[1.0, 0.0], [2.0, 3.0]])
MASK = X > 0


@pytest.fixture
def device(monkeypatch) -> Iterator[list]:
    """Stands for a GPU; what the kernels of attention were given."""
    yield pretend(monkeypatch)
    stop_pretending()


WAITS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 0).all()),
    "if": lambda x: 1 if (x > 0).any() else 0,
    "float": lambda x: float(x.sum()),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x),
    "mask": lambda x: x[MASK],
    "mask, write": lambda x: x.clone().index_put_((MASK,), torch.ones(3)),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: torch.masked_select(x, MASK),
    "unique": lambda x: torch.unique(x),
    "equal": lambda x: torch.equal(x, x),
    "number": lambda x: torch.tensor(2.0),
    "list": lambda x: x.new_tensor([1.0, 2.0]),
    "array to device": lambda x: torch.as_tensor(np.ones(2)),
}


@pytest.mark.parametrize("label", WAITS)
def test_what_waits_is_found(label: str) -> None:
    with pytest.raises(WaitsForDevice), without_waiting():
        WAITS[label](X)


def test_what_waits_in_a_backward_pass_is_found() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * gradients[0].sum().item()

    x = X.clone().requires_grad_()
    with without_waiting():
        y = Reads.apply(x).sum()
    with pytest.raises(WaitsForDevice), without_waiting():
        y.backward()


SEEDED = {
    "dropout": lambda x, seed: ops.dropout(x, 0.5, seed),
    "attention": lambda x, seed: ops.attention(x, x, x, causal=True, dropout=0.5, seed=seed),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "label", "arrays", "keywords"),
    [case for case in op_cases.cases() if getattr(ops, case[0]).override is not None],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_no_override_waits(device: list, name, label, arrays, keywords, dtype) -> None:
    keywords = {
        k: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x
        for k, x in keywords.items()
    }
    given = [torch.from_numpy(x.copy()).to(getattr(torch, dtype)) for x in arrays]
    weight = torch.ones((), dtype=getattr(torch, dtype))

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return first(getattr(ops, name)(*tensors, **keywords)).sum() * weight

    leaves = [x.requires_grad_() for x in given]
    run(*leaves)  # what is made once for all calls may wait
    with without_waiting():
        gradients = torch.autograd.grad(run(*leaves), leaves)
    with torch.no_grad(), without_waiting():
        run(*leaves)
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("name", SEEDED)
def test_no_draw_waits_but_the_first(device: list, name: str) -> None:
    x = torch.ones(2, 16, 4, 8, requires_grad=True)
    seed = keras.random.SeedGenerator(5)
    first: Any = SEEDED[name](x, seed)
    with without_waiting():
        second: Any = SEEDED[name](x, seed)
        second.sum().backward()
    assert not torch.equal(first, second)
    assert seed.state.value.tolist() == [5, 2]


def test_dropout_on_the_device_keeps_its_share(device: list) -> None:
    x = torch.ones(200, 100)
    y: Any = ops.dropout(x, 0.3, keras.random.SeedGenerator(1))
    assert ops.dropout.declines(x, 0.3, keras.random.SeedGenerator(1)) is None
    assert set(y.unique().tolist()) == {0.0, y.max().item()}
    assert abs(y.mean().item() - 1) < 5 * (0.3 / 0.7 / x.numel()) ** 0.5


def test_bits_of_compiled_dropout_are_independent_hashes() -> None:
    count, rate = 1 << 16, 0.3
    lanes = round(rate * dropout_torch.LANE)
    states = [torch.tensor(words, dtype=torch.int32) for words in ([1, 0], [1, 1], [2, 0])]
    drawn = [dropout_torch._hashed(state, count, lanes).double() for state in states]
    sigma = (rate * (1 - rate) / count) ** 0.5
    for bits in drawn:
        assert abs(bits.mean() - (1 - rate)) < 5 * sigma
        neighbours = torch.corrcoef(torch.stack((bits[1:], bits[:-1])))[0, 1]
        assert abs(neighbours) < 5 / count**0.5
    others = torch.corrcoef(torch.stack(drawn)) - torch.eye(3)
    assert others.abs().max() < 5 / count**0.5
    assert torch.equal(drawn[0], dropout_torch._hashed(states[0], count, lanes).double())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_dropout_has_one_graph_and_draws_other_bits_each_time(device: list) -> None:
    seed, x = keras.random.SeedGenerator(1), torch.ones(64, 64, requires_grad=True)
    compiled: Any = torch.compile(
        lambda x: ops.dropout(x, 0.3, seed), backend="aot_eager", fullgraph=True
    )
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    second.sum().backward()
    assert x.grad is not None and torch.equal(
        x.grad, second
    )  # the gradient drops what the forward pass dropped
    assert seed.state.value.tolist() == [1, 2]


def _draws(seed: keras.random.SeedGenerator, count: int = 1) -> list:
    return [seeds_torch.take(seed) for _ in range(count)]


def test_words_are_those_that_keras_draws() -> None:
    ours, theirs = (keras.random.SeedGenerator(7) for _ in range(2))
    for apart in (0, 3):
        seeds_torch.draw_as(apart)
        try:
            found = [[w & seeds_torch.WORD for w in words] for words in _draws(ours, 3)]
            wanted = [theirs.next().tolist() for _ in range(3)]
        finally:
            seeds_torch.draw_as(0)
        assert found == [[w & seeds_torch.WORD for w in words] for words in wanted]
    assert ours.state.value.tolist() == theirs.state.value.tolist() == [7, 6]


def test_words_follow_what_others_do_to_the_state() -> None:
    seed = keras.random.SeedGenerator(7)
    assert _draws(seed, 2) == [(7, 0), (7, 1)]
    twin = copy.copy(seed)
    twin.state = copy.deepcopy(seed.state)
    seed.state.assign(np.array([9, 4], "int32"))  # as a checkpoint does
    assert _draws(seed, 2) == [(9, 4), (9, 5)]
    assert _draws(twin) == [(7, 2)]
    seed.next()
    assert _draws(seed) == [(9, 7)]
    with keras.StatelessScope([(seed.state, torch.tensor([3, 1], dtype=torch.int32))]) as scope:
        assert _draws(seed, 2) == [(3, 1), (3, 2)]
    assert scope.get_current_value(seed.state).tolist() == [3, 3]
    assert _draws(seed) == [(9, 8)]
    with torch.inference_mode():
        inside = keras.random.SeedGenerator(2)
        assert _draws(inside, 2) == [(2, 0), (2, 1)]
    keras.utils.clear_session()
    assert _draws(keras.random.SeedGenerator(7)) == [(7, 0)]
    seed.state._value = torch.nn.Parameter(torch.tensor([5, 5]), requires_grad=False)
    assert _draws(seed) == [(5, 5)]


def test_threads_share_a_seed() -> None:
    from concurrent.futures import ThreadPoolExecutor

    seed = keras.random.SeedGenerator(7)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: seeds_torch.take(seed), range(100)))
    assert sorted(found) == [(7, i) for i in range(100)]
    assert seed.state.value.tolist() == [7, 100]


NUMBERS = (True, 3, 0.5, [1, 2], (1.5, 2), [True], np.arange(3), np.ones((2, 2)), [])


@pytest.mark.parametrize("x", NUMBERS, ids=str)
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "int32"])
def test_numbers_are_sent_as_keras_makes_them(device: list, x, dtype) -> None:
    with without_waiting():
        found = keras.ops.convert_to_tensor(x, dtype)
    stop_pretending()
    wanted = keras.ops.convert_to_tensor(x, dtype)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(found, wanted)


def test_keras_keeps_its_own_way_without_cuda() -> None:
    before = keras_internals.CORE.convert_to_tensor
    runtime_torch.send_without_waiting()
    assert keras_internals.CORE.convert_to_tensor is before


def test_loss_with_positions_of_weight_0_is_that_of_the_op(device: list) -> None:
    rng = np.random.default_rng(0)
    hidden, table = (rng.normal(size=size).astype("float32") for size in ((9, 6), (700, 6)))
    weights = np.array([1, 0, 0.5, 0, 2, 1, 1, 0, 1], "float32")
    hidden[1], labels = np.nan, np.arange(9).astype("int32")
    labels[3] = 10**6  # what counts for nothing may be anything

    def run(body: Any) -> Any:
        given = [torch.from_numpy(x) for x in (labels, weights)]
        return value_and_grad(
            lambda h, t: body(h, t, *given, trainable_table=True)[0], hidden, table
        )

    found, wanted = run(ops.linear_cross_entropy), run(ops.linear_cross_entropy.generic)
    for ours, right in zip([found[0], *found[1]], [wanted[0], *wanted[1]], strict=True):
        np.testing.assert_allclose(
            *(np.asarray(x) for x in (ours, right)), rtol=0,
            atol=tolerance("linear_cross_entropy") * float(np.abs(np.asarray(right)).max()),
        )  # fmt: skip


def vit(kind: Any = training.AdamW, **rule: Any) -> tuple[Any, Any]:
    keras.utils.set_random_seed(0)
    drops: Any = {"dropout_rate": 0.1, "attention_dropout": 0.1, "drop_path_rate": 0.1}
    model = ViTImageClassifier.from_preset(
        "vit_debug", num_classes=10, dtype="mixed_bfloat16", **drops
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kind(1e-3, clip_norm=1.0, **rule), loss, metrics=["accuracy"])
    rng = np.random.default_rng(0)
    x = rng.random((4, *model.backbone.config.image_shape)).astype("float32")
    return model, (x, rng.integers(0, 10, 4).astype("int32"))


def gemma(preset: str = "gemma_debug", remat: bool = False) -> tuple[Any, Any]:
    keras.utils.set_random_seed(0)
    settings: dict[str, Any] = {"dropout": 0.1} if preset == "gemma_debug" else {}
    model = GemmaCausalLM.from_preset(preset, preprocessor=None, dtype="mixed_bfloat16", **settings)
    if remat:
        layers.rematerialize(model, "block")
    model.backbone.enable_lora(rank=4, dropout=0.1)
    model.compile(training.AdamW(1e-3))
    ids = np.random.default_rng(0).integers(1, 100, (2, 24)).astype("int32")
    weights = np.ones(ids.shape, "float32")
    weights[:, -3:] = 0.0
    return model, ({"token_ids": ids, "padding_mask": (weights > 0).astype("int32")}, ids, weights)


MODELS = {
    "ViT": vit,
    "ViT, accumulated": lambda: vit(accumulate=2, ema=0.9),
    "ViT, SGD": lambda: vit(training.SGD, momentum=0.9, accumulate=2),
    "Gemma": gemma,
    "Gemma, rematerialized": lambda: gemma(remat=True),
    "Gemma 2": lambda: gemma("gemma2_debug"),
    "Gemma 3": lambda: gemma("gemma3_debug"),
}


@pytest.mark.parametrize("label", MODELS)
def test_no_training_step_waits(device: list, label: str) -> None:
    model, data = MODELS[label]()
    model.make_train_function()
    model.make_test_function()
    batch = keras.tree.map_structure(torch.from_numpy, data)
    model.train()
    losses = [model.train_function([batch]) for _ in range(2)]  # the first makes what stays
    with without_waiting():
        losses += [model.train_function([batch]) for _ in range(2)]
    model.eval()
    model.test_function([batch])
    with without_waiting():
        model.test_function([batch])
    values = [float(logs["loss"]) for logs in losses]
    assert np.isfinite(values).all() and len(set(values)) == 4
    assert bool(device) == label.endswith(("2", "3"))


@pytest.mark.parametrize(
    "rule", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str
)
def test_descent_on_the_device_is_that_of_keras(device: list, monkeypatch, rule) -> None:
    rng = np.random.default_rng(0)
    start, gradient = (rng.normal(size=(3, 4)).astype("float32") for _ in range(2))

    def moved() -> np.ndarray:
        weight = keras.Variable(start)
        optimizer = training.SGD(0.1, weight_decay=0.3, **rule)
        for size in (1.0, 0.5, 2.0):
            optimizer.apply([torch.from_numpy(size * gradient)], [weight])
        return keras.ops.convert_to_numpy(weight)

    found = moved()
    monkeypatch.setattr(runtime_torch, "on_cuda", lambda: False)
    np.testing.assert_allclose(found, moved(), rtol=0, atol=tolerance("optimizer"))


def test_an_update_follows_a_count_that_others_change(device: list) -> None:
    """As a checkpoint does: the next update is counted from there."""
    weight, gradient = keras.Variable([0.0]), torch.ones(1)
    optimizer = training.SGD(1.0, accumulate=3)
    found = []
    for others in (None, None, None, None, 1, None, 0, None, None):
        if others is not None:
            keras_internals.batches_seen(optimizer).assign(others)
        optimizer.apply([gradient], [weight])
        found.append(weight.value.item())
    assert found == [0, 0, -1, -1, -1, -2, -2, -2, -3]


def test_what_is_computed_again_drops_what_it_dropped(device: list) -> None:
    def losses(remat: bool) -> list[float]:
        model, data = gemma(remat=remat)
        batch = keras.tree.map_structure(torch.from_numpy, data)
        model.make_train_function()
        model.train()
        return [float(model.train_function([batch])["loss"]) for _ in range(4)]

    assert losses(remat=True) == losses(remat=False)


@pytest.mark.parametrize("sampler", ["greedy", "top_p"])
def test_no_token_step_waits(device: list, sampler: str) -> None:
    """`continue_prompts` reads the tokens of a step while the next one is under way."""
    model, _ = gemma("gemma3_debug")
    model.compile(sampler=sampler)
    rng = np.random.default_rng(0)
    prompts, lengths = rng.integers(1, 100, (2, 8)).astype("int32"), np.array([8, 5], "int32")
    draws = rng.random((6, 2)).astype("float32")
    loop = Loop(Passes(model.backbone, model.generator.sampler, 2, 8, 24), jit_compile=False)
    tokens = loop.start(prompts, lengths, draws[0])
    tokens = loop.step(0, tokens, draws[1])
    with without_waiting():
        for index in range(1, 5):
            tokens = loop.step(index, tokens, draws[index + 1])
    loop.finish()
    assert tokens.shape == (2,)
