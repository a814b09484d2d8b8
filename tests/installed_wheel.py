"""The package as `pip install` leaves it: a wheel, in an environment that sees no checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the checkout, its tests or a person's own settings would bring in.
_OURS = (
    *("KMODELS_", "KERAS_", "PYTHON", "PYTEST_", "VIRTUAL_ENV", "XDG_", "HF_", "MPL"),
    *("TF_CPP_", "TOKENIZERS_"),
)


def build(folder: Path) -> Path:
    """Builds the wheel and returns its path.

    Args:
        folder: for the wheel.
    """
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, place: Path) -> Path:
    """Installs the wheel and returns the folder of its programs.

    The environment sees the packages of the running one. It does not process their .pth files, by
    which an editable installation puts a checkout on `sys.path`. `children/sitecustomize.py` spares
    its processes the imports that Keras does not need, as it does for all children of tests.

    Args:
        wheel: the file.
        place: the environment to make.
    """
    venv.create(place, with_pip=False, symlinks=True)
    programs = place / "bin"
    command = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install"]
    command += ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=place)
    packages = next(place.glob("lib/python*/site-packages"))
    seen = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    (packages / "packages_of_the_suite.pth").write_text("\n".join(dict.fromkeys(seen)) + "\n")
    shutil.copy(ROOT / "tests" / "children" / "sitecustomize.py", packages)
    return programs


def variables(programs: Path, home: Path) -> dict[str, str]:
    """Returns the variables of a person who has just installed the wheel and has set none.

    KERAS_BACKEND is not among them: kmodels chooses the backend that is installed.

    Args:
        programs: what `install` returned.
        home: an empty folder.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    # Eight devices are what the tests have, not what a person has.
    flags = kept.pop("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if "device_count" not in flag]
    path = os.pathsep.join([str(programs), "/usr/bin", "/bin"])
    return {**kept, "PATH": path, "HOME": str(home), "XLA_FLAGS": " ".join(flags)}
