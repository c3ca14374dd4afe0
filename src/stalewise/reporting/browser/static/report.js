// The report in its frame, loaded again when the run has changed; what was in view, open or in focus stays so.
import { live } from "./live.js";

const AT_LEAST_MS = 10000; // between two drawings of the report
const frame = document.getElementById("report");
const news = document.getElementById("news");
const follow = document.getElementById("follow");
let shown = null, drawn = -Infinity;

// A way to find an element again in a later page: by its id, or by its number among those of its kind.
function way(element) {
  if (element.id) return `#${CSS.escape(element.id)}`;
  const name = element.localName;
  return { name, number: [...element.ownerDocument.querySelectorAll(name)].indexOf(element) };
}

function find(page, to) {
  return typeof to === "string" ? page.querySelector(to) : page.querySelectorAll(to.name)[to.number];
}

function reload() {
  const { scrollX, scrollY, document: page } = frame.contentWindow;
  const details = [...page.querySelectorAll("details")].map((one) => [way(one), one.open]);
  const focus = page.hasFocus() && page.activeElement !== page.body ? way(page.activeElement) : null;
  frame.addEventListener("load", () => {
    const fresh = frame.contentDocument;
    for (const [to, open] of details) { const one = find(fresh, to); if (one) one.open = open; }
    if (focus) find(fresh, focus)?.focus({ preventScroll: true });
    // The charts take their room when they are drawn, a moment after the page is there.
    for (const wait of [0, 300, 1200]) setTimeout(() => frame.contentWindow.scrollTo(scrollX, scrollY), wait);
    news.textContent = `as of ${new Date().toLocaleTimeString()}`;
  }, { once: true });
  frame.contentWindow.location.reload();
}

function changed(now) {
  shown ??= now;
  if (now === shown) return;
  if (follow.checked && !document.hidden && performance.now() - drawn > AT_LEAST_MS) {
    shown = now;
    drawn = performance.now();
    reload();
  } else {
    news.textContent = "the run has gone on";
  }
}

live(document.getElementById("standing"), changed, () => { news.textContent = "the server does not answer; this is what it said last"; });
