// Who was busy in the last steps of a run: bars of engines and trainer over time, and gaps where they waited.
function timelines() {
  const [width, left, lane, gap] = [380, 58, 34, 12];
  return data.timelines.flatMap(({ steps, busy }, r) => {
    if (!steps) return [];
    const total = steps.reduce((sum, [, seconds]) => sum + seconds, 0);
    const xOf = (seconds) => left + (seconds / total) * (width - left - 8);
    const names = ["engines", "trainer"];
    const shares = names.map((name, i) => `${name} busy ${percent(busy[i])}% of the time`).join(", ");
    const picture = svg("svg", { viewBox: `0 0 ${width} ${2 * (lane + gap) + 26}`, role: "img", "aria-label": shares });
    const bar = (from, to, top, fill, title) => svg("path", { d: `M${xOf(from).toFixed(2)},${top}H${xOf(to).toFixed(2)}v${lane}H${xOf(from).toFixed(2)}z`, fill }, svg("title", {}, title));
    names.forEach((name, i) => picture.append(svg("text", { x: left - 6, y: gap + i * (lane + gap) + lane / 2 + 4, "text-anchor": "end" }, name)));
    let begin = 0;
    for (const [step, seconds, ...lanes] of steps) {
      lanes.forEach((spans, i) => {
        const top = gap + i * (lane + gap);
        const used = spans.reduce((sum, [from, to]) => sum + to - from, 0);
        const title = `step ${count(step)}, ${duration(seconds)}: ${names[i]} busy ${duration(used)}`;
        picture.append(bar(begin, begin + seconds, top, "var(--line)", title));
        picture.append(...spans.map(([from, to]) => bar(begin + from, begin + to, top, i ? "var(--low)" : "var(--high)", title)));
      });
      picture.append(svg("path", { d: `M${xOf(begin).toFixed(2)},${gap - 4}V${2 * (lane + gap) + 4}`, class: "axis" }));
      begin += seconds;
    }
    const [first, last] = [steps[0][0], steps[steps.length - 1][0]];
    picture.append(svg("text", { x: left, y: 2 * (lane + gap) + 20 }, `step ${count(first)}`), svg("text", { x: width - 8, y: 2 * (lane + gap) + 20, "text-anchor": "end" }, `end of step ${count(last)}`));
    const of = data.runs.length > 1 ? `: ${data.runs[r].name}` : "";
    return [el("div", { class: "panel timeline" },
      panelHead({ title: `Engines and trainer over time${of}`, about: `Steps ${count(first)} to ${count(last)}: ${shares}; grey: they waited.` }), picture)];
  });
}
