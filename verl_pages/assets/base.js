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
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const figure = (value) => (value === null ? "–" : Number(value.toPrecision(4)).toString());

function trouble(message) {
  byId("trouble").textContent = message;
  byId("trouble").hidden = false;
}

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
  const packed = atob(byId(`chunk-${id}`).textContent);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

// Curves and tooltips.
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function marker(shape, x, y, colour, hollow) {
  const paint = { fill: hollow ? "var(--card)" : colour, stroke: hollow ? colour : "var(--card)", "stroke-width": hollow ? 1.6 : 1 };
  const paths = {
    circle: `M${x - 4},${y}a4,4 0 1 0 8,0a4,4 0 1 0 -8,0`,
    square: `M${x - 3.6},${y - 3.6}h7.2v7.2h-7.2z`,
    diamond: `M${x},${y - 4.8}l4.8,4.8l-4.8,4.8l-4.8,-4.8z`,
    triangle: `M${x},${y - 4.8}l4.6,8h-9.2z`,
  };
  return svg("path", { d: paths[shape], ...paint });
}

function placeTip(x, y) {
  const tip = byId("tip");
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 16, window.innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 16, window.innerHeight - height - 8))}px`;
}
window.addEventListener("scroll", () => { byId("tip").hidden = true; }, { passive: true });
