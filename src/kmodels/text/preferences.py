"""Preferred and rejected answers, read and tokenized for preference tuning."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.arguments import checked
from kmodels.core.errors import InputError
from kmodels.text.packing import Batch, Cut, Example, fit_prompt, pad
from kmodels.text.records import (
    PICTURES,
    UNREAD,
    Record,
    check_messages,
    check_text,
    has_value,
    read_rows,
    template_fields,
    warn_of_unread,
)

PAIR = "prompt, chosen and rejected"
FORMS = f"{PAIR}, or chosen and rejected that begin with the same prompt"
LABELLED = "prompt, completion and label"
# Fields with a meaning in TRL that no loss of kmodels reads.
UNUSED = {
    *("margin", "score_chosen", "score_rejected", "ref_chosen_logps", "ref_rejected_logps"),
    *("ref_logps", "ref_KL_logps", "context"),
}
# Names of the prompt in other packages; without 'prompt' it would be guessed from the answers.
_PROMPTS = ("instruction", "question", "query", "input")


def read_pairs(path: str | Path) -> list[Record]:
    """Reads a file of JSON lines, or of one JSON array, with chosen and rejected answers.

    Args:
        path: local, or an address such as "gs://bucket/pairs.jsonl". Each record has prompt, chosen
            and rejected, as texts or as lists of messages; without a prompt it is the common
            beginning of both answers, which ends between words or between messages. A record may
            have "images" (one path or a list, relative to the file's folder), and one of messages
            "tools" and "chat_template_kwargs", as for `read_records`. A field with a meaning in TRL
            that kmodels does not use, a system text and a history are named in a warning; others
            are ignored.

    Returns:
        Dictionaries with prompt, chosen and rejected, and the other fields if a record has them,
        in the order of the file. Answers may be empty; `encode_pairs` drops these pairs.

    Raises:
        InputError: for the first bad record, a file that cannot be read, or one without a record.
    """
    return _read(path, lambda value: [check_pair(value)], FORMS, UNUSED | UNREAD)


def read_labelled(path: str | Path) -> list[Record]:
    """Reads a file of JSON lines, or of one JSON array, with answers that are good or bad.

    Args:
        path: as for `read_pairs`. Each record has prompt, completion and label, true for a
            desirable answer, or is one of `read_pairs`, which gives two answers.

    Returns:
        Dictionaries with prompt, completion, label (bool), and the other fields of `read_pairs`.

    Raises:
        InputError: as `read_pairs`.
    """
    return _read(path, check_labelled, f"{LABELLED}; or {FORMS}", UNUSED | UNREAD)


def read_prompts(path: str | Path) -> list[Record]:
    """Reads a file of JSON lines, or of one JSON array, with prompts for sampled answers.

    Args:
        path: as for `read_pairs`. Each record has prompt, a text or a list of messages; its other
            fields are for a reward function.

    Returns:
        The records, in the order of the file.

    Raises:
        InputError: as `read_pairs`.
    """
    return _read(path, lambda value: [check_prompt(value)], "prompt", set())


def check_prompt(value: object) -> Record:
    """Returns a record of `read_prompts` whose prompt's messages are in their usual form."""
    record = _checked(value, "prompt")
    (prompt,) = _fields(record, (), "prompt")
    if prompt is None:
        raise InputError("field 'prompt' is missing; give a text or a list of messages")
    if isinstance(prompt, list):
        prompt = check_messages(prompt, "prompt")
        if prompt[-1]["role"] == "model":
            raise InputError(
                "field 'prompt' ends with the assistant's message; end with the user's"
            )
    return {**record, "prompt": prompt}


def _read(
    path: str | Path, check: Callable[[object], list[Record]], forms: str, named: set[str]
) -> list[Record]:
    def named_in(value: Record) -> set[str]:
        return {name for name in named if has_value(value, name)}

    records, unread = read_rows(path, check, named_in, forms)
    warn_of_unread(path, unread, stacklevel=4)
    return records.rows


# === The forms of a record ===


def check_pair(value: object) -> Record:
    """Returns a pair of `read_pairs` in its usual form.

    It is {"prompt", "chosen", "rejected"}, all texts or all lists of messages, with "tools",
    "chat_template_kwargs" and "images" or "image" if the record has them.

    Raises:
        InputError: names the field that is missing or wrong.
    """
    record = _checked(value, FORMS)
    prompt, chosen, rejected = _fields(record, ("chosen", "rejected"), FORMS)
    if isinstance(chosen, list) or isinstance(rejected, list) or isinstance(prompt, list):
        chosen, rejected = _as_messages(chosen), _as_messages(rejected)
        if not isinstance(prompt, list) and any(map(_holds_prompt, (chosen, rejected))):
            shared = _common(chosen, rejected)
            if not shared:
                raise InputError(
                    "fields 'chosen' and 'rejected' do not begin with the same message; give the "
                    "prompt as 'prompt'"
                )
            if prompt is not None and not any(one.get("content") == prompt for one in shared):
                raise InputError(
                    "field 'prompt' is not in the messages with which 'chosen' and 'rejected' begin"
                )
            prompt = shared
            chosen, rejected = chosen[len(shared) :], rejected[len(shared) :]
            if any(map(_holds_prompt, (chosen, rejected))):
                raise InputError(
                    f"fields 'chosen' and 'rejected' differ in message {len(shared)}, which is not "
                    "the assistant's; they may differ in its replies alone"
                )
    elif prompt is None:
        if others := [name for name in _PROMPTS if name in record]:
            raise InputError(f"field 'prompt' is missing beside {others[0]!r}; give it as 'prompt'")
        size = _common_words(chosen, rejected)
        prompt, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
        if not prompt.strip():
            raise InputError(
                "fields 'chosen' and 'rejected' do not begin with the same words; give the prompt "
                "as 'prompt'"
            )
    return _usual(record, prompt, {"chosen": chosen, "rejected": rejected})


def check_labelled(value: object) -> list[Record]:
    """Returns a record of `read_labelled` in its usual form, or the two of a pair.

    Each is {"prompt", "completion", "label"}.

    Raises:
        InputError: names the field that is missing or wrong.
    """
    record = _checked(value, LABELLED)
    if "completion" not in record and "chosen" in record:
        pair = check_pair(record)
        rest = {key: x for key, x in pair.items() if key not in ("chosen", "rejected")}
        return [
            {**rest, "completion": pair[name], "label": name == "chosen"}
            for name in ("chosen", "rejected")
        ]
    prompt, completion = _fields(record, ("completion",), LABELLED)
    if prompt is None:
        raise InputError(f"field 'prompt' is missing; give {LABELLED}")
    label = record.get("label")
    if label not in (0, 1) or not isinstance(label, int):
        raise InputError(f"field 'label' is {label!r}; give true for a desirable answer, or false")
    if isinstance(prompt, list) or isinstance(completion, list):
        completion = _as_messages(completion)
    return [{**_usual(record, prompt, {"completion": completion}), "label": bool(label)}]


def _checked(value: object, forms: str) -> Record:
    if not isinstance(value, Mapping):
        raise InputError(f"a {type(value).__name__} where an object belongs, with {forms}")
    return {key: part for key, part in value.items() if part is not None}


def _fields(record: Record, answers: Sequence[str], forms: str) -> list[Any]:
    """Returns the prompt, or None, and the answers: texts or lists of messages."""
    for name in answers:
        if name not in record:
            raise InputError(f"field {name!r} is missing; give {forms}")
    for name in ("prompt", *answers):
        if not isinstance(record.get(name, ""), list):
            if name in record:
                check_text(record, name, may_be_empty=name in answers)
        elif not all(isinstance(one, Mapping) for one in record[name]):
            raise InputError(f"field {name!r} is a list of something else than messages")
    return [record.get(name) for name in ("prompt", *answers)]


def _usual(record: Record, prompt: Any, answers: Mapping[str, Any]) -> Record:
    """Returns a record of a prompt and answers that are alike: texts or messages."""
    images = {name: record[name] for name in PICTURES if has_value(record, name)}
    extras = {name: x for name, x in template_fields(record).items() if x}
    if not any(isinstance(one, list) for one in (prompt, *answers.values())):
        if extras:
            raise InputError(f"{' and '.join(extras)} need messages; the record has texts")
        empty = {name: "" for name, text in answers.items() if not text.strip()}
        return {"prompt": prompt, **answers, **empty, **images}
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not asked:
        raise InputError("field 'prompt' is an empty list; give at least one message")
    checked: Record = {}
    for name, answer in answers.items():
        if not any(one.get("content") or one.get("tool_calls") for one in answer):
            checked[name] = []
            continue
        if _holds_prompt(answer):
            role = answer[0].get("role")
            raise InputError(
                f"field '{name}[0].role' is {role!r}; an answer begins with the assistant's message"
            )
        both = check_messages([*asked, *answer], f"prompt + {name}")
        asked, checked[name] = both[: len(asked)], both[len(asked) :]
        if asked[-1]["role"] == "model":
            raise InputError(
                "field 'prompt' ends with the assistant's message; end with the user's"
            )
    return {"prompt": asked, **checked, **extras, **images}


def _as_messages(answer: Any) -> list[Any]:
    if isinstance(answer, list):
        return answer
    return [{"role": "assistant", "content": answer}]


def _holds_prompt(answer: Sequence[Mapping[str, Any]]) -> bool:
    return bool(answer) and answer[0].get("role") not in ("assistant", "model")


def _common(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    size = 0
    while size < min(len(first), len(second)) and first[size] == second[size]:
        size += 1
    return list(first[:size])


def _common_words(first: str, second: str) -> int:
    """Returns the characters of a common beginning that ends with a word.

    A blank in front of the next word belongs to that word, as in TRL.
    """
    size = len(_common(first, second))
    if first == second:
        return size
    start = size
    while start and not first[start - 1].isspace():
        start -= 1
    size = start or size  # texts without blanks are divided anywhere
    return size - (size > 0 and first[size - 1] == " ")


# === Token ids ===


def encode_pairs(preprocessor: Any, pairs: Sequence[Mapping[str, Any]]) -> Batch:
    """Returns token ids of both answers, each after the same prompt.

    The log-probabilities of two answers are comparable only after the same prompt, so a prompt that
    has to be cut is cut for both as for the longer answer. Of messages, the assistant's in an
    answer are learnt through the token that ends them; TRL also learns what the template writes
    behind it, such as a line's end.

    Args:
        preprocessor: a `CausalLMPreprocessor` with `loss_on="responses"`. Its attribute `cut`
            counts what does not fit, and in `cut.dropped` pairs that are left out because no token
            of an answer is left.
        pairs: as `read_pairs` returns them, or records as it reads.

    Returns:
        ({"token_ids", "padding_mask"}, labels, weights), each (pairs, 2, sequence_length): the
        chosen answer, then the rejected one. With images there are their inputs as well.

    Raises:
        InputError: for another loss_on, a record that cannot be written, or if no pair is left.
    """
    _check_loss_on(preprocessor)
    rows = [check_pair(pair) for pair in pairs]
    rows = [row for row in rows if row["chosen"] and row["rejected"]]
    # Cut below, as one.
    chosen, rejected = (
        preprocessor.encode([_record(row, row[name]) for row in rows], sys.maxsize - 1)
        for name in ("chosen", "rejected")
    )
    room = preprocessor.sequence_length + 1
    fitted = [_fitted(pair, room, preprocessor.cut) for pair in zip(chosen, rejected, strict=True)]
    fitted = [pair for pair in fitted if all(any(one.learn) for one in pair)]
    preprocessor.cut.dropped += len(pairs) - len(fitted)
    if not fitted:
        raise InputError(f"none of {len(pairs)} pairs has two answers; give at least one")
    return _padded(preprocessor, fitted)


@checked
def encode_labelled(
    preprocessor: Any, rows: Sequence[Mapping[str, Any]], *, mismatched: bool = True
) -> Batch:
    """Returns token ids of answers, and of answers to another prompt for KTO's divergence.

    The other answer is that of the row before, as in TRL, or of the nearest row before it with
    another prompt; the first row follows the last one.

    Args:
        preprocessor: as of `encode_pairs`.
        rows: as `read_labelled` returns them, or records as it reads.
        mismatched: whether answers to another prompt are needed.

    Returns:
        ({"token_ids", "padding_mask", "desirable"}, labels, weights), each (rows, 2,
        sequence_length): the answer, then the other one, which is not there without `mismatched`;
        "desirable" is int32 (rows,).

    Raises:
        InputError: as `encode_pairs`, or if all rows have the same prompt.
    """
    _check_loss_on(preprocessor)
    answers = [one for row in rows for one in check_labelled(row)]
    answered = [row for row in answers if row["completion"]]
    preprocessor.cut.dropped += len(answers) - len(answered)
    if not answered:
        raise InputError(f"none of {len(answers)} rows has an answer; give at least one")
    columns = [[_record(row, row["completion"]) for row in answered]]
    if mismatched:
        others = [answered[i]["completion"] for i in _others(answered)]
        columns.append([_record(*pair) for pair in zip(answered, others, strict=True)])
    encoded = [preprocessor.encode(column) for column in columns]
    inputs, labels, weights = _padded(preprocessor, list(zip(*encoded, strict=True)))
    inputs["desirable"] = np.array([row["label"] for row in answered], "int32")
    return inputs, labels, weights


def _check_loss_on(preprocessor: Any) -> None:
    if preprocessor.loss_on != "responses":
        raise InputError(
            f"the preprocessor has loss_on={preprocessor.loss_on!r}; set loss_on='responses', "
            "because preferences are of answers"
        )


def _record(row: Record, answer: Any) -> Record:
    """Returns a record of `read_records`, of which the answer alone is learnt."""
    extras = {
        name: row[name] for name in ("tools", "chat_template_kwargs", *PICTURES) if name in row
    }
    if isinstance(row["prompt"], str):
        return {"prompts": row["prompt"], "responses": answer, **extras}
    # A reply in the prompt is read, not learnt.
    asked = [{**one, "weight": 0} if one["role"] == "model" else one for one in row["prompt"]]
    return {"messages": [*asked, *answer], **extras}


def _fitted(pair: Sequence[Example], room: int, cut: Cut) -> list[Example]:
    """Returns two examples with the same prompt, cut the same."""
    prompt = min(one.learn.index(True) for one in pair)
    # A token across the border makes the prompts differ in their last token.
    prompt = len(_common(*(one.ids[:prompt] for one in pair)))
    longest = max(len(one.ids) for one in pair) - prompt
    # The first token stays, such as the start token.
    places, rest = fit_prompt(prompt - 1, longest, room - 1)
    places = [0, *(place + 1 for place in places)]
    fitted = []
    for ids, learn, images in pair:
        response = min(rest, len(ids) - prompt)
        chosen = [*places, *range(prompt, prompt + response)]
        cut.examples += len(chosen) < len(ids)
        cut.prompt_tokens += prompt - len(places)
        cut.response_tokens += len(ids) - prompt - response
        fitted.append(Example([ids[i] for i in chosen], [learn[i] for i in chosen], images))
    return fitted


def _others(rows: Sequence[Record]) -> list[int]:
    """Returns for each row the nearest one before it with another prompt of the same form."""
    asked = [
        _identity([row[name] for name in ("prompt", *PICTURES) if name in row]) for row in rows
    ]
    partners = [-1] * len(rows)
    for form in (str, list):
        places = [i for i, row in enumerate(rows) if isinstance(row["prompt"], form)]
        # In the second round, rows at the beginning find those at the end.
        for number, i in [*enumerate(places)] * 2:
            before = places[number - 1]
            partners[i] = partners[before] if asked[before] == asked[i] else before
    if -1 in partners:
        raise InputError(
            f"row {partners.index(-1)} finds no row with another prompt, which KTO's divergence "
            "needs; give answers to several prompts, or use apo_zero_unpaired"
        )
    return partners


def _identity(value: Any) -> Any:
    """Returns an object that equals that of equal texts, and of the same image objects."""
    if isinstance(value, Mapping):
        return {key: _identity(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_identity(part) for part in value]
    return value if isinstance(value, str | bool | int | float) else id(value)


def _padded(preprocessor: Any, rows: Sequence[Sequence[Example]]) -> Batch:
    """Returns arrays (rows, examples of a row, ...)."""
    examples = [one for row in rows for one in row]
    length = preprocessor.sequence_length
    _, labels, weights = pad(examples, length, preprocessor.tokenizer.pad_token_id)
    # The last token is predicted, and not read.
    read = [Example(one.ids[:-1], [], one.images) for one in examples]
    inputs = preprocessor.prompt_inputs(read, length)
    return keras.tree.map_structure(
        lambda x: x.reshape(len(rows), len(rows[0]), *x.shape[1:]), (inputs, labels, weights)
    )
