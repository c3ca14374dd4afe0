"""The documents agree with the code, their links lead somewhere and their examples run."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from benchmarks.gsm8k_bench.picture import label
from scripts.doctests import fenced
from scripts.draw_objectives import drawing
from scripts.package_readme import for_package_index
from scripts.reference import PAGES as PAGES_MADE
from scripts.site import linked, notebook_markdown, outside, rewritten, site_path

from batches import random_batch
from stalewise import __version__
from stalewise.objectives import OBJECTIVES, evaluate
from stalewise.objectives.batch_statistics import vcpo_factor
from stalewise.objectives.diagnostics import age_statistics, drift_statistics

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def repository_files() -> list[Path]:
    """Tracked files; outside of a checkout (in a source archive) there is nothing to ask."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def sections(text: str) -> dict[str, str]:
    """Text under each heading of the second level."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return {name.strip("` "): body for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def first_two_cells(text: str) -> dict[str, str]:
    """Rows of tables whose first cell is a name in backticks: that name and the second cell."""
    return dict(re.findall(r"^\| `(\w+)` \| ((?:\\\||[^|])*?) \|", text, flags=re.MULTILINE))


def parameter_rows(section: str) -> dict[str, str]:
    tables = re.findall(r"^\| parameter \| default \|.*\n(?:\|.*\n)+", section, flags=re.MULTILINE)
    return {name: default for table in tables for name, default in first_two_cells(table).items()}


def disagreements(name: str, section: str) -> list[str]:
    """How the section's table of parameters differs from the registry."""
    known = OBJECTIVES[name].parameters()
    documented = parameter_rows(section)
    problems = [f"{name}.{parameter} is not a parameter" for parameter in documented.keys() - known.keys()]
    for parameter, (kind, default) in known.items():
        if parameter not in documented:
            problems.append(f"{name}.{parameter} is not documented")
        elif _value(documented[parameter]) != default:
            problems.append(f"{name}.{parameter} is documented as {documented[parameter]}; its default is {default}")
        choices = [c for c in get_args(kind) if isinstance(c, str)]
        problems += [f"{name}.{parameter} = {c} is not documented" for c in choices if f"`{c}`" not in section]
    return problems


def _value(cell: str) -> Any:
    cell = cell.strip("`")
    return float(cell) if re.fullmatch(r"[-+.\deE]*\d[-+.\deE]*", cell) else cell


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> list[str]:
    return [slug(heading) for heading in re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)]


def broken_links(page: Path) -> list[str]:
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", without_code(page.read_text()))
    broken: list[str] = []
    for link in links:
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def doctest_failures(text: str, name: str) -> tuple[int, int]:
    """(failed, attempted) of the python blocks with prompts, in one namespace."""
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    examples = doctest.DocTestParser().get_doctest("\n".join(b for b in blocks if ">>> " in b), {}, name, name, 0)
    result = doctest.DocTestRunner(verbose=False).run(examples)
    return result.failed, result.attempted


OBJECTIVE_SECTIONS = sections((ROOT / "docs/objectives.md").read_text())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_has_a_section_with_its_parameters(name: str) -> None:
    assert name in OBJECTIVE_SECTIONS
    section = OBJECTIVE_SECTIONS[name]
    assert disagreements(name, section) == []
    assert ("\nNo parameters." in section) == (not OBJECTIVES[name].parameters())
    assert ("Needs `proximal_logp`" in section) == OBJECTIVES[name].needs_proximal
    figure = f"images/objectives/{name}.svg"
    for part in (
        "**Source.**",
        "**On fresh data",
        "**Statistics.**",
        "**Conventions.**",
        "**Use it.**",
        f"]({figure})",
    ):
        assert part in section, part


def test_no_section_describes_an_objective_that_is_not_there() -> None:
    described = {name for name, body in OBJECTIVE_SECTIONS.items() if "**Source.**" in body}
    assert described == {*OBJECTIVES, "vcpo"}


def test_the_step_control_has_no_parameters() -> None:
    assert list(inspect.signature(vcpo_factor).parameters) == ["sequence_weights"]
    assert "\nNo parameters." in OBJECTIVE_SECTIONS["vcpo"]


def test_every_metric_is_documented_and_no_other() -> None:
    batch: dict[str, Any] = {**random_batch()}
    reported = {
        *evaluate("grpo", **batch).stats,
        *drift_statistics(update_norm=1.0, learning_rate=1.0, drift_before=0.0),
        *age_statistics(update=1, versions=torch.tensor([0])),
        # What the learner and the conductor add; tests/unit/test_run.py compares a real run with the page.
        *("update", "generation_batch", "rollouts", "reward", "truncated_fraction", "degenerate_fraction"),
        *("verifier_error_fraction", "taken", "loss", "grad_norm", "learning_rate", "step_factor", "seconds"),
        *(
            "kl_reference",
            "mismatch_mean",
            "mismatch_max",
            "reward_error",
            "batch_drift",
            "batch_budget",
            "horizon_budget",
        ),
    }
    assert set(first_two_cells((ROOT / "docs/metrics.md").read_text())) == reported


