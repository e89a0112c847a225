// Histograms over training steps: a column for each step, darker where more of its responses are.
function histograms() {
  return data.histograms.flatMap((histogram) => histogram.runs.flatMap((columns, r) => {
    if (!columns.length) return [];
    const { title, about, low, high } = histogram;
    const name = severalRuns ? `${title}: ${data.runs[r].name}` : title;
    const panel = el("div", { class: "panel histogram", "data-run": severalRuns ? r : null }, panelHead({ title: name, about }), histogramChart(name, columns, low, high));
    return [panel];
  }));
}

function histogramChart(title, columns, low, high) {
  const scale = scaleOf({ exact: true }, [{ mean: [low, high] }], SMALL);
  const axis = stepAxis();
  const picture = axes(title, scale, axis, SMALL);
  const bins = columns[0][2].length;
  const edge = (bin) => low + (bin * (high - low)) / bins;
  // A column reaches half way to its neighbours.
  const middles = columns.map(([first, last]) => (first + last) / 2);
  const half = (i) => (i > 0 ? (middles[i] - middles[i - 1]) / 2 : columns.length > 1 ? (middles[1] - middles[0]) / 2 : 0.5);
  const within = (step) => picture.xOf(Math.max(axis.from, Math.min(axis.to, step))).toFixed(1);
  const greatest = Math.max(...columns.flatMap(([, , shares]) => shares));
  columns.forEach(([, , shares], i) => {
    const [left, right] = [within(middles[i] - half(i)), within(middles[i] + half(Math.min(i + 1, columns.length - 1)))];
    shares.forEach((share, bin) => {
      if (!share) return;
      const [top, bottom] = [scale.y(edge(bin + 1)).toFixed(1), scale.y(edge(bin)).toFixed(1)];
      picture.append(svg("path", { class: "bin", d: `M${left},${top}H${right}V${bottom}H${left}z`, opacity: (0.12 + 0.88 * Math.sqrt(share / greatest)).toFixed(3) }));
    });
  });
  const tipTitle = (middle) => {
    const [first, last] = columns[middles.indexOf(middle)];
    return first === last ? `step ${count(first)}` : `steps ${count(first)} to ${count(last)}`;
  };
  addCursor(picture, middles, { ...axis, tipTitle }, (middle) => {
    const shares = columns[middles.indexOf(middle)][2].map((share, bin) => [share, bin]).filter(([share]) => share);
    const most = shares.sort((a, b) => b[0] - a[0]).slice(0, 8).sort((a, b) => b[1] - a[1]);
    return most.map(([share, bin]) => el("div", {}, `${short(edge(bin))} to ${short(edge(bin + 1))}`, el("strong", {}, `${tenths(share / 10)}%`)));
  });
  const [, , final] = columns[columns.length - 1];
  const peak = final.indexOf(Math.max(...final));
  picture.setAttribute("aria-label", `${title}: in the last step most often from ${short(edge(peak))} to ${short(edge(peak + 1))}`);
  return picture;
}
