// What the scripts of all pages share. Text of models and data enters the document only as text nodes.
const data = JSON.parse(document.getElementById("data").textContent);

const byId = (id) => document.getElementById(id);

// An element with attributes and children; strings become text nodes, null children are skipped.
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Characters that show nothing, or change what is shown around them: controls, direction, zero width, tags, fillers.
const UNSEEN = /(?![\t\n])[\p{Cc}\p{Cf}\u2028\u2029\u115f\u1160\u3164\uffa0\u{e0000}-\u{e0fff}]/gu;

// They become symbols, or their number.
function visible(text) {
  return String(text).replace(UNSEEN, (c) => {
    const code = c.codePointAt(0);
    if (c === "\r") return "";
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

// One decimal, halves to even as in results.md: toFixed rounds exact halves up, and of .25 and .75 the first must go down.
const tenths = (x) => (Math.abs(x) % 1 === 0.25 ? x - Math.sign(x) * 0.01 : x).toFixed(1);
const percent = (value) => (value === null ? "–" : tenths(100 * value));
const points = (value) => (Number(tenths(100 * value)) < 0 ? "−" : "+") + tenths(100 * Math.abs(value));
const percent0 = (share) => `${Math.round(100 * share)}%`;
const count = (number) => number.toLocaleString("en");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

// Numbers as short as they can be told apart.
function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return Number(value.toExponential(2)).toExponential().replace("e+", "e").replaceAll("-", "−");
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 }).replace("-", "−");
}

// A table whose first `names` columns are left-aligned; without rows, a sentence.
function tableOf(headers, names, rows, empty = "") {
  if (!rows.length && empty) return el("p", { class: "empty" }, empty);
  const head = el("tr", {}, ...headers.map((text, i) => el("th", { scope: "col", class: i < names ? "name" : null }, text)));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows));
}
const rowName = (text) => el("th", { scope: "row", class: "name" }, text);
const cellOf = (text) => el("td", {}, text);
const scrolled = (label, table) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${label}, table` }, table);
const option = (value, text) => el("option", { value }, text);

// Chunks: compressed JSON in script elements that are not executed; the most recent ones stay unpacked.
const unpacked = new Map();
const MAX_UNPACKED = 48;

function chunk(id) {
  let found = unpacked.get(id);
  if (!found) found = unpack(id);
  unpacked.delete(id);
  unpacked.set(id, found);
  if (unpacked.size > MAX_UNPACKED) unpacked.delete(unpacked.keys().next().value);
  return found;
}

async function unpack(id) {
  const stream = new Blob([bytesOf(byId(`chunk-${id}`).textContent)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

function placeTip(x, y) {
  const tip = byId("tip");
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 16, window.innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 16, window.innerHeight - height - 8))}px`;
}
window.addEventListener("scroll", () => { byId("tip").hidden = true; }, { passive: true });

// The page is ready once `parts`, which unpack their data, are shown.
function whenReady(...parts) {
  if (!("DecompressionStream" in window)) {
    byId("trouble").textContent = "This browser cannot unpack the data, because it lacks DecompressionStream. Browsers since 2023 have it.";
    byId("trouble").hidden = false;
    return Promise.resolve();
  }
  return Promise.all(parts.map((part) => part())).then(() => {
    performance.mark("ready");
    document.documentElement.setAttribute("data-ready", "");
  });
}
