"""The papers' claims as experiments: definitions, runs, kept results, verdicts, figures and pages.

`python -m experiments.lab` runs them; docs/experiments.md explains the definitions under `experiments/`. Imports
none of typer, rich and plotly, so that it works on a machine with little more than torch.
"""
