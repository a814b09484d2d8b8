"""The link between a child and its parent: requests and answers, a JSON object a line."""

import json
import os
import sys
from typing import Any


class Link:
    """Answers and requests between a child and its parent.

    Args:
        answers: a file descriptor that nothing else writes to.
    """

    def __init__(self, answers: int):
        self._answers = os.fdopen(answers, "wb", buffering=0)

    def send(self, **answer: object) -> None:
        """Sends one answer of plain values."""
        self._answers.write(json.dumps(answer).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next request; None where there will be no more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None
