"""Bad input is met with one line that says what, where and what to do; nothing is lost, and nothing half made stays."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import completed
from rundirs import write_run
from stalewise.api import run as train
from stalewise.config import RunConfig, make_config
from stalewise.errors import ModelError, StoreError
from stalewise.models import EMBEDDED
from stalewise.models.loading import vocabulary_size
from stalewise.planning.calibration import fingerprint
from stalewise.rollout.policy_files import read_policy_files
from stalewise.store import batch_directories, shard_path
from stalewise.store.atomic import RunLock, read_json, write_json_atomic
from stalewise.store.checkpoints import versions
from stalewise.store.json_lines import read_jsonl
from stalewise.types import NullCallback
from tiny import call, refused, tiny_record, write_config


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A copy of the embedded policy, to be damaged."""
    shutil.copytree(EMBEDDED / "arithmetic", tmp_path / "policy")
    return tmp_path / "policy"


def config_file(tmp_path: Path, **sections: Any) -> Path:
    return write_config(tmp_path / "config.toml", tiny_record(tmp_path / "runs", **sections))


def rows_task(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Sections for the embedded policy on rows of a file."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": {"path": "arithmetic"}, "task": {"name": "jsonl", "options": {"path": str(path), **options}}}


def sums(answer: str = "") -> list[dict[str, str]]:
    return [{"problem": f"{a}+{a}=", "answer": answer or str(2 * a)} for a in range(10, 50)]


# ---------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimizer.learning_rat=1e-4", "optimizer.learning_rat is not a setting; did you mean learning_rate?"),
        ("learning_rate=1e-4", "learning_rate is not a setting; did you mean optimizer.learning_rate?"),
        ("schedule.max_new_tokens=8", "schedule.max_new_tokens is not a setting; did you mean sampler.max_new_tokens?"),
        ("batch.num_generations=8", "batch.num_generations is not a setting; did you mean batch.group_size?"),
        ("optimizer.lr=1e-4", "optimizer.lr is not a setting; did you mean optimizer.learning_rate?"),
        ("save_steps=8", "save_steps is not a setting; did you mean checkpoints.every?"),
        ("output_dir=x", "output_dir is not a setting; did you mean name or runs?"),
        ("optimizer.warmup_steps=8", "optimizer.warmup_steps is not a setting; did you mean optimizer.warmup_updates?"),
        ("no_such_thing=8", "no_such_thing is not a setting; known: batch, checkpoints"),
        ("schedule.updates=many", "schedule.updates is 'many': input should be a valid integer"),
        ("schedule.lag=2", "lag has no meaning in a staged schedule: remove it or change kind"),
        ("objective.name=grop", "objective: no objective is called 'grop'; did you mean grpo"),
        ("objective.params={clip=3.0}", "objective mu_grpo has no parameter 'clip'"),
        ("objective.params={clip_low=1.5}", "objective: mu_grpo.clip_low is 1.5; expected a bound on the ratio from 0"),
        ("optimizer.betas=[1.5, 2.0]", "optimizer.betas.0 is 1.5: input should be less than 1"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate is inf: input should be a finite number"),
        ('name=".."', "name is '..': it may have letters, digits, _, - and ."),
        ("task.name=arithmetics", "unknown task 'arithmetics'; did you mean arithmetic"),
        ("task.options={terms=3}", "task arithmetic has no option 'terms'"),
        ("model.device=cuda:99", "model.device is 'cuda:99'"),
        ("model.device=gpu", "model.device is 'gpu'"),
        ("seed", "--set seed: expected key=value"),
    ],
)
def test_a_setting_that_is_wrong(tmp_path: Path, setting: str, message: str) -> None:
    assert message in refused("train", config_file(tmp_path), "--set", setting)
    assert not list((tmp_path / "runs").rglob("*.safetensors"))


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    message = refused("train", tmp_path / "none.toml")
    assert (
        message == f"{tmp_path}/none.toml does not exist; `stalewise init {tmp_path}/none.toml` writes a commented one"
    )
    assert refused("train", tmp_path / "none") == (
        f"{tmp_path}/none does not exist: name a TOML file (`stalewise init` writes one) or a run directory"
    )
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.resolved.json").write_text("{}")
    assert refused("train", tmp_path / "runs" / "mien").endswith(f"; there are in {tmp_path}/runs: mine")


