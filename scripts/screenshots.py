"""Make the pictures of the report and the rollout browser: train a small run, open it in Chromium, take screenshots.

    python scripts/screenshots.py                  # about a minute on one core, then docs/images/{report,rollouts}*.png
    python scripts/screenshots.py runs/my_run OUT  # of another run, to another directory

Needs Chromium, playwright and Pillow, which `make install` brings for the tests, except Chromium itself.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from stalewise.api import run
from stalewise.config import make_config
from stalewise.reporting.browser import make_server
from stalewise.reporting.render import write_report

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WINDOWS = {"": (1280, 900), "-phone": (390, 844)}
THEMES: dict[str, Literal["light", "dark"]] = {"": "light", "-dark": "dark"}
TALLEST_PHONE = 8000  # pixels of the report
COLOURS = 128  # of a picture: half the bytes, and no difference to see
DRAWN = """() => [...document.querySelectorAll("[data-figure]")]
    .every((plot) => plot.querySelector(".main-svg") || plot.closest("details:not([open])"))"""


def train(runs: Path) -> Path:
    """µ-GRPO in 4 stages on 216 sums, each of which is asked four or five times."""
    rows = [
        {"id": f"{a}+{b}", "problem": f"{a}+{b}=", "answer": str(a + b)} for a in range(30, 54) for b in range(41, 53)
    ]
    path = runs / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = {
        "name": "sums",
        "runs": str(runs),
        "model": {"path": "embedded:arithmetic", "threads": 1},
        "task": {"name": "jsonl", "options": {"path": str(path), "verifier": "exact", "held_out": 0.25}},
        "schedule": {"kind": "staged", "stages": 4, "updates": 256},
        "objective": {"name": "mu_grpo"},
        "batch": {"prompts": 4, "group_size": 8},
        "optimizer": {"learning_rate": 5e-4, "schedule": "cosine", "warmup_updates": 16},
        "sampler": {"max_new_tokens": 8},
        "evaluation": {"prompts": 72, "samples": 4, "every": 32},
    }
    return run(make_config(record)).directory


def shoot(page: Page, path: Path, height: int) -> None:
    """The first `height` pixels of a page as a small PNG."""
    page.screenshot(path=path, full_page=True)
    image = Image.open(path).convert("RGB")
    image = image.crop((0, 0, image.width, min(image.height, height))).quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    print(f"{path}: {image.width} × {image.height}, {path.stat().st_size:,} bytes")


def take_pictures(browser: Browser, report: Path, rollouts: str, images: Path) -> None:
    """The report and the rollouts, light and dark, in a window and on a phone."""
    for window, (width, height) in WINDOWS.items():
        for theme, scheme in THEMES.items():
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            page.goto(report.as_uri())
            page.wait_for_function(DRAWN)
            tall = page.evaluate("document.documentElement.scrollHeight")
            if window and tall > TALLEST_PHONE:
                raise SystemExit(f"the report is {tall} pixels tall on a phone, more than {TALLEST_PHONE}")
            shoot(page, images / f"report{window}{theme}.png", 1900)
            page.goto(rollouts)
            page.locator(".tokens").first.wait_for()
            page.locator("#gold:not([hidden])").wait_for()
            shoot(page, images / f"rollouts{window}{theme}.png", 1500)
            context.close()


def main() -> None:
    given = [Path(argument) for argument in sys.argv[1:]]
    images = given[1] if len(given) > 1 else IMAGES
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        directory = given[0] if given else train(Path(temporary))
        report = write_report([directory], Path(temporary) / "report.html")
        server = make_server(directory)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium") or shutil.which("google-chrome"))
        take_pictures(browser, report, f"{server.url}rollouts#sort=ratio&descending=true", images)
        browser.close()
        server.shutdown()


if __name__ == "__main__":
    main()
