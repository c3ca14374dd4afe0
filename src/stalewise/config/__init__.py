"""The config of a run: one pydantic model, read from TOML; an unknown key is an error."""

from stalewise.config.run import (
    FORMAT,
    RunConfig,
    is_section,
    load_config,
    make_config,
    parse_override,
    read_toml,
    set_dotted,
    setting_names,
    setting_values,
    write_resolved,
)
from stalewise.config.sections import LoraSection, OptimizerSection, ScheduleSection, TaskSection

__all__ = ["FORMAT", "LoraSection", "OptimizerSection", "RunConfig", "ScheduleSection", "TaskSection"]
__all__ += ["is_section", "load_config", "make_config", "parse_override", "read_toml", "set_dotted", "setting_names"]
__all__ += ["setting_values", "write_resolved"]
