// Panels: a chart with its title, what it shows and its legend; and the window that one of them is enlarged in.
// A view is {title, note, about, names, axis, percent, log, lines(smoothing), smooth, keys(lines, large)}; without lines, it says so.
const chartOf = (view, axis, frame, log, smoothing) =>
  lineChart({ title: view.title, percent: view.percent, log, exact: frame !== SMALL }, view.lines(smoothing), axis, frame);

const panelOf = (view) => el("div", { class: "panel" }, ...panelParts(view));

function panelParts(view) {
  const lines = view.lines();
  if (!lines.length) return [panelHead(view), el("p", { class: "empty" }, "No run that is shown has this figure.")];
  const button = el("button", { type: "button", class: "enlarge", "aria-label": `Enlarge ${view.title}`, title: "Enlarge: zoom, logarithm, smoothing, PNG, CSV" }, "⤢");
  button.addEventListener("click", () => enlarge(view));
  return [panelHead(view, button), chartOf(view, view.axis, SMALL, view.log), legend(view.keys(lines, false))];
}

function panelHead({ title, note, about }, button = null) {
  const head = el("h3", {}, button, title, note ? " " : null, note ? el("small", {}, note) : null);
  return el("div", { class: "panel-head" }, head, about ? el("p", { class: "about" }, about) : null);
}

// The window: drag over the chart to zoom, double click to see the whole.
function enlarge(view) {
  const settings = { axis: view.axis, log: view.log, smoothing: view.smooth };
  const place = el("div", { class: "large-chart" });
  const box = el("dialog", { class: "large", "aria-label": view.title });
  const draw = () => {
    const width = Math.max(320, place.clientWidth);
    const frame = { width, height: Math.max(240, Math.min(window.innerHeight * 0.56, width * 0.7)), left: 96, right: 20, top: 12, bottom: 48 };
    const picture = chartOf(view, settings.axis, frame, settings.log, settings.smoothing);
    place.replaceChildren(picture);
    zoomBy(picture, (from, to) => { settings.axis = from === null ? view.axis : { ...view.axis, from, to }; draw(); });
  };
  const button = (text, act) => {
    const made = el("button", { type: "button" }, text);
    made.addEventListener("click", act);
    return made;
  };
  const log = el("input", { type: "checkbox", id: "large-log" });
  log.checked = settings.log;
  log.addEventListener("change", () => { settings.log = log.checked; draw(); });
  const smoothing = el("select", { id: "large-smoothing" }, ...[0, 5, 15, 45].map((points) => option(points, points ? `${points} points` : "none")));
  smoothing.value = settings.smoothing;
  smoothing.addEventListener("change", () => { settings.smoothing = Number(smoothing.value); draw(); });
  const name = view.title.replace(/[^\p{L}\p{N}@.-]+/gu, "_").slice(0, 80);
  box.append(
    el("div", { class: "head" }, el("h2", {}, view.title), button("Close", () => box.close())),
    view.about ? el("p", { class: "quiet" }, view.about) : "", place, legend(view.keys(view.lines(), true)),
    el("div", { class: "filters large-tools" }, el("label", { class: "check" }, el("span", {}, log, " logarithm")),
      view.smooth !== undefined ? el("label", { class: "check" }, el("span", {}, "Smoothing ", smoothing)) : "",
      button("Whole range", () => { settings.axis = view.axis; draw(); }),
      button("PNG", () => canvasOf(place.firstChild).toBlob((blob) => save(blob, `${name}.png`))),
      button("CSV", () => save(new Blob([csvOf(rowsOf(view.axis.name, view.lines()))], { type: "text/csv" }), `${name}.csv`))),
    el("p", { class: "quiet" }, "Drag over the chart to zoom; a double click shows the whole. ", view.names ? `In metrics.jsonl: ${view.names.join(", ")}` : ""));
  document.body.append(box);
  // What is outside of a modal window is below it.
  box.append(byId("tip"));
  box.addEventListener("close", () => { document.body.append(byId("tip")); box.remove(); });
  box.showModal();
  draw();
}

