"""Export and push: directories that others load, cards that say what the run says, and nothing of this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hubs import Hub, hub_of_our_own
from rundirs import add_evaluation, metrics, write_run
from stalewise.api import evaluate, learn, run
from stalewise.config import RunConfig, load_config, make_config
from stalewise.config.run_directory import read_config
from stalewise.errors import ConfigError, HubError, StoreError
from stalewise.integrations.hub import export, export_policy, export_rollouts, push
from stalewise.integrations.hub.card import model_card
from stalewise.integrations.hub.provenance import Base, base_of, config_file, shareable
from stalewise.models.loading import EMBEDDED, load_model
from stalewise.reporting.read import read_run
from stalewise.store import batch_directories, open_batch
from stalewise.store.atomic import read_json, read_jsonl, write_json_atomic
from stalewise.store.checkpoints import checkpoint_directory
from tiny import call, called_json, refused, tiny_record

POLICY_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
OURS = ["README.md", "stalewise.json", "training_config.toml"]


def names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def card_of(directory: Path) -> tuple[Any, str]:
    card = ModelCard.load(directory / "README.md")
    return card.data, card.text


# ---------------------------------------------------------------- a policy


def test_an_export_is_a_directory_that_transformers_loads(tiny_run: RunConfig, tmp_path: Path) -> None:
    target = tmp_path / "out" / "policy"
    assert call("export", tiny_run.directory, target).stdout == f"{target}\n"
    assert names(target) == sorted([*POLICY_FILES, *OURS])
    loaded = AutoModelForCausalLM.from_pretrained(target).state_dict()
    checkpoint = load_model(str(checkpoint_directory(tiny_run.directory, 4)), device=torch.device("cpu")).state_dict()
    assert all(torch.equal(loaded[name], checkpoint[name]) for name in checkpoint)
    assert AutoTokenizer.from_pretrained(target)("1+2=")["input_ids"]
    record = read_json(target / "stalewise.json")
    assert (record["kind"], record["run"], record["version"]) == ("policy", "tiny", 4)
    assert sorted(record["files"]) == [name for name in names(target) if name != "stalewise.json"]
    as_run = evaluate(tiny_run.directory, prompts=8, samples=2)
    as_export = evaluate(target, task="arithmetic", prompts=8, samples=2, max_new_tokens=8)
    assert as_export.accuracy == as_run.accuracy


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
    for record, note in ((first, " (before training)"), (last, " (this one)")):
        value, low, high = (record["accuracy"][key] for key in ("value", "low", "high"))
        assert f"| {record['version']}{note} | 8 | 2 | {value:.3f} [{low:.3f}, {high:.3f}] |" in text
    assert "`mu_grpo` with clip_low = 0.0, clip_high = 5.0, kappa = 0.0001" in text
    assert "4 updates, staged, µ = 2 updates on each generation batch, 2 batches in all." in text
    assert "| 1 | 2 | 32 |" in text and "| 2 | 0 to 1 |" in text
    assert "learning_rate 0.0003" in text and "optimizer.learning_rate = 0.0003" in text
    assert "stalewise train training_config.toml" in text and "device cpu" in text
    assert "was not calibrated" in text and "one seed (0)" in text
    assert "None" not in text and "\n\n\n" not in text


def test_its_config_trains_the_same_policy(tiny_run: RunConfig, tmp_path: Path) -> None:
    target = export_policy(tiny_run.directory, tmp_path / "out")
    again = load_config(target / "training_config.toml", {"runs": str(tmp_path / "runs")})
    assert again.identity() == tiny_run.identity()
    run(again)
    weights = [load_file(place / "model.safetensors") for place in (target, checkpoint_directory(again.directory, 4))]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_an_earlier_version_tells_of_itself(tiny_run: RunConfig, tmp_path: Path) -> None:
    target = tmp_path / "out"
    record = called_json("export", tiny_run.directory, target, "--version", 2)
    assert (record["version"], record["directory"]) == (2, str(target))
    data, text = card_of(target)
    assert "after 2 of 4 updates" in text and "the run has gone on to version 4" in text
    assert "This very version was not evaluated." in text and not data.eval_results
    assert "(this one)" not in text and "| 1 | 2 | 32 |" not in text  # the second batch came later
    message = refused("export", tiny_run.directory, tmp_path / "other", "--version", 3)
    assert message.endswith("has no checkpoint of version 3; it has 0, 2, 4")


def test_what_went_wrong_is_in_the_card(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", updates=8, done=6)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(6, ess=0.05)) + "\n")
    write_json_atomic(directory / "limits.json", {"format": "stalewise.limits/1", "limits": [0.5, 8.0]})
    add_evaluation(directory, 7, 0.2)
    config = read_config(directory)
    text = model_card(read_run(directory), config, 7, Base("it", "owner/name"), adapter=False, config_name="c.toml")
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
    with pytest.raises(StoreError, match=r"has no committed rollouts of its own \(it learned from those of others"):
        export_rollouts(config.directory, tmp_path / "rollouts")


# ---------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    lora = {"model": {"lora": {"rank": 4, "alpha": 8.0}}, "optimizer": {"learning_rate": 1e-2}}
    config = make_config(tiny_record(tmp_path_factory.mktemp("runs"), "adapted", **lora))
    run(config)
    return config


def test_an_adapter_and_the_merged_policy_are_one(adapted: RunConfig, tmp_path: Path) -> None:
    from peft import PeftModel

    merged = export_policy(adapted.directory, tmp_path / "merged")
    alone = export_policy(adapted.directory, tmp_path / "alone", adapter=True)
    assert names(merged) == sorted([*POLICY_FILES, *OURS])
    tokenizer = ["tokenizer.json", "tokenizer_config.json"]
    assert names(alone) == sorted(["adapter_config.json", "adapter_model.safetensors", *tokenizer, *OURS])
    assert read_json(alone / "adapter_config.json")["base_model_name_or_path"] == "arithmetic"
    ids = AutoTokenizer.from_pretrained(alone)("1+2=", return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(EMBEDDED / "arithmetic")
    before = base(ids).logits
    logits = [model(ids).logits for model in (PeftModel.from_pretrained(base, alone), load_merged(merged))]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert (logits[0] - before).abs().max() > 1e-2
    data, text = card_of(alone)
    assert data.library_name == "peft" and "This is the LoRA adapter alone." in text
    assert "here it is merged into the weights" in card_of(merged)[1]


def load_merged(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory)


def test_the_relation_to_the_base_is_in_the_metadata(adapted: RunConfig) -> None:
    found = read_run(adapted.directory)
    settings = {"adapter": True, "config_name": "c.toml"}
    itself = model_card(found, adapted, 4, Base("it", "owner/name"), **settings)
    assert ModelCard(itself).data.to_dict()["base_model_relation"] == "adapter"
    assert 'AutoModelForCausalLM.from_pretrained("owner/name")' in itself
    later = model_card(found, adapted, 4, Base("it", "owner/name", is_itself=False), **settings)
    assert "base_model" not in ModelCard(later).data.to_dict()  # it would not fit that model
    assert "the adapter is of no use without it" in later


def test_all_weights_have_no_adapter(tiny_run: RunConfig, tmp_path: Path) -> None:
    assert "trained all weights and has no adapter" in refused(
        "export", tiny_run.directory, tmp_path / "x", "--adapter"
    )


# ---------------------------------------------------------------- whole or not there


def test_what_is_there_is_not_overwritten(tiny_run: RunConfig, tmp_path: Path) -> None:
    target = export_policy(tiny_run.directory, tmp_path / "out", version=2)
    assert "exists already and is not overwritten" in refused("export", tiny_run.directory, target)
    assert read_json(target / "stalewise.json")["version"] == 2
    assert call("export", tiny_run.directory, target, "--force").exit_code == 0
    assert read_json(target / "stalewise.json")["version"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for precious in (tiny_run.directory, checkpoint_directory(tiny_run.directory, 4)):
        before = names(precious)
        message = refused("export", tiny_run.directory, precious, "--force")
        assert "is no earlier export, so --force leaves it alone" in message
        assert names(precious) == before
    (tmp_path / "file").write_text("mine")
    assert "is no earlier export" in refused("export", tiny_run.directory, tmp_path / "file", "--force")
    (tmp_path / "empty").mkdir()
    assert names(export_policy(tiny_run.directory, tmp_path / "empty")) == sorted([*POLICY_FILES, *OURS])


def test_an_export_that_fails_leaves_what_was_there(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = export_policy(tiny_run.directory, tmp_path / "out", version=2)

    def fails(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "model_card", fails)
    with pytest.raises(StoreError, match=r"disk full while writing .*out"):
        export_policy(tiny_run.directory, target, force=True)
    assert read_json(target / "stalewise.json")["version"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_damaged_checkpoint_is_not_handed_on(tiny_run: RunConfig, tmp_path: Path) -> None:
    copied = tmp_path / "tiny"
    shutil.copytree(tiny_run.directory, copied)
    weights = checkpoint_directory(copied, 4) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "model.safetensors is damaged" in refused("export", copied, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "is no run directory" in refused("export", tmp_path, tmp_path / "out")


# ---------------------------------------------------------------- where it comes from


def test_a_base_is_followed_to_where_it_began(tiny_run: RunConfig, tmp_path: Path) -> None:
    def base(path: str) -> Base:
        return base_of(make_config({"model": {"path": path}}))

    assert base("auto").words == "the small policy `arithmetic` that comes with stalewise"
    assert (base("owner/name").name, base("smollm2").name) == ("owner/name", "HuggingFaceTB/SmolLM2-135M-Instruct")
    later = base(str(checkpoint_directory(tiny_run.directory, 4)))
    assert (
        later.words
        == "version 4 of the run tiny, which began as the small policy `arithmetic` that comes with stalewise"
    )
    assert not later.is_itself
    assert base(str(export_policy(tiny_run.directory, tmp_path / "out"))) == later
    shutil.copytree(EMBEDDED / "arithmetic", tmp_path / "mine")
    assert base(str(tmp_path / "mine")).words == "a model in a directory called `mine`"


def test_nothing_of_this_machine_gets_out(adapted: RunConfig, tmp_path: Path) -> None:
    places = {"task": {"name": "jsonl", "options": {"path": "/data/secret/train.jsonl", "chat": True}}}
    served = {"engine": "server", "server": {"urls": ["http://10.0.0.7:9000"], "paths": {"/data": "/mnt"}}}
    planned = {"learning_rate": "planned", "calibration": "/data/c.json"}
    stored = {"url": "s3://mine/run", "options": {"endpoint_url": "http://10.0.0.7:9001"}}
    elsewhere = {"plan": planned, "runs": "/data/runs", "trackers": ["wandb"], "storage": stored}
    config = make_config({**places, "sampler": served, **elsewhere})
    text = config_file(config)
    assert not any(word in text for word in ("/data", "/mnt", "10.0.0.7", "wandb", "planned", "mine"))
    (tmp_path / "config.toml").write_text(text)
    again = load_config(tmp_path / "config.toml")
    assert (again.task.options["path"], again.sampler.server.urls) == ("train.jsonl", ["http://localhost:8000"])
    assert shareable(again) == shareable(config)
    for target in (
        export_policy(adapted.directory, tmp_path / "merged"),
        export_policy(adapted.directory, tmp_path / "alone", adapter=True),
        export_rollouts(adapted.directory, tmp_path / "rollouts"),
    ):
        for name in names(target):
            data = (target / name).read_bytes()
            assert str(adapted.runs).encode() not in data and str(EMBEDDED).encode() not in data
            assert b'"worker"' not in data  # the names of machines


# ---------------------------------------------------------------- rollouts


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_rollouts_are_a_dataset_and_can_be_learned_from(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    target = tmp_path / "rollouts"
    assert call("export", tiny_run.directory, target, "--rollouts").stdout == f"{target}\n"
    loaded = datasets.load_dataset(str(target), split="train", cache_dir=str(tmp_path / "cache"))
    stored = [
        rollout
        for path in batch_directories(tiny_run.directory / "rollouts")
        for rollout in open_batch(path).iter_rollouts()
    ]
    assert loaded["rollout_id"][:] == [rollout.rollout_id for rollout in stored]
    assert [tuple(row) for row in loaded["behaviour_logp"]] == [rollout.behaviour_logp for rollout in stored]
    text = (target / "README.md").read_text()
    assert "64 responses" in text and "| 1 | 2 | 32 |" in text
    config = make_config(tiny_record(tmp_path / "runs", "again"))
    assert learn(config, [target]).updates == 4
    assert "leave out --version and --adapter" in refused(
        "export", tiny_run.directory, tmp_path / "x", "--rollouts", "--version", 2
    )


# ---------------------------------------------------------------- push


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_of_our_own() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setenv("HF_TOKEN", "hf_made_up")
        yield found


def test_a_push_uploads_what_it_would_write(tiny_run: RunConfig, tmp_path: Path, hub: Hub) -> None:
    result = call("push", tiny_run.directory, "me/tiny", "--private")
    assert result.stdout == f"{hub.url}/me/tiny\n"
    (record,) = hub.created
    assert record.get("visibility") == "private" or record.get("private") is True
    folder = tmp_path / "me" / "tiny"
    written = called_json("push", tiny_run.directory, "me/tiny", "--to", tmp_path)
    assert written == {"place": str(folder), "uploaded": False}
    assert hub.repositories["models/me/tiny"] == {name: (folder / name).read_bytes() for name in names(folder)}
    assert len(hub.created) == 1  # nothing was uploaded for the second


def test_rollouts_are_pushed_as_a_dataset(tiny_run: RunConfig, tmp_path: Path, hub: Hub) -> None:
    assert push(tiny_run.directory, "me/tiny", rollouts=True) == f"{hub.url}/datasets/me/tiny"
    folder = Path(push(tiny_run.directory, "me/tiny", rollouts=True, to=tmp_path))
    assert folder == tmp_path / "datasets" / "me" / "tiny"
    assert sorted(hub.repositories["datasets/me/tiny"]) == names(folder)


def test_force_also_removes_what_is_not_in_the_folder(tiny_run: RunConfig, hub: Hub) -> None:
    hub.repositories["models/me/tiny"] = {"old.safetensors": b"old"}
    push(tiny_run.directory, "me/tiny")
    assert "old.safetensors" in hub.repositories["models/me/tiny"]
    push(tiny_run.directory, "me/tiny", force=True)
    assert sorted(hub.repositories["models/me/tiny"]) == sorted([*POLICY_FILES, *OURS])


def test_a_hub_that_refuses_or_is_not_there_is_one_message(
    tiny_run: RunConfig, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuses = 401
    message = refused("push", tiny_run.directory, "me/tiny")
    assert message.startswith(f"{hub.url} did not take me/tiny: ") and "`hf auth login`" in message
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"did not take me/tiny: ConnectError: .*--to DIRECTORY writes the same folder"):
        push(tiny_run.directory, "me/tiny")
    with pytest.raises(ConfigError, match="cannot be the name of a repository"):
        push(tiny_run.directory, "me/ti/ny")
    with pytest.raises(ConfigError, match="leave out --version and --adapter"):
        push(tiny_run.directory, "me/tiny", rollouts=True, adapter=True)
