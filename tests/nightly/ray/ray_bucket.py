"""A storage at addresses bucket:// that all processes of this machine see."""

import os

import fsspec
from fsspec.implementations.local import LocalFileSystem


class BucketFileSystem(LocalFileSystem):
    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path):
        path = os.fspath(path)
        if path.startswith("bucket://"):
            path = os.environ["KMODELS_TEST_BUCKET"] + "/" + path.removeprefix("bucket://")
        return path.rstrip("/") or "/"


fsspec.register_implementation("bucket", BucketFileSystem, clobber=True)
