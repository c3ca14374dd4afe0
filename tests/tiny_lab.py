"""A tiny experiment: definitions that the tests of the lab write into a directory."""

from __future__ import annotations

from pathlib import Path

from experiments.lab.definition import Experiment, load_experiments

HEAD = """
number = 1
title = "A tiny one"
claim = "It runs."
verdict = "ours"
metrics = ["ess"]
[[sources]]
paper = "nobody"
place = "nowhere"
says = "nothing"
"""
BASES = """
[tiny.task]
name = "arithmetic"
[tiny.model]
device = "cpu"
threads = 1
[tiny.schedule]
kind = "synchronous"
updates = 2
[tiny.batch]
prompts = 4
group_size = 4
[tiny.sampler]
max_new_tokens = 4
[tiny.evaluation]
every = 1
prompts = 4
samples = 2
[policy.strong]
base = "tiny"
set = { seed = 100 }
"""
LAB = """
[lab]
base = "tiny"
task = "tiny"
rates = [1e-4, 1e-3, 1e-2]
seeds = [2, 9]
[[lab.arms]]
name = "{method}"
[lab.arms.axes.method]
auto = { objective = { name = "mu_grpo" } }
GRPO = { objective = { name = "grpo" }, options = { pass_samples = 4 } }
[[lab.arms]]
name = "GRPO, hot"
rate = "hot of GRPO"
set = { objective = { name = "grpo" } }
[[lab.arms]]
name = "GRPO, foreign"
rate = "of GRPO"
set = { objective = { name = "grpo" }, sampler = { foreign = { path = "policy:strong", share = 0.5 } } }
[[lab.arms]]
name = "fixed"
rate = "set"
set = { objective = { name = "grpo" }, optimizer = { learning_rate = 5e-4 } }
[[lab.arms]]
name = "before"
kind = "evaluate"
options = { pass_samples = 4 }
"""


def define(root: Path, lab: str = LAB, bases: str = BASES) -> list[Experiment]:
    directory = root / "experiments" / "tiny"
    directory.mkdir(parents=True)
    (root / "experiments" / "bases.toml").write_text(bases)
    (directory / "experiment.toml").write_text(HEAD + lab)
    return load_experiments(root / "experiments")
