// The browser of responses: a list of prompts, and the responses to one of them at two places (run and step) side by side.
const browse = { entries: [], matches: [], sides: [null, null], samples: [0, 0], marks: true, formulas: true, measure: "" };
const measures = measuresOf();
const SPLITS = { val: "validation ", train: "training " };
const GLYPHS = { c: "✓", w: "×", n: "–", u: "?", t: "T", m: "M", x: "C" };
const verdictClass = (code) => (code === "c" ? "correct" : code === "w" ? "wrong" : "else");
const correctIn = ([, , verdicts]) => verdicts.split("c").length - 1;
const shareOf = (cell) => correctIn(cell) / cell[2].length;
const some = (cells, code) => cells.some(([, , verdicts]) => verdicts.includes(code));

// An entry of the list: the order of its fields is that of `_entry` in samples.py. A cell is [run, step, verdicts, truncated].
function entryOf([split, uid, source, text, cells, chunkId, place]) {
  const entry = { split, uid, source, text, cells, chunkId, place };
  const byRun = Map.groupBy ? Map.groupBy(cells, ([run]) => run) : cells.reduce((map, cell) => map.set(cell[0], [...(map.get(cell[0]) || []), cell]), new Map());
  entry.shares = [...byRun.values()].map((own) => own.filter(([, , verdicts]) => verdicts).map(shareOf)).filter((own) => own.length);
  entry.change = entry.shares.reduce((sum, shares) => sum + shares[shares.length - 1] - shares[0], 0);
  return entry;
}

// Filters: of the cells that are chosen, and of the whole entry.
const VERDICTS = {
  several: ["answered at several steps", (cells) => cells.length > 1],
  gained: ["more often correct at the end", (_, entry) => entry.change > 0],
  lost: ["less often correct at the end", (_, entry) => entry.change < 0],
  always: ["always correct", (cells) => cells.every((cell) => correctIn(cell) === cell[2].length)],
  never: ["never correct", (cells) => !some(cells, "c")],
  mixed: ["correct and incorrect", (cells) => some(cells, "c") && cells.some((cell) => correctIn(cell) < cell[2].length)],
  apart: ["correct at only some steps or runs", (cells) => some(cells, "c") && cells.some((cell) => !correctIn(cell))],
  cut: ["cut at the length limit", (cells) => cells.some(([, , , cut]) => cut > 0)],
};
const ORDERS = {
  steps: ["most steps", (a, b) => b.cells.length - a.cells.length],
  gain: ["largest gain", (a, b) => b.change - a.change],
  loss: ["largest loss", (a, b) => a.change - b.change],
  place: ["place in the data", (a, b) => browse.sources.indexOf(a.source) - browse.sources.indexOf(b.source) || a.uid - b.uid],
};
const titleOf = ({ split, source, uid }) => `${source ? `${visible(source)} · ` : ""}${SPLITS[split] || ""}${data.samples.noun} ${uid}`;
const placeName = ([run, step]) => `${severalRuns ? `${data.runs[run].name}: ` : ""}step ${count(step)}`;
const sameCell = (cell, chosen) => chosen && cell[0] === chosen[0] && cell[1] === chosen[1];

// A choice that says nothing is hidden.
function fillFilter(name, all, options) {
  byId(`filter-${name}`).append(...(all ? [option("", all)] : []), ...options.map(([value, text]) => option(value, text)));
  byId(`filter-${name}`).parentElement.hidden = options.length < 2;
}

function fillFilters() {
  const distinct = (values) => [...new Set(values)];
  browse.sources = distinct(browse.entries.map(({ source }) => source));
  const cells = browse.entries.flatMap((entry) => entry.cells);
  let places = distinct(cells.map(([run, step]) => `${run},${step}`));
  if (places.length > 60) places = severalRuns ? distinct(cells.map(([run]) => String(run))) : [];
  const codes = Object.entries(data.samples.verdicts).filter(([code]) => some(cells, code));
  fillFilter("split", "all", distinct(browse.entries.map(({ split }) => split)).map((split) => [split, SPLITS[split]]));
  fillFilter("source", "all", browse.sources.map((source) => [source, visible(source) || "(none)"]));
  fillFilter("place", "all", places.map((place) => [place, place.includes(",") ? placeName(place.split(",").map(Number)) : data.runs[place].name]));
  fillFilter("verdict", "any", [...Object.entries(VERDICTS).map(([key, [name]]) => [key, name]), ...codes.map(([code, name]) => [`is:${code}`, `some response: ${name.replaceAll("_", " ")}`])]);
  fillFilter("order", "", Object.entries(ORDERS).map(([key, [name]]) => [key, name]));
  byId("filter-order").value = data.samples.order;
  for (const one of byId("filter-order").options) one.defaultSelected = one.selected;
}

