"""Directories and files at addresses such as "gs://bucket/run", through fsspec."""

from kmodels.core.files import is_remote
from kmodels.core.remote.address import open_address
from kmodels.core.remote.fetch import (
    fetch,
    fetch_published,
    holds_file,
    list_matching,
    list_published,
    local_copy,
)
from kmodels.core.remote.publish import publish, put_file, remove
from kmodels.core.remote.staged import staged, write_file
from kmodels.core.shown import shown

__all__ = [
    "fetch",
    "fetch_published",
    "holds_file",
    "is_remote",
    "list_matching",
    "list_published",
    "local_copy",
    "open_address",
    "publish",
    "put_file",
    "remove",
    "shown",
    "staged",
    "write_file",
]
