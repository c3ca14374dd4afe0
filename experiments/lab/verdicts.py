"""The rule of each experiment, stated before its runs. The docstring of a function is printed on the page.

A rule gives two one-sided p-values: that the claim is not so, and that its opposite is not so. Where a claim has
several parts, all must hold, so that its p-value is the largest of theirs. `judge` corrects for the number of claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.lab.law import (
    OLDEST,
    LawScores,
    exponent_lines,
    judge_models,
    lengths_of,
    observations,
    resampled_exponents,
)
from experiments.lab.results import ArmResult, Results
from experiments.lab.statistics import ALPHA, Difference, Spread, fisher, holm, mean_of, smallest_found, welch

SHOWN, NOT_SHOWN, OPPOSITE, UNKNOWN = "shown", "not shown", "opposite", "cannot say"
EQUAL = 0.02  # accuracies closer than this count as equal
MARGIN = 0.03  # of claims that were not tuned here
FALL = 0.1  # a loss of accuracy that is a failure
LOST = 0.1  # the same as a share


@dataclass(frozen=True, slots=True)
class Finding:
    """Two p-values, our number, and further lines for the page. Without p-values the results cannot say."""

    p_shown: float | None
    p_opposite: float | None
    ours: str
    lines: list[str] = field(default_factory=list)


def missing(what: str) -> Finding:
    """A finding for results that lack `what`."""
    return Finding(None, None, f"missing: {what}")


def judge(findings: Mapping[str, Finding], claims: int = 0) -> dict[str, tuple[str, float]]:
    """Verdict of each claim with its adjusted p-value: Holm over all claims and their opposites together.

    `claims` is the number of claims where some were not tested yet.
    """
    known = {name: finding for name, finding in findings.items() if finding.p_shown is not None}
    p_values = {f"{name} {SHOWN}": finding.p_shown or 0.0 for name, finding in known.items()}
    p_values |= {f"{name} {OPPOSITE}": finding.p_opposite or 0.0 for name, finding in known.items()}
    adjusted = holm(p_values, 2 * claims)
    verdicts: dict[str, tuple[str, float]] = {}
    for name in findings:
        if name not in known:
            verdicts[name] = (UNKNOWN, 1.0)
            continue
        shown, opposite = adjusted[f"{name} {SHOWN}"], adjusted[f"{name} {OPPOSITE}"]
        if shown < ALPHA:
            verdicts[name] = (SHOWN, shown)
        else:
            verdicts[name] = (OPPOSITE, opposite) if opposite < ALPHA else (NOT_SHOWN, shown)
    return verdicts


def _ready(*arms: ArmResult | None) -> bool:
    """Whether all arms are there, with two seeds or more."""
    return all(arm is not None and len(arm.runs) > 1 for arm in arms)


def _less(one: ArmResult, other: ArmResult) -> Difference:
    """Score of the first minus that of the second."""
    return welch(other.scores, one.scores)


def _told(one: ArmResult, other: ArmResult, gap: Difference | None = None) -> str:
    """Both arms and their difference, `gap`; by default Welch's."""
    gap = gap or _less(one, other)
    return (
        f"{one.name} (η {one.rate:g}) {one.mean}, {other.name} (η {other.rate:g}) {other.mean}: {gap}; "
        f"a difference of {smallest_found(gap):.3f} would be found"
    )


def _counts(arms: Sequence[ArmResult]) -> str:
    return ", ".join("{} {} of {}".format(arm.name, *arm.collapses) for arm in arms)


