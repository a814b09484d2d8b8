"""The environment variables that make processes of different backends alike."""

import os

# No accelerator's memory is taken ahead of need, nothing that was compiled before is found again.
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
}


def environment(backend: str, generic: str, threads: int) -> dict[str, str]:
    """Returns the variables of a process.

    Args:
        backend: backend of Keras.
        generic: ops without overrides, as in KMODELS_GENERIC_OPS.
        threads: threads of operations.
    """
    flags = [os.environ.get("XLA_FLAGS", "")]
    if threads == 1:
        flags.append("--xla_cpu_multi_thread_eigen=false")
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    names = (*names, "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    return {
        **QUIET,
        **dict.fromkeys(names, str(threads)),
        "XLA_FLAGS": " ".join(filter(None, flags)),
        "KERAS_BACKEND": backend,
        "KMODELS_GENERIC_OPS": generic,
    }
