"""What a run is: one pydantic model, read from TOML; an unknown key is an error."""

from stalewise.config.run import (
    FORMAT,
    LoraSection,
    OptimizerSection,
    RunConfig,
    TaskSection,
    identity_of,
    is_section,
    load_config,
    make_config,
    parse_override,
    read_toml,
    set_dotted,
    write_resolved,
)
from stalewise.config.schedule_sections import ScheduleSection

__all__ = [
    "FORMAT",
    "LoraSection",
    "OptimizerSection",
    "RunConfig",
    "ScheduleSection",
    "TaskSection",
    "identity_of",
    "is_section",
    "load_config",
    "make_config",
    "parse_override",
    "read_toml",
    "set_dotted",
    "write_resolved",
]
