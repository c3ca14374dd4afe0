"""Every rule on results made by hand: it can say shown, not shown and opposite; figures and pages follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from experiments.lab.definition import load_experiments
from experiments.lab.figures import figures
from experiments.lab.law import bias_slope, halves, observations, predict
from experiments.lab.pages import page
from experiments.lab.results import FORMAT, Results, difference, mean_of
from experiments.lab.verdicts import rules

from stalewise.staleness.law import Law, simulate

ROOT = Path(__file__).parents[2]
JITTER = (-0.01, 0.0, 0.01)  # of three seeds


def run(curve: Sequence[float], seconds: float = 10.0, **more: Any) -> dict[str, Any]:
    """A kept run with this accuracy at equally spaced updates, learning for nine tenths of its time."""
    steps = len(curve) - 1
    return {
        "kind": "train",
        "ended": "",
        "collapsed_at": None,
        "evaluations": {
            "version": [32 * place for place in range(len(curve))],
            "accuracy": list(curve),
            "seconds": [seconds * place / steps for place in range(len(curve))],
        },
        "seconds": {"learn": 0.9 * seconds, "generate": 0.1 * seconds},
        "training_seconds": seconds,
        "generations": 4,
        "series": {"clip_fraction": [[1.0, 2.0], [0.1, 0.3]], "ess": [[1.0], [0.9]]},
        **more,
    }


def arm(name: str, curve: Sequence[float], axes: dict[str, str], *, kind: str = "train", **more: Any) -> dict[str, Any]:
    seeds = {str(place): run([value + by for value in curve], **more) for place, by in enumerate(JITTER)}
    return {"name": name, "kind": kind, "axes": axes, "seeds": seeds}


def results(*arms: dict[str, Any]) -> Results:
    machine = [{"cores": 2, "workers": 1, "seconds": 1.0}]
    head = {"format": FORMAT, "machine": machine, "planned": 1, "done": 1, "failed": {}}
    return Results({**head, "arms": list(arms)})


def verdict(rule: str, *arms: dict[str, Any]) -> str:
    return rules()[rule](results(*arms)).verdict


def clips(tight: Sequence[float], relaxed: Sequence[float]) -> list[dict[str, Any]]:
    return [
        arm(name, curve, {"clip": name, "mu": "256", "rate": "1e-3"})
        for name, curve in (("tight", tight), ("relaxed", relaxed))
    ]


@pytest.mark.parametrize(
    ("tight", "relaxed", "word"),
    [
        ([0.4, 0.6, 0.6], [0.4, 0.9, 0.3], "shown"),
        ([0.4, 0.6, 0.6], [0.4, 0.9, 0.9], "not shown"),  # it climbs and stays
        ([0.4, 0.6, 0.6], [0.4, 0.7, 0.3], "not shown"),  # it climbs in two of three seeds
        ([0.4, 0.8, 0.8], [0.4, 0.6, 0.3], "opposite"),
    ],
)
def test_clipping_dilemma(tight: list[float], relaxed: list[float], word: str) -> None:
    made = clips(tight, relaxed)
    if relaxed[1] == 0.7:
        made[1]["seeds"]["0"]["evaluations"]["accuracy"] = [0.4, 0.5, 0.2]
    assert verdict("clipping_dilemma", *made) == word


def scopes(**finals: float) -> list[dict[str, Any]]:
    return [arm(scope, [0.4, value], {"scope": scope, "mu": "96", "rate": "5e-4"}) for scope, value in finals.items()]


def test_where_the_harm_is() -> None:
    hold = {"post": 0.7, "suffix": 0.7, "sequence": 0.7}
    assert verdict("where_the_harm_is", *scopes(none=0.1, trigger=0.1, **hold)) == "shown"
    assert verdict("where_the_harm_is", *scopes(none=0.1, trigger=0.7, **hold)) == "not shown"
    assert verdict("where_the_harm_is", *scopes(none=0.9, trigger=0.9, **hold)) == "opposite"
    assert verdict("where_the_harm_is", *scopes(none=0.9)) == "cannot say"


def speeds(fresh: float, staged: float, seconds: float) -> list[dict[str, Any]]:
    rest = {"rate": "1e-3"}
    return [
        arm("GRPO", [0.4, 0.8, fresh], {"method": "GRPO", "stages": "fresh", **rest}, seconds=10.0),
        arm("µ-GRPO", [0.4, 0.8, staged], {"method": "µ-GRPO", "stages": "4", **rest}, seconds=seconds),
    ]


def test_accuracy_at_speed() -> None:
    assert verdict("accuracy_at_speed", *speeds(0.9, 0.9, 5.0)) == "shown"
    assert verdict("accuracy_at_speed", *speeds(0.9, 0.8, 5.0)) == "opposite"
    assert verdict("accuracy_at_speed", *speeds(0.9, 0.9, 20.0)) == "opposite"
    uncertain = speeds(0.9, 0.9, 5.0)
    uncertain[1]["seeds"]["0"]["evaluations"]["accuracy"][-1] = 0.7
    assert verdict("accuracy_at_speed", *uncertain) == "not shown"


def test_no_knob() -> None:
    def arms(p3o: float) -> list[dict[str, Any]]:
        finals = {"GRPO ε=0.2": 0.7, "GRPO ε=0.4": 0.8, "P3O": p3o}
        return [arm(method, [0.4, value], {"method": method, "mu": "16"}) for method, value in finals.items()]

    assert verdict("no_knob", *arms(0.8)) == "shown"
    assert verdict("no_knob", *arms(0.75)) == "opposite"  # better than one ε, worse than the best
    assert verdict("no_knob", *arms(0.8)[:2]) == "cannot say"


def test_mismatch() -> None:
    def arms(grpo: float, p3o: float) -> list[dict[str, Any]]:
        finals = {("GRPO", "none"): 0.9, ("GRPO", "fp8"): grpo, ("P3O", "none"): 0.9, ("P3O", "fp8"): p3o}
        return [arm(f"{m} {k}", [0.4, v], {"method": m, "mismatch": k}) for (m, k), v in finals.items()]

    assert verdict("mismatch", *arms(grpo=0.5, p3o=0.88)) == "shown"
    assert verdict("mismatch", *arms(grpo=0.88, p3o=0.88)) == "not shown"
    assert verdict("mismatch", *arms(grpo=0.88, p3o=0.5)) == "opposite"


def test_two_anchors() -> None:
    def arms(plain: float, hot: float) -> list[dict[str, Any]]:
        finals = {("one", "1.0"): 0.9, ("one", "1.2"): 0.9, ("two", "1.0"): plain, ("two", "1.2"): hot}
        return [
            arm(f"{m}{t}", [0.4, v], {"method": f"{m} anchor{'s' * (m == 'two')}", "temperature": t, "rate": "1e-3"})
            for (m, t), v in finals.items()
        ]

    assert verdict("two_anchors", *arms(plain=0.9, hot=0.4)) == "shown"
    assert verdict("two_anchors", *arms(plain=0.9, hot=0.9)) == "not shown"
    assert verdict("two_anchors", *arms(plain=0.9, hot=0.95)) == "opposite"


def test_pass_at_k() -> None:
    def passes(name: str, one: float, many: float) -> dict[str, Any]:
        found = {"1": {"value": one}, "64": {"value": many}}
        seeds = {
            str(s): {"pass_at": {k: {"value": v["value"] + j / 10} for k, v in found.items()}}
            for s, j in enumerate(JITTER)
        }
        return {"name": name, "kind": "evaluate", "axes": {}, "seeds": seeds}

    before = passes("before", 0.4, 0.95)
    before["seeds"] = {"0": {"pass_at": {"1": {"value": 0.4}, "64": {"value": 0.95}}}}
    assert verdict("pass_at_k", before, passes("after P3O", 0.8, 0.95)) == "shown"
    assert verdict("pass_at_k", before, passes("after P3O", 0.4, 0.95)) == "not shown"
    assert verdict("pass_at_k", before, passes("after P3O", 0.8, 0.8)) == "opposite"
    assert "pass@k" in figures()["pass_at_k"](results(before, passes("after P3O", 0.8, 0.95)))[""]


def test_ours_is_judged_at_equal_time() -> None:
    def arms(auto: float, seconds: float) -> list[dict[str, Any]]:
        return [
            arm("auto", [0.4, auto], {"method": "auto", "rate": "1e-3"}, seconds=seconds),
            arm("P3O", [0.4, 0.8], {"method": "P3O", "rate": "1e-3"}, seconds=10.0),
        ]

    assert verdict("ours", *arms(0.9, 10.0)) == "shown"
    assert verdict("ours", *arms(0.8, 10.0)) == "not shown"
    assert verdict("ours", *arms(0.9, 20.0)) == "opposite"  # after 10 s it stands at 0.65


def test_ours_compares_means_over_learning_rates() -> None:
    def arms(method: str, **ends: float) -> list[dict[str, Any]]:
        return [arm(f"{method} {rate}", [0.4, end], {"method": method, "rate": rate}) for rate, end in ends.items()]

    given = [*arms("auto", small=0.9, large=0.7), *arms("P3O", small=0.9, large=0.2), *arms("GRPO", small=0.9)]
    given[2]["seeds"].popitem()  # of P3O, whose other seeds are compared still
    (line,) = (one for one in rules()["ours"](results(*given)).lines if "mean over η" in one)
    assert line.startswith("auto less P3O, ") and "GRPO" not in line  # which was run at one of the two alone
    small, large, whole = (line.split(word)[1].split("]")[0] for word in ("small", "large", "mean over η"))
    assert "+0.000" in small and large.count("+0.500") == 3  # mean and both ends: the seeds move together
    assert whole.count("+0.250") == 3


# ---------------------------------------------------------------- the law


def grid(law: Law | None, slope: float = 1.0) -> Results:
    """Runs drawn from a law, or from a coin; and biases that grow with a power of S·η."""
    generator = np.random.default_rng(0)
    arms: list[dict[str, Any]] = []
    for S in (3, 15, 63, 255):
        for rate in (5e-4, 1e-3, 2e-3, 4e-3):
            seeds: dict[str, Any] = {}
            for seed in range(4):
                lost: int | None = int(generator.integers(1, 257)) if generator.random() < 0.5 else None
                if law is not None:
                    drawn = simulate(
                        law, staleness=S, learning_rate=rate, updates=256, update_norm_per_lr=180.0, generator=generator
                    )
                    lost = drawn.collapsed_at
                seeds[str(seed)] = run([0.4, 0.5], collapsed_at=lost, update_norm_per_lr=180.0)
            axes = {"S": str(S), "rate": f"{rate:g}", "T": "256"}
            arms.append({"name": f"{S} {rate}", "kind": "train", "axes": axes, "seeds": seeds})
    for rate in (1e-4, 1e-3):
        seeds = {
            str(seed): {
                "learning_rate": rate,
                "rows": [
                    {
                        "age": age,
                        "objective": "relaxed clip",
                        "bias": (1 + seed / 100) * (age * rate) ** slope,
                        "cosine": 0.9,
                    }
                    for age in (8, 32, 64)
                ],
            }
            for seed in range(3)
        }
        arms.append({"name": f"bias {rate}", "kind": "bias", "axes": {"bias_rate": f"{rate:g}"}, "seeds": seeds})
    return results(*arms)


LAW = Law(batch_radius=math.inf, critical_radius=70.0, scatter=0.2)


def test_the_law_foretells_runs_that_obey_it() -> None:
    made = grid(LAW)
    white, black = halves(observations(made))
    assert len(white) == len(black) == 32
    assert predict(white, black).per_run > predict(white, black).base_rate
    assert bias_slope(made).value == pytest.approx(1.0, abs=0.01)
    finding = rules()["the_law"](made)
    assert finding.verdict == "shown"
    (allowed,) = (line for line in finding.lines if "that a plan of all these runs allows" in line)
    rates = [float(part.split(" at S=")[0]) for part in allowed.split(": ")[1].split(", ")]
    planned = LAW.critical_radius * math.exp(-1.645 * LAW.scatter) / (256 * 180.0)
    assert rates == [pytest.approx(planned, rel=0.2)] * 4


@pytest.mark.nightly
def test_the_law_does_not_foretell_a_coin() -> None:
    assert rules()["the_law"](grid(None)).verdict != "shown"


@pytest.mark.nightly
def test_a_bias_that_does_not_grow_is_the_opposite() -> None:
    assert rules()["the_law"](grid(LAW, slope=0.0)).verdict == "opposite"
    assert rules()["the_law"](grid(LAW, slope=0.4)).verdict == "not shown"


def test_the_power_of_a_bias_is_found_where_some_places_drown_in_noise() -> None:
    """Squares scatter by as much as the smallest of them are: which places count must not decide the power."""
    inside = 0
    for trial in range(20):
        generator = np.random.default_rng(trial)
        arms: list[dict[str, Any]] = []
        for rate in (1e-4, 3e-4, 1e-3):
            seeds: dict[str, Any] = {}
            for seed in range(5):
                squares = [(8.0 * age * rate) ** 2 + generator.normal(0, 2e-4) for age in (8, 16, 32, 64)]
                rows = [
                    {"age": age, "objective": "relaxed clip", "bias": math.copysign(math.sqrt(abs(q)), q)}
                    for age, q in zip((8, 16, 32, 64), squares, strict=True)
                ]
                seeds[str(seed)] = {"learning_rate": rate, "rows": rows}
            arms.append({"name": f"{rate}", "kind": "bias", "axes": {"bias_rate": f"{rate:g}"}, "seeds": seeds})
        slope = bias_slope(results(*arms))
        assert slope.value == pytest.approx(1.0, abs=0.15)
        inside += slope.low <= 1.0 <= slope.high
    assert inside >= 17


# ---------------------------------------------------------------- means, figures and pages


def test_means_have_the_interval_of_student() -> None:
    # t(0.975, 2) = 4.303; the standard error of 0.5, 0.7, 0.9 is 0.2/√3.
    mean = mean_of([0.5, 0.7, 0.9])
    assert mean.high - mean.value == pytest.approx(4.3027 * 0.2 / math.sqrt(3), rel=1e-4)
    assert mean_of([0.5]).seeds == 1 and math.isnan(mean_of([0.5]).low)
    assert mean_of([]).seeds == 0


def test_differences_are_paired_by_seed() -> None:
    first, second = results(*clips([0.4, 0.5], [0.4, 0.7])).arms
    gap = difference(first, second)  # the same jitter in both: no spread is left
    assert (gap.low, gap.high) == (pytest.approx(0.2), pytest.approx(0.2))


EXAMPLES: dict[str, Results] = {
    "clipping_dilemma": results(*clips([0.4, 0.6, 0.6], [0.4, 0.9, 0.3])),
    "where_the_harm_is": results(*scopes(none=0.1, trigger=0.1, post=0.7, suffix=0.7, sequence=0.7)),
    "accuracy_at_speed": results(*speeds(0.9, 0.9, 5.0)),
    "the_law": grid(LAW),
}


@pytest.mark.parametrize("rule", EXAMPLES)
def test_figures_and_page_follow_from_results(rule: str) -> None:
    experiment = next(e for e in load_experiments(ROOT / "experiments") if e.table.verdict == rule)
    made = EXAMPLES[rule]
    finding = rules()[rule](made)
    drawn = figures()[rule](made)
    for text in drawn.values():
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "nan" not in text
    text = page(experiment, {"lab": (made, finding)}, {"lab": [f"lab{end}.svg" for end in drawn]})
    assert f"**Verdict: {finding.verdict}.**" in text and "![" in text
    assert text.index("Rule, stated before these runs") < text.index("![")
