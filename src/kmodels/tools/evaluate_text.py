"""`kmodels eval` of a language model, or of an embedder, on lines of JSON."""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kmodels import presets
from kmodels.core.errors import InputError, check_choice, pluralize
from kmodels.core.remote import local_copy
from kmodels.runs import run_folder
from kmodels.runs.report import metric
from kmodels.text.records import check_messages, check_text, json_records

# Fields of a record of each task; a prompt may be called question.
FIELDS = {
    "multiple_choice": ("prompt", "choices", "answer"),
    "exact_match": ("prompt", "answer"),
    "perplexity": ("text",),
    "retrieval": ("query", "positive"),
}
FORMS = "prompt, choices and answer; prompt and answer; text; or query and positive"
# Ranks up to which a document counts as found.
RANKS = (1, 5, 10)
QUESTION = "question"
# Ways to write a prompt, those of `kmodels generate`.
WAYS = ("chat", "instruction", "text")
Row = dict[str, Any]


def read_tasks(path: str | Path, skip_bad: bool = False) -> tuple[str, list[Row], list[str]]:
    """Reads a file of JSON lines, or of one JSON array, whose records are all of one task.

    Args:
        path: local, or an address such as "gs://bucket/held.jsonl". Records have prompt (or
            question; a text or a list of messages), choices (at least two texts) and answer (the
            text of a choice, or its number from 0 on); prompt and answer, a text; text; or query
            and positive, the text of its document or a list of them. Further fields are ignored.
        skip_bad: leaves out bad records instead of raising.

    Returns:
        (task, one of `FIELDS`; records with its fields, the answer to choices as a number; a line
        for each record that was left out).

    Raises:
        InputError: names the line of a bad record, or of one of another task than the first.
    """
    first: str | None = None
    rows: list[Row] = []
    skipped: list[str] = []
    try:
        for where, read in json_records(local_copy(path), path):
            try:
                task, row = check_task(read())
                if task != (first := first or task):
                    raise InputError(
                        f"a record of {task} in a file of {first}; give each task its own file"
                    )
                rows.append(row)
            except InputError as error:
                if not skip_bad:
                    raise InputError(f"{where}: {error}") from error.__cause__
                skipped.append(f"{where}: {error}")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if first is None:
        raise InputError(f"{path} holds no records; give one JSON object a line with {FORMS}")
    return first, rows, skipped


