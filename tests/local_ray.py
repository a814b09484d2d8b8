"""A Ray cluster of two CPUs in this process, which leaves nothing behind."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Ray asks for them when it is imported. With tokens it would write one into the home folder.
VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


@contextmanager
def started() -> Iterator[None]:
    """Starts one and ends it; its folder has a short name, which Unix sockets need."""
    os.environ.update(VARIABLES)
    import ray
    import ray.data

    folder = tempfile.mkdtemp(prefix="ray")
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=folder,
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
    finally:
        ray.shutdown()
        # Its processes write a little longer.
        for _ in range(50):
            shutil.rmtree(folder, ignore_errors=True)
            if not os.path.exists(folder):
                break
            time.sleep(0.1)
