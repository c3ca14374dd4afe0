"""The rule of each experiment, stated before its runs. The docstring of a function is printed on the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from experiments.lab.comparisons import (
    collapsed_of,
    largest_value,
    less,
    mean_metric,
    only,
    over_all,
    speed_up,
    time_to_equal,
    tuned,
)
from experiments.lab.finding import EQUAL, Finding, above, below, judged, missing, signed
from experiments.lab.law import the_law
from experiments.lab.results import (
    ArmResult,
    Mean,
    Results,
    best,
    collapsed,
    difference,
    final,
    mean_of,
    not_learning,
    seconds,
    switches,
)


def clipping_dilemma(results: Results) -> Finding:
    """Decided at the largest µ and the largest η. Shown where the relaxed clip's best accuracy on the way is above the
    tight clip's best, and its final accuracy is below its own best by more than 0.1, both beyond doubt. Opposite
    where the tight clip's best is above the relaxed clip's, beyond doubt. Otherwise not shown.
    """
    place = {"mu": largest_value(results, "mu"), "rate": largest_value(results, "rate")}
    tight, relaxed = (only(results.where(clip=clip, **place)) for clip in ("tight", "relaxed"))
    if tight is None or relaxed is None:
        return missing("a tight and a relaxed clip at the largest µ")
    climb = difference(tight, relaxed, best)
    fall = relaxed.mean(lambda run: less(best(run), final(run)))
    clipped = [f"{arm.name}: {arm.mean(mean_metric('clip_fraction')).value:.1%}" for arm in (tight, relaxed)]
    return Finding(
        judged(above(climb) and above(fall, 0.1), below(climb)),
        f"best {tight.mean(best)} tight, {relaxed.mean(best)} relaxed, which ends at {relaxed.mean(final)}",
        [
            f"Relaxed less tight, best on the way: {signed(climb)}; the relaxed clip then falls by {fall}.",
            f"The tight clip ends at {tight.mean(final)}.",
            f"Clipped tokens, mean over the run: {'; '.join(clipped)}.",
        ],
    )


def where_the_harm_is(results: Results) -> Finding:
    """Decided at the largest µ and η 5e-4 (real model: 2e-5). Shown where each of post, suffix and sequence ends with a
    higher accuracy than each of none and trigger, beyond doubt in all six pairs. Opposite where no pair is so and at
    least one is the other way round, beyond doubt. Otherwise not shown. The region: places (µ, η) at which the mean of
    the three is above the mean of the two by at least 0.1.
    """
    head = [arm for arm in results.arms if "region" not in arm.axes]
    arms = {arm.axes["scope"]: arm for arm in head}
    pairs = [(low, high) for low in ("none", "trigger") for high in ("post", "suffix", "sequence")]
    if any(scope not in arms for pair in pairs for scope in pair):
        return missing("all five scopes at the first place")
    gaps = {f"{high} less {low}": difference(arms[low], arms[high]) for low, high in pairs}
    right, wrong = sum(above(gap) for gap in gaps.values()), sum(below(gap) for gap in gaps.values())
    lines = [f"{name}: {signed(gap)}." for name, gap in gaps.items()]
    lines.append("Collapsed: " + ", ".join(f"{scope} {collapsed_of(arm)}" for scope, arm in arms.items()) + ".")
    region = _region(results)
    if region:
        wide = [place for place, gap in region.items() if gap >= 0.1]
        lines.append(
            f"The scopes differ by 0.1 or more at {len(wide)} of {len(region)} places tried: {', '.join(wide)}."
        )
        lines.append("Three less two, by place: " + "; ".join(f"{p}: {gap:+.2f}" for p, gap in region.items()) + ".")
    ours = ", ".join(f"{scope} {arm.mean(final)}" for scope, arm in arms.items())
    return Finding(judged(right == 6, right == 0 and wrong > 0), f"{ours}; {right} of 6 pairs", lines)


def _region(results: Results) -> dict[str, float]:
    """Mean of post, suffix and sequence minus the mean of none and trigger, by µ and η."""
    found: dict[str, float] = {}
    apart = {"region": "yes"} if results.where(region="yes") else {}  # else a run would count in both of its arms
    for mu, rate in product(results.values("mu"), results.values("rate")):
        means: dict[str, float] = {}
        for scope in ("none", "trigger", "post", "suffix", "sequence"):
            arms = results.where(mu=mu, rate=rate, scope=scope, **apart)
            means[scope] = mean_of(final(run) for arm in arms for run in arm.runs.values()).value
        gap = np.mean([means[s] for s in ("post", "suffix", "sequence")]) - (means["none"] + means["trigger"]) / 2
        if math.isfinite(gap):
            found[f"µ {mu}, η {rate}"] = float(gap)
    return found


def accuracy_at_speed(results: Results) -> Finding:
    """Each method at the η at which its mean final accuracy is best. Shown where µ-GRPO in 4 stages is not below GRPO
    with µ=4 by more than 0.02, and takes less time, both beyond doubt. Opposite where it is below by more than 0.02, or
    takes more time, beyond doubt. Otherwise not shown. Time is that of training at equal updates, without evaluating.
    """
    fresh = tuned(results.where(method="GRPO", stages="fresh"))
    staged = tuned(results.where(method="µ-GRPO", stages="4"))
    if fresh is None or staged is None:
        return missing("GRPO with µ=4 and µ-GRPO in 4 stages")
    gap, ratio = difference(fresh, staged), speed_up(fresh, staged)
    reached = time_to_equal(fresh, staged)
    lines = [f"µ-GRPO in 4 stages less GRPO µ=4: {signed(gap)} at {ratio} times the speed{reached}."]
    for arm in results.arms:
        if arm.kind == "train":
            lines.append(
                f"{arm.name}: {arm.mean(final)}, {arm.mean(seconds).value:.1f} s, learner not learning "
                f"{arm.mean(not_learning).value:.0%}, {arm.mean(switches).value:.0f} generations."
            )
    lines += [
        f"{arm.name}: {run['accuracy']['value']:.3f} [{run['accuracy']['low']:.3f}, {run['accuracy']['high']:.3f}] of "
        f"{run['prompts']} questions."
        for arm in results.arms
        if arm.kind == "evaluate"
        for run in arm.runs.values()
    ]
    worse, slower = below(gap, -EQUAL), ratio.seeds > 1 and ratio.high < 1
    equal = gap.low > -EQUAL if gap.seeds > 1 else gap.value > -EQUAL
    faster = ratio.low > 1 if ratio.seeds > 1 else ratio.value > 1
    ours = f"{fresh.mean(final)} → {staged.mean(final)} at {ratio.value:.2f}× the speed"
    idle = f"; not learning {fresh.mean(not_learning).value:.0%} → {staged.mean(not_learning).value:.0%}"
    return Finding(judged(equal and faster, worse or slower), ours + idle, lines)


def no_knob(results: Results) -> Finding:
    """At every µ, P3O against GRPO with the ε at which its mean final accuracy is best. Shown where P3O is at no µ
    below it by more than 0.02 (lower end of the interval). Opposite where at every µ it is below by more than that,
    beyond doubt. Otherwise not shown.
    """
    gaps: dict[str, Mean] = {}
    lines: list[str] = []
    for rate, mu in product((None, *results.values("rate")), results.values("mu")):  # another η is beside the rule
        arms = [arm for arm in results.where(mu=mu) if arm.axes.get("rate") == rate]
        p3o = only([arm for arm in arms if arm.axes["method"] == "P3O"])
        others = [arm for arm in arms if arm.axes["method"] != "P3O"]
        chosen = tuned(others)
        if p3o is None or chosen is None:
            continue
        gap = difference(chosen, p3o)
        listed = ", ".join(f"{arm.axes['method']} {arm.mean(final)}" for arm in [*others, p3o])
        place = f"µ={mu}" if rate is None else f"Beside the rule, η={rate}, µ={mu}"
        lines.append(f"{place}: {listed}; P3O less the best of GRPO ({chosen.axes['method']}): {signed(gap)}.")
        if rate is None:
            gaps[mu] = gap
    if not gaps:
        return missing("P3O and GRPO at one µ")
    kept = all((gap.low if gap.seeds > 1 else gap.value) > -EQUAL for gap in gaps.values())
    ours = "P3O less best GRPO: " + ", ".join(f"{signed(gap)} at µ={mu}" for mu, gap in gaps.items())
    return Finding(judged(kept, all(below(gap, -EQUAL) for gap in gaps.values())), ours, lines)


def mismatch(results: Results) -> Finding:
    """A method's loss is its final accuracy without mismatch less that with it, seed by seed. Shown where P3O's mean
    loss is below 0.1 under every mismatch, and below GRPO's, beyond doubt, under at least one. Opposite where P3O's
    loss is above GRPO's, beyond doubt, under more of them than it is below. Otherwise not shown.
    """
    losses: dict[tuple[str, str], Mean] = {}
    gaps: dict[str, Mean] = {}
    kinds = [kind for kind in results.values("mismatch") if kind != "none"]
    for kind, method in product(kinds, results.values("method")):
        plain, disturbed = (only(results.where(method=method, mismatch=k)) for k in ("none", kind))
        if plain is not None and disturbed is not None:
            losses[kind, method] = difference(disturbed, plain)
    for kind in kinds:
        grpo, p3o = (only(results.where(method=method, mismatch=kind)) for method in ("GRPO", "P3O"))
        plain = [only(results.where(method=method, mismatch="none")) for method in ("GRPO", "P3O")]
        if grpo and p3o and plain[0] and plain[1]:
            gaps[kind] = _loss_gap(grpo, p3o, plain[0], plain[1])
    if not gaps:
        return missing("GRPO and P3O with and without a mismatch")
    stays = all(losses[kind, "P3O"].value < 0.1 for kind in gaps)
    fewer, more = sum(below(gap) for gap in gaps.values()), sum(above(gap) for gap in gaps.values())
    lines = [
        f"{kind}: loss of "
        + ", ".join(f"{m} {loss.value:+.3f}" for (k, m), loss in losses.items() if k == kind)
        + (f"; P3O's loss less GRPO's {signed(gaps[kind])}." if kind in gaps else ".")
        for kind in kinds
    ]
    worst = max(gaps, key=lambda kind: losses[kind, "P3O"].value)
    ours = f"P3O loses {signed(losses[worst, 'P3O'])} at most, under {worst}; by the rule less than GRPO in {fewer}, "
    ours += f"more in {more} of {len(gaps)}"
    return Finding(judged(stays and fewer > 0, more > fewer), ours, lines)


def _loss_gap(grpo: ArmResult, p3o: ArmResult, grpo_plain: ArmResult, p3o_plain: ArmResult) -> Mean:
    """P3O's loss minus GRPO's, paired by seed."""
    values: list[float | None] = []
    for seed in set(grpo.runs) & set(p3o.runs) & set(grpo_plain.runs) & set(p3o_plain.runs):
        theirs = less(final(grpo_plain.runs[seed]), final(grpo.runs[seed]))
        ours = less(final(p3o_plain.runs[seed]), final(p3o.runs[seed]))
        values.append(less(ours, theirs))
    return mean_of(values)


def two_anchors(results: Results) -> Finding:
    """Decided at the largest η. Shown where, at temperature 1.2, two anchors end below one anchor by more than 0.1, and
    at 1.0 not above it, beyond doubt in both cases. Opposite where two anchors end above one at 1.2, beyond doubt.
    Otherwise not shown.
    """
    rate = largest_value(results, "rate")
    gaps: dict[str, Mean] = {}
    lines: list[str] = []
    for temperature, at in product(("1.0", "1.2"), results.values("rate")):
        one, two = (
            only(results.where(method=m, temperature=temperature, rate=at)) for m in ("one anchor", "two anchors")
        )
        if one is None or two is None:
            continue
        gap = difference(one, two)
        lines.append(
            f"Temperature {temperature}, η {at}: one anchor {one.mean(final)}, two anchors {two.mean(final)} "
            f"({signed(gap)}); collapsed {collapsed_of(one)} and {collapsed_of(two)}."
        )
        if at == rate:
            gaps[temperature] = gap
    if len(gaps) < 2:
        return missing("one and two anchors at both temperatures")
    ours = f"two less one: {signed(gaps['1.0'])} at 1.0, {signed(gaps['1.2'])} at 1.2"
    return Finding(judged(below(gaps["1.2"], -0.1) and not above(gaps["1.0"]), above(gaps["1.2"])), ours, lines)


def pass_at_k(results: Results) -> Finding:
    """Shown where P3O's pass@1 after training is above that before, beyond doubt, and its pass@64 is at no µ below
    that before by more than 0.02 (lower end of the interval). Opposite where pass@64 is below by more than that, beyond
    doubt, at any µ. Otherwise not shown.
    """
    before = results.arm("before")
    after = [arm for arm in results.arms if arm.name.startswith("after ")]
    p3o = [arm for arm in after if "P3O" in arm.name]
    if before is None or not p3o:
        return missing("pass@k before and after P3O")
    start = next(iter(before.runs.values()))
    k = max(start["pass_at"], key=int)
    first = [_gain(arm, start, "1") for arm in p3o]
    last = [_gain(arm, start, k) for arm in p3o]
    lines = [f"Before: pass@1 {start['pass_at']['1']['value']:.3f}, pass@{k} {start['pass_at'][k]['value']:.3f}."]
    lines += [
        f"{arm.name}: pass@1 {signed(_gain(arm, start, '1'))}, pass@{k} {signed(_gain(arm, start, k))}."
        for arm in after
    ]
    kept = all((gap.low if gap.seeds > 1 else gap.value) > -EQUAL for gap in last)
    ours = "; ".join(
        f"{a.name.removeprefix('after ')}: pass@1 {signed(f)}, pass@{k} {signed(g)}"
        for a, f, g in zip(p3o, first, last, strict=True)
    )
    return Finding(judged(all(map(above, first)) and kept, any(below(gap, -EQUAL) for gap in last)), ours, lines)


def _gain(arm: ArmResult, start: Mapping[str, Any], k: str) -> Mean:
    return arm.mean(lambda run: run["pass_at"][k]["value"] - start["pass_at"][k]["value"])


def ours(results: Results) -> Finding:
    """Accuracy at equal wall-clock: at the shortest mean time of the compared arms, on straight lines between a run's
    evaluations. `auto` and the single methods each at the η at which that is best. Shown where `auto` is above the best
    single method, beyond doubt; opposite where it is below, beyond doubt; otherwise not shown.
    """
    arms = [arm for arm in results.arms if "method" in arm.axes]
    automatic = [arm for arm in arms if arm.axes["method"] == "auto"]
    single = [arm for arm in arms if arm.axes["method"] != "auto"]
    if not automatic or not single:
        return missing("auto and a single method")
    gap, other, told = _at_clock(automatic, single, min(arm.mean(seconds).value for arm in arms))
    lines = [told]
    # A collapsed run may end early and would set the time for all.
    whole = [arm.mean(seconds).value for arm in arms if not arm.count(collapsed)[0]]
    if whole:
        lines.append("Beside the rule, by the shortest time of an arm that never collapsed: ")
        lines[-1] += _at_clock(automatic, single, min(whole))[2]
    for method in results.values("method"):
        finals = {arm.axes["rate"]: arm.mean(final) for arm in arms if arm.axes["method"] == method}
        lines.append(
            f"{method}, final accuracy: " + ", ".join(f"η {rate} {mean}" for rate, mean in finals.items()) + "."
        )
    lines += _less_each(results, automatic)
    if planned := [arm for arm in results.arms if "planned" in arm.axes]:
        lines.append("As planned: " + ", ".join(f"{arm.name} {arm.mean(final)}" for arm in planned) + ".")
    stage = sorted((arm for arm in results.arms if arm.kind == "learn"), key=lambda arm: -arm.mean(final).value)
    if stage:
        lines.append(
            "One stored stage, final accuracy by objective: "
            + ", ".join(f"{a.axes['objective']} {a.mean(final)}" for a in stage)
            + "."
        )
    return Finding(judged(above(gap), below(gap)), f"auto less {other}: {signed(gap)} at equal wall-clock", lines)


def _less_each(results: Results, automatic: Sequence[ArmResult]) -> list[str]:
    """`auto` minus each method run at the same learning rates: at each rate, and averaged."""
    own = {arm.axes["rate"]: arm for arm in automatic}
    lines: list[str] = []
    for method in results.values("method"):
        rival = {arm.axes["rate"]: arm for arm in results.where(method=method)}
        if method != "auto" and rival.keys() == own.keys():
            at = [f"η {rate} {signed(difference(rival[rate], own[rate]))}" for rate in own]
            whole = signed(over_all(automatic, list(rival.values())))
            lines.append(f"auto less {method}, final accuracy: {', '.join(at)}, mean over η {whole}.")
    return lines


def _at_clock(automatic: Sequence[ArmResult], single: Sequence[ArmResult], clock: float) -> tuple[Mean, str, str]:
    """`auto` minus the best single method at a time, the name of that method, and both as text."""

    def there(run: Mapping[str, Any]) -> float | None:
        known = [
            (s, a)
            for s, a in zip(run["evaluations"]["seconds"], run["evaluations"]["accuracy"], strict=True)
            if s is not None
        ]
        return float(np.interp(clock, [s for s, _ in known], [a for _, a in known])) if known else None

    one, other = (tuned(side, there) for side in (automatic, single))
    assert one is not None and other is not None
    gap = difference(other, one, there)
    told = f"at {clock:.1f} s of training, best η each, {one.name} has {one.mean(there)}, {other.name} "
    return gap, other.name, told + f"{other.mean(there)} ({signed(gap)})."


def rules() -> dict[str, Callable[[Results], Finding]]:
    """Rules by the name used in definitions."""
    listed = (clipping_dilemma, where_the_harm_is, accuracy_at_speed, no_knob, mismatch, two_anchors, the_law)
    return {rule.__name__: rule for rule in (*listed, pass_at_k, ours)}
