// What is known of each token of a response, and a text coloured by it.

// The measures that some response has: how to call them, what a token's value is, how strong its colour.
function measuresOf() {
  const found = [
    { key: "logprob", name: "log-probability", unit: "nats", values: (t) => t.logprobs, about: "log-probability of the token under the policy; strong colour: improbable", low: true },
    { key: "entropy", name: "entropy", unit: "nats", values: (t) => t.entropies, about: "entropy of the policy where the token was sampled; strong colour: undecided" },
  ];
  data.samples.prefixes.forEach((names, p) => {
    const kinds = [
      ["value of the first measured prefix that contains the token", false],
      ["value of that prefix less the mean of the prefixes before it, a term of the response's velocity", true],
      ["change of that difference from the prefix before, a term of the response's acceleration", true],
    ];
    kinds.forEach(([about, signed], order) => found.push({ key: `${names[0]}/${order}`, name: names[order], about, signed, values: (t) => alongPrefixes(t, p, order) }));
  });
  return found;
}

// The value, its velocity or its acceleration of every measured prefix (order 0, 1, 2); null where there is none.
function prefixValues(values, order) {
  if (order === 0) return values;
  let sum = 0;
  const deltas = values.map((value, j) => {
    const delta = j ? value - sum / j : null;
    sum += value;
    return delta;
  });
  if (order === 1) return deltas;
  return deltas.map((delta, j) => (j > 1 ? delta - deltas[j - 1] : null));
}

// The number of a shown token in the whole response, from 0.
const numberOf = (t, i) => (i < t.head ? i : i + t.skipped);

// For every shown token the value of the first prefix that contains it.
function alongPrefixes(t, p, order) {
  const own = t.prefixes[p];
  if (!own || !own.length || own.includes(null)) return null;
  const values = prefixValues(own, order);
  let j = 0;
  return t.lengths.map((_, i) => {
    while (j < t.rows.length && t.rows[j] <= numberOf(t, i)) j++;
    return j < t.rows.length ? values[j] : null;
  });
}

// The same scale for all responses that are shown; the outermost hundredth of tokens has the strongest colour.
function scaleOfTokens(measure, responses) {
  const values = responses.flatMap((r) => (r && r.tokens && measure.values(r.tokens)) || []).filter((v) => v !== null);
  if (!values.length) return null;
  const sorted = values.map((v) => (measure.signed ? Math.abs(v) : v)).sort((a, b) => a - b);
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  if (measure.signed) return { low: -at(0.99) || -1, high: at(0.99) || 1 };
  if (measure.low) return { low: Math.min(at(0.01), -1e-3), high: 0 };
  return { low: measure.key === "entropy" ? 0 : at(0.01), high: Math.max(at(0.99), at(0.01) + 1e-6) };
}

// Strength from 0 to 1, below 0 for the other colour.
function strength(measure, { low, high }, value) {
  if (measure.signed) return Math.max(-1, Math.min(1, value / high));
  const share = Math.max(0, Math.min(1, (value - low) / (high - low || 1)));
  if (measure.low) return 1 - share;
  // The lowest rank still differs from no rank.
  return measure.key === "entropy" ? share : 0.1 + 0.9 * share;
}

function colourSpan(span, share) {
  span.classList.add(share < 0 ? "below" : "above");
  span.style.setProperty("--s", `${Math.round(72 * Math.abs(share))}%`);
}

function tokenLegend(measure, scale) {
  const steps = Array.from({ length: 9 }, (_, i) => scale.low + ((scale.high - scale.low) * i) / 8);
  const bar = el("span", { class: "ramp", "aria-hidden": "true" }, ...steps.map((value) => {
    const part = el("i");
    colourSpan(part, strength(measure, scale, value));
    return part;
  }));
  return el("p", { class: "token-legend" }, el("b", {}, measure.name), el("span", {}, short(scale.low)), bar,
    el("span", {}, `${short(scale.high)} ${measure.unit || ""}`), el("span", { class: "quiet" }, measure.about));
}

