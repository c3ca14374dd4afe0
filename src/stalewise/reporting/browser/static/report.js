// The report in its frame, reloaded when the run has changed; scroll position, open details and focus are kept.
import { live } from "./live.js";

const RELOAD_MS = 10000; // least time between two reloads
const frame = document.getElementById("report");
const news = document.getElementById("news");
const follow = document.getElementById("follow");
let shown = null, drawn = -Infinity;

// How to find an element after a reload: by its id, or by its position among elements of its kind.
function pathTo(element) {
  if (element.id) return `#${CSS.escape(element.id)}`;
  const name = element.localName;
  return { name, number: [...element.ownerDocument.querySelectorAll(name)].indexOf(element) };
}

function find(page, to) {
  return typeof to === "string" ? page.querySelector(to) : page.querySelectorAll(to.name)[to.number];
}

function reload() {
  const { scrollX, scrollY, document: page } = frame.contentWindow;
  const details = [...page.querySelectorAll("details")].map((one) => [pathTo(one), one.open]);
  const focus = page.hasFocus() && page.activeElement !== page.body ? pathTo(page.activeElement) : null;
  frame.addEventListener("load", () => {
    const fresh = frame.contentDocument;
    for (const [to, open] of details) { const one = find(fresh, to); if (one) one.open = open; }
    if (focus) find(fresh, focus)?.focus({ preventScroll: true });
    // The charts get their height when they are drawn, shortly after the page has loaded.
    for (const wait of [0, 300, 1200]) setTimeout(() => frame.contentWindow.scrollTo(scrollX, scrollY), wait);
    news.textContent = `as of ${new Date().toLocaleTimeString()}`;
  }, { once: true });
  frame.contentWindow.location.reload();
}

function changed(now) {
  shown ??= now;
  if (now === shown) return;
  if (follow.checked && !document.hidden && performance.now() - drawn > RELOAD_MS) {
    shown = now;
    drawn = performance.now();
    reload();
  } else {
    news.textContent = "the run has continued";
  }
}

live(document.getElementById("status"), changed, () => { news.textContent = "the server does not answer; this is its last status"; });
