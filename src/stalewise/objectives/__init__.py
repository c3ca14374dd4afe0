"""Objectives as pure functions: ratios, advantages, surrogates, reductions, diagnostics, and a registry by name."""

from stalewise.objectives.advantages import Advantages, group_advantages
from stalewise.objectives.loss import ObjectiveResult, evaluate, micro_batch_loss, micro_batch_sums
from stalewise.objectives.registry import OBJECTIVES, Objective, Settings, get_objective
from stalewise.objectives.regularizers import Regularizers
from stalewise.objectives.tokens import Tokens, constant_denominator, make_tokens, natural_denominator

__all__ = ["OBJECTIVES", "Advantages", "Objective", "ObjectiveResult", "Settings", "Tokens", "constant_denominator"]
__all__ += ["evaluate", "get_objective", "group_advantages", "make_tokens", "micro_batch_loss", "micro_batch_sums"]
__all__ += ["Regularizers", "natural_denominator"]
