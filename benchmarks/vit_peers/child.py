"""The process of one system: `python -m vit_peers.child NAME SETTINGS`, driven by `vit_train.py`.

Reads one JSON object a line, {"steps": n} (0 to end), and answers each with one.
"""

import importlib
import json
import os
import sys
from importlib.machinery import PathFinder
from typing import Any

from vit_peers import ALL, SYSTEMS
from vit_peers.common import Finished, Pace, Settings, answer_line, peak_mb


class OneFramework(PathFinder):
    """Finds everything but the other frameworks, as in an environment of one backend.

    Keras loads TensorFlow and JAX where they are; that would count as 500 MiB of memory for all
    Keras systems, and none of the others.
    """

    hidden: tuple[str, ...] = ()

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname in cls.hidden:
            return None
        return super().find_spec(fullname, path, target)


def hide_others(backend: str) -> None:
    OneFramework.hidden = tuple(framework for framework in ALL if framework != backend)
    sys.meta_path = [OneFramework if finder is PathFinder else finder for finder in sys.meta_path]


def main(name: str, text: str) -> None:
    # Libraries print; what they print must not end up between the answers.
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def ask(answer: dict) -> dict:
        channel.write(answer_line(answer))
        line = sys.stdin.readline()
        return json.loads(line) if line else {"steps": 0}

    system = SYSTEMS[name]
    settings = Settings(**json.loads(text))
    hide_others(settings.backend)
    pace = Pace(ask)
    module = importlib.import_module(f"vit_peers.{system.module}")
    try:
        module.train(settings, pace, **system.options)
    except Finished:
        # The reports of the ops are there where kmodels is.
        dispatch = sys.modules.get("kmodels.core.dispatch")
        last = {"peak_mb": peak_mb(), "overrides": dispatch.summary() if dispatch else None}
        channel.write(answer_line(last))
        channel.close()
        # The frameworks' threads and pools need no orderly end.
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
