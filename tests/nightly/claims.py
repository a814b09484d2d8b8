"""Says where each test of an older commit is proved now: `python tests/nightly/claims.py COMMIT`.

Of commit 7d5f49af, the last one before the tests were laid out by what they prove, `claims.tsv` has
a line for each file whose tests are in another one by the same names, and a line for each other
test function: where it is proved now, or why it was dropped. The script lists old tests without a
place and lines whose new test is not there; the exit status is 0 without any.
"""

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("claims.tsv")
DROPPED = "dropped: "


def functions(text: str) -> set[str]:
    """The test functions of a file, also those that are defined for one backend alone."""
    nodes = ast.walk(ast.parse(text))
    return {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    }


def tests_at(commit: str) -> set[str]:
    """path::function of every test of a commit."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    names = git("ls-tree", "-r", "--name-only", commit, "tests").splitlines()
    return {
        f"{name}::{function}"
        for name in names
        if name.endswith(".py")
        for function in functions(git("show", f"{commit}:{name}"))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", default="7d5f49af")
    old = tests_at(parser.parse_args().commit)
    now = {
        f"{path.relative_to(ROOT)}::{function}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for function in functions(path.read_text())
    }
    claims = dict(line.split("\t") for line in LIST.read_text().splitlines())
    files = {name: claims.pop(name) for name in list(claims) if "::" not in name}
    for name in old - set(claims):
        file, _, function = name.partition("::")
        if file in files:
            claims[name] = f"{files[file]}::{function}"
    wrong = [f"no line: {name}" for name in sorted(old - set(claims))]
    dropped = [reason for reason in claims.values() if reason.startswith(DROPPED)]
    for name, places in sorted(claims.items()):
        wrong += [
            f"not there: {place}, for {name}"
            for place in re.findall(r"tests/[\w/]+\.py::\w+", places)
            if place not in now
        ]
    print("\n".join(wrong) if wrong else f"all of {len(claims)} have a place")
    print(f"{len(old)} old tests, {len(now)} now, {len(dropped)} dropped with a reason")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
