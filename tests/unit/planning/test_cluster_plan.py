"""Planning for a cluster: formulas against simulation, limits that can be computed by hand, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from stalewise.planning.cluster_plan import load_cluster, plan_cluster

EXAMPLE = Path(__file__).parents[3] / "configs/clusters/mu_grpo.toml"


# ---------------------------------------------------------------- the paper's setting


def test_the_setting_of_mu_grpo_comes_near_its_averages_and_not_to_its_best() -> None:
    plan = plan_cluster(load_cluster(EXAMPLE))
    assert plan.generation_speed_up() == pytest.approx(1.82, rel=0.15)
    assert plan.speed_up("staged") == pytest.approx(1.53, rel=0.10)
    assert plan.speed_up("staged") < 2.2 * 0.75
    idle = {one.formula.name: one.formula.learner_idle for one in plan.schedules}
    assert idle["streamed"] > 0.2 and idle["streamed staged"] < 0.006
    half = plan_cluster(load_cluster(EXAMPLE, {"learning.rollouts_per_update": 64}))
    assert half.speed_up("staged") > 2.0