def clipping_dilemma(results: Results) -> Finding:
    """A fall is the share of its best accuracy on the way that a run has lost in its score. The tight clip is taken at
    the rate where its best on the way is highest. Shown where at some rate the relaxed clip's best on the way is above
    that, and its fall is larger than a tenth and than the tight clip's fall (t-tests with the deviation over seeds
    pooled over arms; the smallest p-value of a rate, times their number). Opposite where the relaxed clip's best is
    below the tight clip's at every rate.
    """
    tight, relaxed = (results.where(clip=clip) for clip in ("tight", "relaxed"))
    if not tight or len(relaxed) < len(results.values("rate")) or not _ready(*tight, *relaxed):
        return missing("both clips at every rate")
    if not any(_rises(run) for arm in relaxed for run in arm.runs.values()):
        return missing("a run of the relaxed clip that rises above its start")
    rival = max(tight, key=lambda arm: mean_of(arm.best).value)
    of_best, of_falls = Spread.of([arm.best for arm in results.arms]), Spread.of([_falls(arm) for arm in results.arms])
    climbs = {arm.name: of_best.less(arm.best, rival.best) for arm in relaxed}
    falls = {arm.name: of_falls.mean(_falls(arm)) for arm in results.arms}
    p_values = {
        arm.name: max(
            climbs[arm.name].p_above(),
            falls[arm.name].p_above(LOST),
            of_falls.less(_falls(arm), _falls(rival)).p_above(),
        )
        for arm in relaxed
    }
    chosen = min(relaxed, key=lambda arm: p_values[arm.name])
    ours = (
        f"best on the way {mean_of(rival.best)} {rival.name}, {mean_of(chosen.best)} {chosen.name} "
        f"({climbs[chosen.name]}); shares lost at the end {falls[rival.name]} and {falls[chosen.name]}"
    )
    lines = [f"{arm.name}: best on the way {mean_of(arm.best)}, lost at the end {falls[arm.name]}." for arm in tight]
    for arm in relaxed:
        lines.append(
            f"{arm.name}: best on the way {mean_of(arm.best)}, less that of {rival.name}: {climbs[arm.name]}; lost "
            f"at the end {falls[arm.name]}."
        )
    p_shown = min(1.0, len(relaxed) * min(p_values.values()))
    return Finding(p_shown, max(climb.p_below() for climb in climbs.values()), ours, lines)


def _rises(run: Mapping[str, Any]) -> bool:
    """Whether any evaluation is above the first one."""
    first, *later = run["evaluations"]["accuracy"]
    return max(later, default=0.0) > first


def _falls(arm: ArmResult) -> list[float]:
    """The share of its best accuracy on the way that each run has lost in its score."""
    return [1 - end / best if best else 0.0 for best, end in zip(arm.best, arm.scores, strict=True)]


def where_the_harm_is(results: Results) -> Finding:
    """At the hot rate. Shown where the relaxed clip without a veto collapses more often than with the suffix vetoed,
    and than with the whole response vetoed (Fisher, both). Opposite where either veto collapses more often than none.
    """
    scopes = ("none", "suffix", "sequence", "tight")
    hot = {scope: arm for scope in scopes if (arm := results.arm(f"{scope}, hot")) is not None}
    own = {scope: arm for scope in scopes if (arm := results.arm(scope)) is not None and _ready(arm)}
    if not all(_ready(hot.get(scope)) for scope in scopes):
        return missing("all scopes and the tight clip at the hot rate")
    vetoes = [hot["suffix"], hot["sequence"]]
    worse = [fisher(hot["none"].collapses, arm.collapses) for arm in vetoes]
    better = [fisher(arm.collapses, hot["none"].collapses) for arm in vetoes]
    control = fisher(hot["none"].collapses, hot["tight"].collapses)
    lines = [f"Scores at the hot rate: {_told(arm, hot['none'])}." for arm in (*vetoes, hot["tight"])]
    lines += [
        f"The control: a tight clip without any veto collapses {'less often than' if control < ALPHA else 'like'} none "
        f"(p = {control:.2g}); {_told(hot['suffix'], hot['tight'])}.",
    ]
    if len(own) == len(scopes):
        lines.append(
            f"Each at its own rate: {_told(own['suffix'], own['tight'])}; {_told(own['suffix'], own['none'])}; "
            f"collapsed {_counts(list(own.values()))}."
        )
    gaps = ", ".join(f"{scope} {_less(hot[scope], hot['none'])}" for scope in ("suffix", "sequence", "tight"))
    ours = f"collapsed: {_counts(list(hot.values()))}; score less that of none: {gaps}"
    return Finding(max(worse), min(1.0, 2 * min(better)), ours, lines)


def accuracy_at_speed(results: Results) -> Finding:
    """µ-GRPO against GRPO with µ=4, each at its own rate, at equal updates. Shown where it is not below by more than
    0.02 at µ = 16, at 64 and at 256 (Welch, one-sided, all three). Opposite where it is below by more than that at any
    (the smallest p-value, times three).
    """
    fresh = results.arm("GRPO, µ=4")
    staged = results.where(method="µ-GRPO")
    if fresh is None or not _ready(fresh, *staged) or len(staged) < 3:
        return missing("GRPO with µ=4, and µ-GRPO at three µ")
    gaps = [_less(arm, fresh) for arm in staged]
    lines = [f"{_told(arm, fresh)}." for arm in (*staged, *results.where(method="tight clip")) if _ready(arm)]
    ours = f"{fresh.mean} with µ=4; µ-GRPO less that: "
    ours += ", ".join(f"{gap} at µ={arm.axes['mu']}" for gap, arm in zip(gaps, staged, strict=True))
    worst = min(1.0, len(gaps) * min(gap.p_below(-EQUAL) for gap in gaps))
    return Finding(max(gap.p_above(-EQUAL) for gap in gaps), worst, ours, lines)


