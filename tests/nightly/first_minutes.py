"""What a person meets in the first minutes: the built wheel, in an empty home, on each backend.

python3 tests/nightly/first_minutes.py                    all three backends, each installed by pip
python3 tests/nightly/first_minutes.py --backend jax      one of them

For each backend it makes an environment below .venv/first-minutes, installs the wheel with pip and
the versions of constraints.txt, and runs commands with nothing else in the environment than a HOME
that is empty and a PATH; what is right both with KERAS_BACKEND and without. Then Jupyter is
installed, and each notebook for the backend alone runs at its small size; the first one finds no
matplotlib and installs it. It prints a row for each: exit code, seconds, the command, its last
line. Wrong uses have to end with exit code 2 and one line. The exit status is 1 if anything is not
as it has to be. It takes half an hour, so it is no part of `make test`.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from environments import BACKENDS, FOLDER, ROOT

PLACE = FOLDER / "first-minutes"
SECONDS = 600


@dataclass
class Use:
    """A command line, the exit code that it has to have, and what its last line has to say."""

    words: str
    code: int = 0
    says: str = ""
    backend: str | None = None
    typed: str = ""
    small: bool = False


RIGHT = (
    Use("kmodels --version", says="kmodels "),
    Use("kmodels vit --epochs 4", says="report.html"),
    Use("kmodels vit --epochs 4", says="report.html"),
    Use("kmodels doctor"),
    Use("kmodels report RUN", says="report.html"),
    Use("python -c MODEL", says="saved"),
    Use("kmodels chat tiny --max-new-tokens 8", typed="Hello\n"),
    Use("python -c IMPORT", says="ViTBackbone"),
)
WRONG = (
    Use("kmodels vit", 2, "KERAS_BACKEND is 'wrong'", backend="wrong"),
    Use("kmodels doctor", 2, "which is not installed; pip install", backend="OTHER"),
    Use("kmodels vit --preset vit_nothing", 2, "neither a preset nor a directory"),
    Use("kmodels vit --data folder:empty", 2, "holds no images"),
    Use("kmodels vit --data folder:broken", 2, "broken"),
    Use("kmodels vit --data cifar", 2, "is unknown; give one of"),
    Use("kmodels vit --stepps 5", 2, "did you mean --steps?"),
    Use("kmodels vit --steps many", 2, "given was 'many'"),
    Use("kmodels vit --batch-size 0", 2, "give at least 1"),
    Use("kmodels vit --resume", 2, "--resume finds no run"),
    Use("kmodels probe", 2, "pip install 'kmodels[probe]'"),
    Use("kmodels report empty", 2, "holds no run"),
    Use("kmodels gemma --data broken.jsonl", 2, "line 1: not JSON"),
    Use("kmodels gemma --data empty", 2, "Is a directory"),
    Use("kmodels convert nowhere out.onnx --to onnx", 2, "onnx"),
    Use("kmodels convert nowhere out --to onxx", 2, "choose one of hf, timm"),
    Use("kmodels plan", 2, "--preset"),
    Use("kmodels vitt", 2, "Did you mean 'vit'?"),
)
IMPORT = "import kmodels; print(*[n for n in dir(kmodels.models) if n == 'ViTBackbone'])"

# A Gemma that is small and has learnt nothing, with a tokenizer of its own.
MODEL = """
from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor
from kmodels.text import demo
from kmodels.text.training import train_tokenizer

