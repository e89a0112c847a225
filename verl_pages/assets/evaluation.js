// The page of an evaluation: results for the chosen figure, curves of pass@k, responses and verdicts, rank metrics.
const AVERAGE = -1;
const severalRuns = data.runs.length > 1;
const ownerOf = (run) => run;
const rowOf = (label, benchmark) => data.rows.find((row) => row.label === label && row.benchmark === benchmark);
const benchmarkName = (b) => (b === AVERAGE ? "macro average" : data.benchmarks[b]);
const allKs = (rows) => [...new Set(rows.flatMap((row) => row.pass.map(([k]) => k)))].sort((a, b) => a - b);
const withAverage = (which) => [...data.benchmarks.keys(), AVERAGE].filter(which);

function resultCell(row, kind, k) {
  const estimate = row && row[kind].find((entry) => entry[0] === k);
  if (!estimate) return cellOf("–");
  const [, value, low, high] = estimate;
  const change = kind === "pass" && row.differences.find((entry) => entry[0] === k);
  const cell = el("td", {}, change ? changeOf(change) : null, change ? " " : null, el("span", { class: "score" }, percent(value)));
  if (low === null) return cell;
  const [band, dot] = [el("i"), el("b")];
  band.style.left = `${100 * low}%`;
  band.style.width = `${100 * (high - low)}%`;
  dot.style.left = `${100 * value}%`;
  const track = el("span", { class: "track", "aria-hidden": "true" }, band, dot);
  cell.append(el("span", { class: "range" }, track, el("span", {}, `${percent(low)} to ${percent(high)}`)));
  return cell;
}

function changeOf([, difference, from, to, outside]) {
  const direction = outside ? (difference > 0 ? "up" : "down") : "";
  const mark = { up: " ▲", down: " ▼" }[direction] || "";
  const title = from === null ? null : `95% interval ${points(from)} to ${points(to)}`;
  return el("span", { class: `change ${direction}`, title }, points(difference) + mark);
}

// The longer list, of benchmarks or of runs, goes down.
function showResults(kind, k) {
  const benchmarks = withAverage((b) => b !== AVERAGE || data.rows.some((row) => row.benchmark === AVERAGE));
  const labels = [...data.labels.keys()];
  const labelName = (l) => data.labels[l].name;
  const [downs, downName, overs, overName] = labels.length <= benchmarks.length
    ? [benchmarks, benchmarkName, labels, labelName] : [labels, labelName, benchmarks, benchmarkName];
  const lines = downs.map((down) => el("tr", { class: downs === benchmarks && down === AVERAGE ? "average" : null }, rowName(downName(down)),
    ...overs.map((over) => resultCell(downs === benchmarks ? rowOf(over, down) : rowOf(down, over), kind, k))));
  const headers = [downs === benchmarks ? "benchmark" : "run", ...overs.map(overName)];
  byId("results-table").replaceChildren(tableOf(headers, 1, data.rows.length ? lines : [], "There are no results."));
}

function figureButtons() {
  const ks = allKs(data.rows);
  const chosen = ["maj", "rm", "rm_maj"].filter((kind) => data.rows.some((row) => row[kind].length));
  const figures = [...ks.map((k) => ["pass", k]), ...ks.slice(-1).filter((k) => k > 1).flatMap((k) => chosen.map((kind) => [kind, k]))];
  const buttons = figures.map(([kind, k]) => {
    const button = el("button", { type: "button", "aria-pressed": "false" }, `${kind}@${k}`);
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      showResults(kind, k);
    });
    return button;
  });
  byId("figures").replaceChildren(...buttons);
  if (buttons.length) buttons[0].click();
  else showResults("pass", 1);
}