function zoomBy(picture, zoom) {
  const { frame } = picture;
  const chosen = svg("path", { class: "chosen" });
  picture.append(chosen);
  let start = null;
  const span = (event) => [start, pictureX(picture, event)].map((x) => Math.max(frame.left, Math.min(x, frame.width - frame.right))).sort((a, b) => a - b);
  picture.addEventListener("pointerdown", (event) => { start = pictureX(picture, event); });
  picture.addEventListener("pointermove", (event) => {
    if (start === null) return;
    const [from, to] = span(event);
    chosen.setAttribute("d", `M${from},${frame.top}H${to}V${frame.height - frame.bottom}H${from}z`);
  });
  picture.addEventListener("pointerup", (event) => {
    if (start === null) return;
    const [from, to] = span(event);
    start = null;
    chosen.removeAttribute("d");
    if (to - from > 8) zoom(picture.valueAt(from), picture.valueAt(to));
  });
  picture.addEventListener("dblclick", () => zoom(null));
}

// The picture on a canvas of twice its size. An image of it would be against the page's policy.
function canvasOf(picture) {
  const { width, height } = picture.viewBox.baseVal;
  const canvas = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
  const pen = canvas.getContext("2d");
  const lookOf = (part) => getComputedStyle(part);
  pen.fillStyle = lookOf(picture.closest("dialog")).backgroundColor;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  for (const part of picture.querySelectorAll("path:not(.cursor, .chosen), text")) {
    const look = lookOf(part);
    pen.setTransform(2, 0, 0, 2, 0, 0);
    pen.globalAlpha = look.opacity;
    pen.fillStyle = look.fill;
    if (part.tagName === "text") {
      const turned = part.transform.baseVal.consolidate()?.matrix;
      if (turned) pen.transform(turned.a, turned.b, turned.c, turned.d, turned.e, turned.f);
      pen.font = `${look.fontSize} ${look.fontFamily}`;
      pen.textAlign = { middle: "center", end: "right" }[look.textAnchor] || "left";
      pen.fillText(part.textContent, part.getAttribute("x") || 0, part.getAttribute("y") || 0);
      continue;
    }
    const path = new Path2D(part.getAttribute("d"));
    if (look.fill !== "none") pen.fill(path);
    if (look.stroke === "none") continue;
    Object.assign(pen, { strokeStyle: look.stroke, lineWidth: parseFloat(look.strokeWidth) });
    pen.setLineDash((look.strokeDasharray.match(/[\d.]+/g) || []).map(Number));
    pen.stroke(path);
  }
  return canvas;
}

// Text that a spreadsheet would take for a formula begins with an apostrophe.
const csvOf = (rows) => rows.map((row) => row.map((cell) => (typeof cell === "string" ? `"${cell.replace(/^[=+@\t-]/, "'$&").replaceAll('"', '""')}"` : cell ?? "")).join(",")).join("\r\n") + "\r\n";

// Rows of a table of lines: a place, and of each line its value there, and its lowest and highest.
function rowsOf(name, lines) {
  const places = [...new Set(lines.flatMap(({ x }) => x))].sort((a, b) => a - b);
  const columns = lines.flatMap((line) => ["mean", "low", "high"].filter((kind) => line[kind]).map((kind) => [line, kind]));
  const at = new Map(lines.map((line) => [line, new Map(line.x.map((x, i) => [x, i]))]));
  return [[name, ...columns.map(([line, kind]) => line.name + (kind === "mean" ? "" : `, ${kind}est`))],
    ...places.map((x) => [x, ...columns.map(([line, kind]) => line[kind][at.get(line).get(x)])])];
}

function save(blob, name) {
  const link = el("a", { download: name, href: URL.createObjectURL(blob) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
