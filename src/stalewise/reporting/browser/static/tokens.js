// A response token by token: shaded by ratio, marked by what the objective did, with a description of the token in focus.
export const CLIPPED = 1, VETOED = 2, TRIGGER = 4;
// Upper ends of the shades as factors above 1; below 1 their inverses.
export const SHADES = [1.05, 1.2, 2, 5, 100];

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value; else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function shade(logRatio) {
  if (logRatio === null || logRatio === undefined) return "unseen";
  if (Number.isNaN(Number(logRatio))) return "broken";
  const size = SHADES.findIndex((factor) => Math.abs(logRatio) < Math.log(factor));
  if (size === 0) return "r0";
  return `${logRatio > 0 ? "up" : "down"}${size < 0 ? SHADES.length : size}`;
}

export function digits(value, count = 4) {
  if (value === null || value === undefined) return "unknown";
  value = Number(value);
  if (value === 0) return "0";
  if (Number.isNaN(value)) return "not a number";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-3 ? value.toExponential(Math.max(0, count - 2)) : String(Number(value.toPrecision(count)));
  return text.replaceAll("-", "−");
}

// Numbers that JSON lacks arrive as strings: NaN, Infinity, -Infinity.
export function ratio(logRatio, count = 4) {
  return digits(Math.exp(Number(logRatio)), count);
}

export function describe(tokens, i, trigger) {
  const parts = [`token ${tokens.start + i} “${tokens.texts[i].replaceAll("↵\n", "↵")}” (id ${tokens.ids[i]})`];
  const logRatio = tokens.log_ratio?.[i];
  if (tokens.behaviour_logp[i] === null) return [...parts, "from outside: the policy read it, and nothing was learned from it"].join(" · ");
  if (logRatio === null || logRatio === undefined) {
    parts.push("no ratio: no update has recorded it");
  } else {
    parts.push(`ratio ${ratio(logRatio)}`);
    parts.push(`log-probability ${digits(tokens.behaviour_logp[i])} when sampled, ${digits(tokens.logp[i])} at the update`);
  }
  const flags = tokens.flags?.[i] ?? 0;
  if (flags & CLIPPED) parts.push("clipped: its ratio was bounded");
  if (flags & TRIGGER) parts.push(tokens.start + i === trigger ? "trigger of the veto: the policy had almost stopped producing this token" : "would also have triggered the veto");
  if (flags & VETOED) parts.push("vetoed: its loss was set to 0");
  return parts.join(" · ");
}

// The turns of an episode, each in its own block; what came from outside is folded.
function conversation(items, start, segments) {
  const turns = [];
  for (const { by, start: first, tokens } of segments) {
    const own = items.slice(Math.max(0, first - start), Math.max(0, first + tokens - start));
    if (!own.length) continue;
    const title = `${by}, ${tokens} tokens`;
    turns.push(by === "policy"
      ? element("div", { className: "turn own" }, element("div", { className: "speaker" }, title), ...own)
      : element("details", { className: "turn outside" }, element("summary", { className: "speaker" }, title), ...own));
  }
  return turns;
}

function draw(box, tokens, name, trigger, segments) {
  const made = tokens.ids.map((id, i) => {
    const flags = tokens.flags?.[i] ?? 0;
    const outside = tokens.behaviour_logp[i] === null;
    const kinds = ["token", outside ? "read" : shade(tokens.log_ratio?.[i])];
    if (flags & CLIPPED) kinds.push("clipped");
    if (flags & VETOED) kinds.push("vetoed");
    if (flags & TRIGGER) kinds.push("trigger");
    if (tokens.start + i === trigger) kinds.push("first");
    const token = element("span", { className: kinds.join(" "), id: `${name}-${tokens.start + i}`, role: "option" }, tokens.texts[i] || "∅");
    token.setAttribute("aria-selected", "false");
    return token;
  });
  box.replaceChildren(...(segments.length ? conversation(made, tokens.start, segments) : made));
  return made;
}

// The tokens of one response; `say` gets the description of a token, `beside` moves to a neighbouring response.
export class TokenView {
  constructor(name, label, trigger, segments, say, beside) {
    this.trigger = trigger; // position of the token that triggered the veto, or null
    this.segments = segments; // turns of an episode; empty for a single turn
    this.name = name;
    this.say = say;
    this.at = -1;
    this.box = element("div", { className: "tokens", tabIndex: 0, role: "listbox", "aria-label": label });
    this.box.addEventListener("mouseover", (event) => this.point(event.target));
    this.box.addEventListener("click", (event) => { const i = this.indexOf(event.target); if (i >= 0) this.move(i); });
    this.box.addEventListener("focus", () => this.move(Math.max(this.at, 0)));
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "ArrowUp" || event.key === "ArrowDown") { event.preventDefault(); beside(event.key === "ArrowDown" ? 1 : -1); return; }
      const target = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: this.tokens.ids.length - 1 }[event.key];
      if (target === undefined) return;
      event.preventDefault();
      this.move(target);
    });
  }

  show(tokens) {
    this.tokens = tokens;
    this.at = -1;
    this.items = draw(this.box, tokens, this.name, this.trigger, this.segments);
  }

  indexOf(target) {
    return target.classList?.contains("token") ? Number(target.id.slice(this.name.length + 1)) - this.tokens.start : -1;
  }

  point(target) {
    const i = this.indexOf(target);
    if (i < 0) return;
    target.title = describe(this.tokens, i, this.trigger);
    this.say(describe(this.tokens, i, this.trigger));
  }

  move(i) {
    if (i < 0 || i >= this.tokens.ids.length) return;
    const children = this.items;
    if (this.at >= 0) { children[this.at]?.classList.remove("at"); children[this.at]?.setAttribute("aria-selected", "false"); }
    this.at = i;
    const folded = children[i].closest("details.outside");
    if (folded) folded.open = true;
    children[i].classList.add("at");
    children[i].setAttribute("aria-selected", "true");
    this.box.setAttribute("aria-activedescendant", children[i].id);
    children[i].scrollIntoView({ block: "nearest", inline: "nearest" });
    this.say(describe(this.tokens, i, this.trigger));
  }
}
