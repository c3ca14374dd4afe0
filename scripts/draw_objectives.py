"""Draws docs/images/objectives/NAME.svg: the weight that each objective gives a token, by its ratio.

    python scripts/draw_objectives.py

The weight is −∂loss/∂ℓ of one token in units of |A|, times the denominator: 1 for the plain policy gradient of A = 1.
The token is a response of its own in a batch of 33; the ratios of the others are spread log-normally (σ = 0.5), half of
them with A = 1 and half with A = −1: P3O's effective sample size and M2PO's threshold are those of a stale batch.
"""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import torch
from experiments.lab.draw import Panel, Series, draw_panels

from stalewise.objectives import OBJECTIVES, evaluate

IMAGES = Path(__file__).parents[1] / "docs/images/objectives"
OTHERS, SPREAD = 32, 0.5
LARGEST = 6.0  # of the axis; a line that leaves it ends there
RATIOS = [2 ** (step / 16) for step in range(-64, 65)]  # 1/16 to 16


def weight(name: str, ratio: float, advantage: float) -> float:
    """−∂loss/∂ℓ of the token, in units of |A| and times the denominator."""
    normal = NormalDist(0, SPREAD)
    others = [normal.inv_cdf((index + 0.5) / OTHERS) for index in range(OTHERS)]
    log_ratio = torch.tensor([[torch.tensor(ratio).log().item()], *([one] for one in others)], dtype=torch.float64)
    logp = torch.full_like(log_ratio, -1.0, requires_grad=True)
    behaviour = -1.0 - log_ratio
    signs = [1.0 if index % 2 else -1.0 for index in range(OTHERS)]
    result = evaluate(
        name,
        logp=logp,
        behaviour_logp=behaviour,
        advantage=torch.tensor([advantage, *signs], dtype=torch.float64),
        mask=torch.ones_like(log_ratio),
        proximal_logp=behaviour if OBJECTIVES[name].needs_proximal else None,
        denominator=1.0,
    )
    (gradient,) = torch.autograd.grad(result.loss, logp)
    return -gradient[0, 0].item()


def drawing(name: str) -> str:
    """The figure of one objective."""
    series = []
    for label, advantage in (("A = 1", 1.0), ("A = −1", -1.0)):
        values = [(ratio, weight(name, ratio, advantage)) for ratio in RATIOS]
        points = [(ratio, value, value, value) for ratio, value in values if abs(value) <= LARGEST]
        series.append(Series(label, points))
    panel = Panel(name, series, x_title="ratio r", y_title="weight of ∇ℓ", x_log=True, y_range=(-LARGEST, LARGEST))
    return draw_panels(f"{name}: weight of a token by its ratio", [panel], columns=1)


def main() -> None:
    """Draw all."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in OBJECTIVES:
        (IMAGES / f"{name}.svg").write_text(drawing(name))


if __name__ == "__main__":
    main()
