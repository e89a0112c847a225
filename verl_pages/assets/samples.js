// Samples over steps: the list of prompts, and the responses to one of them at two steps side by side.
const browse = { entries: [], matches: [], sides: [null, null], samples: [0, 0], marks: true, measure: "" };
const measures = measuresOf();

// An entry of the list: the order of its fields is that of `_entry` in page_samples.py.
function entryOf([split, uid, source, text, cells, chunkId, place]) {
  const entry = { split, uid, source, text, cells, chunkId, place };
  const byRun = new Map();
  for (const cell of cells) byRun.set(cell[0], [...(byRun.get(cell[0]) || []), cell[2] / cell[3]]);
  entry.shares = [...byRun.values()];
  entry.change = entry.shares.reduce((sum, shares) => sum + shares[shares.length - 1] - shares[0], 0);
  return entry;
}

const VERDICTS = {
  several: ["answered at several steps", (e) => e.cells.length > 1],
  gained: ["more often correct at the end", (e) => e.change > 0],
  lost: ["less often correct at the end", (e) => e.change < 0],
  always: ["always correct", (e) => e.cells.every(([, , correct, all]) => correct === all)],
  never: ["never correct", (e) => e.cells.every(([, , correct]) => correct === 0)],
  mixed: ["correct and incorrect", (e) => e.cells.some(([, , c, n]) => c > 0) && e.cells.some(([, , c, n]) => c < n)],
  cut: ["cut at the length limit", (e) => e.cells.some(([, , , , cut]) => cut > 0)],
};
const ORDERS = {
  steps: ["most steps", (a, b) => b.cells.length - a.cells.length],
  gain: ["largest gain", (a, b) => b.change - a.change],
  loss: ["largest loss", (a, b) => a.change - b.change],
  uid: ["place in the data", (a, b) => a.uid - b.uid],
};

function fillFilters() {
  const splits = [...new Set(browse.entries.map(({ split }) => split))].sort();
  const sources = [...new Set(browse.entries.map(({ source }) => source))].sort();
  byId("filter-split").append(option("", "all"), ...splits.map((split) => option(split, split === "val" ? "validation" : "training")));
  byId("filter-source").append(option("", "all"), ...sources.map((source) => option(source, visible(source) || "(none)")));
  byId("filter-verdict").append(option("", "any"), ...Object.entries(VERDICTS).map(([key, [name]]) => option(key, name)));
  byId("filter-order").append(...Object.entries(ORDERS).map(([key, [name]]) => option(key, name)));
}

function applyFilters() {
  const [split, source, verdict, order] = ["split", "source", "verdict", "order"].map((name) => byId(`filter-${name}`).value);
  const words = byId("filter-text").value.trim().toLowerCase();
  browse.matches = browse.entries.filter((entry) => (!split || entry.split === split) && (!source || entry.source === source)
    && (!verdict || VERDICTS[verdict][1](entry)) && (!words || entry.text.toLowerCase().includes(words)));
  browse.matches.sort(ORDERS[order || "steps"][1]);
  byId("count").textContent = `${browse.matches.length.toLocaleString("en")} of ${plural(browse.entries.length, "prompt")}`;
  return prompts.show(browse.matches.length);
}

async function promptItem(place) {
  const entry = browse.matches[place];
  // Of several runs, their mean.
  const mean = (pick) => percent0(entry.shares.reduce((sum, shares) => sum + pick(shares), 0) / entry.shares.length);
  const last = mean((shares) => shares[shares.length - 1]);
  const tally = entry.shares.some((shares) => shares.length > 1) ? `${mean((shares) => shares[0])} → ${last}` : last;
  return el("div", { class: "item" },
    el("div", { class: "where" }, el("span", {}, `${entry.split === "val" ? "validation" : "training"} · ${entry.uid}${entry.source ? ` · ${visible(entry.source)}` : ""}`),
      el("span", { class: "tally", title: "correct responses at the first and the last step" }, tally)),
    el("div", { class: "text", dir: "auto" }, visible(entry.text) || "(no prompt)"));
}
const percent0 = (share) => `${Math.round(100 * share)}%`;

const sameCell = (cell, chosen) => chosen && cell[0] === chosen[0] && cell[1] === chosen[1];

async function openPrompt() {
  const entry = browse.matches[prompts.chosen];
  if (entry) {
    // The steps that were looked at stay, if this prompt has them.
    const { cells } = entry;
    const own = cells.filter(([run]) => run === cells[0][0]);
    const first = cells.find((cell) => sameCell(cell, browse.sides[0])) || cells[0];
    let last = cells.find((cell) => sameCell(cell, browse.sides[1])) || own[own.length - 1];
    if (last === first && cells.length > 1) last = cells[cells.length - 1] === first ? cells[0] : cells[cells.length - 1];
    browse.sides = [first, last].map((cell) => cell.slice(0, 2));
    browse.samples = [0, 0];
  }
  await drawPrompt();
  byId("detail").scrollTop = 0;
}
const prompts = rowList(byId("list"), byId("list-space"), promptItem, openPrompt);