def _chosen(results: Results, arms: Sequence[ArmResult]) -> ArmResult:
    """The arm with the best mean on the tuning seeds, at its best rate."""

    def tuned(arm: ArmResult) -> float:
        return max(sum(values) / len(values) for values in results.tuning["scores"][arm.name].values())

    return max(arms, key=tuned)


def no_knob(results: Results) -> Finding:
    """At every µ, P3O against GRPO with the ε that was best on the tuning seeds, each at its own rate. Shown where P3O
    is not below it by more than 0.03 at any µ (Welch, one-sided, all). Opposite where it is below by more than that at
    any (the smallest p-value, times the number of µ).
    """
    gaps: dict[str, Difference] = {}
    lines: list[str] = []
    for mu in results.values("mu"):
        arms = [arm for arm in results.where(mu=mu) if _ready(arm)]
        p3o = next((arm for arm in arms if arm.axes["method"] == "P3O"), None)
        others = [arm for arm in arms if arm is not p3o]
        if p3o is None or len(others) < 3:
            return missing(f"P3O and GRPO with three ε at µ={mu}")
        rival = _chosen(results, others)
        gaps[mu] = _less(p3o, rival)
        lines.append(f"{_told(p3o, rival)}. Collapsed: {_counts(arms)}.")
        tight = next(arm for arm in others if arm.axes["method"] == "GRPO ε=0.2")
        lines += [f"Against the tight clip: {_told(p3o, tight)}."] if tight is not rival else []
    if not gaps:
        return missing("P3O and GRPO at any µ")
    ours = "P3O less best GRPO: " + ", ".join(f"{gap} at µ={mu}" for mu, gap in gaps.items())
    margin = results.tuning["margin"]
    worst = min(1.0, len(gaps) * min(gap.p_below(-margin) for gap in gaps.values()))
    return Finding(max(gap.p_above(-margin) for gap in gaps.values()), worst, ours, lines)


def mismatch(results: Results) -> Finding:
    """The loss of a method under a mismatch is its score without mismatch less that with it. Shown where P3O loses less
    than 0.1 under every mismatch (Welch, one-sided, all), and GRPO loses more than 0.1 under at least one (the smallest
    p-value, times their number). Opposite where P3O loses more than 0.1 under one of them (likewise).
    """
    return _mismatch(results, lambda plain: FALL, _less)


def mismatch_by_gain(results: Results) -> Finding:
    """The loss of a method under a mismatch is its score without mismatch less that with it; it is large where it is
    more than half of what the method gains without mismatch. Shown where P3O's loss is smaller than that under every
    mismatch (one-sided t-tests with the deviation over seeds pooled over arms, all), and GRPO's is larger under at
    least one (the smallest p-value, times their number). Opposite where P3O's is larger under one of them (likewise).
    """
    return _mismatch(results, _half_of_gain, _pooled_less(results))


Less = Callable[[ArmResult, ArmResult], Difference]


def _pooled_less(results: Results) -> Less:
    """Score of the first arm minus that of the second, with the deviation over seeds pooled over all arms."""
    samples = [arm.scores for arm in results.arms if _ready(arm)]
    return lambda one, other: Spread.of(samples).less(one.scores, other.scores)


def _half_of_gain(arm: ArmResult) -> float:
    """Half of the difference between an arm's score and the accuracy that it began with."""
    return (arm.mean.value - mean_of([run["evaluations"]["accuracy"][0] for run in arm.runs.values()]).value) / 2


