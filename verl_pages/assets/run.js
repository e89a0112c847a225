// The page of runs: overview, sections of curves, time by phase, options.
const shown = { runs: new Set(data.runs.keys()), together: data.groups.length < data.runs.length, layer: "", smoothing: 0 };
const severalRuns = data.runs.length > 1;
// What gives a run its colour.
const ownerOf = (run) => (shown.together ? data.groups[run.group] : run);
const groupMembers = (g) => [...data.runs.keys()].filter((r) => data.runs[r].group === g);

// What is drawn: a line per run, or per group of seeds, and series.
function linesOf(panel, smoothing) {
  const curves = unpackedCurves[panel.chunk][panel.place];
  const lines = [];
  panel.series.forEach((_, s) => {
    const pointsOf = (runs) => runs.filter((r) => shown.runs.has(r)).map((r) => curves[s][r]).filter((points) => points && points[0].length);
    for (const [owner, runs] of owners()) {
      const members = pointsOf(runs);
      if (members.length) lines.push(lineOf(panel, s, owner, members.length > 1 ? joined(members) : members[0], smoothing));
    }
  });
  const few = panel.series.length * (severalRuns ? shown.runs.size : 1) <= 6;
  return lines.map((line) => ({ ...line, marks: few && line.x.length <= 24 }));
}

const owners = () => (shown.together ? data.groups.map((group, g) => [group, groupMembers(g)]) : data.runs.map((run, r) => [run, [r]]));

// With several runs a colour is a run and a dash a series; with one, a colour is a series. Correct and wrong have their own.
function lookOf(panel, s, owner) {
  const meaning = MEANINGS[panel.series[s]];
  const place = panel.series.slice(0, s).filter((name) => !MEANINGS[name]).length + (severalRuns && panel.series.some((name) => MEANINGS[name]) ? 2 : 0);
  // Of a few lines all have their own dash, so that two in one place are both seen.
  const turn = severalRuns || panel.series.length <= 3 ? place : Math.floor(place / data.styles.length);
  const look = { dash: DASHES[turn % DASHES.length], ...(severalRuns ? {} : data.styles[place % data.styles.length]), ...meaning };
  return severalRuns ? { ...look, ...owner } : look;
}

function lineOf(panel, s, owner, [x, mean, low, high], smoothing) {
  const name = [severalRuns ? owner.name : "", panel.series[s]].filter(Boolean).join(": ") || panel.title;
  return { ...lookOf(panel, s, owner), name, x, mean, low, high, smooth: smoothed(mean, smoothing) };
}

// Seeds: the mean of runs at each point, and the lowest and highest of them.
function joined(members) {
  const at = new Map();
  for (const [x, mean] of members) {
    x.forEach((step, i) => {
      const key = Math.floor(step / data.width);
      if (!at.has(key)) at.set(key, [step, []]);
      at.get(key)[1].push(mean[i]);
    });
  }
  const sorted = [...at].sort((a, b) => a[0] - b[0]).map(([, entry]) => entry);
  return [sorted.map(([x]) => x), sorted.map(([, v]) => v.reduce((a, b) => a + b, 0) / v.length),
    sorted.map(([, v]) => Math.min(...v)), sorted.map(([, v]) => Math.max(...v))];
}

function smoothed(values, window) {
  if (!window) return null;
  const half = Math.floor(window / 2);
  return values.map((_, i) => {
    const part = values.slice(Math.max(0, i - half), i + half + 1);
    return part.reduce((a, b) => a + b, 0) / part.length;
  });
}

// The curves by chunk, once they are unpacked.
const unpackedCurves = [];

function viewOf(panel) {
  // With several runs the colours are in the bar above; the panel itself says what its dashes are.
  const dashes = () => panel.series.map((name, s) => ({ name, ...lookOf(panel, s, { colour: "var(--quiet)" }) }));
  return {
    ...headOf(panel), axis: stepAxis(), percent: panel.percent, smooth: shown.smoothing, log: panel.log,
    lines: (smoothing = shown.smoothing) => linesOf(panel, smoothing),
    keys: (lines, large) => (panel.series.length < 2 && !panel.named && !(large && severalRuns) ? [] : severalRuns && !large ? dashes() : lines.map((line) => ({ ...line, marks: false }))),
  };
}