let promptRound = 0;
async function drawPrompt() {
  const round = ++promptRound;
  const detail = byId("detail");
  const entry = browse.matches[prompts.chosen];
  if (!entry) {
    detail.replaceChildren(el("p", { class: "empty" }, browse.entries.length ? "No prompt matches the filters." : "There are no samples. Reinforcement learning keeps those of every step with trainer.samples.freq=1; supervised fine-tuning has none."));
    return;
  }
  const record = (await chunk(entry.chunkId))[entry.place];
  if (round !== promptRound) return;
  const held = browse.sides.map((side) => record.cells.find((cell) => sameCell(cell, side)));
  const numbers = held.map(([, , list], side) => Math.min(browse.samples[side], list.length - 1));
  const responses = held.map(([, , list], side) => list[numbers[side]]);
  const single = entry.cells.length === 1 && responses[0] === responses[1];
  const texts = responses.map((r) => r.text.join(""));
  const marks = browse.marks && !single ? differences(...texts) : [null, null];
  const measure = measures.find(({ key }) => key === browse.measure);
  const scale = measure ? scaleOfTokens(measure, responses) : null;
  const panes = (single ? [0] : [0, 1]).map((side) => pane(entry, side, held[side], numbers[side], responses[side], marks && marks[side], measure, scale));
  const focus = keptFocus(detail);
  detail.replaceChildren(
    el("h3", {}, `${entry.split === "val" ? "Validation" : "Training"} prompt ${entry.uid}`),
    el("p", { class: "prose prompt", dir: "auto" }, visible(record.prompt) || "(no prompt)"),
    el("p", { class: "facts" }, el("span", {}, "Ground truth ", el("b", {}, visible(record.truth) || "none"))),
    stepStrip(entry), tools(responses, measure, scale, marks === null, single),
    el("div", { class: `panes ${single ? "single" : ""}` }, ...panes), figureTable(responses, single));
  focus();
}

// Where the keyboard is inside `box`; what is returned goes there again once the box is drawn again.
function keptFocus(box) {
  const focused = document.activeElement;
  if (!focused || focused === box || !box.contains(focused)) return () => {};
  const name = focused.id ? `#${focused.id}` : `.${focused.classList[0]}`;
  const place = [...box.querySelectorAll(name)].indexOf(focused);
  return () => {
    const found = box.querySelectorAll(name);
    if (found.length) found[Math.min(place, found.length - 1)].focus({ preventScroll: true });
  };
}

// One button for every step (and run), as dark as the share of correct responses.
function stepStrip(entry) {
  const strip = el("div", { class: "strip" });
  for (const [r, run] of data.runs.entries()) {
    const cells = entry.cells.filter((cell) => cell[0] === r);
    if (!cells.length) continue;
    const row = el("div", { class: "steps", role: "group", "aria-label": `Steps of ${run.name}` });
    if (severalRuns) row.append(el("span", { class: "owner" }, swatch({ style: ownerOf(run) }), run.name));
    for (const cell of cells) {
      const [, step, correct, all] = cell;
      const sides = browse.sides.map((side) => sameCell(cell, side));
      const name = `Step ${step.toLocaleString("en")}: ${correct} of ${all} correct`;
      const button = el("button", { type: "button", class: "step", title: `${name}. Click: show right; with shift: show left`, "aria-label": name,
        "aria-pressed": String(sides[0] || sides[1]), "data-side": sides[0] && sides[1] ? "LR" : sides[0] ? "L" : sides[1] ? "R" : null }, String(step));
      button.style.setProperty("--s", `${Math.round((100 * correct) / all)}%`);
      button.addEventListener("click", (event) => show(event.shiftKey ? 0 : 1, cell));
      row.append(button);
    }
    strip.append(row);
  }
  return strip;
}

function show(side, cell) {
  browse.sides[side] = cell.slice(0, 2);
  return drawPrompt();
}

function tools(responses, measure, scale, tooDifferent, single) {
  const box = el("input", { type: "checkbox", id: "marks" });
  box.checked = browse.marks;
  box.addEventListener("change", () => { browse.marks = box.checked; drawPrompt(); });
  const known = measures.filter((one) => responses.some((r) => r.tokens && one.values(r.tokens)));
  const parts = [single ? null : el("label", {}, box, " mark differences")];
  if (known.length) {
    const select = el("select", { id: "measure" }, option("", "nothing"), ...known.map(({ key, name }) => option(key, name)));
    select.value = known.some(({ key }) => key === browse.measure) ? browse.measure : "";
    select.addEventListener("change", () => { browse.measure = select.value; drawPrompt(); });
    parts.push(el("label", {}, "Colour tokens by ", select));
  } else parts.push(el("span", { class: "quiet" }, "Tokens have no figures here to colour them by; trainer.samples.tokens=true keeps them."));
  if (tooDifferent) parts.push(el("span", { class: "quiet" }, "The responses differ too much to mark the differences."));
  return el("div", {}, el("div", { class: "pane-tools" }, ...parts), measure && scale ? tokenLegend(measure, scale) : null);
}