def _mismatch(results: Results, bound_of: Callable[[ArmResult], float], less: Less) -> Finding:
    kinds = [kind for kind in results.values("mismatch") if kind != "none"]
    losses: dict[tuple[str, str], Difference] = {}
    bounds: dict[str, float] = {}
    for method in ("P3O", "GRPO ε=0.2"):
        plain = results.arm(f"{method}, none")
        for kind in kinds:
            under = results.arm(f"{method}, {kind}")
            if plain is None or under is None or not _ready(plain, under):
                return missing(f"{method} without mismatch and under {kind}")
            losses[method, kind] = less(plain, under)
            bounds[method] = bound_of(plain)
    if any(bound <= 0 for bound in bounds.values()):
        return missing("a gain without mismatch")
    if not losses:
        return missing("any mismatch")
    lines: list[str] = []
    for kind in kinds:
        arms = results.where(mismatch=kind)
        lost = "; ".join(f"{method} loses {losses[method, kind]}" for method in ("P3O", "GRPO ε=0.2"))
        lines.append(f"{kind}: {lost}. Collapsed: {_counts(arms)}.")
    p3o, grpo = ([losses[method, kind] for kind in kinds] for method in ("P3O", "GRPO ε=0.2"))
    stays = max(loss.p_below(bounds["P3O"]) for loss in p3o)
    falls = [
        min(1.0, len(kinds) * min(loss.p_above(bounds[method]) for loss in side))
        for method, side in (("GRPO ε=0.2", grpo), ("P3O", p3o))
    ]
    worst = [max(kinds, key=lambda kind: losses[method, kind].value) for method in ("P3O", "GRPO ε=0.2")]
    ours = f"P3O loses {losses['P3O', worst[0]]} at most, under {worst[0]}; "
    ours += f"GRPO {losses['GRPO ε=0.2', worst[1]]}, under {worst[1]}"
    return Finding(max(stays, falls[0]), falls[1], ours, lines)


def two_anchors(results: Results) -> Finding:
    """For each of the two losses with two anchors: at temperature 1.0 it is not above one anchor by 0.03 or more, and
    at 1.2 it is below by more than 0.1 (Welch, one-sided). Shown where that is so of both. Opposite where one of them
    is above one anchor at 1.2 (the smaller p-value, times two).
    """
    return _two_anchors(results, lambda one: FALL, _less)


def two_anchors_by_gain(results: Results) -> Finding:
    """For each of the two losses with two anchors: at temperature 1.0 it is not above one anchor by 0.03 or more, and
    at 1.2 it is below by more than half of what one anchor gains at 1.2 (one-sided t-tests with the deviation over
    seeds pooled over arms). Shown where that is so of both. Opposite where one of them is above one anchor at 1.2 (the
    smaller p-value, times two).
    """
    return _two_anchors(results, _half_of_gain, _pooled_less(results))


def _two_anchors(results: Results, bound_of: Callable[[ArmResult], float], less: Less) -> Finding:
    parts: list[float] = []
    above: list[float] = []
    lines: list[str] = []
    told: list[str] = []
    for method in ("separate", "mixture"):
        for temperature in ("1.0", "1.2"):
            one, two = (results.arm(f"{name}, T={temperature}") for name in ("one anchor", method))
            if one is None or two is None or not _ready(one, two):
                return missing(f"one anchor and {method} at temperature {temperature}")
            gap = less(two, one)
            parts.append(
                gap.p_below(results.tuning.get("margin", MARGIN))
                if temperature == "1.0"
                else gap.p_below(-bound_of(one))
            )
            above += [gap.p_above()] if temperature == "1.2" else []
            told.append(f"{method} {gap} at {temperature}")
            lines.append(f"{_told(two, one, gap)}. Collapsed: {_counts([one, two])}.")
    lines.append(
        f"The control, a tight clip: {', '.join(f'{a.name} {a.mean}' for a in results.where(method='tight clip'))}."
    )
    return Finding(max(parts), min(1.0, 2 * min(above)), "two anchors less one: " + ", ".join(told), lines)


def the_law(results: Results) -> Finding:
    """Fitted on the runs of the two shorter lengths (64 and 128 updates in the laboratory), the models predict who
    collapses among those of the two longer ones (256 and 512). Shown where the law (η·G·T) has a larger log-likelihood
    per run there than displacement (η·G·√T) and than η alone (t-test over cells of equal settings, one-sided, both).
    Opposite where displacement is better than the law. Halves by seed, each predicted from the other, stand beside it.
    """
    found = observations(results)
    fell = sum(one.collapsed for one in found)
    if fell < 5 or len(found) - fell < 5 or len({one.updates for one in found}) < 4:
        return missing(f"five collapses and five survivals at four lengths: {fell} of {len(found)} collapsed")
    scores: LawScores = judge_models(found)
    law, displacement, rate = (scores.per_run[name] for name in ("law", "displacement", "rate"))
    longer = " and ".join(map(str, lengths_of(found)[1]))
    ours = f"log-likelihood per run of {longer} updates: law {law:.3f}, displacement {displacement:.3f}, η {rate:.3f}"
    p_law = max(scores.law_less_displacement.p_above(), scores.law_less_rate.p_above())
    return Finding(p_law, scores.law_less_displacement.p_below(), ours, scores.lines + exponent_lines(found))