const filterOf = (name) => byId(`filter-${name}`).value;
const chosenCells = (entry) => entry.cells.filter(([run, step]) => ["", String(run), `${run},${step}`].includes(filterOf("place")));
// The verdict that responses are looked for by; empty: any.
const chosenCode = () => (filterOf("verdict").startsWith("is:") ? filterOf("verdict").slice(3) : "");

function applyFilters() {
  const [split, source, verdict] = ["split", "source", "verdict"].map(filterOf);
  const words = filterOf("text").trim().toLowerCase();
  const passes = (entry) => {
    const cells = chosenCells(entry).filter(([, , verdicts]) => verdicts);
    if (filterOf("place") && !cells.length) return false;
    return !verdict || (chosenCode() ? some(cells, chosenCode()) : cells.length > 0 && VERDICTS[verdict][1](cells, entry));
  };
  browse.matches = browse.entries.filter((entry) => (!split || entry.split === split) && (!source || entry.source === source)
    && (!words || entry.text.toLowerCase().includes(words)) && passes(entry));
  browse.matches.sort(ORDERS[filterOf("order") || "steps"][1]);
  byId("count").textContent = `${count(browse.matches.length)} of ${plural(browse.entries.length, data.samples.noun)}`;
  return prompts.show(browse.matches.length);
}

async function promptItem(place) {
  const entry = browse.matches[place];
  // Of several runs, their mean.
  const mean = (pick) => percent0(entry.shares.reduce((sum, shares) => sum + pick(shares), 0) / entry.shares.length);
  const last = entry.shares.length ? mean((shares) => shares[shares.length - 1]) : "–";
  const tally = entry.shares.some((shares) => shares.length > 1) ? `${mean((shares) => shares[0])} → ${last}` : last;
  return el("div", { class: "item" },
    el("div", { class: "where" }, el("span", {}, titleOf(entry)), el("span", { class: "tally", title: "correct responses at the first and the last step" }, tally)),
    el("div", { class: "text", dir: "auto" }, visible(entry.text.replace(TEMPLATE, " ").trim()) || `(no ${data.samples.noun})`));
}