const headOf = ({ title, about, names, nonfinite }) => ({ title, about, names, note: nonfinite ? `${plural(nonfinite, "value")} not finite` : "" });
const drawPanel = (figure) => figure.replaceChildren(...panelParts(viewOf(data.panels[Number(figure.dataset.panel)])));

// Draws every panel that can be seen, those in the window first, without keeping the page busy for long.
let drawRound = 0;
async function redraw() {
  const round = ++drawRound;
  for (const figure of document.querySelectorAll("[data-run]")) figure.hidden = !shown.runs.has(Number(figure.dataset.run));
  const waiting = [];
  for (const figure of document.querySelectorAll("[data-panel]")) {
    const { layer } = data.panels[Number(figure.dataset.panel)];
    figure.hidden = Boolean(layer) && layer !== shown.layer;
    figure.classList.add("waiting");
    if (!figure.hidden && !figure.closest("details:not([open])")) waiting.push(figure);
  }
  const away = (figure) => Math.max(0, Math.abs(figure.getBoundingClientRect().top) - window.innerHeight);
  const order = waiting.map((figure) => [away(figure), figure]).sort((a, b) => a[0] - b[0]);
  const chunks = new Set(waiting.map((figure) => data.panels[Number(figure.dataset.panel)].chunk));
  await Promise.all([...chunks].map(async (id) => { unpackedCurves[id] ||= await chunk(id); }));
  let since = performance.now();
  for (const [, figure] of order) {
    if (round !== drawRound) return;
    drawWaiting(figure);
    if (performance.now() - since < 30) continue;
    await new Promise((resume) => { setTimeout(resume); });
    since = performance.now();
  }
}

function drawWaiting(figure) {
  if (!figure.classList.contains("waiting") || figure.hidden || !unpackedCurves[data.panels[Number(figure.dataset.panel)].chunk]) return;
  drawPanel(figure);
  figure.classList.remove("waiting");
}
// Whoever prints at once gets the whole page.
window.addEventListener("beforeprint", () => document.querySelectorAll("[data-panel]").forEach(drawWaiting));

function redrawAll() {
  runChips();
  showOverview();
  redraw();
  drawPrompt();
}

function makeSections() {
  const links = [["overview", "Overview"]];
  for (const [section, title] of Object.entries(data.sections)) {
    const panels = [...data.panels.entries()].filter(([, panel]) => panel.section === section);
    const table = section === "speed" ? phaseTable() : null;
    const pictures = { speed: timelines, distributions: histograms }[section]?.() || [];
    if (!panels.length && !table && !pictures.length) continue;
    const grid = el("div", { class: "panels" }, ...panels.map(([i, panel]) =>
      el("div", { class: "panel waiting", "data-panel": i }, panelHead(headOf(panel)))), ...pictures);
    const head = el("h2", { id: `${section}-title` }, title);
    const parts = section === "others" ? [foldedPanels(panels, head, grid)] : [head, table, grid];
    byId("sections").append(el("section", { id: section, "aria-labelledby": `${section}-title` }, ...parts));
    links.push([section, title]);
  }
  links.push(["options", "Configuration"], ["samples", "Samples"]);
  byId("nav").append(...links.map(([id, title]) => el("a", { href: `#${id}` }, title)));
}

// Hundreds of panels: folded, with a search for the metric's name.
function foldedPanels(panels, head, grid) {
  const field = el("input", { type: "search", autocomplete: "off", spellcheck: "false" });
  const form = el("form", { class: "filters", role: "search" }, el("label", { class: "grow" }, "Text in the name", field));
  form.addEventListener("submit", (event) => event.preventDefault());
  field.addEventListener("input", () => {
    const words = field.value.trim().toLowerCase();
    [...grid.children].forEach((figure, i) => figure.classList.toggle("filtered", !panels[i][1].title.toLowerCase().includes(words)));
  });
  const box = el("details", {}, el("summary", {}, head, " ", el("span", { class: "quiet" }, plural(panels.length, "metric"))), form, grid);
  box.addEventListener("toggle", redraw);
  return box;
}

