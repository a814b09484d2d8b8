"""Directories and files at addresses such as "gs://bucket/run", through fsspec."""

from kmodels.core.remote.address import is_remote
from kmodels.core.remote.fetch import (
    fetch,
    fetch_published,
    list_matching,
    list_published,
    local_copy,
)
from kmodels.core.remote.publish import publish, remove
from kmodels.core.remote.staged import staged

__all__ = [
    "fetch",
    "fetch_published",
    "is_remote",
    "list_matching",
    "list_published",
    "local_copy",
    "publish",
    "remove",
    "staged",
]