// Runs as lines over log2 k.
function curvePanel(benchmark) {
  const rows = data.rows.filter((row) => row.benchmark === benchmark && row.pass.length);
  const ks = allKs(rows);
  const axis = {
    name: "k, samples per problem", from: ks[0], to: ks[ks.length - 1], log2: true, inset: 8, near: 0,
    ticks: (low, high) => ks.filter((k, i) => k >= low && k <= high && (ks.length <= 7 || i % 2 === (ks.length - 1) % 2)),
    tipTitle: (k) => `pass@${k}`,
  };
  const lines = rows.map((row) => {
    const [x, mean, low, high] = [0, 1, 2, 3].map((place) => row.pass.map((entry) => entry[place]));
    return { ...data.labels[row.label], marks: true, x, mean, ...(low.includes(null) ? {} : { low, high }) };
  });
  const title = benchmarkName(benchmark);
  return panelOf({
    title, note: benchmark === AVERAGE ? "" : plural(Math.max(...rows.map((row) => row.problems)), "problem"),
    about: "Chance that at least one of k samples is correct.", axis, percent: true, log: false, lines: () => lines, keys: (_, large) => (large ? lines : []),
  });
}

function showCurves() {
  const order = withAverage((b) => data.rows.some((row) => row.benchmark === b && row.pass.length));
  byId("curves").hidden = !order.length;
  byId("curves-legend").replaceChildren(legend(data.labels.map((label) => ({ ...label, marks: true }))));
  byId("curves-grid").replaceChildren(...[...order.slice(-1), ...order.slice(0, -1)].map(curvePanel));
}

// The shares of verdicts as one bar: correct and wrong in their colours, the others in grey.
function shareBar(reasons) {
  const groups = { good: reasons.correct || 0, bad: reasons.wrong || 0 };
  groups.other = Object.values(reasons).reduce((sum, number) => sum + number, 0) - groups.good - groups.bad;
  return el("span", { class: "shares", "aria-hidden": "true" }, ...Object.entries(groups).filter(([, number]) => number).map(([name, number]) => {
    const part = el("span");
    part.style.flex = `${number} 0 0`;
    part.style.background = `var(--${name})`;
    return part;
  }));
}

function showResponses() {
  const reasons = data.reasons.filter((name) => data.rows.some((row) => row.reasons[name]));
  const headers = ["benchmark", "run", "problems", "samples each", "mean tokens", "truncated", "repetition", "verdicts", ...reasons.map((name) => name.replaceAll("_", " "))];
  const lines = data.rows.map((row, i) => {
    const [low, high] = row.samples;
    const cells = [row.problems + (row.missing ? ` (${row.missing} without samples)` : ""), low === high ? String(low) : `${low} to ${high}`,
      row.tokens === null ? "–" : row.tokens.toFixed(1), percent(row.truncated), percent(row.repetition), shareBar(row.reasons), ...reasons.map((name) => String(row.reasons[name] || 0))];
    return el("tr", { class: i && data.rows[i - 1].benchmark !== row.benchmark ? "first" : null }, rowName(benchmarkName(row.benchmark)), el("td", { class: "name" }, data.labels[row.label].name), ...cells.map(cellOf));
  });
  byId("responses-table").replaceChildren(tableOf(headers, 2, lines, "There are no responses."));
  const metricLines = data.rows.flatMap((row) => Object.entries(row.metrics).map(([name, means]) => el("tr", {}, rowName(benchmarkName(row.benchmark)),
    el("td", { class: "name" }, data.labels[row.label].name), el("td", { class: "name" }, name), ...means.map((mean) => cellOf(short(mean))))));
  if (metricLines.length) byId("metrics").replaceChildren(el("h3", {}, "Rank metrics, means"), scrolled("Rank metrics", tableOf(["benchmark", "run", "metric", "all responses", "correct", "wrong"], 3, metricLines)));
}

byId("legend").append(...data.legend.map((text) => el("span", {}, text)), ...data.pages.map(({ text, href }) => el("a", { href }, text)));
figureButtons();
showResponses();
showCurves();
whenReady(startSamples);
