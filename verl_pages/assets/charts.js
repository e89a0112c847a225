// Curves over steps: one panel per figure, one line per run (or per group of seeds) and series.
const CHART = { width: 380, height: 220, left: 68, right: 14, top: 10, bottom: 26 };
const DASHES = [null, "6 3", "2 3", "9 3 2 3", "12 4", "1 4", "4 2 1 2 1 2", "3 6"];
const shown = { runs: new Set(data.runs.keys()), together: false, layer: "", smoothing: 0 };
const paint = (style) => style[dark.matches ? "dark" : "light"];
const severalRuns = data.runs.length > 1;

// What gives a run its colour.
const ownerOf = (run) => (shown.together ? data.groups[run.group] : run);

// Numbers as short as they can be told apart.
function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return Number(value.toExponential(2)).toExponential().replace("e+", "e").replaceAll("-", "−");
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 }).replace("-", "−");
}
const shownValue = (panel, value) => (panel.percent ? `${tenths(100 * value)}%` : short(value));

// What is drawn: a line per run, or per group, and series, each [x, mean, low, high] by point.
function linesOf(panel, curves) {
  const lines = [];
  const alone = panel.series.length * (severalRuns ? shown.runs.size : 1) <= 6;
  panel.series.forEach((label, s) => {
    if (!shown.together) {
      for (const r of shown.runs) {
        const points = curves[s][r];
        if (points && points[0].length) lines.push(lineOf(panel, s, data.runs[r], points));
      }
      return;
    }
    for (const [g, group] of data.groups.entries()) {
      const members = [...shown.runs].filter((r) => data.runs[r].group === g).map((r) => curves[s][r]).filter((p) => p && p[0].length);
      if (members.length) lines.push(lineOf(panel, s, group, members.length > 1 ? joined(members) : members[0]));
    }
  });
  return lines.map((line) => ({ ...line, alone }));
}

function lineOf(panel, s, owner, [x, mean, low, high]) {
  // With several runs a colour is a run and a dash a series; with one, a colour is a series.
  const style = severalRuns ? owner : data.styles[panel.series.length > 1 ? s % data.styles.length : 0];
  const dash = DASHES[(severalRuns ? s : Math.floor(s / data.styles.length)) % DASHES.length];
  const name = [severalRuns ? owner.name : "", panel.series[s]].filter(Boolean).join(": ") || panel.title;
  return { name, style, dash, x, mean, low, high, smooth: smoothed(mean, shown.smoothing) };
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

function niceTicks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((size) => size >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i === 0 ? 0 : i * step);
  return ticks;
}

function scaleOf(panel, lines) {
  const values = lines.flatMap((line) => [...line.mean, ...(line.low || []), ...(line.high || [])]);
  let low = values.reduce((a, b) => Math.min(a, b), Infinity);
  let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const inner = CHART.height - CHART.top - CHART.bottom;
  if (panel.log && low > 0 && high / low > 8) {
    const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.ceil((to - from) / 5);
    const ticks = Array.from({ length: Math.floor((to - from) / every) + 1 }, (_, i) => 10 ** (from + i * every));
    return { ticks, label: (v) => v.toExponential(0).replace("e+", "e").replace("-", "−"), y: (v) => CHART.top + inner * (1 - (Math.log10(v) - from) / (to - from)) };
  }
  // Rates start at zero; a value that hardly moves is not blown up to fill the panel.
  if (panel.percent && low >= 0) low = 0;
  else if (low > 0 && low < 0.4 * high) low = 0;
  const least = Math.max(Math.abs(high), Math.abs(low)) * 1e-3 || 1;
  if (low === 0 && high < least) high = least;
  else if (high - low < least) [low, high] = [low - least / 2, high + least / 2];
  if (low !== 0) low -= 0.04 * (high - low);
  high += 0.04 * (high - low);
  const ticks = niceTicks(low, high, 5);
  const label = panel.percent ? (v) => `${Number((100 * v).toPrecision(3))}%` : (v) => short(Math.abs(v) < 1e-12 * Math.abs(high) ? 0 : v);
  return { ticks, label, y: (v) => CHART.top + inner * (1 - (v - low) / (high - low)) };
}

const xOf = (step) => CHART.left + (step / Math.max(1, data.last)) * (CHART.width - CHART.left - CHART.right);

