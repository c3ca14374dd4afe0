"""Every rule on results made by hand: it can say shown, not shown and opposite; figures and pages follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from experiments.lab import verdicts
from experiments.lab.definition import load_experiments
from experiments.lab.figures import figures
from experiments.lab.law import resampled_exponents
from experiments.lab.pages import Judged, describe_runs, page, seeds_of, with_sign
from experiments.lab.results import FORMAT, Results
from experiments.lab.verdicts import Finding, judge, rules

ROOT = Path(__file__).parents[2]
JITTER = (-0.01, -0.005, 0.0, 0.0, 0.005, 0.01)  # of six seeds


def run(value: float, *, best: float, **more: Any) -> dict[str, Any]:
    """A kept run that ends at this accuracy, and was at `best` on the way."""
    evaluations = {"version": [0, 32, 64, 96, 128], "accuracy": [0.2, best, value, value, value]}
    return {"ended": "", "evaluations": evaluations, "series": {}, **more}


def arm(name: str, value: float, *, axes: dict[str, str] | None = None, fell: int = 0, **more: Any) -> dict[str, Any]:
    """Six seeds around a value, the first `fell` of which were there and end at a quarter of it."""
    ends = [value / 4 if place < fell else value for place in range(len(JITTER))]
    seeds = {
        str(200 + place): run(end + by, best=value - by + 0.02, **more)
        for place, (end, by) in enumerate(zip(ends, JITTER, strict=True))
    }
    return {"name": name, "kind": "train", "axes": axes or {}, "rate": 1e-3, "seeds": seeds}


def results(*arms: dict[str, Any], tuned: dict[str, float] | None = None) -> Results:
    """`tuned`: scores on the tuning seeds, where they are not those of the judged ones."""
    values = {
        one["name"]: next(iter(one["seeds"].values()))["evaluations"]["accuracy"][-1]
        for one in arms
        if one["axes"] or 1
    }
    scores = {name: {"0.001": [value, value], "0.003": [0.1, 0.1]} for name, value in (values | (tuned or {})).items()}
    tuning = {
        "rates": [1e-4, 1e-3, 3e-3],
        "widened": 1,
        "is_complete": True,
        "scores": {name: {"0.0001": [0.1, 0.1], **by_rate} for name, by_rate in scores.items()},
        "best": dict.fromkeys(scores, 1e-3),
        "edges": [],
        "spread": dict.fromkeys(scores, 0.01),
        "margin": 0.03,
        "seeds_asked": 3,
        "seeds_run": 6,
    }
    machine = [{"cores": 2, "workers": 1, "seconds": 1.0}]
    head = {
        "format": FORMAT,
        "setting": "lab",
        "machine": machine,
        "planned": 1,
        "done": 1,
        "failed": {},
        "cpu_seconds": 10,
    }
    return Results({**head, "tuning": tuning, "arms": list(arms)})


def verdict(rule: str, made: Results) -> str:
    return judge({rule: rules()[rule](made)})[rule][0]


def clips(tight: tuple[float, int], relaxed: tuple[float, int]) -> Results:
    """Best accuracy on the way and falls of both clips at one rate; at another one both stay lower."""
    chosen = {"tight": tight, "relaxed": relaxed}
    low = {"tight": (0.5, 0), "relaxed": (0.4, 0)}
    return results(
        *(
            arm(f"{clip}, η={rate}", best, fell=fell, axes={"clip": clip, "rate": rate})
            for rate, given in (("1e-4", low), ("2e-4", chosen))
            for clip, (best, fell) in given.items()
        )
    )


def test_clipping_dilemma() -> None:
    assert verdict("clipping_dilemma", clips((0.6, 0), (0.9, 6))) == "shown"
    assert verdict("clipping_dilemma", clips((0.6, 0), (0.9, 0))) == "not shown"  # the relaxed clip does not fall
    assert verdict("clipping_dilemma", clips((0.6, 6), (0.9, 6))) == "not shown"  # the tight clip falls as well
    assert verdict("clipping_dilemma", clips((0.9, 0), (0.9, 6))) == "not shown"  # it climbs no further
    assert verdict("clipping_dilemma", clips((0.9, 0), (0.6, 6))) == "opposite"
    assert verdict("clipping_dilemma", clips((0.19, 0), (0.18, 6))) != "cannot say"
    nothing = [arm(f"{clip}, η=1", 0.1, axes={"clip": clip, "rate": "1"}) for clip in ("tight", "relaxed")]
    assert verdict("clipping_dilemma", results(*nothing)) == "cannot say"  # no run rises above its start, 0.2
    assert verdict("clipping_dilemma", results(arm("tight", 0.8, axes={"clip": "tight"}))) == "cannot say"


def scopes(none: int, suffix: int, sequence: int) -> Results:
    fell = {"none": none, "suffix": suffix, "sequence": sequence, "tight": 0}
    hot = [arm(f"{scope}, hot", 0.5, fell=count) for scope, count in fell.items()]
    return results(*hot, *(arm(scope, 0.9) for scope in fell))


def test_where_the_harm_is() -> None:
    assert verdict("where_the_harm_is", scopes(6, 0, 0)) == "shown"
    assert verdict("where_the_harm_is", scopes(6, 3, 0)) == "not shown"  # 6 of 6 against 3 of 6: p = 0.09
    assert verdict("where_the_harm_is", scopes(0, 6, 0)) == "opposite"
    (control,) = (line for line in rules()["where_the_harm_is"](scopes(6, 0, 0)).lines if "control" in line)
    assert "less often than none" in control
    assert "score less that of none: suffix +0.375" in rules()["where_the_harm_is"](scopes(6, 0, 0)).ours


def hot_alone(whole: Results) -> Results:
    """Without the arms at their own rates, as with a real model."""
    return results(*(one for one in whole.record["arms"] if one["name"].endswith(", hot")))


def test_arms_at_the_hot_rate_are_enough() -> None:
    rule, made = "where_the_harm_is", scopes(6, 0, 0)
    alone = hot_alone(made)
    assert verdict(rule, alone) == "shown"
    assert not any("own rate" in line for line in rules()[rule](alone).lines)
    assert any("own rate" in line for line in rules()[rule](made).lines)
    assert all("nan" not in text for text in figures(rule, alone).values())


def speeds(values: Sequence[float], fresh: float = 0.9) -> Results:
    staged = [
        arm(f"µ-GRPO, µ={mu}", value, axes={"method": "µ-GRPO", "mu": mu})
        for mu, value in zip(("16", "64", "256"), values, strict=True)
    ]
    return results(arm("GRPO, µ=4", fresh), *staged)


def test_accuracy_at_speed() -> None:
    assert verdict("accuracy_at_speed", speeds((0.9, 0.9, 0.9))) == "shown"
    assert verdict("accuracy_at_speed", speeds((0.9, 0.9, 0.88))) == "not shown"  # at the margin
    assert verdict("accuracy_at_speed", speeds((0.9, 0.9, 0.85))) == "opposite"


def knobs(p3o: float, tuned: dict[str, float] | None = None) -> Results:
    finals = {"GRPO ε=0.2": 0.8, "GRPO ε=0.4": 0.9, "GRPO ε=0.6": 0.7, "P3O": p3o}
    arms = [arm(f"{method}, µ=16", value, axes={"method": method, "mu": "16"}) for method, value in finals.items()]
    return results(*arms, tuned=tuned)


def test_no_knob() -> None:
    assert verdict("no_knob", knobs(0.9)) == "shown"
    assert verdict("no_knob", knobs(0.87)) == "not shown"
    assert verdict("no_knob", knobs(0.82)) == "opposite"  # better than one ε, worse than the best
    # The rival is chosen on the tuning seeds, not on those that judge.
    assert verdict("no_knob", knobs(0.82, {"GRPO ε=0.2, µ=16": 0.99})) == "shown"


def mismatches(grpo: float, p3o: float) -> Results:
    finals = {("GRPO ε=0.2", "none"): 0.9, ("GRPO ε=0.2", "fp8"): grpo, ("P3O", "none"): 0.9, ("P3O", "fp8"): p3o}
    return results(*(arm(f"{m}, {k}", v, axes={"method": m, "mismatch": k}) for (m, k), v in finals.items()))


def test_mismatch() -> None:
    assert verdict("mismatch", mismatches(grpo=0.5, p3o=0.88)) == "shown"
    assert verdict("mismatch", mismatches(grpo=0.88, p3o=0.88)) == "not shown"
    assert verdict("mismatch", mismatches(grpo=0.5, p3o=0.5)) == "opposite"


def anchors(plain: float, hot: float) -> Results:
    finals = {("one anchor", "1.0"): 0.9, ("one anchor", "1.2"): 0.9}
    finals |= {(name, "1.0"): plain for name in ("separate", "mixture")} | {
        ("separate", "1.2"): 0.4,
        ("mixture", "1.2"): hot,
    }
    return results(*(arm(f"{m}, T={t}", v, axes={"method": m, "temperature": t}) for (m, t), v in finals.items()))


def test_two_anchors() -> None:
    assert verdict("two_anchors", anchors(plain=0.9, hot=0.4)) == "shown"
    assert verdict("two_anchors", anchors(plain=0.95, hot=0.4)) == "not shown"  # they are better at 1.0
    assert verdict("two_anchors", anchors(plain=0.9, hot=0.9)) == "not shown"  # one of them holds
    assert verdict("two_anchors", anchors(plain=0.9, hot=0.95)) == "opposite"


def passes(one: float, many: float, spread: float = 0.1) -> Results:
    after = arm("P3O, µ=4", 0.8, axes={"method": "P3O", "mu": "4"})
    for place, seed in enumerate(after["seeds"].values()):
        seed["pass_at"] = {"1": {"value": one + JITTER[place]}, "64": {"value": many + JITTER[place] / 10}}
    starts = [{"1": {"value": 0.4 + jitter / 10}, "64": {"value": 0.95 + jitter * spread}} for jitter in JITTER]
    seeds = {str(200 + place): {"pass_at": start} for place, start in enumerate(starts)}
    before = {"name": "before", "kind": "evaluate", "axes": {}, "rate": None, "seeds": seeds}
    made = results(after)
    return Results({**made.record, "arms": [after, before]})


def test_pass_at_k() -> None:
    assert verdict("pass_at_k", passes(0.8, 0.95)) == "shown"
    assert verdict("pass_at_k", passes(0.4, 0.95)) == "not shown"
    assert verdict("pass_at_k", passes(0.8, 0.8)) == "opposite"
    assert verdict("pass_at_k", passes(0.8, 0.95, spread=9.0)) == "not shown"  # what was before is uncertain, too
    assert "pass@k" in figures("pass_at_k", passes(0.8, 0.95))[""]
    made = passes(0.8, 0.95).record
    without_runs = arm("P3O, µ=16", 0.8, axes={"method": "P3O", "mu": "16"}) | {"seeds": {}}
    assert verdict("pass_at_k", Results({**made, "arms": [*made["arms"], without_runs]})) == "cannot say"


def test_ours() -> None:
    def arms(auto: float) -> Results:
        return results(arm("auto", auto), arm("GRPO µ=4", 0.9), arm("P3O µ=16", 0.8))

    assert verdict("ours", arms(0.9)) == "shown"
    assert verdict("ours", arms(0.88)) == "not shown"
    assert verdict("ours", arms(0.85)) == "opposite"


def grid(power: float, limit: float = 4.0) -> Results:
    """Runs that collapse where η·G·T^power is too large, without any scatter."""
    arms: list[dict[str, Any]] = []
    for lag in ("µ=1", "µ=8, lag 1"):
        for rate in (3e-4, 5e-4, 8e-4, 1.2e-3, 2e-3, 3e-3, 5e-3):
            for updates in (64, 128, 256, 512):
                fell = rate * 200 * updates**power > limit * 256 ** (power - 0.5)
                axes = {"lag": lag, "rate": f"{rate:g}", "T": str(updates)}
                name = f"{lag} {rate:g} {updates}"
                arms.append(arm(name, 0.5, axes=axes, fell=6 * fell, early_norm_per_lr=200.0))
    return results(*arms)


def test_the_law() -> None:
    assert verdict("the_law", grid(1.0)) == "shown"
    assert verdict("the_law", grid(0.5)) == "opposite"
    assert verdict("the_law", grid(1.0, limit=1e9)) == "cannot say"  # nothing collapses


def test_verdicts_are_corrected_for_the_number_of_claims() -> None:
    # 0.02 alone is enough, times two for the opposite; among three claims it is the second smallest of six: 0.1.
    one = Finding(0.02, 1.0, "")
    assert judge({"a": one})["a"] == ("shown", 0.04)
    among = judge({"a": one, "b": Finding(0.5, 0.001, ""), "c": Finding(0.9, 0.9, ""), "d": Finding(None, None, "")})
    assert among["a"] == ("not shown", pytest.approx(0.1))
    assert among["b"] == ("opposite", pytest.approx(0.006)) and among["d"][0] == "cannot say"


def few(power: float, centre: float = 1.5e-5) -> Results:
    """One seed on a coarse grid, as on GSM8K: runs collapse above a rate that falls as T^-power, with scatter."""
    random = np.random.default_rng(1)
    arms: list[dict[str, Any]] = []
    for lag in ("µ=4", "µ=4, lag 3"):
        for rate in (5e-6, 1e-5, 2e-5, 4e-5):
            for updates in (24, 48, 96, 192):
                fell = rate * math.exp(0.2 * random.normal()) > centre * (96 / updates) ** power
                axes = {"lag": lag, "rate": f"{rate:g}", "T": str(updates)}
                one = arm(f"{lag} {rate:g} {updates}", 0.5, axes=axes, fell=6 * fell, early_norm_per_lr=200.0)
                arms.append({**one, "seeds": {"200": one["seeds"]["200"]}})
    return results(*arms)


def test_the_law_of_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not as often as the rule: p-values that decide need no more.
    monkeypatch.setattr(verdicts, "resampled_exponents", lambda found, times: resampled_exponents(found, times // 4))
    assert verdict("the_law_of_few_runs", few(1.0)) == "shown"
    assert verdict("the_law_of_few_runs", few(0.25)) == "opposite"
    assert verdict("the_law_of_few_runs", few(0.0)) == "opposite"
    assert verdict("the_law_of_few_runs", few(1.0, centre=1.0)) == "cannot say"  # nothing collapses


EXAMPLES: dict[str, Results] = {
    "clipping_dilemma": clips((0.6, 0), (0.9, 6)),
    "where_the_harm_is": scopes(6, 0, 0),
    "accuracy_at_speed": speeds((0.9, 0.9, 0.9)),
    "pass_at_k": passes(0.8, 0.95),
    "the_law": grid(1.0),
}


@pytest.mark.parametrize("rule", EXAMPLES)
def test_figures_and_page_follow_from_results(rule: str) -> None:
    experiment = next(e for e in load_experiments(ROOT / "experiments") if e.table.verdict == rule)
    made = EXAMPLES[rule]
    finding = rules()[rule](made)
    drawn = figures(rule, made)
    for text in drawn.values():
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "nan" not in text
    judged = Judged(made, finding, *judge({rule: finding})[rule])
    text = page(experiment, {"lab": judged}, {"lab": [f"lab{end}.svg" for end in drawn]})
    assert "**Verdict: shown** (p " in text and "![" in text
    assert text.index("Rule, stated before these runs") < text.index("![")
    assert "asks for 3 seeds of each arm; 6 are planned" in text and "widened by 1 steps" in text
    assert not math.isnan(judged.p) and "nan" not in text


def test_a_page_tells_what_is_left_and_runs_that_began_with_another_policy() -> None:
    def made(starts: list[float], done: int) -> Results:
        runs = {
            str(seed): {"ended": "", "evaluations": {"accuracy": [start, 0.9]}} for seed, start in enumerate(starts)
        }
        arms = [{"name": "one", "kind": "train", "axes": {}, "rate": 1.0, "seeds": runs}]
        head = {"format": FORMAT, "setting": "real", "machine": [{"workers": 2}], "wall_seconds": 9, "cpu_seconds": 9}
        return Results({**head, "tuning": {}, "arms": arms, "done": done, "planned": 4})

    finding = Finding(0.5, 0.5, "")
    whole, part = made([0.25] * 4, 4), made([0.25, 0.25, 0.27], 3)
    assert seeds_of(Judged(whole, finding, "not shown", 1.0, (4, 4))) == "4 seeds"
    assert seeds_of(Judged(part, finding, "not shown", 1.0, (2, 3))) == "2 to 3 seeds, 3 of 4 jobs"
    assert "different accuracy" not in describe_runs(whole)
    assert describe_runs(part).endswith("**Runs begin with policies of different accuracy: 0.25, 0.27.**")
    assert [with_sign(p) for p in (0.0421, 3e-9)] == ["= 0.042", "< 1e-6"]
