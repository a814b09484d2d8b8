"""Makes the package index's page of the README: hatchling runs this when it builds the package.

Links between files of the repository lead nowhere on the index. They become links to
`project.urls.Repository` once pyproject.toml gives that; until then they become plain text.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_RELATIVE = re.compile(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def description(text: str, repository: str | None) -> str:
    """Returns the README as the index shows it.

    Args:
        text: the README.
        repository: address of the repository, or None.
    """
    target = r"[\1]({}/blob/HEAD/\2)".format(repository.rstrip("/")) if repository else r"\1"
    parts = _FENCED.split(text)
    return "".join(
        part if part.startswith("```") else _RELATIVE.sub(target, part) for part in parts
    )


class ReadmeHook(MetadataHookInterface):
    """Sets `readme`, which pyproject.toml therefore calls dynamic."""

    def update(self, metadata: dict) -> None:
        """Writes the description into the package's metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": description(text, repository),
        }
