"""The rollout browser as a person uses it: filters, groups, tokens, keys, a phone, hostile text and a large store."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from playwright.sync_api import Page, expect

from rollout_runs import GROUP_SIZE, HOSTILE, MANY, WORDS, add_batch, consume, make_rollout, seen_by, start_run
from stalewise.config.run_directory import read_config
from stalewise.reporting.browser import RunServer
from stalewise.reporting.browser.group import printable
from stalewise.store import batch_directories, read_tokens, token_log_directory
from stalewise.types import POLICY, Segment, TokenFlag

Serve = Callable[[Path], RunServer]
HAS_SIDEWAYS_SCROLL = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


def open_rollouts(page: Page, server: RunServer, words: str = "") -> None:
    page.goto(f"{server.url}rollouts#{words}")
    page.locator(".tokens").first.wait_for()


def tokens_of(page: Page, response: int = 0) -> list[dict[str, Any]]:
    return (
        page.locator(".tokens")
        .nth(response)
        .locator(".token")
        .evaluate_all("(tokens) => tokens.map((token) => ({ text: token.textContent, kinds: [...token.classList] }))")
    )


def stored(run: Path) -> pa.Table:
    shards = [str(path) for path in sorted(run.glob("**/shard-*.parquet"))]
    return ds.dataset(shards, format="parquet").to_table()


def say_count(table: pa.Table) -> str:
    groups = len(pc.call_function("unique", [table.column("group")]))
    return f"{table.num_rows:,} rollouts in {groups:,} groups"


def test_filters_filter_as_pyarrow_does(small: Path, page: Page, serve: Serve) -> None:
    open_rollouts(page, serve(small))
    table = stored(small)
    count = page.locator("#count")
    expect(count).to_have_text(say_count(table))
    page.get_by_text("Filters", exact=False).first.click()

    def check(expression: ds.Expression) -> None:
        expect(count).to_have_text(say_count(table.filter(expression)))
        page.get_by_role("button", name="Clear").click()
        expect(count).to_have_text(say_count(table))

    page.get_by_label("truncated").check()
    check(ds.field("finish_reason") == "length")
    page.get_by_label("verifier error").check()
    check(ds.field("reward_error") != "")
    page.get_by_label("Reward from").fill("0.5")
    check(ds.field("reward") >= 0.5)
    page.get_by_label("Group", exact=True).fill("17")
    check(ds.field("group") == 17)
    page.get_by_label("Response contains").fill("<script>")
    check(ds.field("text").isin([text for text in table.column("text").to_pylist() if "<script>" in text]))
    page.get_by_label("Update", exact=True).fill("2")
    in_update = read_tokens(token_log_directory(small), 2).column("rollout_id")
    check(ds.field("rollout_id").isin(in_update))
    page.get_by_role("checkbox", name="vetoed tokens").check()
    vetoed = [
        row["rollout_id"]
        for update in range(6)
        for row in read_tokens(token_log_directory(small), update).to_pylist()
        if any(flag & TokenFlag.VETOED for flag in row["flags"])
    ]
    check(ds.field("rollout_id").isin(vetoed))
    page.get_by_label("Reward part").select_option("format")
    page.get_by_label("Part to").fill("0")
    zero = [i for i in range(480) if make_rollout(i).reward_parts["format"] == 0]
    check(ds.field("rollout_id").isin(zero))


def test_tokens_are_marked_as_the_token_log_says(small: Path, page: Page, serve: Serve) -> None:
    open_rollouts(page, serve(small), "in=g000000-v000000&open=5")
    expect(page.locator("h2")).to_contain_text("Group 5")
    seen = {row["rollout_id"]: row for row in read_tokens(token_log_directory(small), 0).to_pylist()}
    marked = 0
    for response in range(GROUP_SIZE):
        rollout = make_rollout(5 * GROUP_SIZE + response)
        tokens = tokens_of(page, response)
        assert [token["text"].strip() for token in tokens] == [printable(WORDS[i]) for i in rollout.response_ids]
        for token, flags in zip(tokens, seen[rollout.rollout_id]["flags"], strict=True):
            for kind, flag in (("clipped", TokenFlag.CLIPPED), ("vetoed", TokenFlag.VETOED)):
                assert (kind in token["kinds"]) == bool(flags & flag)
                marked += bool(flags & flag)
            assert ("first" in token["kinds"]) == bool(flags & TokenFlag.TRIGGER)
        logp = zip(seen[rollout.rollout_id]["logp"], rollout.behaviour_logp, strict=True)
        for token, (policy, behaviour) in zip(tokens, logp, strict=True):
            side = "r0" if abs(policy - behaviour) < 0.04 else "up" if policy > behaviour else "down"
            if not 0.04 <= abs(policy - behaviour) < 0.06:  # on the edge between two shades
                assert any(kind.startswith(side) for kind in token["kinds"])
    assert marked > 3
    vetoed = page.locator("article").filter(has=page.locator(".token.first"))
    expect(vetoed.locator(".story").first).to_contain_text("The veto was triggered by token 2")


def sums_run(directory: Path) -> Path:
    """Groups 0 and 41 have the same prompt, at versions 0 and 4; the gold answer of group 1 has changed since."""
    run = start_run(directory)
    prompts = read_config(run).make_task().prompts(0, 80)
    asked = [prompts[0].prompt_id if group == 41 else prompts[group].prompt_id for group in range(80)]
    asked[1] = "another"
    for number in range(2):
        rows = range(number * 160, (number + 1) * 160)
        rollouts = [make_rollout(i, prompt_id=asked[i // GROUP_SIZE], version_first=4 * number) for i in rows]
        consume(run, add_batch(run, number, rollouts), number, range(4 * number, 4 * number + 4), per_update=40)
    return run


def test_the_gold_answer_and_the_prompt_at_other_versions_are_shown(tmp_path: Path, page: Page, serve: Serve) -> None:
    run = sums_run(tmp_path / "run")
    answer = read_config(run).make_task().prompts(0, 1)[0].answer
    open_rollouts(page, serve(run))
    expect(page.locator("#gold pre")).to_have_text(answer)
    expect(page.locator("article .gold")).to_have_text([f"gold {answer}"] * GROUP_SIZE)
    others = page.get_by_role("group", name="This prompt across versions").get_by_role("button")
    expect(others).to_have_text([re.compile("version 0: reward"), re.compile("version 4: reward")])
    others.nth(1).click()
    expect(page.locator("h2")).to_contain_text("Group 41")
    expect(others.nth(1)).to_have_attribute("aria-pressed", "true")
    page.locator("#list").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#gold")).to_have_text("Gold answerunknown: the task's data has changed since")
    expect(others).to_have_count(0)


@pytest.mark.parametrize("width", [1280, 760, 390])
def test_the_sort_control_shows_its_longest_choice(small: Path, page: Page, serve: Serve, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    open_rollouts(page, serve(small))
    needed, has = page.get_by_label("Sort by").evaluate(
        """(select) => {
          const context = document.createElement("canvas").getContext("2d");
          const style = getComputedStyle(select);
          context.font = style.font;
          const widths = [...select.options].map((option) => context.measureText(option.text).width);
          const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
          return [Math.max(...widths), select.clientWidth - padding];
        }"""
    )
    assert has - needed >= 18  # the arrow


def test_filters_are_folded_on_a_phone(small: Path, page: Page, serve: Serve) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    open_rollouts(page, serve(small), "truncated=true&reward_min=0")
    expect(page.get_by_label("Batch")).to_be_hidden()
    expect(page.locator("#legend .token").first).to_be_hidden()
    expect(page.locator("#all-active")).to_have_text("(2 set)")
    expect(page.get_by_label("Sort by")).to_be_visible()
    page.locator("#search > summary").click()
    expect(page.get_by_label("Batch")).to_be_visible()


def test_what_was_not_consumed_shows_no_ratio(small: Path, page: Page, serve: Serve) -> None:
    open_rollouts(page, serve(small), "in=r000:g000002-v000008&open=80")
    expect(page.locator("#content")).to_contain_text("removed by rollback r000")
    expect(page.locator(".story").first).to_contain_text("No update has used it yet")
    assert {kind for token in tokens_of(page) for kind in token["kinds"]} == {"token", "unseen"}


def test_an_episode_is_a_conversation_with_what_came_from_outside_folded(
    tmp_path: Path, page: Page, serve: Serve
) -> None:
    from rollout_runs import add_batch, consume, start_run

    run = start_run(tmp_path / "episodes")
    turns = (Segment(POLICY, 3), Segment("tool <b>", 2), Segment(POLICY, 2))
    ids, logp = (8, 9, 10, 11, 12, 13, 14), (-1.0, -0.5, -2.0, 0.0, 0.0, -0.7, -0.1)
    rollouts = [
        make_rollout(i, response_ids=ids, behaviour_logp=logp, reward=1.0, reward_error="", segments=turns if i else ())
        for i in range(GROUP_SIZE)
    ]
    consume(run, add_batch(run, 0, rollouts), 0, range(1), per_update=GROUP_SIZE)
    open_rollouts(page, serve(run))
    assert page.locator(".tokens").nth(0).locator(".turn").count() == 0  # one turn, as ever
    episode = page.locator(".tokens").nth(1)
    expect(episode.locator(".turn")).to_have_count(3)
    expect(episode.locator(".turn.own .speaker")).to_have_text(["policy, 3 tokens", "policy, 2 tokens"])
    outside = episode.locator("details.turn.outside")
    expect(outside.locator("summary")).to_have_text("tool <b>, 2 tokens")
    expect(outside.locator(".token").first).not_to_be_visible()
    outside.locator("summary").click()
    expect(outside.locator(".token").first).to_be_visible()
    kinds = [token["kinds"] for token in tokens_of(page, 1)]
    assert [token["text"].strip() for token in tokens_of(page, 1)] == [printable(WORDS[i]) for i in ids]
    assert [("read" in some) for some in kinds] == [False, False, False, True, True, False, False]
    assert all(any(kind[:2] in ("r0", "up", "do") for kind in some) for some in kinds if "read" not in some)
    expect(page.locator("article").nth(1)).to_contain_text("5 in 2 turns, 2 from outside")


def test_hostile_text_is_shown_and_never_executed(tmp_path: Path, page: Page, serve: Serve) -> None:
    run = start_run(tmp_path / "<b>run")
    everything = tuple(range(len(HOSTILE)))
    rollouts = [
        make_rollout(
            i,
            response_ids=everything,
            behaviour_logp=(-0.5,) * len(everything),
            prompt_id=HOSTILE[i % 2] + "\u202e",
            prompt_ids=everything,
            reward=float("nan") if i == 1 else 1.0,
            reward_error="".join(HOSTILE) if i == 1 else "",
            reward_parts={HOSTILE[1]: 1.0},
            text=" ".join(HOSTILE),
        )
        for i in range(GROUP_SIZE)
    ]
    batch = add_batch(run, 0, rollouts)
    consume(run, batch, 0, range(1), per_update=GROUP_SIZE)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        open_rollouts(page, serve(run))
        assert [token["text"].strip() for token in tokens_of(page)] == [printable(text) for text in HOSTILE]
        for text in HOSTILE[:3]:
            expect(page.locator(".tokens").first).to_contain_text(text)
        page.locator(".tokens .token").first.hover()
        expect(page.locator("#detail")).to_contain_text(HOSTILE[0])
        assert page.evaluate("window.pwned") is None
        assert page.locator("#content script, #content img, #content b, .row img, .row script").count() == 0
        assert "\u202e" not in page.locator("body").inner_text() and "\u2028" not in page.locator("body").inner_text()
        assert not page.evaluate(HAS_SIDEWAYS_SCROLL)


def test_keys_move_between_groups_and_tokens(small: Path, page: Page, serve: Serve) -> None:
    open_rollouts(page, serve(small))
    page.locator("#list").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.locator("h2")).to_contain_text("Group 2")
    expect(page.locator(".row[aria-selected=true]")).to_contain_text("group 2")
    page.keyboard.press("End")
    expect(page.locator("h2")).to_contain_text("Group 119")
    page.keyboard.press("Home")
    expect(page.locator("h2")).to_contain_text("Group 0")
    boxes = page.locator(".tokens")
    boxes.nth(0).focus()
    page.keyboard.press("End")
    last = len(make_rollout(0).response_ids) - 1
    expect(page.locator("#detail")).to_contain_text(f"token {last} ")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    expect(boxes.nth(1)).to_be_focused()
    assert boxes.nth(1).get_attribute("aria-activedescendant") == "t1-0"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    seen = seen_by(batch_directories(small / "rollouts")[0], range(40))
    start = int(seen.rows.response_offsets[1])
    logp = f"{seen.logp[start]:.4g}".replace("-", "−")
    expect(page.locator("#detail")).to_contain_text(f"{logp} at the update")


def test_the_address_remembers_filters_and_group(small: Path, page: Page, serve: Serve) -> None:
    open_rollouts(page, serve(small))
    page.get_by_label("Prompt id contains").fill("prompt/3")
    expect(page.locator("#count")).to_contain_text("11 groups")
    page.locator(".row", has_text="group 31").click()
    expect(page.locator("h2")).to_contain_text("Group 31")
    page.reload()
    expect(page.locator("h2")).to_contain_text("Group 31")
    expect(page.locator("#count")).to_contain_text("11 groups")


def test_a_corrupt_shard_is_shown_as_such(small: Path, page: Page, serve: Serve, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small, tmp_path / "run"))
    (batch_directories(run / "rollouts")[0] / "shard-00001.parquet").write_bytes(b"PAR1 broken")
    open_rollouts(page, serve(run))
    expect(page.get_by_role("alert")).to_contain_text("shard-00001.parquet is damaged")
    expect(page.locator("#count")).to_have_text("416 rollouts in 104 groups")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_a_phone_has_no_sideways_scroll(
    small: Path, page: Page, serve: Serve, scheme: Any
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 390, "height": 844})
    open_rollouts(page, serve(small), "vetoed=true")
    page.locator("#search > summary").click()
    page.locator("#more summary").click()
    page.locator("#legend > summary").click()
    assert not page.evaluate(HAS_SIDEWAYS_SCROLL)
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 30
    assert [found for found in contrasts if found["contrast"] < 4.5] == []


# WCAG 2: of every text that is in view, with the first ground that is not transparent.
CONTRASTS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  const light = (rgb) => rgb.slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const rgb = parse(getComputedStyle(e).backgroundColor);
      if (rgb.length < 4 || rgb[3] > 0) return rgb;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")]
    .filter((e) => e.offsetParent && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()))
    .map((e) => {
      const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))];
      return { text: e.textContent.slice(0, 40), contrast: (Math.max(a, b) + .05) / (Math.min(a, b) + .05) };
    });
}"""