async function openPrompt() {
  const entry = browse.matches[prompts.chosen];
  if (entry) {
    // The steps that were looked at stay, if this prompt has them; a step that is filtered by is on the right.
    const { cells } = entry;
    const own = cells.filter(([run]) => run === cells[0][0]);
    const first = cells.find((cell) => sameCell(cell, browse.sides[0])) || cells[0];
    let last = cells.find((cell) => sameCell(cell, browse.sides[1])) || own[own.length - 1];
    if (filterOf("place") || chosenCode()) last = chosenCells(entry).find(([, , verdicts]) => verdicts.includes(chosenCode())) || last;
    else if (last === first && cells.length > 1) last = cells[cells.length - 1] === first ? cells[0] : cells[cells.length - 1];
    browse.sides = [first, last].map((cell) => cell.slice(0, 2));
    browse.samples = [first, last].map(([, , verdicts]) => Math.max(0, verdicts.indexOf(chosenCode())));
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
    detail.replaceChildren(el("p", { class: "empty" }, browse.entries.length ? `No ${data.samples.noun} matches the filters.` : data.samples.none));
    return;
  }
  const record = (await chunk(entry.chunkId))[entry.place];
  if (round !== promptRound) return;
  const cells = browse.sides.map((side) => entry.cells.find((cell) => sameCell(cell, side)));
  const numbers = cells.map(([, , verdicts], side) => Math.min(browse.samples[side], verdicts.length - 1));
  const responses = cells.map((cell, side) => record.cells[entry.cells.indexOf(cell)][numbers[side]] || null);
  const single = cells[0] === cells[1] && entry.cells.length === 1;
  const both = responses[0] && responses[1];
  const marks = browse.marks && !single && both ? differences(...responses.map((r) => r.text.join(""))) : [null, null];
  const measure = measures.find(({ key }) => key === browse.measure);
  const colours = measure && { measure, scale: scaleOfTokens(measure, responses) };
  const panes = (single ? [0] : [0, 1]).map((side) => pane(entry, side, cells[side], numbers[side], responses[side], marks && marks[side], colours));
  const focus = keptFocus(detail);
  detail.replaceChildren(
    el("h3", {}, titleOf(entry)),
    el("p", { class: "prose prompt", dir: "auto" }, ...(record.prompt ? richText(record.prompt) : [`(no ${data.samples.noun})`])),
    el("p", { class: "facts" }, el("span", {}, `${data.samples.truth} `, el("b", {}, ...answerNodes(record.truth || "none")))),
    placeStrip(entry), tools(record, responses, colours, marks === null, single),
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
    const again = box.querySelectorAll(name);
    if (again.length) again[Math.min(place, again.length - 1)].focus({ preventScroll: true });
  };
}

// One button for every step (and run), as dark as the share of correct responses.
function placeStrip(entry) {
  const strip = el("div", { class: "strip" });
  for (const [r, run] of data.runs.entries()) {
    const cells = entry.cells.filter((cell) => cell[0] === r);
    if (!cells.length) continue;
    const row = el("div", { class: "steps", role: "group", "aria-label": `Steps of ${run.name}` });
    if (severalRuns) row.append(el("span", { class: "owner" }, swatch(ownerOf(run)), run.name));
    for (const cell of cells) {
      const sides = browse.sides.map((side) => sameCell(cell, side));
      const name = `Step ${count(cell[1])}: ${correctIn(cell)} of ${cell[2].length} correct`;
      const button = el("button", { type: "button", class: "step", title: `${name}. Click: show right; with shift: show left`, "aria-label": name,
        "aria-pressed": String(sides[0] || sides[1]), "data-side": sides[0] && sides[1] ? "LR" : sides[0] ? "L" : sides[1] ? "R" : null }, String(cell[1]));
      button.style.setProperty("--s", `${Math.round(100 * shareOf(cell)) || 0}%`);
      button.addEventListener("click", (event) => show(event.shiftKey ? 0 : 1, cell));
      row.append(button);
    }
    strip.append(row);
  }
  return strip;
}

function show(side, cell) {
  browse.sides[side] = cell.slice(0, 2);
  browse.samples[side] = 0;
  return drawPrompt();
}

function toggle(name, text) {
  const box = el("input", { type: "checkbox", id: name });
  box.checked = browse[name];
  box.addEventListener("change", () => { browse[name] = box.checked; drawPrompt(); });
  return el("label", {}, box, ` ${text}`);
}

function tools(record, responses, colours, tooDifferent, single) {
  const typeset = [record.prompt, ...responses.map((r) => (r ? r.text.join("") : ""))].some(hasFormulas);
  const known = measures.filter((one) => responses.some((r) => r && r.tokens && one.values(r.tokens)));
  const parts = [single ? null : toggle("marks", "mark differences"), typeset ? toggle("formulas", "typeset formulas") : null];
  if (known.length) {
    const select = el("select", { id: "measure" }, option("", "nothing"), ...known.map(({ key, name }) => option(key, name)));
    select.value = known.some(({ key }) => key === browse.measure) ? browse.measure : "";
    select.addEventListener("change", () => { browse.measure = select.value; drawPrompt(); });
    parts.push(el("label", {}, "Colour tokens by ", select));
  } else if (data.samples.hint) parts.push(el("span", { class: "quiet" }, data.samples.hint));
  if (tooDifferent) parts.push(el("span", { class: "quiet" }, "The responses differ too much to mark the differences."));
  return el("div", {}, el("div", { class: "pane-tools" }, ...parts.filter(Boolean)), colours && colours.scale ? tokenLegend(colours.measure, colours.scale) : null);
}

