"""Checks the English of docs, docstrings, comments and messages: make lint-prose.

python tests/prose.py [PATH...]   prints what to change as path:line:column, and exits with 1

proselint's checks look for clichés, doubled words and the like. Beside them are the words of
`VOCABULARY`, which this project writes otherwise, and sentences of the docs without a verb. The
style sheet is in CONTRIBUTING.md.
"""

import io
import itertools
import re
import string
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, CheckResult, Padding, types
from proselint.registry.checks.engine import Fancy
from proselint.tools import LintFile
from textblob.en import tag

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "recipes", "docs")
# Written by a script from docstrings, which are checked themselves; and what happened, as it did.
EXCLUDED = ("docs/api.md",)
# Straight quotes and x for sizes are meant, and docs quote ranges such as 3-5.
OFF = ("typography", "dates_times", "cliches.write-good")
# A pattern, and what to write in its place.
VOCABULARY = {
    r"(?<!there.)(?:is|are) no (?:array|directory|file|list|model|number|preset)s?": "is not a ...",
    r"(?:leave|leaves|left) (?:it|them|the \w+) away": "leave out",
    r"anew|afresh": "again, or: from the start",
    r"of one's own": "of your own",
    r"the model knows": "the model supports",
    r"; take (?:a|an|the|kmodels|keras)": "; use ...",
    r"but for (?:a|an|the|one|two)": "except for",
    r"go(?:es)? on (?:with|from)": "continue with, or: resume from",
    r"by way of": "through",
    r"as ever": "as before, or: as always",
    r"pictures?": "image, or of a plot: figure",
    r"(?:told|said|given|measured|meant|kept|found) (?:is|are|was|were) (?:what|that|how)": (
        "put the subject first"
    ),
    r"(?:leave|leaves|left|leaving) (?:it |them |the \w+ )?aside": "leave out, or: ignore",
    r"knows? no": "does not support, or: has no",
    r"in few bits": "quantized",
    r"the begin": "the beginning",
    r"in a line": "in one line",
    r"let go of": "release",
    r"(?:hears?|heard|tells|told) of": "receive, or: report",
    r"without a word": "silently",
    r"not there any more": "no longer there",
    r"rank 0": "rank zero",
    r"random state": "RNG state",
}
# Verbs that the tagger takes for nouns.
_VERBS = """
accepts acts asks calls changes copy counts decline ends gives hands holds imports keeps lies
lists load loads makes means measure measures names need needs nest point puts reads registers runs
returns saves say says see sends set shows splits stands starts states stops takes tells tests
traces train trains use works writes
"""
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_NOT_PROSE = re.compile(r"``[^`]*``|`[^`]*`|https?://\S+|\]\([^)]*\)|<[^<>\n]*>")
_FIELD = re.compile(r"\{[^{}]*\}")


def _blank(match: re.Match[str]) -> str:
    """Something of the same length that is not a word, and no space between two."""
    return re.sub(r"[^\n]", "·", match[0])


def _code(text: str, what: re.Pattern[str] = _NOT_PROSE) -> str:
    """The text with a word of the same length for each piece of code, no two alike in a row."""
    letters = itertools.cycle(string.ascii_uppercase)
    return what.sub(lambda match: next(letters) * len(match[0]), text)


def of_markdown(text: str) -> str:
    """The prose of a page, at the places that it has there."""
    text = re.sub(r"^#.*$", _blank, _FENCE.sub(_blank, text), flags=re.MULTILINE)
    return _code(text)


def of_python(text: str) -> str:
    """Comments, docstrings and messages of a module, at the places that they have there."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    kept = re.sub(r"[^\n]", "·", text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.STRING):
            continue
        words = token.string
        if token.type == tokenize.STRING:
            prefix = re.match(r"[a-zA-Z]*", words)
            if not re.search(r"\s", words.strip("\"' ")):
                continue  # a name or a key
            if prefix and "f" in prefix[0].lower():
                words = _code(words, _FIELD)
            words = re.sub(r"^[a-zA-Z]*[\"']+|[\"']+$", _blank, words)
        begin = starts[token.start[0] - 1] + token.start[1]
        kept = kept[:begin] + _code(words) + kept[begin + len(words) :]
    return kept


def fragments(text: str, check: Check) -> Iterator[CheckResult]:
    """Sentences of paragraphs that no verb holds together."""
    # Tables and the terms of lists need none.
    prose = re.sub(r"^(?: *\||[-*] +([A-Z])\1).*$", _blank, text, flags=re.MULTILINE)
    for match in re.finditer(r"(?<=[.\n]\s)[A-Z][^.!?:;|·]*\.(?=\s)", prose):
        words = match[0].split()
        if len(words) < 3 or any(word.lower().strip(".,") in _VERBS.split() for word in words):
            continue
        if not any(kind.startswith(("VB", "MD")) for _, kind in tag(" ".join(words))):
            yield CheckResult(check.path, check.message.format(match[0][:60]), match.span(), None)


def checks() -> tuple[Check, ...]:
    return (
        *(
            Check(
                types.PreferredForms({pattern.replace(" ", r"\s+"): better}, Padding.WORDS_IN_TEXT),
                Fancy(),
                "kmodels.vocabulary",
                "'{1}' reads better as: {0}",
            )
            for pattern, better in VOCABULARY.items()
        ),
        Check(fragments, path="kmodels.fragments", message="no verb in: {}"),
    )


def found(path: str, text: str) -> list[str]:
    """What to change in a file, a line each."""
    python = path.endswith(".py")
    enabled = {**dict.fromkeys(OFF, False), "kmodels.fragments": not python, "kmodels": True}
    config = {**DEFAULT, "checks": {**enabled, **DEFAULT["checks"], **enabled}}
    lines = []
    for result in LintFile(path, (of_python if python else of_markdown)(text)).lint(config):
        line, column = result.pos
        message = " ".join(result.check_result.message.split())
        lines.append(f"{path}:{line}:{column}: {message}")
    return lines


def register() -> None:
    """Gives proselint its own checks and those of this project; `found` needs them, once."""
    registry = CheckRegistry()
    registry.register_many(__register__)
    registry.register_many(checks())


def main() -> int:
    """Checks the files that are named, or all."""
    register()
    paths = [Path(name).resolve() for name in sys.argv[1:]] or [
        *ROOT.glob("*.md"),
        *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.*"))),
    ]
    lines = []
    for path in paths:
        name = str(path.relative_to(ROOT))
        if path.suffix in (".py", ".md") and name not in EXCLUDED:
            lines += found(name, path.read_text())
    print("\n".join(lines) or "prose: nothing to change")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