def test_a_hundred_thousand_rollouts_open_and_scroll(big: Path, page: Page, serve: Serve) -> None:
    open_rollouts(page, serve(big))
    groups = MANY // GROUP_SIZE
    expect(page.locator("#count")).to_have_text(f"{MANY:,} rollouts in {groups:,} groups")
    assert page.locator(".row").count() < 60
    for share in (0.25, 0.5, 0.75, 1.0):
        page.locator("#list").evaluate("(list, share) => { list.scrollTop = share * list.scrollHeight; }", share)
        wanted = min(int(share * groups), groups - 1)
        expect(page.locator(f"#row-{wanted}")).to_contain_text(f"group {wanted}")
    page.get_by_label("Sort by").select_option("ratio")
    page.get_by_label("Response contains").fill("text 77")
    expect(page.locator("#count")).to_have_text(f"{MANY // 1000 * 11:,} rollouts in {MANY // 1000 * 4:,} groups")


def test_a_batch_in_the_making_is_no_damage_and_is_shown_when_it_is_there(
    small: Path, tmp_path: Path, page: Page, serve: Serve
) -> None:
    run = Path(shutil.copytree(small, tmp_path / "run"))
    manifest = batch_directories(run / "rollouts")[1] / "manifest.json"
    away = manifest.rename(tmp_path / "manifest.json")
    open_rollouts(page, serve(run))
    expect(page.locator("#generating")).to_contain_text("Being generated, listed when complete: g000001")
    expect(page.locator("#problems")).to_be_hidden()
    expect(page.locator("#count")).to_have_text("320 rollouts in 80 groups")
    expect(page.locator("#status")).to_contain_text("update 6 of 8")
    away.rename(manifest)
    page.get_by_role("button", name="refresh").click()
    expect(page.locator("#count")).to_have_text("480 rollouts in 120 groups")
    expect(page.locator("#generating")).to_be_hidden()