// The text of a response with its differences marked and its tokens coloured.
function fillText(pre, response, marks, colours) {
  const text = response.text[0] + response.text[1];
  const { measure, scale } = colours || {};
  const values = scale && response.tokens ? measure.values(response.tokens) : null;
  const ends = new Set([text.length, response.text[0].length]);
  const tokenAt = new Map();
  if (values) {
    response.tokens.lengths.reduce((from, length, i) => {
      for (let end = from; end < from + length; end++) tokenAt.set(end, i);
      ends.add(from);
      return from + length;
    }, 0);
  }
  for (const [from, to] of marks || []) ends.add(from).add(to);
  // What is not shown as it is stays whole, unless tokens are coloured or the gap is in it.
  const special = new Map(values ? [] : specialRanges(text).filter(([a, b]) => !response.left || b <= response.text[0].length || a >= response.text[0].length).map((range) => [range[0], range]));
  for (const [start, end] of special.values()) ends.add(start).add(end);
  const inside = (end) => [...special.values()].some(([a, b]) => a < end && end < b);
  const cuts = [...ends].filter((end) => end > 0 && end <= text.length && !inside(end)).sort((a, b) => a - b);
  const make = specialMaker();
  const parts = [];
  let from = 0;
  let mark = 0;
  for (const end of cuts) {
    while (marks && mark < marks.length && marks[mark][1] <= from) mark++;
    const differs = marks && mark < marks.length && marks[mark][0] < end;
    const token = tokenAt.get(from);
    const shownText = special.has(from) ? make(text.slice(from, end), special.get(from)[2]) : visible(text.slice(from, end));
    if (differs || token !== undefined) {
      const span = el(differs ? "mark" : "span", { "data-token": token }, shownText);
      if (token !== undefined && values[token] !== null) colourSpan(span, strength(measure, scale, values[token]));
      parts.push(span);
    } else parts.push(shownText);
    if (end === response.text[0].length && response.left) {
      parts.push(el("span", { class: "cut" }, `\n[… ${count(response.left)} characters left out on this page …]\n`));
    }
    from = end;
  }
  pre.replaceChildren(...(parts.length ? parts : [el("span", { class: "cut" }, "(empty)")]));
  if (values) watchTokens(pre, response.tokens);
}

// The values of the token under the pointer, or of the one that the arrow keys reach.
function watchTokens(pre, t) {
  let at = -1;
  let known = null;
  const show = (i, x, y) => {
    known ||= measures.map((one) => [one, one.values(t)]).filter(([, values]) => values);
    at = i;
    for (const old of pre.querySelectorAll(".at")) old.classList.remove("at");
    const spans = pre.querySelectorAll(`[data-token="${i}"]`);
    for (const span of spans) span.classList.add("at");
    const rows = known.filter(([, values]) => values[i] !== null && values[i] !== undefined)
      .map(([one, values]) => el("div", {}, one.name, el("strong", {}, short(values[i])), one.unit || ""));
    const name = [...spans].map((span) => span.textContent).join("").replace(/\n/g, "↵").replace(/ /g, "·");
    byId("tip").replaceChildren(el("div", {}, `token ${numberOf(t, i) + 1} `, el("code", {}, name)), ...rows);
    placeTip(x, y);
  };
  const hide = () => {
    for (const old of pre.querySelectorAll(".at")) old.classList.remove("at");
    byId("tip").hidden = true;
  };
  pre.tabIndex = 0;
  pre.onpointermove = (event) => {
    const span = event.target.closest("[data-token]");
    if (span) show(Number(span.dataset.token), event.clientX, event.clientY);
    else hide();
  };
  pre.onpointerleave = hide;
  pre.onblur = hide;
  pre.onkeydown = (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const next = Math.max(0, Math.min(at + moves[event.key], t.lengths.length - 1));
    const span = pre.querySelector(`[data-token="${next}"]`);
    if (!span) return;
    const box = span.getBoundingClientRect();
    show(next, box.left, box.bottom);
  };
}
