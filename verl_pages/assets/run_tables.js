// The tables of runs: overview, time by phase, configuration.
function tableOf(headers, names, rows) {
  const head = el("tr", {}, ...headers.map((text, i) => el("th", { scope: "col", class: i < names ? "name" : null }, text)));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows));
}

function duration(seconds) {
  if (seconds === undefined) return "–";
  if (seconds < 120) return `${short(Number(seconds.toPrecision(3)))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  return minutes < 60 * 48 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${(minutes / 1440).toFixed(1)} days`;
}

const atStep = (value, step) => el("span", {}, `${percent(value)}% `, el("small", {}, `step ${step.toLocaleString("en")}`));
function stepsOf(run) {
  const steps = run.steps.toLocaleString("en");
  if (run.complete) return steps;
  return `${steps}${run.planned > run.steps ? ` of ${run.planned.toLocaleString("en")}` : ""}, not finished`;
}

const COLUMNS = [
  ["steps", stepsOf],
  ["training pass@1", ({ figures }) => (figures.training === undefined ? null : `${percent(figures.training)}%`)],
  ["validation, first", ({ figures }) => figures.val && atStep(figures.val[0], figures.val[1])],
  ["last", ({ figures }) => figures.val && atStep(figures.val[2], figures.val[3])],
  ["best", ({ figures }) => figures.best && atStep(...figures.best)],
  ["tokens of a response", ({ figures }) => figures.tokens === undefined ? null : short(figures.tokens)],
  ["ER", ({ figures }) => figures.er === undefined ? null : short(figures.er)],
  ["ERV", ({ figures }) => figures.erv === undefined ? null : short(figures.erv)],
  ["ERA", ({ figures }) => figures.era === undefined ? null : short(figures.era)],
  ["loss", ({ figures }) => figures.loss === undefined ? null : short(figures.loss)],
  ["a step", ({ figures }) => figures.seconds === undefined ? null : duration(figures.seconds)],
  ["all steps", ({ figures }) => figures.total === undefined ? null : duration(figures.total)],
  ["tokens/s", ({ figures }) => figures.throughput === undefined ? null : short(figures.throughput)],
  ["seed", (run) => run.seed],
  ["estimator", (run) => run.estimator],
  ["model", (run) => run.model],
  ["version", (run) => run.version],
];

function showOverview() {
  const columns = COLUMNS.filter(([, cell]) => data.runs.some((run) => cell(run)));
  const rows = data.runs.map((run) => el("tr", {},
    el("th", { scope: "row", class: "name" }, el("span", { class: "owner" }, swatch({ style: ownerOf(run) }), run.name)),
    ...columns.map(([, cell]) => el("td", {}, cell(run) || "–"))));
  byId("overview-table").replaceChildren(tableOf(["run", ...columns.map(([name]) => name)], 1, rows));
  const parts = ["Figures of training are means over its last 10 steps."];
  if (data.width > 1) parts.push(`Each point of a curve is the mean of ${data.width} steps; where it is one line per run, the band reaches from their lowest to their highest value, so that no peak is lost.`);
  else parts.push("Curves show every step.");
  if (data.groups.length < data.runs.length) parts.push("Runs that differ in nothing but their seed and their names are seeds of one setting: their line is the mean over them, and the band reaches from the lowest to the highest.");
  byId("reading").textContent = parts.join(" ");
}

function phaseTable() {
  const names = [...new Set(data.phases.flatMap((phases) => Object.keys(phases)))];
  if (!names.length) return null;
  const totals = data.phases.map((phases) => Object.values(phases).reduce((a, b) => a + b, 0));
  const rows = names.map((name) => el("tr", {}, el("th", { scope: "row", class: "name" }, name),
    ...data.phases.map((phases, r) => {
      if (!(name in phases)) return el("td", {}, "–");
      const share = phases[name] / (totals[r] || 1);
      const bar = el("span", { class: "meter", "aria-hidden": "true" }, el("i"));
      bar.firstChild.style.width = `${100 * share}%`;
      return el("td", {}, bar, el("span", { class: "amount" }, `${duration(phases[name])} `, el("small", {}, `${percent(share)}%`)));
    })));
  const region = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Time by phase, table" });
  region.append(tableOf(["phase, all steps", ...data.runs.map(({ name }) => name)], 1, rows));
  return region;
}

async function showOptions() {
  const rows = await chunk(data.options);
  const words = byId("option-text").value.trim().toLowerCase();
  const only = severalRuns && byId("differing").checked;
  const matching = rows.filter(([name, differs, values]) =>
    (!only || differs) && (!words || [name, ...values].some((text) => text.toLowerCase().includes(words))));
  const drawn = matching.slice(0, 1500).map(([name, differs, values]) => el("tr", { class: differs ? "differs" : null },
    el("th", { scope: "row", class: "name" }, visible(name)),
    ...(differs ? values.map((text) => el("td", { class: "name value" }, visible(text)))
      : [el("td", { class: "name value", colspan: data.runs.length }, visible(values[0]))])));
  const differing = rows.filter(([, differs]) => differs).length;
  const about = severalRuns ? `; the runs differ in ${differing || "none"}` : "";
  byId("option-count").textContent = `${matching.length.toLocaleString("en")} of ${plural(rows.length, "option")}${about}`;
  byId("option-table").replaceChildren(tableOf(["option", ...data.runs.map(({ name }) => name)], 1 + data.runs.length, drawn));
  byId("option-table").hidden = !drawn.length;
}