function startTools() {
  const layers = [...new Set(data.panels.map(({ layer }) => layer).filter(Boolean))].sort((a, b) => a.slice(6) - b.slice(6));
  shown.layer = layers[0] || "";
  byId("layer").append(...layers.map((layer) => option(layer, layer.replace("_", " "))));
  byId("layer-tool").hidden = layers.length < 2;
  byId("layer").addEventListener("input", () => { shown.layer = byId("layer").value; redraw(); });
  byId("smoothing").addEventListener("input", () => { shown.smoothing = Number(byId("smoothing").value); redraw(); });
  byId("together-tool").hidden = !shown.together;
  byId("together").addEventListener("input", () => { shown.together = byId("together").checked; redrawAll(); });
}

// What the colours are; a click leaves a run, or a group of seeds, out.
function runChips() {
  if (!severalRuns) return;
  byId("runs").replaceChildren(...owners().map(([owner, members]) => {
    const button = el("button", { type: "button", class: "owner", title: owner.differs, "aria-pressed": String(members.some((r) => shown.runs.has(r))) }, swatch(owner), owner.name);
    button.addEventListener("click", () => {
      const on = members.some((r) => shown.runs.has(r));
      for (const r of members) shown.runs[on ? "delete" : "add"](r);
      button.setAttribute("aria-pressed", String(!on));
      redraw();
    });
    return button;
  }));
}

function duration(seconds) {
  if (seconds < 120) return `${short(Number(seconds.toPrecision(3)))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  return minutes < 60 * 48 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${(minutes / 1440).toFixed(1)} days`;
}

function stepsOf(run) {
  if (run.complete) return count(run.steps);
  return `${count(run.steps)}${run.planned > run.steps ? ` of ${count(run.planned)}` : ""}, not finished`;
}

const atStep = ([value, step]) => el("span", {}, `${percent(value)}% `, el("small", {}, step ? `step ${count(step)}` : "before training"));
const COLUMNS = [
  ["reward that is learned from", "reward", short], ["verifiers' score", "score", short], ["pass@1 in training", "training", (value) => `${percent(value)}%`],
  ["validation, first", "first", atStep], ["validation, last", "last", atStep], ["validation, best", "best", atStep],
  ["tokens of a response", "tokens", short], ["effective rank (ER)", "er", short], ["its velocity (ERV)", "erv", short], ["its acceleration (ERA)", "era", short],
  ["loss", "loss", short], ["a step", "seconds", duration], ["all steps", "total", duration], ["tokens/s", "throughput", short],
].map(([name, key, shownAs]) => [name, ({ figures }) => (figures[key] === undefined ? null : shownAs(figures[key]))]);
const TEXTS = [["seed", "seed"], ["advantage estimator", "estimator"], ["rank shaping", "shaping"], ["model", "model"], ["started", "started"], ["host", "host"], ["version", "version"], ["revision", "revision"]]
  .map(([name, key]) => [name, (run) => run[key]]);

