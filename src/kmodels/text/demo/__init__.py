"""Instructions shipped with the package, for demonstrations without a network. See NOTICE."""

from importlib import resources

from kmodels.text.records import Record, Records, read_records

__all__ = ["instructions", "plain", "tasks", "texts"]


def instructions() -> Records:
    """1,100 short instructions with answers (rasbt/LLMs-from-scratch, Apache-2.0)."""
    return _read("instructions.jsonl")


def tasks() -> Records:
    """175 longer tasks, written by people (yizhongw/self-instruct, Apache-2.0)."""
    return _read("tasks.jsonl")


def texts() -> list[str]:
    """Returns the tasks as plain text, to train a tokenizer and a first small model on."""
    return [plain(row) for row in tasks().rows]


def plain(row: Record) -> str:
    """Returns an instruction and its answer as running text."""
    return "\n\n".join(row[name] for name in ("instruction", "context", "response") if row[name])


def _read(name: str) -> Records:
    with resources.as_file(resources.files("kmodels.text.demo") / name) as path:
        return read_records(path)
