// Lines over the last minute, as SVG that follows the page's colours.

const CHART = { width: 600, height: 100, seconds: 60, buckets: 240 };
const pastSteps = new Map(); // step number -> step
const charts = {};

function svg(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

// `series`: [name, function of a step]; `area`: whether the first one is filled.
function makeChart(id, series, area, signed) {
  const box = byId(id);
  for (const [i, [name]] of series.entries()) {
    element("span", `series s${i + 1}`, box.querySelector("figcaption"), name);
  }
  const plot = svg("svg", { class: "chart", viewBox: `0 0 ${CHART.width} ${CHART.height}`, preserveAspectRatio: "none", role: "img" }, box);
  const zero = svg("path", { class: "grid" }, plot);
  svg("path", { class: "grid", d: `M0,0H${CHART.width}` }, plot);
  const fill = area ? svg("path", { class: "area s1" }, plot) : null;
  const paths = series.map((_, i) => svg("path", { class: `s${i + 1}` }, plot)).reverse();
  const scale = element("div", "scale", box);
  const [low, high] = [element("span", "", scale), element("span", "", scale)];
  charts[id] = { series, plot, zero, fill, paths: paths.reverse(), low, high, top: 0, bottom: 0, signed, calm: 0 };
}

function addSteps(steps) {
  steps.step.forEach((step, i) => {
    pastSteps.set(step, Object.fromEntries(Object.keys(steps).map((key) => [key, steps[key][i]])));
  });
}

function forgetSteps(now) {
  for (const [step, facts] of pastSteps) {
    if (facts.now_ms < now - 1000 * CHART.seconds) pastSteps.delete(step);
  }
}

// Means per bucket of time; null where nothing was measured.
function sampled(value, now) {
  const sums = new Array(CHART.buckets).fill(0);
  const counts = new Array(CHART.buckets).fill(0);
  for (const step of pastSteps.values()) {
    const y = value(step);
    if (y === null || y === undefined) continue;
    const age = (now - step.now_ms) / (1000 * CHART.seconds);
    const bucket = Math.min(CHART.buckets - 1, Math.floor((1 - age) * CHART.buckets));
    if (bucket < 0) continue;
    sums[bucket] += y;
    counts[bucket] += 1;
  }
  return sums.map((sum, i) => (counts[i] ? sum / counts[i] : null));
}

function nice(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((factor) => factor * unit >= value) * unit;
}

// The scale grows at once and shrinks only after it was too large for a while.
function rescale(chart, values) {
  const known = values.flat().filter((y) => y !== null);
  const top = nice(Math.max(1, ...known));
  const least = Math.min(0, ...known);
  const bottom = chart.signed && least < 0 ? -nice(-least) : 0;
  chart.calm = top < chart.top || bottom > chart.bottom ? chart.calm + 1 : 0;
  if (top > chart.top || bottom < chart.bottom || chart.calm > 10) {
    Object.assign(chart, { top: chart.calm > 10 ? top : Math.max(top, chart.top), bottom: chart.calm > 10 ? bottom : Math.min(bottom, chart.bottom), calm: 0 });
  }
}

function drawChart(id, now) {
  const chart = charts[id];
  const values = chart.series.map(([, value]) => sampled(value, now));
  rescale(chart, values);
  const y = (value) => CHART.height * (1 - (value - chart.bottom) / (chart.top - chart.bottom));
  const x = (bucket) => ((bucket + 1) / CHART.buckets) * CHART.width;
  setAttr(chart.zero, "d", `M0,${y(0)}H${CHART.width}`);
  values.forEach((line, i) => setAttr(chart.paths[i], "d", linePath(line, x, y)));
  if (chart.fill) setAttr(chart.fill, "d", areaPath(values[0], x, y));
  setText(chart.low, "60 s ago");
  setText(chart.high, `top ${count(chart.top)}${chart.bottom ? `, bottom ${count(chart.bottom)}` : ""}`);
  const last = values.map((line) => line.findLast((value) => value !== null));
  const words = chart.series.map(([name], i) => `${name} ${last[i] === undefined ? "unknown" : last[i].toFixed(1)}`);
  setAttr(chart.plot, "aria-label", `Last minute, now: ${words.join(", ")}`);
}

// A gap of more than two seconds is a gap; a smaller one has a line through it.
function pieces(line) {
  const found = [];
  let last = -Infinity;
  line.forEach((value, i) => {
    if (value === null) return;
    if (i - last > CHART.buckets / 30) found.push([]);
    found.at(-1).push(i);
    last = i;
  });
  return found;
}

function linePath(line, x, y) {
  return pieces(line).map((piece) => {
    const first = piece.length === 1 ? `M${x(piece[0] - 1)},${y(line[piece[0]])}L` : "M";
    return first + piece.map((i) => `${x(i).toFixed(1)},${y(line[i]).toFixed(2)}`).join("L");
  }).join("");
}

function areaPath(line, x, y) {
  return pieces(line).map((piece) => {
    const points = piece.map((i) => `L${x(i).toFixed(1)},${y(line[i]).toFixed(2)}`).join("");
    return `M${x(piece[0])},${y(0)}${points}L${x(piece.at(-1))},${y(0)}Z`;
  }).join("");
}

function makeCharts() {
  makeChart("chart-width", [["admitted", (s) => s.num_admitted], ["in the batch", (s) => s.num_rows]], true, false);
  makeChart("chart-step", [["measured", (s) => s.measured_ms], ["predicted", (s) => s.predicted_ms], ["budget", (s) => s.budget_ms]], false, false);
  makeChart("chart-slack", [["slack", (s) => s.min_slack_ms]], false, true);
}

function drawCharts(now) {
  for (const id of Object.keys(charts)) drawChart(id, now);
}

// In use: by live rows and pins; cached: can be evicted.
function drawPool(pool, pinned) {
  const parts = [
    ["kv-live", Math.max(0, pool.total - pool.free - pool.evictable - pinned)],
    ["kv-pinned", pinned], ["kv-cached", pool.evictable], ["kv-free", pool.free],
  ];
  const bar = byId("kv");
  let at = 0;
  parts.forEach(([name, tokens], i) => {
    const part = bar.children[i] ?? svg("rect", { class: name, y: 0, height: 8 }, bar);
    const width = (100 * tokens) / Math.max(1, pool.total);
    setAttr(part, "x", at.toFixed(2));
    setAttr(part, "width", width.toFixed(2));
    at += width;
  });
  setAttr(bar, "aria-label", `${count(pool.free)} of ${count(pool.total)} KV tokens are free`);
}