function pane(entry, side, cell, number, response, marks, measure, scale) {
  const select = el("select", { "aria-label": side ? "Right step" : "Left step", id: `side-${side}` }, ...entry.cells.map(([r, step, correct, all], i) =>
    option(String(i), `${severalRuns ? `${data.runs[r].name}: ` : ""}step ${step.toLocaleString("en")} (${correct} of ${all} correct)`)));
  select.value = String(entry.cells.findIndex((one) => sameCell(one, cell)));
  select.addEventListener("change", () => show(side, entry.cells[Number(select.value)]));
  const total = entry.cells.find((one) => sameCell(one, cell))[3];
  const buttons = cell[2].map((one, i) => {
    const name = `Response ${i + 1}: ${verdictOf(one)}`;
    const button = el("button", { type: "button", class: `cell ${one.correct ? "correct" : "wrong"}`, title: name, "aria-label": name, "aria-pressed": String(i === number) }, one.correct ? "✓" : "×");
    button.addEventListener("click", () => { browse.samples[side] = i; drawPrompt(); });
    return button;
  });
  const facts = el("p", { class: "facts" },
    el("span", { class: `badge ${response.correct ? "correct" : "wrong"}` }, `${response.correct ? "✓" : "×"} ${visible(verdictOf(response))}`),
    el("span", {}, "answer ", el("b", {}, visible(response.answer) || "none")),
    response.truncated ? el("span", {}, "cut at the length limit") : null,
    response.extra ? el("span", {}, visible(response.extra)) : null);
  const text = el("pre", { class: "response", dir: "auto" });
  fillText(text, response, marks, measure, scale);
  return el("section", { class: "pane", "data-side": side }, select,
    el("div", { class: "cells", role: "group", "aria-label": "Responses" }, ...buttons, total > cell[2].length ? el("small", { class: "quiet" }, `and ${total - cell[2].length} more`) : null), facts, text);
}

const verdictOf = (response) => (response.correct ? "correct" : "incorrect") + (response.reason ? ` (${response.reason})` : "");

const FIGURE_NAMES = { num_tokens: "tokens", logprob: "log-probability, mean", entropy: "entropy, mean", advantage_0: "advantage before shaping", advantage: "advantage", phi: "Phi" };

const RANK_NAMES = { "Effective Rank": "ER", "Effective Rank diff": "ERV", "Effective Rank diff 2": "ERA" };

function figureName(name) {
  const [, layer, metric] = name.match(/^layer_(\d+)\/(.*)$/s) || [];
  return metric ? `${RANK_NAMES[metric] || visible(metric)}, layer ${layer}` : FIGURE_NAMES[name] || visible(name);
}

function figureTable(responses, single) {
  const rows = data.samples.figures.flatMap((name, f) => {
    const values = responses.map((r) => r.figures[f]);
    if (values.every((v) => v === null)) return [];
    const change = values.includes(null) ? null : values[1] - values[0];
    return [el("tr", {}, el("th", { scope: "row", class: "name" }, figureName(name)), el("td", {}, short(values[0])),
      ...(single ? [] : [el("td", {}, short(values[1])), el("td", {}, change === null ? "–" : (change > 0 ? "+" : "") + short(Number(change.toPrecision(4))))]))];
  });
  return el("div", { class: "figures" }, tableOf(single ? ["figure", "value"] : ["figure", "left", "right", "right − left"], 1, rows));
}

function moveSide(side, by) {
  const entry = browse.matches[prompts.chosen];
  if (!entry) return;
  const at = entry.cells.findIndex((cell) => sameCell(cell, browse.sides[side]));
  show(side, entry.cells[Math.max(0, Math.min(at + by, entry.cells.length - 1))]);
}

function moveSample(by) {
  if (!browse.matches.length) return;
  const focused = document.activeElement.closest("[data-side].pane");
  const side = focused ? Number(focused.dataset.side) : 1;
  const count = byId("detail").querySelectorAll(`.pane[data-side="${side}"] .cell`).length;
  if (!count) return;
  browse.samples[side] = (Math.min(browse.samples[side], count - 1) + by + count) % count;
  drawPrompt();
}

function nextMeasure() {
  const select = byId("measure");
  if (!select) return;
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
  select.dispatchEvent(new Event("change"));
}

const sampleKeys = shortcuts({
  j: () => prompts.choose(prompts.chosen + 1),
  k: () => prompts.choose(prompts.chosen - 1),
  n: () => moveSample(1),
  p: () => moveSample(-1),
  "[": () => moveSide(0, -1),
  "]": () => moveSide(0, 1),
  ArrowLeft: () => moveSide(1, -1),
  ArrowRight: () => moveSide(1, 1),
  d: () => { browse.marks = !browse.marks; drawPrompt(); },
  c: nextMeasure,
  "/": () => byId("filter-text").focus(),
});

async function startSamples() {
  browse.entries = (await chunk(data.samples.list)).map(entryOf);
  byId("limits").textContent = data.samples.limits;
  fillFilters();
  document.addEventListener("keydown", sampleKeys);
  byId("filters").addEventListener("input", applyFilters);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(applyFilters));
  await applyFilters();
}