// Up to four runs stand beside each other, more below each other; what is the same for all is said once.
function showOverview() {
  const same = severalRuns ? TEXTS.filter(([, text]) => text(data.runs[0]) && data.runs.every((run) => text(run) === text(data.runs[0]))) : [];
  const columns = [["steps", stepsOf], ...COLUMNS, ...TEXTS.filter((one) => !same.includes(one))].filter(([, cell]) => data.runs.some((run) => cell(run)));
  const heads = data.runs.map((run) => el("div", { class: "run-name" }, el("span", { class: "owner" }, severalRuns ? swatch(ownerOf(run)) : null, run.name), run.differs && !run.name.includes(run.differs) ? el("small", {}, run.differs) : null));
  const across = data.runs.length <= 4;
  const rows = across ? columns.map(([name, cell]) => el("tr", {}, rowName(name), ...data.runs.map((run) => cellOf(cell(run) || "–"))))
    : data.runs.map((run, r) => el("tr", {}, rowName(heads[r]), ...columns.map(([, cell]) => cellOf(cell(run) || "–"))));
  byId("overview-table").classList.add(severalRuns ? (across ? "across" : "down") : "tiles");
  byId("overview-table").replaceChildren(tableOf(across ? ["", ...heads] : ["run", ...columns.map(([name]) => name)], 1, rows));
  const parts = ["Figures of training are means over its last 10 steps."];
  if (same.length) parts.push(`All runs: ${same.map(([name, text]) => `${name} ${text(data.runs[0])}`).join(", ")}.`);
  if (data.width > 1) parts.push(`Each point of a curve is the mean of ${data.width} steps; where it is one line per run, the band reaches from their lowest to their highest value, so that no peak is lost.`);
  else parts.push("Curves show every step; step 0 is the model before training.");
  if (data.groups.length < data.runs.length) parts.push("Runs that differ in nothing but their seed and their names are seeds of one setting: their line is the mean over them, and the band reaches from the lowest to the highest.");
  if (data.runs.some(({ figures }) => figures.er !== undefined)) parts.push("Effective rank: how many directions a response's hidden states spread over (exploration). Velocity: how fast it grows along the response (exploitation). Acceleration: whether that growth itself grows.");
  byId("reading").textContent = parts.join(" ");
  const commands = data.runs.filter(({ command }) => command);
  byId("commands").hidden = !commands.length;
  byId("commands").replaceChildren(el("summary", {}, commands.length > 1 ? "Commands" : "Command"), ...commands.map((run) => el("p", {}, severalRuns ? `${run.name}: ` : null, el("code", {}, run.command))));
}

function phaseTable() {
  const names = [...new Set(data.phases.flatMap((phases) => Object.keys(phases)))];
  if (!names.length) return null;
  const totals = data.phases.map((phases) => Object.values(phases).reduce((a, b) => a + b, 0));
  const rows = names.map((name) => el("tr", {}, rowName(name), ...data.phases.map((phases, r) => {
    if (!(name in phases)) return cellOf("–");
    const share = phases[name] / (totals[r] || 1);
    const bar = el("span", { class: "meter", "aria-hidden": "true" }, el("i"));
    bar.firstChild.style.width = `${100 * share}%`;
    return el("td", {}, bar, el("span", { class: "amount" }, `${duration(phases[name])} `, el("small", {}, `${percent(share)}%`)));
  })));
  const table = scrolled("Time by phase", tableOf(["phase, all steps", ...data.runs.map(({ name }) => name)], 1, rows));
  table.id = "phases";
  return table;
}

async function showOptions() {
  const rows = await chunk(data.options);
  const words = byId("option-text").value.trim().toLowerCase();
  const only = byId("differing").checked && !byId("differing-tool").hidden;
  const matching = rows.filter(([name, differs, values, isSet]) =>
    (!only || (severalRuns ? differs : isSet)) && (!words || [name, ...values].some((text) => text.toLowerCase().includes(words))));
  const drawn = matching.slice(0, 1500).map(([name, differs, values, isSet]) => el("tr", { class: differs || (isSet && !only) ? "differs" : null }, rowName(visible(name)),
    ...values.map((text) => el("td", { class: "name value", colspan: differs ? null : data.runs.length }, visible(text)))));
  const given = rows.filter(([, , , isSet]) => isSet).length;
  const about = given && !severalRuns ? `; ${given} set on the command line` : severalRuns ? `; the runs differ in ${rows.filter(([, differs]) => differs).length || "none"}` : "";
  byId("option-count").textContent = `${count(matching.length)} of ${plural(rows.length, "option")}${about}`;
  byId("option-table").replaceChildren(tableOf(["option", ...data.runs.map(({ name }) => name)], 1 + data.runs.length, drawn));
  byId("option-table").hidden = !drawn.length;
}

byId("troubles").hidden = !data.troubles.length;
byId("troubles-count").textContent = `${plural(data.troubles.length, "thing")} could not be read`;
byId("troubles-list").append(...data.troubles.map((line) => el("li", {}, line)));
makeSections();
startTools();
runChips();
showOverview();
redraw();
byId("differing-tool").hidden = !severalRuns && !data.runs[0].command;
byId("differing-text").textContent = severalRuns ? "differences only" : "set on the command line only";
byId("option-filters").addEventListener("input", showOptions);
byId("option-filters").addEventListener("submit", (event) => event.preventDefault());
const ready = whenReady(showOptions, startSamples);
