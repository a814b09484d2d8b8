"""Hides passwords of addresses in messages and in files of a run."""

import os
import re
from pathlib import Path
from typing import Any

HIDDEN = "***"
# "s3://bucket/x", and "s3:/bucket/x" as pathlib makes of it, within any text.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+\S+")
# "name:password@", where a password may hold slashes, but a port is none.
_USER = re.compile(r"(?<=:/)(/*)([^/:@?]*:(?!\d+/)\S*?@(?![^/?]*@)|[^/:@?]+@)")
# What stands in front of "@" is a name there, such as a container of Azure or a revision.
_NAMES = re.compile(r"(abfss?|wasbs?|ssh|sftp|hf|hdfs|smb):", re.IGNORECASE)
_QUERY = re.compile(r"([?&#;][^=?&#;\s/]+=)[^&#\s]*?(?=[;,.:)'\"]*(?:[&#\s]|$))")


def shown(value: Any) -> Any:
    """Returns a text with the passwords and query values of its addresses replaced by "***".

    Args:
        value: a text, a path, or plain values with these in them; anything else is returned as it
            is.
    """
    if isinstance(value, dict):
        return {key: shown(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [shown(part) for part in value]
    if isinstance(value, Path):
        value = os.fspath(value)
    return _ADDRESS.sub(_hide, value) if isinstance(value, str) else value


def _hide(match: re.Match[str]) -> str:
    # "simplecache::s3://..." chains addresses, each of which may have a password.
    return "::".join(map(_hide_one, match[0].split("::")))


def _hide_one(address: str) -> str:
    def user(match: re.Match[str]) -> str:
        named = ":" not in match[2] and _NAMES.match(address)
        return match[0] if named else f"{match[1]}{HIDDEN}@"

    return _QUERY.sub(rf"\g<1>{HIDDEN}", _USER.sub(user, address, count=1))