const stepTicks = () => niceTicks(0, data.last || 1, 5).filter((step) => Number.isInteger(step)).map((step) =>
  svg("text", { x: Math.min(xOf(step), CHART.width - 3 - 3.6 * step.toLocaleString("en").length), y: CHART.height - 8, "text-anchor": "middle" }, step.toLocaleString("en")));

function drawPanel(figure, panel, curves) {
  const lines = linesOf(panel, curves);
  if (!lines.length) {
    figure.replaceChildren(panelHead(panel), el("p", { class: "empty" }, "No run that is shown has this figure."));
    return;
  }
  const { ticks, label, y } = scaleOf(panel, lines);
  const summary = lines.slice(0, 8).map((line) => `${line.name} ${shownValue(panel, line.mean[0])} to ${shownValue(panel, line.mean[line.mean.length - 1])}`).join("; ");
  const picture = svg("svg", { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", tabindex: 0, "aria-label": `${panel.title}: ${summary}` });
  for (const tick of ticks) {
    picture.append(svg("line", { class: "grid", x1: CHART.left, x2: CHART.width - CHART.right, y1: y(tick), y2: y(tick) }),
      svg("text", { x: CHART.left - 6, y: y(tick) + 4, "text-anchor": "end" }, label(tick)));
  }
  picture.append(...stepTicks());
  const bottom = CHART.height - CHART.bottom;
  picture.append(svg("line", { class: "axis", x1: CHART.left, x2: CHART.width - CHART.right, y1: bottom, y2: bottom }));
  const withBands = lines.filter((line) => line.low);
  if (withBands.length <= 6) for (const line of withBands) picture.append(bandOf(line, y));
  for (const line of lines) picture.append(...strokes(line, y));
  const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  addCursor(picture, steps, (step, left, top) => showValues(panel, lines, step, left, top));
  figure.replaceChildren(panelHead(panel), picture, legendOf(panel, lines));
}

function panelHead(panel) {
  const head = el("h3", { title: panel.names.join("\n") }, enlarger(panel.title), panel.title);
  if (panel.nonfinite) head.append(" ", el("small", {}, `${plural(panel.nonfinite, "value")} not finite`));
  return head;
}

// A panel as wide as the page.
function enlarger(title) {
  const button = el("button", { type: "button", class: "enlarge", "aria-label": `Enlarge ${title}`, "aria-pressed": "false" }, "⤢");
  button.addEventListener("click", () => button.setAttribute("aria-pressed", String(button.closest(".panel").classList.toggle("wide"))));
  return button;
}

function bandOf(line, y) {
  const upper = line.x.map((x, i) => `${xOf(x)},${y(line.high[i])}`);
  const lower = line.x.map((x, i) => `${xOf(x)},${y(line.low[i])}`).reverse();
  return svg("polygon", { points: [...upper, ...lower].join(" "), fill: paint(line.style), opacity: 0.16 });
}

function strokes(line, y) {
  const colour = paint(line.style);
  const dash = line.dash ? { "stroke-dasharray": line.dash } : {};
  const path = (values) => line.x.map((x, i) => `${xOf(x).toFixed(1)},${y(values[i]).toFixed(1)}`).join(" ");
  const stroke = (values, more) => svg("polyline", { points: path(values), fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-linejoin": "round", ...dash, ...more });
  const found = line.smooth ? [stroke(line.mean, { opacity: 0.28, "stroke-width": 1 }), stroke(line.smooth, {})] : [stroke(line.mean, {})];
  if (line.x.length <= 24 && line.alone) found.push(...line.x.map((x, i) => marker(line.style.shape, xOf(x), y((line.smooth || line.mean)[i]), colour, Boolean(line.dash))));
  return found;
}

function swatch(line) {
  const dash = line.dash ? { "stroke-dasharray": line.dash } : {};
  return svg("svg", { width: 28, height: 12, "aria-hidden": "true" },
    svg("line", { x1: 1, x2: 27, y1: 6, y2: 6, stroke: paint(line.style), "stroke-width": 2.2, ...dash }));
}

// With several runs the colours are in the bar above; the panel itself says what its dashes are.
function legendOf(panel, lines) {
  if (panel.series.length < 2) return el("div", { class: "keysOf" });
  if (!severalRuns) return el("div", { class: "keysOf" }, ...lines.map((line) => el("span", {}, swatch(line), line.name)));
  const grey = { light: "#62676d", dark: "#9aa1a9" };
  return el("div", { class: "keysOf" }, ...panel.series.map((name, s) => el("span", {}, swatch({ style: grey, dash: DASHES[s % DASHES.length] }), name)));
}

// The values at a step, `show(step, left, top)`, under the pointer or where the arrow keys are.
function addCursor(picture, steps, show) {
  const cursor = svg("line", { class: "axis", y1: CHART.top, y2: CHART.height - CHART.bottom, visibility: "hidden", "stroke-dasharray": "2 2" });
  picture.append(cursor);
  let at = -1;
  const place = (index, left, top) => {
    at = Math.max(0, Math.min(index, steps.length - 1));
    for (const side of ["x1", "x2"]) cursor.setAttribute(side, xOf(steps[at]));
    cursor.setAttribute("visibility", "visible");
    show(steps[at], left, top);
  };
  const hide = () => {
    cursor.setAttribute("visibility", "hidden");
    byId("tip").hidden = true;
  };
  picture.addEventListener("pointermove", (event) => {
    const { x } = new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse());
    place(steps.reduce((best, step, i) => (Math.abs(xOf(step) - x) < Math.abs(xOf(steps[best]) - x) ? i : best), 0), event.clientX, event.clientY);
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const box = picture.getBoundingClientRect();
    place((at < 0 ? steps.length - 1 : at) + moves[event.key], box.left + box.width / 3, box.top);
  });
}

function showValues(panel, lines, step, left, top) {
  const rows = [];
  for (const line of lines) {
    const i = line.x.reduce((best, x, at) => (Math.abs(x - step) < Math.abs(line.x[best] - step) ? at : best), 0);
    if (Math.abs(line.x[i] - step) > data.width) continue;
    const range = line.low && line.low[i] !== line.high[i] ? `${shownValue(panel, line.low[i])} to ${shownValue(panel, line.high[i])}` : "";
    rows.push([line.mean[i], el("div", {}, swatch(line), line.name, el("strong", {}, shownValue(panel, line.mean[i])), range)]);
  }
  rows.sort((a, b) => b[0] - a[0]);
  const first = Math.floor(step / data.width) * data.width;
  const title = data.width > 1 ? `steps ${first.toLocaleString("en")} to ${Math.min(first + data.width - 1, data.last).toLocaleString("en")}` : `step ${step.toLocaleString("en")}`;
  byId("tip").replaceChildren(el("div", {}, title), ...rows.slice(0, 16).map(([, row]) => row));
  placeTip(left, top);
}

// Shares that add up to one, over steps, as bars one above the other.
function stackedPanel(title, rows, names, colours) {
  const picture = svg("svg", { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", tabindex: 0,
    "aria-label": `${title}: at the last step ${names.map((name, i) => `${name} ${percent(rows[rows.length - 1][i + 1])}%`).join(", ")}` });
  const inner = CHART.height - CHART.top - CHART.bottom;
  const y = (v) => CHART.top + inner * (1 - v);
  const gap = rows.length > 1 ? rows.slice(1).reduce((least, [step], i) => Math.min(least, step - rows[i][0]), Infinity) : 1;
  const width = Math.max(1, Math.min(18, xOf(gap) - xOf(0) - 1));
  for (const share of [0, 0.5, 1]) {
    picture.append(svg("line", { class: "grid", x1: CHART.left, x2: CHART.width - CHART.right, y1: y(share), y2: y(share) }),
      svg("text", { x: CHART.left - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share}%`));
  }
  for (const [step, ...shares] of rows) {
    let below = 0;
    shares.forEach((share, i) => {
      if (share > 0) picture.append(svg("rect", { x: xOf(step) - width / 2, width, y: y(below + share), height: inner * share, fill: colours[i] }));
      below += share;
    });
  }
  picture.append(...stepTicks());
  addCursor(picture, rows.map(([step]) => step), (step, left, top) => {
    const [, ...shares] = rows.find((row) => row[0] === step);
    byId("tip").replaceChildren(el("div", {}, `step ${step.toLocaleString("en")}`),
      ...names.map((name, i) => el("div", {}, block(colours[i]), name, el("strong", {}, `${percent(shares[i])}%`))));
    placeTip(left, top);
  });
  return el("div", { class: "panel" }, el("h3", {}, enlarger(title), title), picture,
    el("div", { class: "keysOf" }, ...names.map((name, i) => el("span", {}, block(colours[i]), name))));
}

const block = (colour) => svg("svg", { width: 12, height: 12, "aria-hidden": "true" }, svg("rect", { width: 12, height: 12, rx: 2, fill: colour }));
