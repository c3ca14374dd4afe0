"""The claims of the papers as experiments: definitions, runs, kept results, verdicts, figures and pages.

Definitions are files under `experiments/`; see docs/experiments.md. What makes runs imports neither typer, rich nor
plotly, so that it works on a machine that has little more than torch.
"""
