"""Settings as keywords."""

from __future__ import annotations

from typing import Any

import pytest

from stalewise.config import make_config
from stalewise.config.run import OF_TRL, settings_record
from stalewise.errors import ConfigError


@pytest.mark.parametrize(
    ("keywords", "record"),
    [
        ({"updates": 8, "stages": 2}, {"schedule": {"updates": 8, "stages": 2}}),
        ({"learning_rate": 1e-5}, {"optimizer": {"learning_rate": 1e-5}}),
        ({"group_size": 4, "max_new_tokens": 9}, {"batch": {"group_size": 4}, "sampler": {"max_new_tokens": 9}}),
        ({"name": "a", "runs": "b", "seed": 1}, {"name": "a", "runs": "b", "seed": 1}),
        ({"objective": "p3o", "params": {"x": 1}}, {"objective": {"name": "p3o", "params": {"x": 1}}}),
        ({"optimizer": {"schedule": "cosine"}}, {"optimizer": {"schedule": "cosine"}}),
        ({"lora": {"rank": 4}}, {"model": {"lora": {"rank": 4}}}),
        ({"precision": "float32"}, {"model": {"precision": "float32"}}),  # not the servers', which lie deeper
        ({"kind": "synchronous"}, {"schedule": {"kind": "synchronous"}}),
        ({"trackers": ["wandb"]}, {"trackers": ["wandb"]}),
        (
            {"evaluation": {"every": 3}, "checkpoints": {"every": 4}},
            {"evaluation": {"every": 3}, "checkpoints": {"every": 4}},
        ),
    ],
)
def test_a_last_name_is_enough(keywords: dict[str, Any], record: dict[str, Any]) -> None:
    assert settings_record(keywords) == record
    assert settings_record(keywords, {"storage.url": "s3://a/b"}) == {**record, "storage": {"url": "s3://a/b"}}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"every": 3}, r'every is the name of several settings: write settings={"checkpoints.every": …} or settings'),
        ({"prompts": 3}, "prompts is the name of several settings"),
        ({"learnin_rate": 1}, "learnin_rate is not a setting; did you mean learning_rate"),
        ({"num_generations": 8}, "num_generations is not a setting here: use group_size"),
        ({"lr": 1e-4}, "lr is not a setting here: use learning_rate"),
        ({"mu": 8}, "mu is not a setting here: use stages, or updates_per_generation with kind="),
        ({"eta": 1e-4}, "eta is not a setting here: use learning_rate"),
        ({"sampler": 3}, "sampler is a table of settings: pass a dict, not 3"),
    ],
)
def test_what_is_unknown_or_ambiguous_is_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_record(keywords)


def test_dotted_names_are_checked_with_the_rest() -> None:
    with pytest.raises(ConfigError, match="expected a name such as"):
        settings_record({}, {3: 4})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"checkpoints\.evry is not a setting; did you mean every"):
        make_config(settings_record({}, {"checkpoints.evry": 4}))


@pytest.mark.nightly  # imports TRL
def test_names_of_trl_are_those_of_trl() -> None:
    trl = pytest.importorskip("trl")
    import inspect

    known = {*inspect.signature(trl.GRPOConfig).parameters, *inspect.signature(trl.GRPOTrainer).parameters}
    assert set(OF_TRL) - known == set()
