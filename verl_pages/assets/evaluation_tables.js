// Tables: results for the chosen figure, responses and verdicts, rank metrics.
function tableOf(headers, names, rows) {
  const head = el("tr", {}, ...headers.map((text, i) => el("th", { scope: "col", class: i < names ? "name" : null }, text)));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows));
}

function resultCell(row, kind, k) {
  const estimate = row && row[kind].find((entry) => entry[0] === k);
  if (!estimate) return el("td", {}, "–");
  const [, value, low, high] = estimate;
  const change = kind === "pass" && row.differences.find((entry) => entry[0] === k);
  const cell = el("td", {}, change ? changeOf(change) : null, change ? " " : null, el("span", { class: "value" }, percent(value)));
  if (low === null) return cell;
  const band = el("i");
  const dot = el("b");
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

function showResults(kind, k) {
  const benchmarks = data.benchmarks.map((_, b) => b);
  if (data.rows.some((row) => row.benchmark === AVERAGE)) benchmarks.push(AVERAGE);
  const labels = data.labels.map((_, l) => l);
  const across = labels.length <= benchmarks.length;
  const headers = across
    ? ["benchmark", ...labels.map((l) => data.labels[l].name)]
    : ["run", ...benchmarks.map(benchmarkName)];
  const lines = (across ? benchmarks : labels).map((down) =>
    el("tr", { class: across && down === AVERAGE ? "average" : null },
      el("th", { scope: "row", class: "name" }, across ? benchmarkName(down) : data.labels[down].name),
      ...(across ? labels : benchmarks).map((over) =>
        resultCell(rowOf(across ? over : down, across ? down : over), kind, k))));
  byId("results-table").replaceChildren(data.rows.length ? tableOf(headers, 1, lines) : el("p", { class: "empty" }, "There are no results."));
}

function figureButtons() {
  const ks = [...new Set(data.rows.flatMap((row) => row.pass.map(([k]) => k)))].sort((a, b) => a - b);
  const figures = [...ks.map((k) => ["pass", k]), ...ks.slice(-1).filter((k) => k > 1).map((k) => ["maj", k])];
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

// The shares of verdicts as one bar: correct and wrong in their colours, the others in grey.
function shareBar(reasons) {
  const total = Object.values(reasons).reduce((sum, count) => sum + count, 0);
  const bar = el("span", { class: "shares", "aria-hidden": "true" });
  const groups = { good: reasons.correct || 0, bad: reasons.wrong || 0 };
  groups.other = total - groups.good - groups.bad;
  for (const [name, count] of Object.entries(groups)) {
    if (!count) continue;
    const part = el("span");
    part.style.flex = `${count} 0 0`;
    part.style.background = `var(--${name})`;
    bar.append(part);
  }
  return bar;
}

function showResponses() {
  const reasons = data.verdicts.map(([, name]) => name).filter((name) => data.rows.some((row) => row.reasons[name]));
  const headers = ["benchmark", "run", "problems", "samples each", "mean tokens", "truncated", "repetition", "verdicts",
    ...reasons.map((name) => name.replace("_", " "))];
  let previous = null;
  const lines = data.rows.map((row) => {
    const first = previous !== null && previous !== row.benchmark;
    previous = row.benchmark;
    const [low, high] = row.samples;
    const missing = row.missing ? ` (${row.missing} without samples)` : "";
    return el("tr", { class: first ? "first" : null },
      el("th", { scope: "row", class: "name" }, benchmarkName(row.benchmark)),
      el("td", { class: "name" }, data.labels[row.label].name),
      el("td", {}, row.problems + missing),
      el("td", {}, low === high ? String(low) : `${low} to ${high}`),
      el("td", {}, row.tokens === null ? "–" : row.tokens.toFixed(1)),
      el("td", {}, percent(row.truncated)), el("td", {}, percent(row.repetition)),
      el("td", {}, shareBar(row.reasons)),
      ...reasons.map((name) => el("td", {}, String(row.reasons[name] || 0))));
  });
  byId("responses-table").replaceChildren(data.rows.length ? tableOf(headers, 2, lines) : el("p", { class: "empty" }, "There are no responses."));
  if (!data.metrics.length) return;
  const metricLines = data.rows.flatMap((row) => Object.entries(row.metrics).map(([name, groups]) =>
    el("tr", {}, el("th", { scope: "row", class: "name" }, benchmarkName(row.benchmark)),
      el("td", { class: "name" }, data.labels[row.label].name), el("td", { class: "name" }, name),
      ...groups.map((mean) => el("td", {}, figure(mean))))));
  const region = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rank metrics, table" });
  region.append(tableOf(["benchmark", "run", "metric", "all responses", "correct", "wrong"], 3, metricLines));
  byId("metrics").replaceChildren(el("h3", {}, "Rank metrics, means"), region);
}
