"""What the tests of `kmodels.tools.compare_backends` have a child do."""

import importlib.util
import os
import subprocess
import sys
import time

from kmodels.core.errors import InputError
from kmodels.tools.compare_backends.children import LeftOut, OutOfMemory


def work(job, link):
    print("noise on stdout")
    what = job["what"]
    errors = {
        "refuse": InputError("the setting is wrong; give another"),
        "leave_out": LeftOut("has no such thing"),
        "crash": ValueError("a first line\n\x1b[1mand a second\x1b[0m"),
        "forget": OutOfMemory("no more"),
        "draw": ValueError(os.environ.get("MPLBACKEND")),
    }
    if what in errors:
        raise errors[what]
    if what == "hang":
        time.sleep(60)
    if what == "exit":
        print("the last words", file=sys.stderr)
        sys.exit(3)
    started = subprocess.Popen(["sleep", "60"]).pid if what == "start" else None
    hidden = importlib.util.find_spec("colorsys") is None
    link.send(hidden=hidden, started=started)
    held = []
    while (request := link.receive()) is not None:
        if request.get("take"):
            held.append(bytearray(b"1") * (request["take"]))
            time.sleep(30)
        link.send(twice=2 * request["number"])
