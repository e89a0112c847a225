// Charts: lines with bands over an axis; values under the pointer or by arrow keys.
// A picture consists of paths and texts alone, so that `canvasOf` can draw it again.
const SMALL = { width: 380, height: 220, left: 68, right: 14, top: 10, bottom: 26 };
const DASHES = [null, "6 3", "2 3", "9 3 2 3", "12 4", "1 4", "4 2 1 2 1 2", "3 6"];
// Correct and wrong look the same on every chart, in colour, line and marker.
const GOOD = { colour: "var(--good)", shape: "circle", dash: null };
const BAD = { colour: "var(--bad)", shape: "square", dash: DASHES[1] };
const MEANINGS = { __proto__: null, correct: GOOD, exact: GOOD, equivalent: { ...GOOD, shape: "diamond", dash: DASHES[3] }, incorrect: BAD, wrong: BAD, different: BAD };

function marker(shape, x, y, colour, hollow) {
  const colours = { fill: hollow ? "var(--card)" : colour, stroke: hollow ? colour : "var(--card)", "stroke-width": hollow ? 1.6 : 1 };
  const paths = {
    circle: `M${x - 4},${y}a4,4 0 1 0 8,0a4,4 0 1 0 -8,0`,
    square: `M${x - 3.6},${y - 3.6}h7.2v7.2h-7.2z`,
    diamond: `M${x},${y - 4.8}l4.8,4.8l-4.8,4.8l-4.8,-4.8z`,
    triangle: `M${x},${y - 4.8}l4.6,8h-9.2z`,
  };
  return svg("path", { d: paths[shape], ...colours });
}

// Ticks at round numbers, and their labels: as many digits as tell neighbours apart.
function niceTicks(low, high, number) {
  const raw = (high - low) / number || 1;
  const power = Math.floor(Math.log10(raw));
  const factor = [1, 2, 2.5, 5, 10].find((m) => m * 10 ** power >= raw * 0.999);
  const step = factor * 10 ** power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i === 0 ? 0 : i * step);
  const size = Math.max(Math.abs(low), Math.abs(high));
  const digits = (factor === 2.5 ? 1 : 0) - power;
  const label = (v) => {
    if (v === 0) return "0";
    if (size >= 1e6 || size < 1e-3) return exponent(v, Math.max(0, digits + Math.floor(Math.log10(Math.abs(v)))));
    return Number(v.toFixed(Math.max(0, digits))).toLocaleString("en", { maximumFractionDigits: 12 }).replace("-", "−");
  };
  return { ticks, label };
}
const exponent = (v, digits) => Number(v.toExponential(Math.min(12, digits))).toExponential().replace("e+", "e").replaceAll("-", "−");

// The vertical axis of `frame`: its ticks, their labels, and the place of a value.
function scaleOf({ percent: rate, log, exact }, lines, frame) {
  const values = lines.flatMap((line) => [...line.mean, ...(line.low || []), ...(line.high || [])]).filter((v) => !log || v > 0);
  const height = frame.height - frame.top - frame.bottom;
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (log && values.length) {
    const [from, to] = [Math.floor(Math.log10(low)), Math.max(Math.ceil(Math.log10(high)), Math.floor(Math.log10(low)) + 1)];
    const every = Math.ceil((to - from) / 6);
    const decades = Array.from({ length: Math.floor((to - from) / every) + 1 }, (_, i) => 10 ** (from + i * every));
    const ticks = to - from > 2 ? decades : decades.flatMap((v) => [v, 2 * v, 5 * v]).filter((v) => v <= 10 ** to);
    return { ticks, label: (v) => (rate ? `${short(100 * v)}%` : short(v)), y: (v) => frame.top + height * (1 - (Math.log10(v) - from) / (to - from)) };
  }
  let [bottom, top] = values.length ? [low, high] : [0, 1];
  // Rates start at zero; a value that hardly moves is not blown up to fill a small panel.
  if (!exact && ((rate && bottom >= 0) || (bottom > 0 && bottom < 0.4 * top))) bottom = 0;
  const size = Math.max(Math.abs(top), Math.abs(bottom));
  if (top - bottom <= size * (exact ? 1e-9 : 1e-3)) [bottom, top] = size ? [bottom && bottom - size / 10, top && top + size / 10] : [0, 1];
  const space = 0.04 * (top - bottom);
  if (bottom !== 0) bottom -= space;
  top += space;
  const { ticks, label } = niceTicks((rate ? 100 : 1) * bottom, (rate ? 100 : 1) * top, frame === SMALL ? 5 : 8);
  return { ticks: rate ? ticks.map((v) => v / 100) : ticks, label: rate ? (v) => `${label(100 * v)}%` : label, y: (v) => frame.top + height * (1 - (v - bottom) / (top - bottom)) };
}

