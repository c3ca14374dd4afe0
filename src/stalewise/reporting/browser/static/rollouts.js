import { VirtualList } from "./list.js";
import { live } from "./live.js";
import { SHADES, TokenView, digits, element, ratio } from "./tokens.js";

const by = (id) => document.getElementById(id);
const form = by("filters");
let asked = 0, shown = 0, fingerprint = null; // fingerprint: of the run as the list shows it

async function ask(path, parameters = {}) {
  const answer = await fetch(`api/${path}?${new URLSearchParams(parameters)}`);
  const found = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(found.error);
  return found;
}

function showProblems(problems) {
  const box = by("problems");
  box.hidden = problems.length === 0;
  box.replaceChildren(...(problems.length ? [element("strong", {}, problems.length === 1 ? "One problem while reading" : `${problems.length} problems while reading`), element("ul", {}, ...problems.map((text) => element("li", {}, text)))] : []));
}

function say(text) {
  by("detail").hidden = false;
  by("detail").textContent = text;
}

// ---------------------------------------------------------------- filters and the address

function filters() {
  const found = {};
  for (const field of form.elements) {
    if (!field.name) continue;
    if (field.type === "checkbox") { if (field.checked) found[field.name] = "true"; }
    else if (field.value !== "" && !(field.name === "sort" && field.value === "group")) found[field.name] = field.value;
  }
  return found;
}

function remember(extra = {}) {
  const words = { ...filters(), ...extra };
  history.replaceState(null, "", `#${new URLSearchParams(words)}`);
}

function restore() {
  const words = new URLSearchParams(location.hash.slice(1));
  for (const field of form.elements) {
    if (!field.name) continue;
    if (field.type === "checkbox") field.checked = words.get(field.name) === "true";
    else field.value = words.get(field.name) ?? (field.name === "sort" ? "group" : "");
  }
  return words.has("open") ? { batch: words.get("in"), group: words.get("open") } : null;
}

function countActive() {
  const inside = [...by("more").querySelectorAll("input, select")].filter((field) => (field.type === "checkbox" ? field.checked : field.value !== ""));
  by("active").textContent = inside.length ? `(${inside.length} set)` : "";
  const all = Object.keys(filters()).filter((name) => name !== "sort" && name !== "descending").length;
  by("all-active").textContent = all ? `(${all} set)` : "";
}

// ---------------------------------------------------------------- the list

function drawRow(box, row) {
  const marks = [];
  if (row.rollback) marks.push(`rolled back (${row.rollback})`);
  if (row.degenerate) marks.push("degenerate");
  if (row.vetoed) marks.push(`${row.vetoed} with veto`);
  if (row.truncated) marks.push(`${row.truncated} truncated`);
  if (row.errors) marks.push(`${row.errors} verifier ${row.errors === 1 ? "error" : "errors"}`);
  const worst = row.worst_log_ratio === null ? "" : ` · worst ratio ${ratio(row.worst_log_ratio, 2)}`;
  box.append(
    element("div", { className: "title" }, element("b", {}, `group ${row.group}`), element("span", { className: "faint" }, row.update === null ? "not used" : `update ${row.update}`), element("span", { className: "end" }, `reward ${row.reward === null ? "unknown" : digits(row.reward, 3)}`)),
    element("div", { className: "prompt" }, row.prompt),
    element("div", { className: "faint" }, `${row.matching === row.rollouts ? row.rollouts : `${row.matching} of ${row.rollouts}`}${worst}${marks.length ? ` · ${marks.join(" · ")}` : ""}`),
  );
}

let query = {};
const list = new VirtualList(by("list"), by("spacer"), 72,
  async (offset, limit) => {
    try {
      const found = await ask("groups", { ...query, offset, limit });
      if (found.fingerprint !== fingerprint) offerRefresh();
      return found.rows;
    } catch (error) { showProblems([error.message]); return null; }
  },
  drawRow, (row) => open(row.batch, row.group));

function offerRefresh() {
  if (!by("again")) by("count").append(" · ", element("button", { id: "again", type: "button", onclick: refresh }, "the run has continued: refresh"));
}

async function search() {
  const mine = (asked += 1);
  query = filters();
  countActive();
  by("count").textContent = "Searching…";
  try {
    const found = await ask("groups", { ...query, offset: 0, limit: 100 });
    if (mine !== asked) return;
    fingerprint = found.fingerprint;
    list.reset(found.groups, found.rows);
    by("count").textContent = `${found.rollouts.toLocaleString("en")} rollouts in ${found.groups.toLocaleString("en")} groups`;
    showProblems([...known.problems, ...found.problems]);
  } catch (error) {
    if (mine !== asked) return;
    by("count").textContent = "the search failed";
    showProblems([error.message]);
  }
}

// ---------------------------------------------------------------- a group

function written(response) {
  if (!response.segments.length) return `${response.length}`;
  const own = response.segments.filter((one) => one.by === "policy");
  const tokens = own.reduce((sum, one) => sum + one.tokens, 0);
  return `${tokens} in ${own.length} turns, ${response.length - tokens} from outside`;
}