def the_law_of_few_runs(results: Results) -> Finding:
    """A probit on log η + a·log T + b·log(1 + S) is fitted to who collapses in all runs, so the threshold of η goes as
    T^-a: a is 1 by the law (η·G·T), ½ by displacement (η·G·√T), 0 where η alone decides. Shown where a is above ½;
    opposite where that is not so and a is below 1 (one-sided, cells of equal settings drawn again 2,000 times).
    """
    found = observations(results)
    fell = sum(one.collapsed for one in found)
    if fell < 5 or len(found) - fell < 5 or len({one.updates for one in found}) < 4:
        return missing(f"five collapses and five survivals at four lengths: {fell} of {len(found)} collapsed")
    if unknown := {one.lag for one in found} - set(OLDEST):
        return missing(f"the staleness of {', '.join(sorted(unknown))}")
    fitted = resampled_exponents(found, times=2000)
    lines = ["The predictions below are those of the laboratory's rule. They decide nothing here."]
    lines += judge_models(found).lines
    return Finding(fitted.p_above(0.5), fitted.p_below(1.0), f"{fell} of {len(found)} collapsed; {fitted.told}", lines)


def pass_at_k_estimates(results: Results) -> Finding:
    """Estimates with intervals and no verdict: with so few seeds a fall of pass@64 by 0.02 could not be excluded."""
    finding = pass_at_k(results)
    return Finding(None, None, finding.ours, finding.lines)


def pass_at_k(results: Results) -> Finding:
    """At every µ: P3O's pass@1 after training is above that before, and its pass@64 is not below that before by more
    than 0.02 (Welch, one-sided; before, each seed has other random numbers). Shown where that is so at all µ. Opposite
    where pass@64 is below by more than that at any (the smallest p-value, times the number of µ).
    """
    before = results.arm("before")
    p3o = [arm for arm in results.where(method="P3O") if _ready(arm)]
    if before is None or not _ready(before) or not p3o or len(p3o) < len(results.values("mu")):
        return missing("pass@k before and after P3O at every µ")
    starts = {k: [run["pass_at"][k]["value"] for run in before.runs.values()] for k in before.first["pass_at"]}
    last = max(starts, key=int)

    def gain(arm: ArmResult, k: str) -> Difference:
        values = [run["pass_at"][k]["value"] if "pass_at" in run else 0.0 for run in arm.runs.values()]
        return welch(starts[k], values)

    lines = [f"Before: pass@1 {mean_of(starts['1'])}, pass@{last} {mean_of(starts[last])}."]
    for arm in (arm for arm in results.arms if arm.kind == "train" and _ready(arm)):
        lines.append(f"{arm.name} (η {arm.rate:g}): " + ", ".join(f"pass@{k} {gain(arm, k)}" for k in starts) + ".")
    ours = "P3O: " + "; ".join(
        f"pass@1 {gain(arm, '1')}, pass@{last} {gain(arm, last)} at µ={arm.axes['mu']}" for arm in p3o
    )
    shown = max(max(gain(arm, "1").p_above(), gain(arm, last).p_above(-EQUAL)) for arm in p3o)
    return Finding(shown, min(1.0, len(p3o) * min(gain(arm, last).p_below(-EQUAL) for arm in p3o)), ours, lines)


def ours(results: Results) -> Finding:
    """At equal updates, each at its own rate. The rival is the single method that was best on the tuning seeds. Shown
    where `auto` is not below it by more than 0.02 (Welch, one-sided); opposite where it is below by more than that.
    """
    automatic = results.arm("auto")
    single = [
        arm for arm in results.arms if arm.name in results.tuning["scores"] and arm.name != "auto" and _ready(arm)
    ]
    if automatic is None or not _ready(automatic) or not single:
        return missing("auto and a single method")
    rival = _chosen(results, single)
    gap = _less(automatic, rival)
    lines = [f"{_told(automatic, arm)}." for arm in single]
    lines.append(f"Above it beyond doubt: {'yes' if gap.p_above() < ALPHA else 'no'} (p = {gap.p_above():.2g}).")
    return Finding(gap.p_above(-EQUAL), gap.p_below(-EQUAL), f"auto less {rival.name}: {gap}", lines)


def rules() -> dict[str, Callable[[Results], Finding]]:
    """Rules by the name used in definitions."""
    listed = (clipping_dilemma, where_the_harm_is, accuracy_at_speed, no_knob, mismatch, two_anchors, the_law)
    of_real_models = (mismatch_by_gain, two_anchors_by_gain, the_law_of_few_runs, pass_at_k_estimates)
    return {rule.__name__: rule for rule in (*listed, *of_real_models, pass_at_k, ours)}
