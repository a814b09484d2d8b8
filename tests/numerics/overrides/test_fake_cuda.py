"""Runs `test_fake_cuda_torch.py` in a process of its own.

Autograd counts the devices with the first backward pass of a process, which must find CUDA there.
"""

from pathlib import Path

import keras
import pytest

from forked_python import quick_python
from python_process import run_python

FILE = Path(__file__).with_name("test_fake_cuda_torch.py")


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="needs torch")
def test_steps_on_cuda_without_numbers(request) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", "--tb=short", FILE]
    if request.config.getoption("--nightly"):
        words.append("--nightly")
    done = run_python(*words, seconds=3600, python=quick_python(), KMODELS_FAKE_CUDA="1")
    assert done.returncode == 0, done.stdout[-6000:]
