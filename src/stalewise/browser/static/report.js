"use strict";
// The report in its frame, loaded again when the run has changed; what was in view stays in view.
const LOOK_MS = 2000, AT_LEAST_MS = 10000; // between two looks at the run, between two drawings of the report
const frame = document.getElementById("report");
const news = document.getElementById("news");
const follow = document.getElementById("follow");
let shown = null, drawn = -Infinity;

async function state() {
  const answer = await fetch("api/state");
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return (await answer.json()).state;
}

function reload() {
  const { scrollX, scrollY } = frame.contentWindow;
  frame.addEventListener("load", () => {
    // The charts take their room when they are drawn, a moment after the page is there.
    for (const wait of [0, 300, 1200]) setTimeout(() => frame.contentWindow.scrollTo(scrollX, scrollY), wait);
    news.textContent = `as of ${new Date().toLocaleTimeString()}`;
  }, { once: true });
  frame.contentWindow.location.reload();
}

async function look() {
  try {
    const now = await state();
    shown ??= now;
    if (now !== shown && follow.checked && !document.hidden && performance.now() - drawn > AT_LEAST_MS) {
      shown = now;
      drawn = performance.now();
      reload();
    } else if (now !== shown) {
      news.textContent = "the run has gone on";
    }
  } catch (error) {
    news.textContent = "the server does not answer; this is what it said last";
  }
  setTimeout(look, LOOK_MS);
}

look();
