// Texts of models and data: formulas are typeset by KaTeX where the page has it, what templates add is folded.
const TEMPLATE = /(?:(?:<\|(?:im_start|start_header_id|turn)\|?>|<start_of_turn>)\w{1,20}(?:<\|end_header_id\|>)?\s*|<[|｜][^|｜<>\n]{1,40}[|｜]>\s*|<\/?(?:s|bos|eos|pad|end_of_turn)>\s*)+/g;
const FORMULA = /\$\$[^$]{1,1000}?\$\$|\\\[[^]{1,1000}?\\\]|\\\([^]{1,1000}?\\\)|\\begin\{((?:align|equation|gather)\*?)\}[^]{1,1000}?\\end\{\1\}|(?<![\\$\w])\$(?!\s)(?=[^$\n]*[\\^_=+*/<>{}|()-]|[\w.,']{1,12}\$)(?:\\.|[^$\\\n]){1,500}?(?<!\s)\$(?!\d)/g;
const ANSWER = /^[^$\n]*(?:\\[a-zA-Z{]|\^)[^$\n]*$/;
// A formula could leave its place, hide what it says, or take long: its source is shown instead.
const REFUSED = /\\(?:href|url|html\w*|includegraphics|[egx]?def|g?let|futurelet|global|long|(?:re|provide)?newcommand|[hv]?phantom|(?:text|f)?color(?:box)?|fcolorbox|smash|(?:math)?[rlc]lap|raisebox|char|mathchoice|tiny|scriptscriptstyle)(?![a-zA-Z])|-\s*[\d.]+\s*(?:em|ex|mu|pt|pc|mm|cm|in|bp|sp|dd|cc|nd|nc)(?![a-zA-Z])|(?:\\!\s*|\\negthinspace\s*){4}|(?<!\\)%/;
const MAX_FORMULAS = 200;
const MAX_TYPESETTING_MS = 1000;

// Ranges [from, to, kind] of a text that are not shown as they are; kinds are "template" and "formula".
function specialRanges(text) {
  const found = [...text.matchAll(TEMPLATE)].map((match) => [match.index, match.index + match[0].length, "template"]);
  if (window.katex && browse.formulas) {
    for (const match of [...text.matchAll(FORMULA)].slice(0, MAX_FORMULAS)) found.push([match.index, match.index + match[0].length, "formula"]);
  }
  let end = 0;
  return found.sort((a, b) => a[0] - b[0]).filter(([from, to]) => from >= end && (end = to));
}

const hasFormulas = (text) => Boolean(window.katex) && text.match(FORMULA) !== null;

// A maker of nodes for the ranges of one text; it stops typesetting when that has taken too long.
function specialMaker() {
  let left = MAX_TYPESETTING_MS;
  return (text, kind) => {
    if (kind === "template") {
      const role = [...text.matchAll(/(?:start|start_header_id|turn)\|?>(\w+)|<[|｜](system|user|assistant|tool)/gi)].pop();
      return el("details", { class: role ? "template turn" : "template" }, el("summary", { "data-role": role ? role[1] || role[2] : "…", title: "tokens of the template" }), visible(text));
    }
    const start = performance.now();
    const made = left > 0 ? formula(text) : null;
    left -= performance.now() - start;
    return made || visible(text);
  };
}

function formula(text) {
  if (REFUSED.test(text)) return null;
  loadFonts();
  const bare = text.startsWith("\\begin");
  const width = text.startsWith("$") && !text.startsWith("$$") ? 1 : 2;
  const display = bare || text.startsWith("$$") || text.startsWith("\\[");
  const place = el("span", { class: display ? "formula display" : "formula", role: "img", "aria-label": visible(text), title: visible(text) });
  try {
    window.katex.render(bare ? text : text.slice(width, -width), place, { output: "html", displayMode: display, trust: false, strict: "ignore", maxSize: 20, maxExpand: 100, macros: { "\\mbox": "\\text{#1}" } });
  } catch {
    return null;
  }
  return place;
}

// The nodes of an answer: often a formula without the signs around one. Words would lose the spaces between them.
function answerNodes(text) {
  const worded = /[a-zA-Z]{3}/.test(text.replace(/\\(?:text|mathrm|operatorname)\{[^{}]*\}|\\[a-zA-Z]+/g, ""));
  const typeset = window.katex && browse.formulas && text.length <= 1000 && !worded && ANSWER.test(text);
  const bare = typeset && formula(`\\(${text}\\)`);
  return bare ? [bare] : richText(text);
}

// The fonts are in the page, and loaded when the first formula is shown. As bytes they need no address.
function loadFonts() {
  for (const holder of document.querySelectorAll("script[data-font]")) {
    const { font, weight, style } = holder.dataset;
    document.fonts.add(new FontFace(font, bytesOf(holder.textContent), { weight, style }));
    holder.remove();
  }
}

function richText(text) {
  const make = specialMaker();
  const nodes = [];
  let from = 0;
  for (const [start, end, kind] of specialRanges(text)) {
    nodes.push(visible(text.slice(from, start)), make(text.slice(start, end), kind));
    from = end;
  }
  return [...nodes, visible(text.slice(from))];
}