function facts(response) {
  const sampler = response.sampler;
  const rows = [
    ["advantage", digits(response.advantage)],
    ["update", response.update === null ? "not used yet" : `${response.update}, at age ${response.age}`],
    ["finished", response.finish === "length" ? "truncated by the token limit" : `stopped (${response.finish})`],
    ["tokens", `${written(response)}${response.clipped ? `, ${response.clipped} clipped` : ""}${response.vetoed ? `, ${response.vetoed} vetoed` : ""}`],
    ["version", response.version_first === response.version_last ? `${response.version_first}` : `${response.version_first} to ${response.version_last}`],
    ["sampler", `${sampler.name}, ${sampler.precision}, temperature ${sampler.temperature}${sampler.top_p < 1 ? `, top-p ${sampler.top_p}` : ""}${sampler.top_k ? `, top-k ${sampler.top_k}` : ""}, seed ${sampler.seed}`],
  ];
  for (const [name, value] of Object.entries(response.parts)) rows.splice(1, 0, [`part ${name}`, digits(value)]);
  for (const [name, value] of Object.entries(response.rewards || {})) rows.push([`reward in ${name}`, value === null ? "unknown" : digits(value)]);
  return element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function describe(response) {
  if (response.update === null) return "No update has used it yet, so there are no ratios.";
  if (response.worst_log_ratio === null) return "Its update recorded none of its tokens, so there are no ratios.";
  const sentences = [`Worst ratio ${ratio(response.worst_log_ratio)}, at token ${response.worst_place}.`];
  if (response.trigger_place !== null) sentences.push(`The veto was triggered by token ${response.trigger_place}: there the policy had almost stopped producing this response.`);
  return sentences.join(" ");
}

function card(response, place, batch, views) {
  const label = `Response ${place + 1}, rollout ${response.rollout_id}, reward ${response.reward === null ? "unknown" : digits(response.reward)}`;
  const head = element("h3", {}, `rollout ${response.rollout_id}`, element("span", { className: "reward" }, `reward ${response.reward === null ? "unknown" : digits(response.reward)}`));
  if (response.missing) return element("article", { className: "card" }, head, element("p", { className: "bad" }, "Its shard cannot be read."));
  const view = new TokenView(`t${place}`, `Tokens: ${label}; arrow keys move`, response.trigger_place, response.segments, say, (step) => views[views.indexOf(view) + step]?.box.focus());
  views.push(view);
  view.show(response.tokens);
  const made = element("article", { className: "card", "aria-label": label }, head);
  if (response.error) made.append(element("p", { className: "bad" }, `The verifier failed: ${response.error}`));
  made.append(element("p", { className: "story" }, describe(response)), view.box);
  const more = windows(response, batch, view);
  if (more) made.append(more);
  made.append(element("details", { open: matchMedia("(min-width: 45rem)").matches }, element("summary", {}, "Details"), facts(response)));
  return made;
}

// Buttons for the other parts of a long response.
function windows(response, batch, view) {
  const size = response.tokens.ids.length;
  if (response.length <= size) return null;
  const where = element("span", { className: "faint" });
  const tell_where = () => { where.textContent = `tokens ${view.tokens.start} to ${view.tokens.start + view.tokens.ids.length - 1} of ${response.length}`; };
  const go = (start, focus) => async () => {
    const from = Math.max(0, Math.min(start(), response.length - 1));
    try { view.show(await ask("tokens", { batch, rollout: response.rollout_id, start: from })); } catch (error) { say(error.message); return; }
    tell_where();
    if (focus !== undefined) { view.at = focus() - from; view.box.focus(); view.move(focus() - from); }
  };
  const button = (text, start, focus) => element("button", { type: "button", onclick: go(start, focus) }, text);
  const buttons = [button("earlier", () => view.tokens.start - size), button("later", () => (view.tokens.start + size < response.length ? view.tokens.start + size : view.tokens.start))];
  if (response.worst_place !== null) buttons.push(button("worst ratio", () => response.worst_place - 20, () => response.worst_place));
  if (response.trigger_place !== null) buttons.push(button("trigger", () => response.trigger_place - 20, () => response.trigger_place));
  tell_where();
  return element("p", { className: "windows" }, ...buttons, where);
}

// The gold answer comes later: finding it may take the server the time to read the task's data.
function showGold({ answer, why }, mine) {
  if (mine !== shown) return;
  by("gold").append(answer === null ? element("p", { className: "faint" }, `unknown: ${why}`) : element("pre", {}, answer));
  by("gold").hidden = false;
  if (answer === null || answer.length > 40 || answer.includes("\n")) return;
  for (const tokens of document.querySelectorAll("article .tokens")) tokens.after(element("p", { className: "gold" }, element("span", { className: "faint" }, "gold "), answer));
}

// The other groups with the same prompt: what later policies made of it.
function versions(found, batch) {
  if (found.versions.length < 2) return [];
  const buttons = found.versions.map((one) => {
    const text = `version ${one.version}${one.rollback ? `, ${one.rollback}` : ""}: reward ${one.reward === null ? "unknown" : digits(one.reward, 3)}`;
    const isThis = one.batch === batch && one.group === found.group;
    return element("button", { type: "button", "aria-pressed": String(isThis), onclick: () => open(one.batch, one.group) }, text);
  });
  return [element("div", { className: "versions", role: "group", "aria-label": "This prompt across versions" }, element("span", { className: "faint" }, "This prompt across versions"), ...buttons)];
}

async function open(batch, group) {
  const mine = (shown += 1);
  const content = by("content");
  try {
    const found = await ask("group", { batch, group });
    if (mine !== shown) return;
    const views = [];
    const rewards = found.responses.map((response) => response.reward).filter((reward) => reward !== null);
    const notes = [`${found.responses.length} responses`];
    if (found.rewards_used !== "first") notes.push(`rewards: ${found.rewards_used}`);
    const equal = rewards.length ? `all rewards are ${digits(rewards[0])}` : "no response has a reward";
    if (found.degenerate) notes.push(`degenerate: ${equal}, so it gives no gradient`);
    if (found.rollback) notes.push(found.is_kept ? `as seen by updates that rollback ${found.rollback} removed; the batch itself is kept` : `removed by rollback ${found.rollback}: the run continued without it`);
    content.replaceChildren(
      element("h2", {}, `Group ${found.group}`, element("span", { className: "faint" }, ` in ${found.directory}`)),
      element("p", { className: "faint" }, `${notes.join(" · ")} · prompt id ${found.prompt_id}`),
      ...found.problems.map((text) => element("p", { className: "bad" }, text)),
      element("div", { className: "card ask" },
        element("div", {}, element("h3", {}, "Prompt"), element("pre", {}, found.prompt)),
        element("div", { id: "gold", hidden: true }, element("h3", {}, "Gold answer"))),
      ...versions(found, batch),
      element("div", { className: "responses" }, ...found.responses.map((response, place) => card(response, place, batch, views))),
    );
    by("detail").hidden = true;
    remember({ in: batch, open: group });
    showGold(await ask("gold", { batch, group }), mine);
  } catch (error) {
    if (mine === shown) content.replaceChildren(element("p", { className: "bad" }, error.message));
  }
}

// ---------------------------------------------------------------- start

function legend() {
  const swatch = (kind, text) => element("span", { className: "key" }, element("span", { className: `token ${kind}` }, text));
  const names = SHADES.map((factor) => `${factor}`);
  const scale = [];
  for (let i = SHADES.length; i > 0; i -= 1) scale.push(swatch(`down${i}`, i === SHADES.length ? `÷${names[i - 1]} or more` : `÷${names[i - 1]}`));
  scale.push(swatch("r0", "about 1"));
  for (let i = 1; i <= SHADES.length; i += 1) scale.push(swatch(`up${i}`, i === SHADES.length ? `×${names[i - 1]} or more` : `×${names[i - 1]}`));
  by("legend").append(
    element("div", {}, element("b", {}, "Ratio"), " of the policy at the update to the policy that sampled: ", ...scale),
    element("div", {}, element("b", {}, "Marks"), " ", swatch("clipped r0", "clipped"), swatch("vetoed r0", "vetoed"), swatch("trigger first r0", "trigger of the veto"), swatch("trigger r0", "later tokens that would trigger it"), swatch("broken", "ratio not a number"), swatch("unseen", "no ratio yet"), swatch("read", "from outside")),
  );
}

let known = { problems: [] };

function choices(select, options) {
  const value = select.value;
  select.replaceChildren(select.options[0], ...options.map(([key, text]) => element("option", { value: key }, text)));
  select.value = options.some(([key]) => key === value) ? value : "";
}

async function overview() {
  known = await ask("overview");
  by("run").textContent = `${known.run}: ${known.rollouts.toLocaleString("en")} rollouts, ${known.consumed.toLocaleString("en")} used`;
  choices(form.elements.batch, known.batches.map((batch) => [batch.key, `${batch.key}${batch.rollback ? " (rolled back)" : ""}, ${batch.rollouts.toLocaleString("en")}`]));
  choices(form.elements.part, known.parts.map((part) => [part, part]));
  by("generating").hidden = known.generating.length === 0;
  by("generating").textContent = `Being generated, listed when complete: ${known.generating.join(", ")}`;
}

async function refresh() {
  try { await overview(); } catch (error) { showProblems([error.message]); return; }
  const top = by("list").scrollTop;
  await search();
  by("list").scrollTop = top;
}

async function start() {
  legend();
  if (matchMedia("(max-width: 45rem)").matches) for (const id of ["search", "legend"]) by(id).open = false;
  try {
    await overview();
  } catch (error) {
    showProblems([error.message]);
    by("count").textContent = "";
    return;
  }
  const wanted = restore();
  await search();
  if (wanted) open(wanted.batch, wanted.group);
  else if (list.total) list.choose(0);
}

let waiting = 0;
form.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { remember(); search(); }, 250);
});
form.addEventListener("reset", () => setTimeout(() => { remember(); search(); }));
form.addEventListener("submit", (event) => event.preventDefault());
let state = null;
start().then(() => live(by("status"), (now) => {
  if (state !== null && now !== state) offerRefresh();
  state = now;
}));