def check_task(value: object) -> tuple[str, Row]:
    """Returns the task of a record, and its fields, see `read_tasks`.

    Raises:
        InputError: names the field that is missing or wrong.
    """
    if not isinstance(value, dict):
        raise InputError(f"a {type(value).__name__} where an object belongs, with {FORMS}")
    row = {key: part for key, part in value.items() if part is not None}
    if QUESTION in row and "prompt" not in row:
        row["prompt"] = row[QUESTION]
    names = [name for name in dict.fromkeys(sum(FIELDS.values(), ())) if name in row]
    task = next((task for task, fields in FIELDS.items() if list(fields) == names), None)
    if task is None:
        raise InputError(f"the fields are {', '.join(value) or 'none'}; give {FORMS}")
    if task == "perplexity":
        return task, {"text": check_text(row, "text")}
    if task == "retrieval":
        texts = row["positive"] if isinstance(row["positive"], list) else [row["positive"]]
        if not texts:
            raise InputError("field 'positive' is an empty list; give the text of a document")
        places = [f"positive[{place}]" for place in range(len(texts))]
        texts = [check_text({at: text}, at) for at, text in zip(places, texts, strict=True)]
        return task, {"query": check_text(row, "query"), "positive": texts}
    if isinstance(row["prompt"], list):
        row["prompt"] = check_messages(row["prompt"], "prompt")
        if row["prompt"][-1]["role"] == "model":
            raise InputError("field 'prompt' ends with the assistant's message")
    else:
        check_text(row, "prompt")
    if task == "exact_match":
        return task, {"prompt": row["prompt"], "answer": check_text(row, "answer")}
    choices, answer = row["choices"], row["answer"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise InputError("field 'choices' is not a list of at least two texts")
    for place, choice in enumerate(choices):
        check_text({f"choices[{place}]": choice}, f"choices[{place}]")
    number = choices.index(answer) if isinstance(answer, str) and answer in choices else answer
    if isinstance(number, bool) or number not in range(len(choices)):
        raise InputError(
            f"field 'answer' is {answer!r}; give one of the choices, or its number from 0 to "
            f"{len(choices) - 1}"
        )
    return task, {"prompt": row["prompt"], "choices": choices, "answer": int(number)}


class TextTask:
    """A file of `read_tasks`, on which models are evaluated.

    Args:
        written_as: how a text becomes a prompt, one of `WAYS`; by default "chat" if the tokenizer
            has a chat template, else "text". Messages are always a chat.

    Raises:
        InputError: for a wrong file or setting.
    """

    def __init__(
        self,
        path: str | Path,
        skip_bad: bool = False,
        written_as: str | None = None,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
    ):
        if written_as is not None:
            check_choice("--as", written_as, WAYS)
        self.task, self.rows, self.skipped = read_tasks(path, skip_bad)
        if written_as is not None and all(isinstance(row.get("prompt"), list) for row in self.rows):
            raise InputError(f"--as has no effect on the messages of {path}; leave it out")
        self.written_as, self.max_new_tokens, self.stop = written_as, max_new_tokens, stop

    def evaluate(self, scorer: Any) -> tuple[dict[str, float], list[Row]]:
        """Returns metrics of a `LanguageScorer`, with names of lm-evaluation-harness, and rows.

        `acc` is the accuracy of the choice with the highest log-likelihood, `acc_norm` by its
        characters, `acc_bytes` by its bytes; `exact_match` the share of replies that are the
        answer, blanks around both aside, and `ended` of those that end before the limit; and
        `word_perplexity`, `byte_perplexity` and `bits_per_byte` are of all texts together. A mean
        has its standard error with the suffix `_stderr`.
        """
        if self.task == "perplexity":
            return self._perplexity(scorer)
        ways = {"multiple_choice": self._choices, "exact_match": self._replies}
        rows, names = ways[self.task](scorer)
        metrics = {}
        for name in names:
            values = [float(row[name]) for row in rows]
            metrics[name] = statistics.fmean(values)
            if len(values) > 1:
                metrics[f"{name}_stderr"] = statistics.stdev(values) / math.sqrt(len(values))
        return metrics, rows

    def retrieve(self, embedder: Any, batch_size: int) -> tuple[dict[str, float], list[Row]]:
        """Returns metrics of an embedder, with names of sentence-transformers, and rows.

        The documents are those of all records, each text once. `accuracy@k` is the share of queries
        with a document of theirs among the first k, `recall@k` the mean share of their documents
        there, `mrr@10` the mean of 1 / rank of the first one, 0 beyond 10, and `ndcg@10` the mean
        normalized discounted cumulative gain.
        """
        import numpy as np

        numbers = {text: None for row in self.rows for text in row["positive"]}
        numbers = {text: number for number, text in enumerate(numbers)}
        queries = [row["query"] for row in self.rows]
        vectors = embedder.encode_document(list(numbers), batch_size=batch_size)
        asked = embedder.encode_query(queries, batch_size=batch_size)
        rows = []
        for row, vector in zip(self.rows, asked, strict=True):
            own = {numbers[text] for text in row["positive"]}
            order = np.argsort(-embedder.similarity(vector, vectors)[0], kind="stable")
            ranks = [place + 1 for place, x in enumerate(order.tolist()) if x in own]
            gains = [1 / math.log2(rank + 1) for rank in ranks if rank <= RANKS[-1]]
            ideal = sum(1 / math.log2(place + 2) for place in range(min(len(own), RANKS[-1])))
            values = {f"accuracy@{k}": float(ranks[0] <= k) for k in RANKS}
            values |= {f"recall@{k}": sum(x <= k for x in ranks) / len(own) for k in RANKS}
            values["mrr@10"] = 1 / ranks[0] if ranks[0] <= RANKS[-1] else 0.0
            rows.append({"ranks": ranks, **values, "ndcg@10": sum(gains) / ideal})
        names = [name for name in rows[0] if name != "ranks"]
        return {name: statistics.fmean(row[name] for row in rows) for name in names}, rows

    def _choices(self, scorer: Any) -> tuple[list[Row], Sequence[str]]:
        import numpy as np

        pairs = []
        for row in self.rows:
            ids = self._prompt_ids(scorer, row["prompt"])
            for choice in row["choices"]:
                if ids is None:  # a blank between both, as in lm-evaluation-harness
                    pairs.append(scorer.pair(row["prompt"], f" {choice}"))
                else:
                    pairs.append((ids, scorer.tokenizer.encode(choice, False)))
        rest = iter(scorer.log_likelihoods(pairs))
        rows = []
        for row in self.rows:
            choices, answer = row["choices"], row["answer"]
            scores = np.array([next(rest)[0] for _ in choices])
            sizes = [
                np.array([len(x) for x in each]) for each in (choices, map(str.encode, choices))
            ]
            rows.append(
                {
                    "log_likelihoods": scores.tolist(),
                    "answer": answer,
                    "prediction": int(scores.argmax()),
                    "acc": bool(scores.argmax() == answer),
                    "acc_norm": bool((scores / sizes[0]).argmax() == answer),
                    "acc_bytes": bool((scores / sizes[1]).argmax() == answer),
                }
            )
        return rows, ("acc", "acc_norm", "acc_bytes")

    def _replies(self, scorer: Any) -> tuple[list[Row], Sequence[str]]:
        prompts, chats = [], []
        for row in self.rows:
            ids = self._prompt_ids(scorer, row["prompt"])
            chats.append(self._way(scorer, row["prompt"]) == "chat")
            prompts.append(scorer.encode(row["prompt"]) if ids is None else ids)
        ends = scorer.tokenizer.stop_token_ids
        if any(chats):
            ends = scorer.model.preprocessor.chat_stop_token_ids
        replies = scorer.replies(prompts, self.max_new_tokens, self.stop, ends)
        rows = [
            {
                "reply": reply,
                "answer": row["answer"],
                "exact_match": reply.strip() == row["answer"].strip(),
                "ended": ended,
            }
            for row, (reply, ended) in zip(self.rows, replies, strict=True)
        ]
        return rows, ("exact_match", "ended")

    def _perplexity(self, scorer: Any) -> tuple[dict[str, float], list[Row]]:
        texts = [row["text"] for row in self.rows]
        rows = [
            {"log_likelihood": score, "words": len(re.split(r"\s+", x)), "bytes": len(x.encode())}
            for x, score in zip(texts, scorer.rolling_log_likelihoods(texts), strict=True)
        ]
        total, words, size = (
            sum(row[name] for row in rows) for name in ("log_likelihood", "words", "bytes")
        )
        metrics = {
            "word_perplexity": math.exp(min(-total / words, 700.0)),
            "byte_perplexity": math.exp(min(-total / size, 700.0)),
            "bits_per_byte": -total / size / math.log(2),
        }
        return metrics, rows

    def _way(self, scorer: Any, prompt: Any) -> str:
        if isinstance(prompt, list):
            return "chat"
        return self.written_as or ("chat" if scorer.tokenizer.chat_template else "text")

    def _prompt_ids(self, scorer: Any, prompt: Any) -> list[int] | None:
        """Returns the token ids of a prompt that a template writes, None for a plain text."""
        text, way = scorer.model.preprocessor, self._way(scorer, prompt)
        if way == "text":
            return None
        if way == "chat":
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return text.chat_token_ids([messages])[0]
        record = {"instruction": prompt, "context": ""}
        inputs = text.generate_preprocess(record, sequence_length=2 * scorer.max_length)
        return inputs["token_ids"][inputs["padding_mask"].astype(bool)].tolist()


def models_of(
    path: str, adapter: str | None, before: bool, precision: str
) -> Iterator[tuple[str, Any]]:
    """Reads the models to evaluate, one after the other.

    Of a run the merged model, or base and adapter are read; with `before` the model without its
    adapter comes first.

    Yields:
        ("before", model) if `before`, then ("after", model), which may be the same object.

    Raises:
        InputError: for a path without a language model, `before` without an adapter, or an adapter
            beside a run that has one.
    """
    run, settings = run_folder.run_at(path), dict[str, Any]()
    if run is not None and (run / "adapter").is_dir():
        if adapter is not None:
            raise InputError(f"{path} is a run with its own adapter; leave --adapter out")
        settings = run_folder.read(run).settings
        if before or not (run / "model" / "config.json").is_file():
            adapter, path = str(run / "adapter"), settings.get("weights") or str(run / "base")
    if before and adapter is None:
        raise InputError(f"{path} has no adapter; leave --before out, or give --adapter")
    path = run_folder.model_in(path)
    cls: Any = presets.causal_lm_of(path)
    model = cls.from_preset(path, dtype=precision)
    if model.preprocessor is None:
        raise InputError(f"{path} holds no tokenizer; put tokenizer.json next to the weights")
    if "template" in settings:
        model.preprocessor.template = settings["template"]
    if before:
        yield "before", model
    if adapter is not None:
        if settings.get("quantize"):  # as the run trained it
            model.backbone.quantize(settings["quantize"])
        model.load_adapter(adapter)
    yield "after", model


def table_of(results: Mapping[str, Mapping[str, float]], task: str, rows: int) -> Any:
    """Returns a table for the terminal with a column for each model."""
    from rich.table import Table

    title = f"{task}, {pluralize(rows, 'record')}"
    table = Table("", *results, title=title, show_header=len(results) > 1)
    for name in results["after"]:
        if name.endswith("_stderr"):
            continue
        cells = []
        for metrics in results.values():
            error = metrics.get(f"{name}_stderr")
            cells.append(metric(metrics[name]) + ("" if error is None else f" ± {error:.4f}"))
        table.add_row(name, *cells)
    return table
