"""What torchrun and `accelerate launch` say of this process in its environment. Imports nothing heavy."""

from __future__ import annotations

import os
from dataclasses import dataclass

from stalewise.errors import ConfigError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place among those that were launched together."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1  # of them on this machine

    @property
    def is_first(self) -> bool:
        """Whether this is the process that speaks, and writes files."""
        return self.rank == 0


def launched() -> Launch:
    """Alone, unless the environment says that there are several."""
    said = {name: os.environ.get(name) for name in VARIABLES}
    try:
        if int(said["WORLD_SIZE"] or 1) == 1:
            return Launch()
        missing = [name for name in VARIABLES if said[name] is None and not name.startswith("LOCAL")]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {said['WORLD_SIZE']} but {missing[0]} is not set: start several processes with "
                "torchrun or `accelerate launch`, or unset WORLD_SIZE"
            )
        rank, world = int(said["RANK"] or 0), int(said["WORLD_SIZE"] or 1)
        return Launch(rank, world, int(said["LOCAL_RANK"] or rank), int(said["LOCAL_WORLD_SIZE"] or world))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        numbers = ", ".join(f"{name}={value}" for name, value in said.items() if value is not None)
        raise ConfigError(f"the environment names no ranks ({numbers}): unset these, or start with torchrun") from None


def environment_of_a_child() -> dict[str, str]:
    """The environment for a process that this one starts, which is no rank."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES}