def test_the_version_and_the_extras_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version", "readme"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/stalewise/__init__.py"
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.findall(r"^## (?:Unreleased \()?(\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == __version__
    extras = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    assert sorted(extras) == sorted(project["project"]["optional-dependencies"])


def test_files_speak_of_the_project_only() -> None:
    # Written apart, so that this file does not find itself.
    elsewhere = ["/" + "work/", "/" + "root/", ".." + "/shared"]
    found: list[str] = []
    for path in repository_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
            found += [f"{path.relative_to(ROOT)}:{number} {place}" for place in elsewhere if place in line]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


RELATIVE = re.compile(r"\]\((?!https?:|#)[^)]*\)")


def test_the_readme_of_a_package_has_no_relative_links() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(RELATIVE.findall(text)) > 15
    for repository in ("", "https://example.org/stalewise"):
        assert RELATIVE.findall(for_package_index(text, repository)) == []
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    assert hook["path"] == "scripts/package_readme.py"


@pytest.mark.parametrize(
    ("repository", "expected"),
    [
        ("", "a `b` [d](https://e.f) [g](#h)\n\n```\n[x](y.md)\n```\n"),
        (
            "https://r.s/t/",
            "![p](https://r.s/t/raw/HEAD/i.svg)\na [`b`](https://r.s/t/blob/HEAD/c.md#k) [d](https://e.f) [g](#h)\n\n"
            "```\n[x](y.md)\n```\n",
        ),
    ],
)
def test_links_of_the_readme_of_a_package(repository: str, expected: str) -> None:
    text = "![p](i.svg)\n<!-- note -->\na [`b`](c.md#k) [d](https://e.f) [g](#h)\n\n```\n[x](y.md)\n```\n"
    assert for_package_index(text, repository).lstrip("\n") == expected


# Rows of the README's table of measurements: the raw file and run that learned, the same with gradient checkpointing
# (in brackets), and the run that generated.
MEASURED = {
    "SmolLM2-135M": (("versus_trl-h200", "learner/stalewise"), None, "sampler/stalewise"),
    "0.5B": (("learner-h200", "0.5b/full/plain/auto"), ("learner-h200", "0.5b/full/recompute/auto"), "0.5b/512"),
    "1.5B": (("learner-h200", "1.5b/full/plain/auto"), ("learner-h200", "1.5b/full/recompute/auto"), "1.5b/512"),
    "7B, 8-bit moments": (None, ("learner-h200", "7b/stage/recompute/auto"), "7b/256"),
    "7B, LoRA": (None, ("learner-h200", "7b/lora-stage/recompute/auto"), ""),
}


def raw_runs(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["runs"]


def test_the_figures_of_the_readme_were_measured() -> None:
    text = (
        (ROOT / "README.md")
        .read_text()
        .partition("<b>Memory and tokens/s on one H200</b>")[2]
        .partition("</details>")[0]
    )
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in text.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == list(MEASURED)
    full, adapters = (row[1].strip("()") for row in rows[-2:])
    summary = " ".join(text.partition("</summary>")[0].split())
    assert summary.endswith(f"7B is trained in {full} with 8-bit moments, in {adapters} with LoRA")
    generated = {"sampler/stalewise": raw_runs("versus_trl-h200")["sampler/stalewise"]["tokens_per_second"]}
    for part, run in json.loads((ROOT / "benchmarks/results/versus_vllm-h200.json").read_text())["parts"].items():
        if "ours" in run:  # the other side alone may be there
            generated[part] = run["ours"]["fixed"]["tokens_per_second"]
    for model, memory, learning, generating in rows[2:]:
        plain, recomputing, sampler = MEASURED[model]
        runs = [(form, raw_runs(place[0])[place[1]]) for form, place in (("{}", plain), ("({})", recomputing)) if place]
        assert memory == " ".join(form.format(f"{run['peak_reserved_bytes'] / 1e9:.0f} GB") for form, run in runs)
        assert learning == " ".join(form.format(f"{run['tokens_per_second']:,.0f}") for form, run in runs)
        assert generating == (f"{generated[sampler]:,.0f}" if sampler else "")


def test_the_readme_has_a_screen_and_a_half() -> None:
    """At most 48 lines of text and code are seen: with picture and margins about 2,050 px at GitHub's width."""
    text = re.sub(r"<!--.*?-->|<details>.*?</details>", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    hidden = ("```", "|---")
    seen = [line for line in text.splitlines() if line.strip() and not line.startswith(hidden)]
    assert len(seen) <= 48


def test_picture_and_words_of_the_readme_are_of_the_kept_runs() -> None:
    record = json.loads((ROOT / "benchmarks/results/gsm8k-h200.json").read_text())
    readme, page = (re.sub(r"\s+", " ", (ROOT / name).read_text()) for name in ("README.md", "docs/benchmarks.md"))
    seconds, accuracy = record["seconds"], record["final_accuracy"]
    assert f"take {seconds['mu_grpo']:.0f} s with µ-GRPO (µ = 16) and {seconds['trl_vllm']:.0f} s with TRL's" in readme
    assert {f"{accuracy[arm]['mean']:.2f}"[1:] for arm in ("mu_grpo", "trl_vllm")} == {".30"}
    assert f"an accuracy of .30, from {record['base_accuracy']:.2f}".replace("0.", ".") in readme
    picture = (ROOT / "docs/images/gsm8k-h200.svg").read_text()
    for arm in (name for name, found in accuracy.items() if found):
        found, seeds, ratio = accuracy[arm], len(accuracy[arm]["values"]), record["time_to_accuracy_ratio"]
        clocks = ratio[arm]["seeds"][0] if arm in ratio else ratio["mu_grpo"]["seeds"][1] if seconds[arm] else 0
        assert (f"<!-- {label(arm, clocks, record['settings'])} -->" in picture) == (clocks > 0)
        row = f"| {seeds} | {seconds[arm]:.0f}" if seconds[arm] else f"| {seeds} | – |"
        assert row in page and f"{found['mean']:.3f}"[1:] in page[page.index(row) :][:60]
    ours = [seconds[arm] for arm in seconds if seconds[arm] and not arm.startswith("trl") and not arm.endswith("_x2")]
    alt = f"128 updates take stalewise {min(ours):.0f} to {max(ours):.0f} seconds and TRL with vLLM "
    assert all(f"{alt}{seconds['trl_vllm']:.0f}]" in text for text in (readme, page))
    twice = f"{accuracy['auto_x2']['mean']:.2f}"[1:]
    assert f"three seeds end at {twice} after {seconds['auto_x2']:.0f} s" in readme
    verdicts = re.findall(r"\| \*\*([a-z ]+)\*\* \|", (ROOT / "docs/results.md").read_text())
    shown, opposite, open_ = (verdicts.count(verdict) for verdict in ("shown", "opposite", "not shown"))
    told = f'{shown} of {len(verdicts)} verdicts are "shown", {opposite} are "opposite", {open_} are "not shown"'
    assert told in readme


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed, _ = doctest_failures(page.read_text(), page.name)
    assert failed == 0, capsys.readouterr().out


def test_the_worked_examples_are_among_them(capsys: pytest.CaptureFixture[str]) -> None:
    for section in ("m2po", "p3o", "vcpo"):
        assert ">>> " in OBJECTIVE_SECTIONS[section]
    assert doctest_failures("```python\n>>> 1 + 1\n3\n\n```\n", "wrong") == (1, 1)
    assert "Expected" in capsys.readouterr().out


EQUATION = re.compile(r"^\| [^|]+ \| [^|]+ \| `([\w/]+\.py):(\w+)` \| `([^`]+)` \|$", re.MULTILINE)


def without_their_line(page: str) -> list[str]:
    """Rows of the map of equations whose line is not in the function that they name."""
    missing: list[str] = []
    for path, name, line in EQUATION.findall(page):
        source = (ROOT / "src/stalewise" / path).read_text()
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        found = [ast.get_source_segment(source, node) or "" for node in functions if node.name == name]
        if not any(line in text for text in found):
            missing.append(f"{path}:{name}: {line}")
    return missing


def test_every_equation_is_computed_where_the_map_says() -> None:
    page = (ROOT / "docs/equations.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "| formula |" not in line]
    assert len(EQUATION.findall(page)) == len(rows) > 25
    assert without_their_line(page) == []
    assert len(without_their_line(page.replace("(1 - ess) *", "ess *"))) == 1  # a line that has changed is found
    described = {name for name in OBJECTIVES if f"surrogates.py:{name}`" in page}
    assert {*OBJECTIVES} - described == {"dapo", "dr_grpo", "cispo", "tis", "m2po"}  # the same lines as others compute


@pytest.mark.parametrize("name", PAGES_MADE)
def test_generated_pages_are_as_the_script_writes_them(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES_MADE[name](), "run `python scripts/reference.py`"


BY_DAY = ("grpo", "p3o", "mu_grpo")  # half a second each; the losses themselves have tests of their own


@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in OBJECTIVES]
)
def test_figures_of_objectives_are_as_the_script_draws_them(name: str) -> None:
    assert (ROOT / f"docs/images/objectives/{name}.svg").read_text() == drawing(name)


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"^ +- [^:]+: ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    own = {name for name in listed if not name.startswith(("repository/", "notebooks/"))}
    assert own == {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    for name in {*listed} - own:
        source = name.removeprefix("repository/") if name.startswith("repository/") else name.replace(".md", ".ipynb")
        assert (ROOT / source).is_file(), name


def test_links_lead_somewhere_in_the_site() -> None:
    added = outside(ROOT)
    inside = [str(page.relative_to(ROOT)) for page in PAGES if page.is_relative_to(ROOT / "docs")]
    there = {site_path(name) for name in [*inside, *added, "notebooks/first_run.ipynb", "notebooks/tour.ipynb"]}
    there |= {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/images/**/*")}
    pages = [*inside, *(name for name in added if name.endswith(".md"))]
    broken = [
        f"{page}: {link}" for page in pages for link in site_links(page) if site_path(link) not in there and link != "."
    ]
    assert broken == []
    assert "repository/SECURITY.md" in there and "repository/experiments/ours/README.md" in there


def test_the_site_is_built_strictly() -> None:
    """With --quiet mkdocs counts no warnings, and --strict finds nothing."""
    (command,) = re.findall(r"bin/mkdocs build(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "--strict" in command and "--quiet" not in command and " -q" not in command


def test_examples_of_docstrings_are_code_in_the_site() -> None:
    text = "Ranks.\n\n>>> rank(3)\n[[1, 2],\n [3]]\n\nMore.\n\n>>> rank(1)"
    expected = "Ranks.\n\n```pycon\n>>> rank(3)\n[[1, 2],\n [3]]\n```\n\nMore.\n\n```pycon\n>>> rank(1)\n```"
    assert fenced(text) == expected and fenced(expected) == expected
    assert "extensions: [scripts/doctests.py]" in (ROOT / "mkdocs.yml").read_text()


def site_links(page: str) -> list[str]:
    return linked(page, (ROOT / page).read_text())


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        (
            "docs/index.md",
            "[a](../SECURITY.md#programs) [b](tasks.md)",
            "[a](repository/SECURITY.md#programs) [b](tasks.md)",
        ),
        ("SECURITY.md", "[c](docs/browser.md#access)", "[c](../browser.md#access)"),
        (
            "docs/index.md",
            "[n](../notebooks/tour.ipynb)\n```\n[x](y.md)\n```\n",
            "[n](notebooks/tour.md)\n```\n[x](y.md)\n```\n",
        ),
        ("experiments/ours/README.md", "![f](lab.svg) [h](https://a.b/c)", "![f](lab.svg) [h](https://a.b/c)"),
    ],
)
def test_links_of_the_site_follow_the_files(page: str, text: str, expected: str) -> None:
    assert rewritten(page, text) == expected


def test_cells_of_a_notebook_become_markdown() -> None:
    printed = {"output_type": "stream", "text": ["2\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# T"]},
        {"cell_type": "code", "source": ["1 + 1"], "outputs": [printed]},
    ]
    assert notebook_markdown({"cells": cells}) == "# T\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n"


# The comparison itself must be able to fail.
TABLE = "| parameter | default | meaning |\n|---|---|---|\n"
RIGHT = TABLE + "| `clip_low` | 0.8 | x |\n| `clip_high` | 1.2 | x |\n"


@pytest.mark.parametrize(
    ("name", "section", "problems"),
    [
        ("grpo", RIGHT, []),
        ("grpo", RIGHT.replace("1.2", "1.28"), ["grpo.clip_high is documented as 1.28; its default is 1.2"]),
        (
            "grpo",
            RIGHT.replace("`clip_low`", "`low`"),
            ["grpo.low is not a parameter", "grpo.clip_low is not documented"],
        ),
        ("tis", "", ["tis.cap is not documented"]),
        (
            "m2po",
            TABLE + "| `variant` | `released` | x |\n| `threshold` | 0.04 | x |\n",
            [
                "m2po.variant is documented as `released`; its default is paper",
                "m2po.variant = paper is not documented",
            ],
        ),
    ],
)
def test_a_disagreement_is_found(name: str, section: str, problems: list[str]) -> None:
    assert disagreements(name, section) == problems


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# The `one` title\n```\n# no title\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#the-one-title) [c](#here) [d](https://example.org/x)\n"
        "[e](missing.md) [f](other.md#no-title) [g](#there)\n"
    )
    assert broken_links(page) == ["missing.md", "other.md#no-title", "#there"]