tokenizer = train_tokenizer(demo.texts(), 500)
model = GemmaCausalLM.from_preset(
    "gemma3_debug",
    vocabulary_size=tokenizer.vocabulary_size(),
    preprocessor=GemmaCausalLMPreprocessor(tokenizer),
)
model.save_to_preset("tiny")
print("saved")
"""


# Executes a notebook beside which it is started, as `jupyter execute` does.
EXECUTE = "from nbclient.cli import main; main()"
NAMED = re.compile(r"^Backends: ((?:`\w+`(?:, )?)+)\.", re.MULTILINE)


def notebooks(backend: str, folder: Path) -> list[Use]:
    """Copies the notebooks that a backend alone runs to a folder, and returns their uses."""
    uses = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        named = NAMED.search("".join(json.loads(path.read_text())["cells"][0]["source"]))
        if named and f"`{backend}`" in named[1]:
            shutil.copy(path, folder)
            words = f"python -c EXECUTE --timeout={SECONDS} --kernel_name=python3 {path.name}"
            uses.append(Use(words, small=True))
    return uses


def build_wheel(python: Path, folder: Path) -> Path:
    command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run([str(part) for part in command], check=True)
    return next(folder.glob("*.whl"))


def install(backend: str) -> Path:
    """Makes the environment of a backend and returns the folder of its programs."""
    place = PLACE / backend
    venv.create(place, with_pip=True, clear=True)
    python = place / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(python, Path(folder))
        command = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
        command += ["-c", ROOT / "constraints.txt", f"{wheel}[{backend}]"]
        subprocess.run([str(part) for part in command], check=True)
    return place / "bin"


def prepare(folder: Path) -> None:
    """Writes the files that wrong uses ask for: no images, broken images, broken lines."""
    (folder / "empty").mkdir()
    for label in ("cats", "dogs"):
        (folder / "broken" / label).mkdir(parents=True)
        for number in range(20):
            (folder / "broken" / label / f"{number}.png").write_text("this is not an image")
    (folder / "broken.jsonl").write_text('{"prompt": "a"\n')


def run(use: Use, programs: Path, home: Path, folder: Path, backend: str | None) -> str | None:
    """Runs a command line and prints a row; returns what is wrong with it, or None."""
    known = {"HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin"}
    chosen = use.backend or backend
    if chosen is not None:
        known["KERAS_BACKEND"] = chosen
    if use.small:
        known["KMODELS_SMALL"] = "1"
    newest = max((folder / "runs").glob("*"), default=folder)
    known_words = {"RUN": str(newest), "IMPORT": IMPORT, "MODEL": MODEL, "EXECUTE": EXECUTE}
    words = [known_words.get(word, word) for word in use.words.split()]
    begun = time.monotonic()
    done = subprocess.run(
        [str(programs / words[0]), *words[1:]],
        env=known,
        cwd=folder,
        input=use.typed,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    seconds = time.monotonic() - begun
    # That a backend was chosen is said wherever nobody named one.
    hidden = ["kmodels: the backend is ", "[IPKernelApp] WARNING | Kernel is running over TCP"]
    if words[0] == "python":  # a program of the user's hears what TensorFlow logs; commands do not
        hidden.append("All log messages before absl::InitializeLog() is called")
    told = [x for x in done.stderr.splitlines() if not any(part in x for part in hidden)]
    shown = (told if use.code else done.stdout.splitlines()) or [""]
    print(f"  {done.returncode:3d} {seconds:6.1f} s  {use.words:<44} {shown[-1][:110]}", flush=True)
    if done.returncode != use.code:
        return f"exit code {done.returncode} and not {use.code}: {told[-1:]}"
    if "Traceback" in done.stderr:
        return "a stack trace"
    if use.says not in shown[-1]:
        return f"the last line does not say {use.says!r}: {shown[-1]!r}"
    if use.code and len(told) != 1:
        return f"{len(told)} lines on stderr, not one"
    if not use.code and any("warning" in line.lower() for line in told):
        return f"warnings: {told}"
    return None


def first_minutes(backend: str, reuse: bool) -> list[str]:
    """Runs all uses of a backend, named and not, and returns what is wrong."""
    programs = PLACE / backend / "bin"
    if not (reuse and programs.is_dir()):
        print(f"{backend}: pip install", flush=True)
        programs = install(backend)
    found = []
    other = next(name for name in reversed(BACKENDS) if name != backend)
    for named in (backend, None):
        print(f"{backend}, KERAS_BACKEND={named or ''}", flush=True)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as home:
            prepare(Path(folder))
            # The wrong ones come first: afterwards there is a run that --resume finds.
            for use in (*(WRONG if named else ()), *RIGHT):
                if use.backend == "OTHER":
                    use = Use(use.words, use.code, use.says, other)
                if problem := run(use, programs, Path(home), Path(folder), named):
                    found.append(f"{backend}, KERAS_BACKEND={named or ''}: {use.words}: {problem}")
                    print(f"      ^ {problem}", flush=True)
    # A notebook's first cell asks pip for what is missing, and has none of our pins.
    command = ["-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    subprocess.run([programs / "python", *command, "ipykernel", "nbclient"], check=True)
    print(f"{backend}, notebooks", flush=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as home:
        for use in notebooks(backend, Path(folder)):
            if problem := run(use, programs, Path(home), Path(folder), None):
                found.append(f"{backend}: {use.words}: {problem}")
                print(f"      ^ {problem}", flush=True)
    return found


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: all")
    parser.add_argument("--reuse", action="store_true", help="environments that are there already")
    options = parser.parse_args()
    found = []
    for backend in options.backend or BACKENDS:
        found += first_minutes(backend, options.reuse)
    print("\n".join(found) or "everything is as it has to be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
