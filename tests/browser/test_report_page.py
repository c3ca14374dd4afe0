"""The report in a browser: its plots are drawn, point by point, and it follows the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Frame, Page, expect

from rundirs import PLOTTED, add_evaluation, metrics, write_run
from stalewise.reporting.browser import RunServer
from stalewise.reporting.render import write_report
from stalewise.reporting.summary import ACCURACY, CHARTS, REWARD
from stalewise.store.json_lines import append_line

UPDATES = 8
DRAWN = """() => [...document.querySelectorAll("[data-figure]")]
    .every((plot) => plot.querySelector(".main-svg") || plot.closest("details:not([open])"))"""
# The values of each curve whose markers can be seen: a marker outside the axes is cut off.
POINTS = """() => {
  const isSeen = (marker, area) => {
    const box = marker.getBoundingClientRect();
    const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
    return box.width > 0 && x >= area.left && x <= area.right && y >= area.top - 1 && y <= area.bottom + 1;
  };
  const curves = (plot) => {
    const area = plot.querySelector(".nsewdrag").getBoundingClientRect();
    return [...plot.querySelectorAll(".scatterlayer .trace")].map((curve, i) => {
      const markers = [...curve.querySelectorAll("path.point")];
      return markers.flatMap((marker, j) => (isSeen(marker, area) ? [plot._fullData[i].y[j]] : []));
    });
  };
  return Object.fromEntries([...document.querySelectorAll("[data-figure]:not(.time)")].filter((one) => one.data)
    .map((plot) => [plot.dataset.figure, curves(plot)]));
}"""
OPEN = "[...document.querySelectorAll('details')].map((one) => one.open)"
GROUND = "(body) => getComputedStyle(body).backgroundColor"
KEYS = [key for key in dict.fromkeys(PLOTTED) if key != ACCURACY]


def drawn(page: Page | Frame) -> dict[str, list[list[float]]]:
    page.wait_for_function(DRAWN, timeout=30_000)
    return page.evaluate(POINTS)


def value(key: str, update: int) -> float:
    """Another one for each curve and each update; exact in float32, which the page has."""
    return (20 * (1 + KEYS.index(key)) + update) / 1024


def record(update: int) -> dict[str, float]:
    return {**metrics(update), **{key: value(key, update) for key in KEYS}, "generation_batch": 2 * update // UPDATES}


def make_run(directory: Path, *, done: int) -> Path:
    run = write_run(directory, updates=UPDATES, done=done)
    (run / "metrics.jsonl").unlink()
    for update in range(done):
        append_line(run / "metrics.jsonl", record(update))
    return run


def check_points(page: Page | Frame, updates: int, accuracies: list[float]) -> None:
    """A point for each update on every curve, and for each evaluation on that of the accuracy."""
    points = drawn(page)
    of_updates = {key: [value(key, update) for update in range(updates)] for key in KEYS}
    assert points == {chart.name: [{**of_updates, ACCURACY: accuracies}[key] for key in chart.keys] for chart in CHARTS}


def test_the_plots_have_a_point_for_each_update_and_reward_and_accuracy_come_before_time(
    tmp_path: Path, page: Page
) -> None:
    page.goto(write_report([make_run(tmp_path / "run", done=UPDATES)]).as_uri())
    check_points(page, UPDATES, [0.4, 0.8])
    order = ("reward", "reward-time", "time", "stages-0", *(c.name for c in CHARTS if c.keys != REWARD))
    boxes = [page.locator(f"[data-figure={name}]").bounding_box() for name in order]
    tops = [box["y"] for box in boxes if box]
    assert len(tops) == len(order) and tops == sorted(tops)
    assert tops[0] < 850 and tops[2] > max(tops[:2])  # the reward without scrolling


def test_the_report_fits_a_phone_and_draws_what_is_unfolded(tmp_path: Path, page: Page) -> None:
    run = write_run(tmp_path / "run", updates=200)
    for version in range(0, 200, 2):  # many rows of the tables
        add_evaluation(run, version, 0.5)
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    page.goto(write_report([run]).as_uri())
    drawn(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.documentElement.scrollHeight") <= 8000
    ess = page.locator("[data-figure=ess]")
    expect(ess.locator(".main-svg")).to_have_count(0)
    page.get_by_text("Importance weights and clipping").click()
    expect(ess.locator(".main-svg").first).to_be_visible()
    assert ess.bounding_box()["width"] > 300  # pyright: ignore[reportOptionalSubscript]


def test_the_served_report_follows_the_run_and_stays_where_it_was_read(
    tmp_path: Path, page: Page, serve: Callable[[Path], RunServer]
) -> None:
    run = make_run(tmp_path / "run", done=5)
    page.goto(serve(run).url)
    frame = page.frame(url="**/report")
    assert frame is not None
    check_points(frame, 5, [0.4])
    expect(page.locator("#status")).to_contain_text(f"update 5 of {UPDATES}")
    frame.locator("#theme").select_option("dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    before = page.locator("body").evaluate(GROUND)
    summary = frame.locator("details:not([open]) > summary").first
    summary.click()
    is_open = frame.evaluate(OPEN)
    assert any(is_open)
    frame.evaluate("scrollTo(0, 700)")
    append_line(run / "metrics.jsonl", record(5))
    expect(page.locator("#news")).to_contain_text("as of")
    check_points(frame, 6, [0.4])
    page.wait_for_timeout(1300)
    assert abs(frame.evaluate("scrollY") - 700) < 5
    assert frame.evaluate(OPEN) == is_open
    assert frame.evaluate("document.activeElement.localName") == "summary"
    expect(page.locator("#status")).to_contain_text(f"update 6 of {UPDATES}")
    page.get_by_role("link", name="Rollouts").click()
    expect(page.locator("#count")).to_have_text("0 rollouts in 0 groups")
    expect(page.locator("#status")).to_contain_text(f"update 6 of {UPDATES}")
    assert page.locator("body").evaluate(GROUND) == before
