"""Text in, text out: the script that Keras' users know, packed rows, and what is saved."""

import shutil

import keras
import numpy as np
import pytest

from kmodels import InputError
from kmodels.data.fit import adapters as data_adapters
from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor
from kmodels.text import TextLoader, Tokenizer, demo
from kmodels.text.training import train_tokenizer

ROWS = demo.instructions().rows[:9]


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    """A directory as a user has one."""
    folder = tmp_path_factory.mktemp("preset") / "gemma"
    keras.utils.set_random_seed(0)
    tokenizer = train_tokenizer(demo.texts(), 420)
    GemmaCausalLM.from_preset(
        "gemma3_debug",
        vocabulary_size=tokenizer.vocabulary_size(),
        preprocessor=GemmaCausalLMPreprocessor(tokenizer),
    ).save_to_preset(folder)
    return folder


def test_the_script_that_keras_users_know(preset):
    """https://ai.google.dev/gemma/docs/core/lora_tuning with one changed import."""
    template = "Instruction:\n{instruction}\n\nResponse:\n{response}"
    data = [template.format(**row) for row in ROWS]

    gemma_lm = GemmaCausalLM.from_preset(preset)
    gemma_lm.backbone.enable_lora(rank=4)
    before = values(gemma_lm)
    gemma_lm.preprocessor.sequence_length = 32
    gemma_lm.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=5e-5),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    logs = gemma_lm.fit(data, epochs=1, batch_size=2, verbose=0).history
    assert set(logs) == {"loss", "sparse_categorical_accuracy"}
    # At this rate the first matrices hardly move: their gradient grows with the second ones.
    after = values(gemma_lm)
    moved = {path for path, value in after.items() if not np.array_equal(value, before[path])}
    seconds = {path for path in after if path.endswith("/lora_b")}
    assert moved >= seconds and len(seconds) == 2 * 2
    assert all("/lora_" in path for path in moved)

    # keras-hub's loss: a mean over all positions, of which only real targets weigh.
    x, labels, weights = gemma_lm.preprocessor(data)
    fresh = GemmaCausalLM.from_preset(preset)
    logits = np.asarray(fresh.predict(x, verbose=0), "float64")
    assert logs["loss"][0] == pytest.approx(np.mean(losses(logits, labels) * weights), rel=1e-3)

    prompt = template.format(instruction="Say a word.", response="")
    text = gemma_lm.generate(prompt, max_length=40)
    assert text.startswith(prompt)
    assert gemma_lm.generate([prompt, "a"], max_length=40)[0] == text
    assert gemma_lm.generate(prompt, max_length=40, strip_prompt=True) == text[len(prompt) :]


def test_fit_takes_records_and_columns_as_well(preset):
    text = GemmaCausalLMPreprocessor.from_preset(preset, sequence_length=200)
    pairs = [{"prompts": row["instruction"], "responses": row["response"]} for row in ROWS]
    columns = {name: [pair[name] for pair in pairs] for name in ("prompts", "responses")}
    chats = [
        {"messages": [{"role": "user", "content": p}, {"role": "model", "content": r}]}
        for p, r in zip(*columns.values(), strict=True)
    ]
    for given in (ROWS, pairs, columns, chats):
        text.template = "gemma" if given is chats else "instruction"
        dataset = data_adapters.as_dataset(given, batch_size=4, preprocess=text)
        assert dataset.num_batches == 3
        _, labels, weights = dataset[1]
        _, expected, _ = text((pairs if given is columns else given)[4:8])
        assert np.array_equal(labels, expected) and labels.shape == weights.shape == (4, 200)


def values(model):
    return {v.path: np.array(keras.ops.convert_to_numpy(v.value), "float32") for v in model.weights}


def losses(logits, labels):
    shifted = logits - logits.max(-1, keepdims=True)
    shares = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(shares, labels[..., None], -1)[..., 0]


def test_each_packed_example_has_the_loss_it_has_alone(preset):
    # Windows of 8 tokens, and a global layer: neither sees the neighbour in the row.
    model = GemmaCausalLM.from_preset(preset)
    text = model.preprocessor
    text.sequence_length, text.loss_on = 250, "responses"
    alone, packed = text(ROWS), text.pack(ROWS)
    assert len(packed[1]) < len(alone[1])
    expected = losses(np.asarray(model.predict(alone[0], verbose=0)), alone[1]) * alone[2]
    found = losses(np.asarray(model.predict(packed[0], verbose=0)), packed[1]) * packed[2]
    segments = packed[0]["segment_ids"]
    by_example = {}
    for row, ids in enumerate(segments):
        for segment in range(1, ids.max() + 1):
            here = ids == segment
            by_example[tuple(packed[0]["token_ids"][row, here])] = found[row, here].sum()
    assert len(by_example) == len(ROWS)
    for row, total in enumerate(expected.sum(-1)):
        size = alone[0]["padding_mask"][row].sum() - 1
        key = tuple(alone[0]["token_ids"][row, :size])
        assert by_example[key] == pytest.approx(total, rel=1e-5)


def test_evaluation_of_packed_rows_gives_the_loss_per_token(preset):
    model = GemmaCausalLM.from_preset(preset)
    model.preprocessor.sequence_length = 250
    model.compile()
    logs = [
        model.evaluate(TextLoader(make(ROWS), 3), return_dict=True, verbose=0)
        for make in (model.preprocessor, model.preprocessor.pack)
    ]
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    # An untrained model gives every token about the same share.
    assert logs[0]["loss"] == pytest.approx(np.log(420), rel=0.2)


def test_what_is_saved_holds_the_preprocessor(preset):
    model = GemmaCausalLM.from_preset(preset)
    again = GemmaCausalLM.from_config(model.get_config())
    for made in (model, again):
        assert made.preprocessor.template == "auto"
        assert made.preprocessor.tokenizer.vocabulary_size() == 420
    assert GemmaCausalLM.from_preset(preset, preprocessor=None).preprocessor is None
    # The vocabulary is a file of its own, which transformers and tokenizers read.
    assert (preset / "config.json").stat().st_size < 4000
    assert Tokenizer.from_file(preset).vocabulary_size() == 420


@pytest.mark.parametrize("harm", ["missing", "flipped", "cut"])
def test_a_damaged_tokenizer_file_is_one_line(preset, tmp_path, harm):
    folder = shutil.copytree(preset, tmp_path / "copy")
    file = folder / "tokenizer.json"
    content = bytearray(file.read_bytes())
    file.unlink()
    if harm == "flipped":
        content[len(content) // 2] ^= 1
    if harm != "missing":
        file.write_bytes(content[: -100 if harm == "cut" else None])
    for cls in (GemmaCausalLM, GemmaCausalLMPreprocessor):
        with pytest.raises(InputError, match=r"copy is damaged: .*tokenizer.json") as error:
            cls.from_preset(folder)
        assert "\n" not in str(error.value)
    assert GemmaCausalLM.from_preset(folder, preprocessor=None).preprocessor is None