const verdictName = (code, reason) => (data.samples.verdicts[code] || "other").replaceAll("_", " ") + (reason ? ` (${visible(reason)})` : "");

// One side: which place it shows, the verdicts of its responses, and the one that is open.
function pane(entry, side, cell, number, response, marks, colours) {
  const select = el("select", { "aria-label": side ? "Right step" : "Left step", id: `side-${side}` }, ...entry.cells.map((one, i) =>
    option(String(i), `${placeName(one)} (${correctIn(one)} of ${one[2].length} correct)`)));
  select.value = String(entry.cells.indexOf(cell));
  select.addEventListener("change", () => show(side, entry.cells[Number(select.value)]));
  const buttons = [...cell[2]].map((code, i) => {
    const name = `Response ${i + 1}: ${verdictName(code, "")}`;
    const faint = chosenCode() && code !== chosenCode() ? " faint" : "";
    const button = el("button", { type: "button", class: `cell ${verdictClass(code)}${faint}`, title: name, "aria-label": name, "aria-pressed": String(i === number) }, GLYPHS[code] || "·");
    button.addEventListener("click", () => { browse.samples[side] = i; drawPrompt(); });
    return button;
  });
  const parts = [select, el("div", { class: "cells", role: "group", "aria-label": "Responses" }, ...buttons)];
  if (response) parts.push(...responseView(cell[2][number], response, marks, colours));
  else parts.push(el("p", { class: "quiet" }, cell[2] ? `This response was left out to keep the page small; ${data.samples.files} has it.` : "There are no responses."));
  return el("section", { class: "pane", "data-side": side }, ...parts);
}

function responseView(code, response, marks, colours) {
  const facts = el("p", { class: "facts" },
    el("span", { class: `badge ${verdictClass(code)}` }, `${GLYPHS[code] || "·"} ${verdictName(code, response.reason)}`),
    el("span", {}, "answer ", el("b", {}, ...answerNodes(response.answer || "none"))),
    response.truncated ? el("span", {}, "cut at the length limit") : null,
    response.extra ? el("span", {}, visible(response.extra)) : null);
  const text = el("pre", { class: "response", dir: "auto" });
  fillText(text, response, marks, colours);
  return [facts, text];
}

function figureTable(responses, single) {
  const rows = data.samples.figures.flatMap((name, f) => {
    const values = responses.map((r) => (r ? r.figures[f] : null));
    if (values.every((v) => v === null)) return [];
    const change = values.includes(null) ? null : Number((values[1] - values[0]).toPrecision(4));
    const beside = single ? [] : [cellOf(short(values[1])), cellOf((change > 0 ? "+" : "") + short(change))];
    return [el("tr", {}, rowName(visible(name)), cellOf(short(values[0])), ...beside)];
  });
  if (!rows.length) return "";
  return el("div", { class: "figures" }, tableOf(single ? ["figure", "value"] : ["figure", "left", "right", "right − left"], 1, rows));
}

function moveSide(side, by) {
  const entry = browse.matches[prompts.chosen];
  if (!entry) return;
  const at = entry.cells.findIndex((cell) => sameCell(cell, browse.sides[side]));
  show(side, entry.cells[Math.max(0, Math.min(at + by, entry.cells.length - 1))]);
}

// The next response, or the next with the chosen verdict, on the side that has the focus.
function moveSample(by) {
  const focused = document.activeElement.closest(".pane") || byId("detail").querySelector(".pane:last-child");
  if (!focused) return;
  const cells = [...focused.querySelectorAll(".cell")];
  const wanted = [...cells.keys()].filter((i) => !cells[i].classList.contains("faint"));
  if (!wanted.length) return;
  const at = wanted.indexOf(cells.findIndex((cell) => cell.getAttribute("aria-pressed") === "true"));
  browse.samples[focused.dataset.side] = wanted[(at + by + wanted.length) % wanted.length];
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
  f: () => { browse.formulas = !browse.formulas; drawPrompt(); },
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