def test_a_config_with_a_byte_order_mark(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert call("doctor", config).exit_code == 0


# ---------------------------------------------------------------- model


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    message = refused("train", config_file(tmp_path, model={"path": "./none"}))
    assert message == "./none is not a directory; embedded policies: arithmetic, arithmetic-steps, smollm2"
    (tmp_path / "empty").mkdir()
    message = refused("train", config_file(tmp_path, model={"path": str(tmp_path / "empty")}))
    assert "has no config.json" in message


def test_a_name_on_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = config_file(tmp_path, model={"path": "nobody/has-this"})
    message = refused("train", config)
    assert message.startswith("nobody/has-this is not a directory, and no hub provides it (")
    assert message.endswith(
        "): name a directory with the model, or connect to the hub, with HF_TOKEN set if it restricts access; "
        'model.path = "auto" and "smollm2" need no hub'
    )
    assert "bad     tokenizer       nobody/has-this is not a directory" in call("doctor", config).stdout
    for load in (vocabulary_size, fingerprint, lambda name: read_policy_files(Path(name))):
        with pytest.raises(ModelError, match="nobody/has-this is not a directory, and no hub provides it"):
            load("nobody/has-this")


def test_a_model_that_was_copied_in_part(tmp_path: Path, policy: Path) -> None:
    config = config_file(tmp_path, model={"path": str(policy)})
    weights = policy / "model.safetensors"
    data = weights.read_bytes()
    weights.unlink()
    assert "has no *.safetensors: it is incomplete" in refused("train", config)
    weights.write_bytes(data[: len(data) // 2])
    assert "does not load as a causal language model" in refused("train", config)
    weights.write_bytes(data)
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    write_json_atomic(policy / "model.safetensors.index.json", index)
    assert "is incomplete: model-00001-of-00002.safetensors missing" in refused("train", config)
    assert versions(tmp_path / "runs" / "tiny") == []


def test_a_model_that_lacks_weights_is_not_filled_up_with_random_ones(tmp_path: Path, policy: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(policy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    message = refused("train", config_file(tmp_path, model={"path": str(policy)}))
    assert "lacks 1 weights of its architecture, the first model.layers.1.mlp.up_proj.weight" in message


def test_a_model_with_weights_that_are_not_finite(tmp_path: Path, policy: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(policy / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    message = refused("train", config_file(tmp_path, model={"path": str(policy)}))
    assert "has weights that are not finite" in message


def make_encoder(directory: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertForMaskedLM(BertConfig(vocab_size=18, **sizes)).save_pretrained(directory)


def make_encoder_decoder(directory: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    T5ForConditionalGeneration(T5Config(vocab_size=18, **sizes)).save_pretrained(directory)


@pytest.mark.parametrize("make", [make_encoder, make_encoder_decoder])
def test_a_model_that_is_not_causal(tmp_path: Path, policy: Path, make: Any) -> None:
    make(policy)
    message = refused("train", config_file(tmp_path, model={"path": str(policy)}))
    assert "causal language model" in message


def test_a_tokenizer_without_an_end(tmp_path: Path, policy: Path) -> None:
    settings = read_json(policy / "tokenizer_config.json")
    del settings["eos_token"]
    write_json_atomic(policy / "tokenizer_config.json", settings)
    config = config_file(tmp_path, model={"path": str(policy)})
    assert "has no end-of-sequence token, so responses could never end" in refused("train", config)
    doctor = call("doctor", config)
    assert doctor.exit_code == 1
    assert "bad     tokenizer" in doctor.stdout
    (policy / "tokenizer.json").unlink()
    (policy / "tokenizer_config.json").unlink()
    assert "has no tokenizer that transformers can load" in refused("train", config)


def test_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    sections = {"model": {"path": "arithmetic"}, "task": {"name": "arithmetic-chat"}}
    config = config_file(tmp_path, **sections)
    message = (
        f"the task asks for a chat template and the tokenizer of {EMBEDDED / 'arithmetic'} has none: choose an "
        "instruct model, or add a chat_template.jinja to it"
    )
    assert refused("train", config) == message
    doctor = call("doctor", config)
    assert doctor.exit_code == 1
    assert f"bad     prompts         {message}" in doctor.stdout
    assert list((tmp_path / "runs").rglob("*.parquet")) == []


def test_a_chat_template_that_is_added_is_found_by_the_same_command(tmp_path: Path, policy: Path) -> None:
    sections = rows_task(tmp_path, sums(), chat=True) | {"model": {"path": str(policy)}}
    config = config_file(tmp_path, **sections)
    for verb in ("train", "generate"):
        assert f"the tokenizer of {policy} has none" in refused(verb, config)
        assert versions(tmp_path / "runs" / "tiny") == []  # it would keep the tokenizer as it is
    (policy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    result = call("train", config)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("system", "template", "said", "remedy"),
    [
        (
            "Be brief.",
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
            "System role not supported",
            "leave out the task's option system, or use another template",
        ),
        ("", "{{ messages[0]['content'] + 1 }}", "can only concatenate str", "use another template"),
        ("", "{{ messages[", "unexpected", "use another template"),
    ],
)
def test_a_chat_template_that_refuses(
    tmp_path: Path, policy: Path, system: str, template: str, said: str, remedy: str
) -> None:
    (policy / "chat_template.jinja").write_text(template)
    sections = rows_task(tmp_path, sums(), chat=True, system=system) | {"model": {"path": str(policy)}}
    config = config_file(tmp_path, **sections)
    message = refused("train", config)
    assert message.startswith(f"the chat template of {policy} does not accept prompt ")
    assert f": {said}" in message
    assert message.endswith(f": {remedy} (chat_template.jinja) or model")
    assert versions(tmp_path / "runs" / "tiny") == []
    assert "bad     prompts" in call("doctor", config).stdout


def test_a_tokenizer_without_padding_pads_with_the_end(tmp_path: Path, policy: Path, tiny_run: RunConfig) -> None:
    settings = read_json(policy / "tokenizer_config.json")
    del settings["pad_token"]
    write_json_atomic(policy / "tokenizer_config.json", settings)
    write_json_atomic(policy / "tokenizer.json", read_json(policy / "tokenizer.json") | {"padding": None})
    config = config_file(tmp_path, model={"path": str(policy)})
    assert "(the tokenizer defines no pad token)" in call("doctor", config).stdout
    result = call("train", config, "--json")
    assert result.exit_code == 0, result.stderr
    # Padding is masked everywhere: which token pads must change nothing.
    expected = read_jsonl(tiny_run.directory / "metrics.jsonl")
    found = read_jsonl(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert [line["reward"] for line in found] == [line["reward"] for line in expected]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=1e-6)


# ---------------------------------------------------------------- task


def test_a_dataset_that_is_empty(tmp_path: Path) -> None:
    assert "is empty: write one JSON object per line" in refused(
        "train", config_file(tmp_path, **rows_task(tmp_path, []))
    )
    none = {"model": {"path": "arithmetic"}, "task": {"name": "jsonl", "options": {"path": str(tmp_path / "none")}}}
    assert f"there is no file {tmp_path}/none" in refused("train", config_file(tmp_path, **none))


def test_a_prompt_that_is_longer_than_the_context(tmp_path: Path) -> None:
    long = [{"problem": "1" * 125 + f"{a}+1=", "answer": "2"} for a in range(10, 40)]
    message = refused("train", config_file(tmp_path, **rows_task(tmp_path, long)))
    assert "the longest prompt has 130 tokens" in message
    assert "over the model's context of 128" in message


@pytest.mark.parametrize("kind", ["rows", "mixture"])
def test_a_long_prompt_is_found_wherever_the_run_meets_it(tmp_path: Path, kind: str) -> None:
    rows = [{"problem": f"{a}+{b}=", "answer": str(a + b), "id": f"{a}+{b}"} for a in range(10, 40) for b in range(30)]
    rows.append({"problem": "1" * 130, "answer": "2", "id": "long one"})
    sections = rows_task(tmp_path, rows)
    if kind == "mixture":
        tables = [{"name": "arithmetic"}, {"name": "jsonl", "options": sections["task"]["options"], "weight": 3}]
        sections |= {"task": {"name": "mixture", "options": {"tasks": tables}}}
    enough = {"batch": {"prompts": 32, "group_size": 2}, "schedule": {"updates": 52, "stages": 2}}
    config = config_file(tmp_path, **{**sections, **enough})
    expected = (
        "the longest prompt has 130 tokens; with sampler.max_new_tokens = 8 that is over the model's context of 128: "
        "shorten prompts or lower max_new_tokens; 1 prompt(s) are too long, such as "
    )
    for verb in ("train", "generate"):
        message = refused(verb, config)
        assert message.startswith(expected)
        assert message.endswith("long one': `exclude_ids` leaves rows out")
    assert not list(tmp_path.rglob("checkpoints"))
    assert f"bad     prompts         {expected}" in call("doctor", config).stdout
    few = {**enough, "schedule": {"updates": 2, "stages": 2}}  # its 64 prompts are others
    assert "ok      prompts " in call("doctor", config_file(tmp_path, **{**sections, **few})).stdout


@pytest.mark.parametrize("new_tokens", [4000, 123])
def test_more_new_tokens_than_the_context_has(new_tokens: int, tmp_path: Path) -> None:
    config = config_file(tmp_path, sampler={"max_new_tokens": new_tokens})
    for verb in ("train", "generate"):
        assert refused(verb, config) == (
            f"the longest prompt has 6 tokens; with sampler.max_new_tokens = {new_tokens} that is over the model's "
            "context of 128: shorten prompts or lower max_new_tokens to at most 122"
        )
        assert not list(tmp_path.rglob("checkpoints"))  # before anything was loaded or written
    doctor = call("doctor", config)
    assert doctor.exit_code == 1 and "to at most 122" in doctor.stdout


def test_suites_that_no_response_fits_after_or_that_are_empty(tmp_path: Path) -> None:
    long = {"name": "long", "task": "arithmetic", "max_new_tokens": 4096}
    config = config_file(tmp_path, evaluation={"prompts": 4, "suite": [long]})
    expected = (
        "the longest prompt has 6 tokens; with max_new_tokens of the suite 'long' = 4096 that is over the model's "
        "context of 128: shorten prompts or lower max_new_tokens to at most 122"
    )
    assert refused("train", config) == expected
    assert not list(tmp_path.rglob("checkpoints"))  # before anything was loaded or written
    doctor = call("doctor", config)
    assert doctor.exit_code == 1 and f"bad     suites          {expected}" in doctor.stdout
    fits = config_file(tmp_path, evaluation={"prompts": 4, "suite": [long | {"max_new_tokens": 122}]})
    assert "ok      suites          long: 16 responses" in call("doctor", fits).stdout
    (tmp_path / "none.jsonl").write_text("")
    missing = config_file(tmp_path, evaluation={"prompts": 4, "suite": [{"file": str(tmp_path / "none.jsonl")}]})
    assert "is empty: write one JSON object per line" in refused("train", missing)
    assert not list(tmp_path.rglob("checkpoints"))


def test_an_evaluation_with_more_new_tokens_than_the_context_has() -> None:
    assert refused("eval", "arithmetic", "--max-new-tokens", "512") == (
        "the longest prompt has 6 tokens; with max_new_tokens = 512 that is over the model's context of 128: shorten "
        "prompts or lower max_new_tokens to at most 122"
    )


def test_responses_that_are_all_truncated(tmp_path: Path) -> None:
    config = config_file(tmp_path, sampler={"max_new_tokens": 1})
    for _ in range(2):  # the rollouts are there at the second time, and still teach nothing
        message = refused("train", config)
        assert "all 32 responses are truncated" in message
        assert "raise sampler.max_new_tokens; the rollouts are kept" in message
    assert len(batch_directories(tmp_path / "runs" / "tiny" / "rollouts")) == 1
    assert versions(tmp_path / "runs" / "tiny") == [0]


def test_groups_that_all_have_no_variance(tmp_path: Path) -> None:
    sections = rows_task(tmp_path, sums(answer="no such thing"), verifier="exact")
    message = refused("train", config_file(tmp_path, **sections))
    assert message.startswith("nothing can be learned from rows: none of 8 groups has variance")
    assert "the mean reward is 0.000" in message
    command = message.partition("`")[2].partition("`")[0]
    assert message.endswith(f"; the rollouts are kept: `{command}` shows responses and rewards")
    assert "17+17=" in call(*command.split()[1:]).stdout


def test_a_verifier_that_fails_on_half_of_a_small_batch_is_repaired_under_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = "def judge(response, answer):\n    return 1 / (int(answer) // 2 % 2)\n"
    (tmp_path / "half_a_judge.py").write_text(judge)
    monkeypatch.syspath_prepend(tmp_path)
    options = {"verifier": "python", "verifier_options": {"function": "half_a_judge:judge", "workers": 1}}
    sampler = {"sampler": {"max_new_tokens": 4, "rollouts_per_shard": 64}}
    config = config_file(tmp_path, **rows_task(tmp_path, sums(), **options), **sampler)
    assert "these responses are not kept, and the same command samples them again" in refused("train", config)
    (tmp_path / "half_a_judge.py").write_text(judge.replace("1 / (int(answer) // 2 % 2)", "float(response == answer)"))
    assert call("train", config).exit_code == 0


def test_a_batch_with_too_few_scores_says_where_a_repaired_verifier_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "another_half.py").write_text("def judge(response, answer):\n    return 1 / (int(answer) // 2 % 2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"verifier": "python", "verifier_options": {"function": "another_half:judge", "workers": 1}}
    config = config_file(tmp_path, **rows_task(tmp_path, sums(), **options))
    assert "these responses are not kept" in refused("train", config)  # those of the last shard
    (tmp_path / "another_half.py").write_text("def judge(response, answer):\n    return response == answer\n")
    message = refused("train", config)
    assert message.endswith(
        "the rollouts are kept as they are: with a repaired verifier choose another name, or delete "
        f"{tmp_path / 'runs' / 'tiny'}"
    )


def test_a_verifier_that_always_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_judge.py").write_text("def judge(prompt, response):\n    raise ValueError('no judge today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"verifier": "python", "verifier_options": {"function": "broken_judge:judge", "workers": 1}}
    config = config_file(tmp_path, **rows_task(tmp_path, sums(), **options))
    message = refused("train", config)
    assert message == ("the verifier of rows failed on all 8 responses, so repair it: 8 × ValueError (no judge today)")
    assert "32 of 32 responses could not be scored: 32 × ValueError (no judge today); that is 100%" in refused(
        "generate", config
    )
    missing = {**options, "verifier_options": {"function": "no_such_judge:judge"}}
    assert "there is no module 'no_such_judge'" in refused(
        "train", config_file(tmp_path, **rows_task(tmp_path, sums(), **missing))
    )


# ---------------------------------------------------------------- run directories


def test_a_shard_with_a_flipped_byte_is_named_and_can_be_made_again(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    assert call("generate", config).exit_code == 0
    shard = shard_path(batch_directories(tmp_path / "runs" / "tiny" / "rollouts")[0], 1)
    right = shard.read_bytes()
    wrong = bytearray(right)
    wrong[len(wrong) // 2] ^= 1
    shard.write_bytes(wrong)
    message = refused("train", config)
    assert message.startswith(f"{shard} is damaged")
    assert "move the shard away and run the same command again" in message
    assert f"{shard} is damaged" in refused("inspect", tmp_path / "runs" / "tiny", "--verify")
    shard.rename(tmp_path / "damaged.parquet")
    assert call("train", config).exit_code == 0
    assert shard.read_bytes() == right


def test_a_run_directory_of_another_config_is_left_alone(tmp_path: Path, tiny_run: RunConfig) -> None:
    shutil.copytree(tiny_run.directory, tmp_path / "runs" / "tiny")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    message = refused("train", config_file(tmp_path, checkpoints={"keep": 8}, optimizer={"learning_rate": 1e-5}))
    assert "belongs to another config (optimizer.learning_rate was 0.0003 and is 1e-05)" in message
    assert "choose another name" in message
    message = refused("train", config_file(tmp_path, checkpoints={"keep": 8}, objective={"params": {"clip_high": 4.0}}))
    assert "objective.params.clip_high was None and is 4.0" in message
    changed = {path.name for path, modified in files.items() if path.stat().st_mtime_ns != modified}
    assert changed <= {"run.lock"}


def test_an_option_that_was_taken_out_is_another_config(tmp_path: Path) -> None:
    config = config_file(tmp_path, objective={"params": {"clip_high": 4.0}})
    assert call("train", config).exit_code == 0
    message = refused("train", config_file(tmp_path))
    assert "objective.params.clip_high was 4.0 and is None" in message
    assert "--unset objective.params.clip_high` continues" in message


def test_a_run_directory_of_another_format_is_left_alone(tmp_path: Path, tiny_run: RunConfig) -> None:
    directory = tmp_path / "runs" / "tiny"
    shutil.copytree(tiny_run.directory, directory)
    record = read_json(directory / "config.resolved.json") | {"format": "stalewise.run/2"}
    write_json_atomic(directory / "config.resolved.json", record)
    message = refused("train", config_file(tmp_path, checkpoints={"keep": 8}))
    assert "has format stalewise.run/2; this release reads stalewise.run/1" in message
    assert "this release reads" in refused("inspect", directory)
    assert "this release reads" in refused("eval", directory)


def test_a_checkpoint_that_is_damaged_is_named(tmp_path: Path) -> None:
    config = config_file(tmp_path, checkpoints={"keep": 8})
    assert call("generate", config).exit_code == 0
    weights = tmp_path / "runs" / "tiny" / "checkpoints" / "v000000" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    message = refused("train", config)
    assert message.startswith(f"{weights} is damaged or missing")


@pytest.mark.parametrize("command", ["train", "generate"])
def test_a_run_that_cannot_begin_leaves_nothing_behind(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_reward = rows_task(tmp_path, sums(), verifier="python", verifier_options={"function": "no_such_judge:judge"})
    no_data = rows_task(tmp_path, [{"question": "1+1=", "answer": "2"}])
    for sections in (no_reward, no_data, {"model": {"path": "arithmetic"}, "task": {"name": "arithmetic-chat"}}):
        refused(command, config_file(tmp_path, **sections))
        assert not (tmp_path / "runs").exists()

    def full(config: RunConfig, *given: Any) -> None:  # here config and environment are written
        assert (config.directory / "environment.json").is_file()
        (config.directory / "checkpoints").mkdir()
        raise StoreError("disk full")

    monkeypatch.setattr("stalewise.orchestrator.orchestrator.write_first_checkpoint", full)
    assert refused(command, config_file(tmp_path)) == "disk full"
    assert not (tmp_path / "runs").exists()
    mine = tmp_path / "runs" / "tiny" / "notes.txt"  # what was there stays
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert refused(command, config_file(tmp_path)) == "disk full"
    assert list((tmp_path / "runs").rglob("*")) == [mine.parent, mine]


def test_a_second_process_is_told_who_has_the_run(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    with RunLock(tmp_path / "runs" / "tiny"):
        for command in ("train", "generate"):
            message = refused(command, config)
            assert f"is in use by process {os.getpid()} on " in message
            assert "then run the same command again" in message


# Ctrl-C in the middle of update 5, in a process of its own.
INTERRUPTED = """
import os, signal
from stalewise.cli import main
from stalewise.trainer.trainer import Trainer

def enqueue(self, rows, *more):
    if self.version == 5:
        os.kill(os.getpid(), signal.SIGINT)
    return whole_enqueue(self, rows, *more)

whole_enqueue, Trainer.enqueue = Trainer.enqueue, enqueue
main()
"""


def test_ctrl_c_in_the_middle_and_on_again(tmp_path: Path) -> None:
    schedule = {"kind": "staged", "updates": 8, "stages": 2}
    config = config_file(tmp_path, schedule=schedule, checkpoints={"every": 2})
    done = completed(INTERRUPTED, "train", config, directory=tmp_path)
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    *_, said, again = done.stderr.splitlines()
    assert said == "interrupted: committed work is kept; the same command resumes:"
    assert again == f"  stalewise train {config}"
    directory = tmp_path / "runs" / "tiny"
    assert [record["update"] for record in read_jsonl(directory / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert versions(directory)[-1] == 4
    result = call("train", config)
    assert result.exit_code == 0, result.stderr
    assert [record["update"] for record in read_jsonl(directory / "metrics.jsonl")] == list(range(8))
    learned = [record for record in read_jsonl(directory / "journal.jsonl") if record["event"] == "learn"]
    assert [(record["first"], record["stop"]) for record in learned] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert versions(directory)[-1] == 8


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 48.00 GiB. GPU 0 has a total capacity …"),
            "(CUDA out of memory)",
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "(DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes)",
        ),
        (
            RuntimeError("unable to mmap 7 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
            "(unable to mmap 7 bytes from file <model.safetensors>: Cannot allocate memory)",
        ),
        (MemoryError("malloc of size 7 failed"), "(malloc of size 7 failed)"),
        (MemoryError(), "(of the machine)"),
    ],
)
def test_memory_that_ends_where_nobody_can_help_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, what: str
) -> None:
    def load(*arguments: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr("stalewise.rollout.engines.embedded.load_model", load)
    message = refused("train", config_file(tmp_path))
    assert message.startswith("the device ran out of memory; committed work is kept: lower learner.tokens_per_micro_")
    assert message.endswith(what)


def test_another_error_of_a_library_is_not_taken_for_a_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: Any, **settings: Any) -> None:
        raise RuntimeError("can't multiply")

    monkeypatch.setattr("stalewise.rollout.engines.embedded.load_model", load)
    with pytest.raises(RuntimeError, match=r"^can't multiply$"):
        call("train", config_file(tmp_path))


# ---------------------------------------------------------------- the system


def test_a_disk_that_is_full_within_a_checkpoint_is_one_message(tmp_path: Path) -> None:
    """The weights are larger than a file may be: safetensors raises an error of its own."""
    config = config_file(tmp_path)
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000)); "
        "from stalewise.cli import main; sys.argv = ['stalewise', 'train', sys.argv[1]]; main()"
    )
    done = completed(program, config, directory=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: disk full while writing ")
    assert not (tmp_path / "runs").exists()
    assert call("train", config).exit_code == 0


def test_a_run_directory_that_is_moved_away_ends_the_run_and_comes_back(tmp_path: Path) -> None:
    config = make_config(tiny_record(tmp_path / "runs"))
    away = tmp_path / "away"

    class Mover(NullCallback):
        def metrics(self, update: int, record: dict[str, Any]) -> None:
            if update == 1:
                config.directory.rename(away)

    with pytest.raises(StoreError, match=r"tiny was moved or deleted during the run: put it back"):
        train(config, Mover())
    assert not config.directory.exists()  # not begun anew in the old place
    away.rename(config.directory)
    assert train(config).updates == 4


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    assert "name is 'xxx" in refused("train", config, "--set", f"name={'x' * 300}")
    assert "is not a run directory" in refused("inspect", tmp_path / ("x" * 300))
    assert "File name too long" in refused("init", tmp_path / ("x" * 300))
    text = config.read_text().replace('check = "off"', 'path = "a\\u0000b"')
    config.write_text(text)
    assert "model.path has a NUL character" in refused("train", config)


def test_names_and_messages_cannot_steer_the_terminal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", model={"path": "\x1b[31mred[bold]"}, task={"name": "\x1b]0;title\x07"})
    shown = call("inspect", run)
    assert shown.exit_code == 0 and "\x1b" not in shown.stdout and "\x07" not in shown.stdout
    assert "\\x1b[31mred[bold]" in shown.stdout
    assert "\x1b" not in call("train", tmp_path / "\x1b[31m.toml").stderr


def test_eval_refuses_what_is_wrong_before_torch_is_imported(tiny_run: RunConfig) -> None:
    given = {
        "nowhere is not a directory": ["nowhere", "--task", "arithmetic"],
        "unknown task 'arithmetik'": [str(tiny_run.directory), "--task", "arithmetik"],
        "has no option 'digit'": [str(tiny_run.directory), "--option", "digit=3"],
        "none.jsonl": [str(tiny_run.directory), "--file", "none.jsonl"],
        "none.txt": [str(tiny_run.directory), "--exclude-ids", "none.txt"],
        "has no suite 'hard'": [str(tiny_run.directory), "--suite", "hard"],
        "greedy responses": [str(tiny_run.directory), "--temperature", "0", "--samples", "2"],
    }
    code = f"""
import sys
from tiny import refused
for words in {list(given.values())!r}:
    print(refused('eval', *words))
print({{'torch', 'transformers', 'scipy'}} & set(sys.modules))
"""
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    *refusals, heavy = done.stdout.splitlines()
    assert heavy == "set()", done.stderr
    for expected, said in zip(given, refusals, strict=True):
        assert expected in said


@pytest.mark.parametrize("verb", ["verify", "inspect", "difficulty", "fork"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_directory_of_another_user_is_one_message(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch, verb: str, number: int
) -> None:
    """Permissions do not stop root, as which tests may run: the system's refusal is raised here."""

    def refuse(path: Path) -> Iterator[Path]:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert os.strerror(number) in refused(verb, tiny_run.directory)
