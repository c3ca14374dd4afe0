"""Model cards say what the run says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hubs import card_of
from rundirs import add_evaluation, metrics, write_run
from stalewise.api import learn
from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import read_config
from stalewise.errors import StoreError
from stalewise.integrations.hub import export_policy, export_rollouts
from stalewise.integrations.hub.card import BasePolicy, model_card, size_category
from stalewise.reporting.read import read_run
from stalewise.store.atomic import write_json_atomic
from stalewise.store.json_lines import read_jsonl
from tiny import called_json, refused, tiny_record


def test_the_card_says_what_the_run_says(tiny_run: RunConfig, tmp_path: Path) -> None:
    data, text = card_of(export_policy(tiny_run.directory, tmp_path / "out"))
    first, *_, last = read_jsonl(tiny_run.directory / "eval.jsonl")
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", "apache-2.0")
    assert (data.base_model, data.model_name, data.tags[0]) == (None, "tiny", "stalewise")
    accuracy, pass_at_2 = data.eval_results
    assert (accuracy.metric_name, pass_at_2.metric_name) == ("avg@2", "pass@2")
    for found, said in ((accuracy, last["accuracy"]), (pass_at_2, last["pass_at"]["2"])):
        assert found.metric_value == said["value"]
        assert (found.metric_args["low"], found.metric_args["high"]) == (said["low"], said["high"])
    for record, note in ((first, " (before training)"), (last, " (this version)")):
        value, low, high = (record["accuracy"][key] for key in ("value", "low", "high"))
        assert f"| {record['version']}{note} | 8 | 2 | {value:.3f} [{low:.3f}, {high:.3f}] |" in text
    assert "`mu_grpo` with clip_low = 0.0, clip_high = 5.0, kappa = 0.0001" in text
    assert "4 updates, staged, µ = 2 updates on each generation batch, 2 batches in all." in text
    assert "| 1 | 2 | 32 |" in text and "| 2 | 0 to 1 |" in text
    assert "learning_rate 0.0003" in text and "optimizer.learning_rate = 0.0003" in text
    assert "stalewise train training_config.toml" in text and "device cpu" in text
    assert "was not calibrated" in text and "one seed (0)" in text
    assert "None" not in text and "\n\n\n" not in text


def test_an_earlier_version_tells_of_itself(tiny_run: RunConfig, tmp_path: Path) -> None:
    target = tmp_path / "out"
    record = called_json("export", tiny_run.directory, target, "--version", 2)
    assert (record["version"], record["directory"]) == (2, str(target))
    data, text = card_of(target)
    assert "after 2 of 4 updates" in text and "the run has continued to version 4" in text
    assert "This version was not evaluated." in text and not data.eval_results
    assert "(this version)" not in text and "| 1 | 2 | 32 |" not in text  # the second batch came later
    message = refused("export", tiny_run.directory, tmp_path / "other", "--version", 3)
    assert message.endswith("has no checkpoint of version 3; it has 0, 2, 4")


def test_what_went_wrong_is_in_the_card(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", updates=8, done=6)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(6, ess=0.05)) + "\n")
    write_json_atomic(directory / "limits.json", {"format": "stalewise.limits/1", "limits": [0.5, 8.0]})
    add_evaluation(directory, 7, 0.2)
    config = read_config(directory)
    text = model_card(
        read_run(directory), config, 7, BasePolicy("it", "owner/name"), adapter=False, config_name="c.toml"
    )
    assert "**Got worse.** Held-out accuracy on arithmetic fell from 0.400 [0.350, 0.450] to 0.200" in text
    assert "not finished: 7 of 8 updates" in text and "ESS falls to 0.05" in text
    assert "R_batch = 0.5 within one" in text and "R_crit = 8 over a run" in text and "At most 25% and 25%" in text
    assert "The licence is that of owner/name." in text
    metadata = ModelCard(text).data.to_dict()
    assert (metadata["base_model"], metadata["base_model_relation"]) == ("owner/name", "finetune")


def test_a_run_that_learned_from_others_says_from_which(tiny_run: RunConfig, tmp_path: Path) -> None:
    config = make_config(tiny_record(tmp_path / "runs", "again", schedule={"updates": 2, "stages": None}))
    learn(config, [tiny_run.directory])
    _, text = card_of(export_policy(config.directory, tmp_path / "out"))
    assert "stalewise learn training_config.toml --rollouts tiny/rollouts/g000000-v000000" in text
    assert "Nothing was generated" in text
    with pytest.raises(StoreError, match=r"has no committed rollouts of its own \(it learned from those of other runs"):
        export_rollouts(config.directory, tmp_path / "rollouts")


def test_the_relation_to_the_base_is_in_the_metadata(adapted: RunConfig) -> None:
    found = read_run(adapted.directory)
    settings = {"adapter": True, "config_name": "c.toml"}
    itself = model_card(found, adapted, 4, BasePolicy("it", "owner/name"), **settings)
    assert ModelCard(itself).data.to_dict()["base_model_relation"] == "adapter"
    assert 'AutoModelForCausalLM.from_pretrained("owner/name")' in itself
    later = model_card(found, adapted, 4, BasePolicy("it", "owner/name", is_itself=False), **settings)
    assert "base_model" not in ModelCard(later).data.to_dict()  # it would not fit that model
    assert "the adapter cannot be used without it" in later


def test_sizes_have_the_names_of_the_hub() -> None:
    found = [size_category(rows) for rows in (999, 20_000, 3_000_000)]
    assert found == ["n<1K", "10K<n<100K", "1M<n<10M"]


def test_text_of_a_config_is_no_markup_in_a_card(tmp_path: Path) -> None:
    system = "<script>alert(1)</script>`</code>\n\n# Heading\x1b[31m"
    task = {"name": "jsonl", "options": {"path": "a.jsonl", "chat": True, "system": system}}
    directory = write_run(tmp_path / "run", task=task)
    add_evaluation(directory, 9, 0.5, task="<img src=x>")
    base = BasePolicy("<b>it</b>", "")
    text = model_card(read_run(directory), read_config(directory), 8, base, adapter=False, config_name="c.toml")
    body = text.partition("\n---\n")[2]
    assert "\n# Heading" not in body and "\x1b" not in body and "<b>" not in body and "<img" not in body
    outside = "".join(part for i, part in enumerate(body.split("`")) if i % 2 == 0)
    assert "<script>" not in outside
