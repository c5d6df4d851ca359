"""A hook of hatchling: one distribution needs the others at its own version."""

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Pins(MetadataHookInterface):
    """The dependencies of a distribution: those in `pinned`, at its own version, and those in `others`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the dependencies."""
        pinned = [f"{name}=={metadata['version']}" for name in self.config["pinned"]]
        metadata["dependencies"] = [*pinned, *self.config.get("others", ())]