// The horizontal axis over training steps.
const stepAxis = () => ({
  name: "training step",
  from: 0,
  to: Math.max(1, data.last),
  ticks: (low, high, number) => niceTicks(low, high, number).ticks.filter((step) => Number.isInteger(step)),
  tipTitle: (step) => {
    const first = Math.floor(step / data.width) * data.width;
    if (!step) return "step 0, before training";
    return data.width > 1 ? `steps ${count(first)} to ${count(Math.min(first + data.width - 1, data.last))}` : `step ${count(step)}`;
  },
  near: data.width,
});

// An empty picture with its axes, which are named where there is room.
function axes(title, { ticks, label, y }, axis, frame) {
  const picture = svg("svg", { viewBox: `0 0 ${frame.width} ${frame.height}`, role: "img", tabindex: 0, "aria-label": title });
  const [left, right, bottom] = [frame.left, frame.width - frame.right, frame.height - frame.bottom];
  const inset = axis.inset || 0;
  const place = axis.log2 ? Math.log2 : Number;
  const [first, last] = [place(axis.from), place(axis.to)];
  const xOf = (x) => left + inset + (last > first ? (place(x) - first) / (last - first) : 0.5) * (right - left - 2 * inset);
  const valueAt = (x) => {
    const value = first + ((x - left - inset) / (right - left - 2 * inset)) * (last - first);
    return axis.log2 ? 2 ** value : value;
  };
  const across = (name, at) => svg("path", { class: name, d: `M${left},${at}H${right}` });
  for (const tick of ticks) picture.append(across("grid", y(tick)), svg("text", { x: left - 9, y: y(tick) + 4, "text-anchor": "end" }, label(tick)));
  for (const tick of axis.ticks(axis.from, axis.to, frame === SMALL ? 5 : 10)) {
    const x = Math.min(xOf(tick), frame.width - 3 - 3.6 * count(tick).length);
    picture.append(svg("text", { x, y: bottom + 18, "text-anchor": "middle" }, count(tick)));
  }
  picture.append(across("axis", bottom));
  if (frame !== SMALL) {
    picture.append(svg("text", { x: (left + right) / 2, y: frame.height - 8, "text-anchor": "middle" }, axis.name));
    picture.append(svg("text", { transform: `translate(16 ${(frame.top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, title.slice(0, 80)));
  }
  return Object.assign(picture, { xOf, valueAt, frame });
}

// A chart of lines {name, colour, shape, dash, x, mean, low, high, smooth, marks}; `panel` may be percent, log, or exact.
function lineChart(panel, all, axis, frame = SMALL) {
  const lines = all.map((line) => within(line, axis));
  const scale = scaleOf(panel, lines, frame);
  const text = (value) => (panel.percent ? `${tenths(100 * value)}%` : short(value));
  const picture = axes(panel.title, scale, axis, frame);
  const summary = lines.filter(({ x }) => x.length).slice(0, 8).map((line) => `${line.name} ${text(line.mean[0])} to ${text(line.mean[line.mean.length - 1])}`).join("; ");
  picture.setAttribute("aria-label", `${panel.title}: ${summary}`);
  const at = (x, value) => `${picture.xOf(x).toFixed(1)},${scale.y(panel.log && value <= 0 ? Number.MIN_VALUE : value).toFixed(1)}`;
  const bands = lines.filter((line) => line.low && !panel.log);
  for (const { x, low, high, colour } of bands.length <= 6 ? bands : []) {
    const edge = [...x.map((one, i) => at(one, high[i])), ...x.map((one, i) => at(one, low[i])).reverse()];
    if (edge.length) picture.append(svg("path", { class: "band", d: `M${edge.join("L")}z`, fill: colour, opacity: 0.15 }));
  }
  for (const { x, mean, smooth, colour, shape, dash, marks } of lines) {
    const drawn = (values) => x.flatMap((one, i) => (panel.log && values[i] <= 0 ? [] : [at(one, values[i])]));
    const stroke = (values, more) => {
      const points = drawn(values);
      if (points.length) picture.append(svg("path", { class: "line", d: `M${points.join("L")}`, stroke: colour, "stroke-width": 1.8, ...(dash ? { "stroke-dasharray": dash } : {}), ...more }));
    };
    if (smooth) stroke(mean, { class: "behind", opacity: 0.28, "stroke-width": 1 });
    stroke(smooth || mean, {});
    if (marks) picture.append(...drawn(smooth || mean).map((point) => marker(shape, ...point.split(",").map(Number), colour, Boolean(dash))));
  }
  const places = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  addCursor(picture, places, axis, (place) => {
    const rows = [];
    for (const line of lines.filter(({ x }) => x.length)) {
      const i = line.x.reduce((best, x, number) => (Math.abs(x - place) < Math.abs(line.x[best] - place) ? number : best), 0);
      if (Math.abs(line.x[i] - place) > axis.near) continue;
      const range = line.low && line.low[i] !== line.high[i] ? `${text(line.low[i])} to ${text(line.high[i])}` : "";
      rows.push([line.mean[i], el("div", {}, swatch(line), line.name, el("strong", {}, text(line.mean[i])), range)]);
    }
    return rows.sort((a, b) => b[0] - a[0]).slice(0, 16).map(([, row]) => row);
  });
  return picture;
}

// The part of a line that the axis shows.
function within(line, { from, to }) {
  const keep = (values) => values && values.filter((_, i) => line.x[i] >= from && line.x[i] <= to);
  return { ...line, x: keep(line.x), mean: keep(line.mean), low: keep(line.low), high: keep(line.high), smooth: keep(line.smooth) };
}

// Calls `rows(place)` for what the tooltip says of the place under the pointer, or where the arrow keys are.
function addCursor(picture, places, { tipTitle }, rows) {
  const { xOf, frame } = picture;
  const cursor = svg("path", { class: "axis cursor", visibility: "hidden", "stroke-dasharray": "2 2" });
  picture.append(cursor);
  let at = -1;
  const show = (index, left, top) => {
    at = Math.max(0, Math.min(index, places.length - 1));
    cursor.setAttribute("d", `M${xOf(places[at])},${frame.top}V${frame.height - frame.bottom}`);
    cursor.setAttribute("visibility", "visible");
    byId("tip").replaceChildren(el("div", {}, tipTitle(places[at])), ...rows(places[at]));
    placeTip(left, top);
  };
  const hide = () => {
    cursor.setAttribute("visibility", "hidden");
    byId("tip").hidden = true;
  };
  if (!places.length) return;
  picture.addEventListener("pointermove", (event) => {
    const x = pictureX(picture, event);
    show(places.reduce((best, place, i) => (Math.abs(xOf(place) - x) < Math.abs(xOf(places[best]) - x) ? i : best), 0), event.clientX, event.clientY);
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const box = picture.getBoundingClientRect();
    show((at < 0 ? places.length - 1 : at) + moves[event.key], box.left + box.width / 3, box.top);
  });
}
const pictureX = (picture, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse()).x;

function swatch({ colour, shape, dash, marks }) {
  const picture = svg("svg", { width: 30, height: 12, "aria-hidden": "true" },
    svg("path", { class: "key", d: "M1,6H29", stroke: colour, "stroke-width": 2.2, ...(dash ? { "stroke-dasharray": dash } : {}) }));
  if (marks) picture.append(marker(shape, 15, 6, colour, Boolean(dash)));
  return picture;
}
const legend = (lines) => el("div", { class: "keysOf" }, ...lines.map((line) => el("span", {}, swatch(line), line.name)));
