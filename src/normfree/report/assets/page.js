"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("data").textContent);
  const tooltip = find("tooltip");
  const panels = [...data.panels, ...data.sections.flatMap((section) => section.panels)];
  const names = [...new Set(panels.flatMap((panel) => panel.curves.map((curve) => curve.name)))];
  // What the reader chose, kept while a page of work in progress loads itself again.
  const kept = recall();
  const legends = [...document.querySelectorAll(".legend")].map(makeLegend);
  const charts = [];
  let printing = false;

  // ---- numbers -------------------------------------------------------------------------------------------------

  const trim = (text) => text.replace(/\.?0+(?=e|$)/, "").replace("e+", "e");

  const minus = (text) => text.replaceAll("-", "−");

  // The digits before the point in threes: 1,234.5.
  const grouped = (text) => text.replace(/^-?\d+/, (digits) => digits.replace(/\B(?=(\d{3})+$)/g, ","));

  // Three digits in a compact form: 1.2e-3, 0.25, 12.3, 1,234.
  function compact(value) {
    if (!Number.isFinite(value)) return String(value);
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 0.01 || size >= 1e5) return trim(value.toExponential(2));
    if (size >= 100) return grouped(String(Math.round(value)));
    const text = value.toPrecision(3);
    return text.includes(".") ? trim(text) : text;
  }

  // Round ticks between two ends; the ends are divided first, because their difference may leave the float range.
  function linearTicks(low, high, count, whole) {
    const rough = high / count - low / count;
    if (!(rough > 0)) return { ticks: [low], step: 1 };
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = power * [1, 2, 5, 10].find((factor) => rough <= factor * power * (1 + 1e-9));
    if (whole) step = Math.max(1, step);
    const ticks = [];
    const start = Math.ceil(low / step - 1e-9);
    for (let k = 0; k <= 2 * count + 2; k++) {
      const tick = (start + k) * step;
      if (!Number.isFinite(tick) || tick / 2 > high / 2 + step * 1e-9) break;
      ticks.push(tick);
    }
    return { ticks, step };
  }

  function linearLabels(ticks, step) {
    const size = Math.max(...ticks.map(Math.abs));
    const place = Math.floor(Math.log10(step) + 1e-9);
    if (size === 0 || (size >= 1e-3 && size < 1e5)) {
      return ticks.map((tick) => [minus(grouped(tick.toFixed(Math.max(0, -place))))]);
    }
    const digits = Math.min(15, Math.max(0, Math.floor(Math.log10(size)) - place));
    return ticks.map((tick) => {
      const [lead, power] = tick.toExponential(digits).split("e").map((part) => minus(String(Number(part))));
      return tick === 0 ? ["0"] : [lead === "1" ? "10" : `${lead}·10`, power];
    });
  }

  // Ticks of a logarithmic axis in decades: each, or each few, or 1, 2 and 5 of each.
  function logTicks(low, high, count) {
    const span = high - low;
    const ticks = [];
    if (span < 2.2) {
      for (let k = Math.floor(low); k <= high; k++) [1, 2, 5].forEach((lead) => ticks.push(k + Math.log10(lead)));
    } else {
      const step = [1, 2, 3, 5, 10, 20, 30, 50, 100].find((each) => span / each <= count) || 200;
      for (let k = Math.ceil(low / step) * step; k <= high; k += step) ticks.push(k);
    }
    return ticks.filter((tick) => tick >= low && tick <= high);
  }

  // Whether the ticks of a panel are readable without powers of ten.
  function isShort(panel) {
    const drawn = panel.curves.flatMap((curve) => curve.values.map(Number)).filter((value) => value > 0 && value < Infinity);
    return !panel.log_y || !drawn.length || logTicks(...logRange(drawn.map(Math.log10)), 7).every(hasShortLabel);
  }

  const hasShortLabel = (tick) => tick >= -3 && tick <= 4;

  // A label is a text and perhaps an exponent.
  function logLabels(ticks, plain) {
    if (plain && ticks.every(hasShortLabel)) {
      return ticks.map((tick) => [grouped(String(Number((10 ** tick).toPrecision(3))))]);
    }
    return ticks.map((tick) => {
      const power = Math.floor(tick + 1e-9);
      const lead = Math.round(10 ** (tick - power));
      return [lead === 1 ? "10" : `${lead}·10`, minus(String(power))];
    });
  }

  function logRange(values) {
    const low = Math.min(...values), high = Math.max(...values);
    // At least a decade, so that noise does not look like growth.
    if (high - low < 1) return [(low + high) / 2 - 0.55, (low + high) / 2 + 0.55];
    return [low - 0.05 * (high - low), high + 0.05 * (high - low)];
  }

  // With `unspread`, single values at names: a small difference would look large.
  function linearRange(values, unspread) {
    let low = Math.min(...values), high = Math.max(...values);
    if (low >= 0 && (low < 0.5 * high || unspread)) low = 0;
    const margin = 0.05 * high - 0.05 * low || 0.1 * Math.abs(high) || 1;
    if (low !== 0) low = Math.max(low - margin, -Number.MAX_VALUE);
    return [low, Math.min(high + margin, Number.MAX_VALUE)];
  }

  // Wrap text to `most` pixels; break long words.
  function wrap(text, most, long) {
    const some = new RegExp(`.{1,${Math.ceil(most / 8)}}`, "gu"); // letters that fit
    const lines = [];
    for (const word of text.split(" ").flatMap((each) => (long(each) > most ? each.match(some) : [each]))) {
      const longer = `${lines.at(-1)} ${word}`;
      if (lines.length && long(longer) <= most) lines[lines.length - 1] = longer;
      else lines.push(word);
    }
    return lines;
  }

  // ---- charts --------------------------------------------------------------------------------------------------

  function add(parent, name, attributes, text) {
    const node = document.createElementNS(parent.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }

  const range = (list) => list.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);

  const spot = (point) => `${point.x.toFixed(1)} ${point.y.toFixed(1)}`;

  function makeChart(figure) {
    const panel = panels[figure.dataset.panel];
    const legend = legendOf(figure);
    const shown = (curve) => !legend.hidden.has(curve.name);
    const box = figure.querySelector(".chart");
    const svg = box.querySelector("svg");
    const curves = panel.curves.map((curve) => ({
      name: curve.name,
      values: curve.values.map(Number),
      spread: curve.spread.map(Number),
      singles: curve.singles.map((single) => single.map(Number)), // the values of single runs
      crossed: new Set(curve.crossed),
      x: [curve.x, panel.x, curve.values.map((_, i) => i + 1)].find((x) => x.length),
    }));
    const named = panel.names.length > 0; // categorical x axis: separate points, no lines
    const unspread = named && curves.every((curve) => !curve.spread.some(Boolean) && !curve.singles.length);
    const along = (position) => (panel.log_x ? Math.log10(position) : position);
    const [left, right] = named ? [0.5, panel.names.length + 0.5] : range([...panel.x, ...curves.flatMap((curve) => range(curve.x))].map(along));
    // Whole numbers, but for the last one of work in progress.
    const whole = curves.every(({ x }) => Number.isInteger(x[0]) && x.slice(1, -1).every(Number.isInteger));
    // Panels beside each other write their numbers alike.
    const plain = [data.panels, ...data.sections.map((section) => section.panels)].find((group) => group.includes(panel)).every(isShort);
    let log = panel.log_y;
    let drawn = []; // the visible curves with their points on the screen
    let drawnAt = null; // the width of the last drawing: an observer also calls at its start and for the drawing's own height
    let cursor = null;
    let at = null; // the curve and the point that are being read

    function draw(wide = box.clientWidth) {
      drawnAt = wide;
      const width = Math.max(200, drawnAt);
      const height = Math.round(Math.min(width > 700 ? 400 : 330, Math.max(220, width * 0.55)));
      svg.replaceChildren();
      at = null;
      const visible = curves.filter(shown);
      const place = (v) => (Number.isFinite(v) && (v > 0 || !log) ? (log ? Math.log10(v) : v) : NaN);
      const heights = visible.map((curve) => curve.values.map(place));
      const reached = visible.flatMap((curve) => curve.spread.flatMap((half, i) => [-half, half].map((d) => place(curve.values[i] + d))));
      reached.push(...visible.flatMap((curve) => curve.singles.flat().map(place)));
      const values = heights.flat().filter((v) => !Number.isNaN(v));
      const nothing = values.length === 0;
      const limits = range([...values, ...[...reached, ...panel.levels.map((level) => place(level.value))].filter((v) => !Number.isNaN(v))]);
      let [low, high] = nothing ? (log ? [-0.5, 0.5] : [0, 1]) : log ? logRange(limits) : linearRange(limits, unspread);
      if (!(high / 2 - low / 2 > 0)) [low, high] = [-1, 1];

      const count = Math.max(3, Math.floor(height / 36));
      const y = log ? { ticks: logTicks(low, high, count) } : linearTicks(low, high, count);
      const powers = y.ticks.filter(Number.isInteger);
      if (log && !plain && powers.length > 1) y.ticks = powers; // 10⁰ and 10¹ do without 2·10⁰ and 5·10⁰
      const labels = log ? logLabels(y.ticks, plain) : linearLabels(y.ticks, y.step);
      const letters = Math.max(...labels.map(([text, power]) => 7.6 * text.length + 5.8 * (power || "").length));
      const margin = { left: Math.min(letters + 10, 90), right: 14, top: panel.levels.length ? 20 : 8, bottom: 26 }; // a name may stand above its level
      const tall = height - margin.top - margin.bottom;
      const ticks = named ? layNames(width - margin.left - margin.right) : null;
      if (named) [margin.left, margin.bottom] = [Math.max(margin.left, ticks.left), ticks.bottom];
      svg.setAttribute("viewBox", `0 0 ${width} ${margin.top + tall + margin.bottom}`);
      svg.setAttribute("height", margin.top + tall + margin.bottom);
      const inner = width - margin.left - margin.right;
      const edge = named ? 0 : panel.log_x ? 0.04 : 0.01; // a share of the width; few points have room around them
      const toX = (v) => margin.left + inner * (right > left ? edge + ((1 - 2 * edge) * (along(v) - left)) / (right - left) : 0.5);
      const toY = (v) => margin.top + tall * (1 - (v / 2 - low / 2) / (high / 2 - low / 2));
      const end = margin.left + inner, floor = margin.top + tall;

      y.ticks.forEach((tick, i) => {
        const level = Math.round(toY(tick)) + 0.5;
        add(svg, "line", { class: "grid", x1: margin.left, x2: end, y1: level, y2: level });
        addLabel({ x: margin.left - 8, y: level + 4, "text-anchor": "end" }, labels[i]);
      });
      if (named) drawNames(ticks, toX, floor);
      else drawNumbers(toX, inner, floor);
      add(svg, "line", { class: "base", x1: margin.left, x2: end, y1: floor + 0.5, y2: floor + 0.5 });
      const onAxis = (level) => !log && low === 0 && level.value < 0.01 * high; // among the numbers below
      const levels = (nothing ? [] : panel.levels).filter((level) => !Number.isNaN(place(level.value)) && !onAxis(level));
      for (const level of levels) {
        const at = toY(place(level.value));
        add(svg, "line", { class: "level", x1: margin.left, x2: end, y1: at, y2: at });
      }
      for (const stage of panel.stages.filter((stage) => along(stage) >= left && along(stage) <= right)) {
        add(svg, "line", { class: "stage", x1: toX(stage), x2: toX(stage), y1: margin.top, y2: floor });
      }
      if (nothing) {
        const text = visible.length ? "no value can be drawn on this scale" : "all curves are hidden";
        add(svg, "text", { x: margin.left + inner / 2, y: margin.top + tall / 2 - 8, "text-anchor": "middle" }, text);
      }
      const step = Math.min(12, (0.6 * inner) / (panel.names.length * curves.length)); // curves beside each other at a name
      const below = add(svg, "g", {});
      drawn = [];
      visible.forEach((curve, c) => {
        const aside = named ? (curves.indexOf(curve) - (curves.length - 1) / 2) * step : 0;
        drawn.push(drawCurve(curve, heights[c], (v) => toX(v) + aside, toY, place));
      });
      drawn = drawn.filter((curve) => curve.points.length);
      const taken = []; // the places of the names of levels, which stand over the curves
      for (const level of levels) {
        const y = toY(place(level.value)), others = levels.filter((other) => other !== level).map((other) => toY(place(other.value)));
        const name = add(svg, "text", { class: "level-name" }, level.name), long = name.getComputedTextLength();
        const right = (panel.log_x ? end - 0.1 * inner : end) - long, left = margin.left + 0.1 * inner;
        const spots = [13, -5].flatMap((aside) => [right, (right + left) / 2, left].map((x) => ({ x, y: y + aside, long })));
        const hits = spots.map((spot) => crossings(spot, taken, others) + 100 * (spot.y + 3 > floor));
        const best = spots[hits.indexOf(Math.min(...hits))];
        taken.push(best);
        name.setAttribute("x", best.x);
        name.setAttribute("y", best.y);
      }
      if (!named) drawBands(below);
      figure.querySelector(".covers").hidden = !below.childElementCount;
      cursor = add(svg, "g", {});
      cursor.span = [margin.top, floor];
    }

    // How much of the curves, other levels and other names lies where a name would stand.
    function crossings(spot, taken, others) {
      const inside = (x, y) => x > spot.x - 3 && x < spot.x + spot.long + 3 && y > spot.y - 11 && y < spot.y + 5;
      const over = (other) => inside(Math.max(spot.x, Math.min(other.x, spot.x + spot.long)), other.y - 4) && other.x < spot.x + spot.long && other.x + other.long > spot.x;
      let count = 50 * taken.filter(over).length + 20 * others.filter((y) => inside(spot.x, y)).length;
      for (const { points } of drawn) {
        const steps = named || points.length > 100 ? 1 : 12;
        points.forEach((p, k) => {
          const q = named ? p : points[k + 1] ?? p;
          for (let s = 0; s < steps; s++) count += inside(p.x + ((q.x - p.x) * s) / steps, p.y + ((q.y - p.y) * s) / steps);
        });
      }
      return count;
    }

    function drawNumbers(toX, inner, floor) {
      const x = panel.log_x ? spaced(toX) : linearTicks(left, right, Math.max(2, Math.floor(inner / 52)), whole);
      const words = panel.log_x ? x.ticks.map((tick) => [compact(tick)]) : linearLabels(x.ticks, x.step);
      x.ticks.forEach((tick, i) => {
        add(svg, "line", { class: "base", x1: toX(tick), x2: toX(tick), y1: floor, y2: floor + 4 });
        addLabel({ x: toX(tick), y: floor + 18, "text-anchor": "middle" }, whole ? [grouped(String(tick))] : words[i]);
      });
    }

    function addLabel(place, [text, power]) {
      const label = add(svg, "text", place, text);
      if (power) add(label, "tspan", { class: "power", dy: -5 }, power);
    }

    // The names in lines that fit beside each other, or slanted by 60° where a word does not; and the room they take.
    function layNames(inner) {
      const room = inner / panel.names.length;
      const ruler = add(svg, "text", {});
      const long = (text) => { ruler.textContent = text; return ruler.getComputedTextLength(); };
      const slanted = panel.names.some((name) => name.split(" ").some((word) => long(word) > room - 6));
      const most = slanted ? Math.max(1, Math.floor((0.87 * room) / 18)) : Infinity; // lines beside the next name
      let lines, deep;
      for (let wide = slanted ? 130 : room - 6; !(deep <= most) && wide < 1000; wide += 20) {
        lines = panel.names.map((name) => wrap(name, wide, long));
        deep = Math.max(...lines.map((each) => each.length));
      }
      const longest = Math.max(...lines.flat().map(long));
      ruler.remove();
      if (!slanted) return { lines, slanted, left: 0, bottom: 12 + 14 * deep };
      return { lines, slanted, left: 0.5 * longest + 6 * deep - room / 2, bottom: 14 + 0.87 * longest + 7 * deep };
    }

    function drawNames({ lines, slanted }, toX, floor) {
      lines.forEach((each, i) => {
        const x = toX(i + 1), y = floor + (slanted ? 14 : 18);
        add(svg, "line", { class: "base", x1: x, x2: x, y1: floor, y2: floor + 4 });
        const turn = slanted ? { "text-anchor": "end", transform: `rotate(-60 ${x} ${y})` } : { "text-anchor": "middle" };
        const label = add(svg, "text", { class: "place", x, y, ...turn });
        const up = slanted ? 7 * (each.length - 1) : 0; // the lines of a slanted name lie around its tick
        each.forEach((line, k) => add(label, "tspan", { x, dy: k ? 14 : -up }, line));
      });
    }

    // The positions themselves as ticks of a logarithmic axis, those left out that have no room.
    function spaced(toX) {
      const all = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
      const ticks = [];
      for (const tick of all) {
        if (!ticks.length || toX(tick) - toX(ticks.at(-1)) >= 52) ticks.push(tick);
      }
      return { ticks };
    }

    function drawCurve(curve, heights, toX, toY, place) {
      const points = [];
      heights.forEach((v, i) => {
        if (!Number.isNaN(v)) points.push({ i, x: toX(curve.x[i]), y: toY(v) });
      });
      const style = legend.look(curve.name);
      const joined = (k, l) => points[k] && points[l] && points[l].i - points[k].i === 1;
      const group = add(svg, "g", { class: `curve ${style}${named ? " named" : ""}` });
      group.dataset.name = curve.name;
      if (!named && points.length) add(group, "path", { class: "path", d: points.map((p, k) => (joined(k - 1, k) ? "L" : "M") + spot(p)).join("") });
      const bars = points.filter((point) => curve.spread[point.i] > 0).map((point) => {
        const ends = [-1, 1].map((sign) => toY(place(curve.values[point.i] + sign * curve.spread[point.i])));
        const [low, high] = ends.map((v) => (Number.isNaN(v) ? point.y : v).toFixed(1));
        const x = point.x.toFixed(1);
        return `M${x} ${low}V${high}m-4 0h8M${x} ${low}m-4 0h8`;
      });
      if (bars.length) add(group, "path", { class: "whisker", d: bars.join("") });
      const sparse = curve.x.length <= 60 && svg.clientWidth > 9 * curve.x.length;
      const singles = curve.singles.map((single) => points.map((point) => ({ x: point.x, y: toY(place(single[point.i])) })).filter((point) => !Number.isNaN(point.y)));
      const few = singles.flatMap((single) => single.map((point, k) => `${named || sparse || !k ? "M" : "L"}${spot(point)}${named || sparse ? "h0" : ""}`));
      if (few.length) add(group, "path", { class: `singles${named || sparse ? " sparse" : ""}`, d: few.join("") });
      // A long curve shows some of its points, for their shape.
      const some = Math.ceil(points.length / 8);
      const dots = points.filter((p, k) => !curve.crossed.has(p.i) && (sparse || k % some === 0 || !(joined(k - 1, k) || joined(k, k + 1))));
      if (dots.length) add(group, "path", { class: "dots", d: dots.map((point) => `M${spot(point)}${legend.shape(curve.name, named ? 1.5 : 1)}`).join("") });
      const last = points.at(-1);
      const crossed = points.filter((p) => curve.crossed.has(p.i) || (!named && p === last && p.i < curve.values.length - 1));
      if (crossed.length) {
        add(group, "path", { class: "cross", d: crossed.map((p) => `M${spot(p)}m-5-5l10 10m0-10l-10 10`).join("") });
      }
      return { curve, style, points };
    }

    // Draw a wide pale band under each segment that later curves cover.
    function drawBands(below) {
      const counts = drawn.map(({ points }, c) => {
        const over = drawn.slice(c + 1).map((other) => {
          const at = new Map(other.points.map((point) => [point.x, point.y]));
          return points.map((point) => Math.abs(at.get(point.x) - point.y) <= 1.25);
        });
        const joins = (k) => k > 0 && points[k].i - points[k - 1].i === 1;
        return points.map((_, k) => (joins(k) ? over.filter((on) => on[k - 1] && on[k]).length : 0));
      });
      const wider = Math.min(3.2, 14 / range([1, ...counts.flat()])[1]);
      drawn.forEach(({ points, style }, c) => {
        const paths = []; // by how many curves lie on them
        counts[c].forEach((over, k) => {
          if (!over) return;
          const start = over === counts[c][k - 1] ? "" : `M${spot(points[k - 1])}`;
          paths[over] = `${paths[over] ?? ""}${start}L${spot(points[k])}`;
        });
        paths.forEach((d, over) => add(below, "path", { class: `band ${style}`, d, "stroke-width": 2 + over * wider }));
      });
    }

    // Show the point and, with it, the points of other curves that it covers.
    function read(line, point) {
      at = { line, point };
      const together = [line, ...drawn.filter((other) => other !== line)]
        .map((other) => ({ other, point: other === line ? point : other.points.find((p) => p.i === point.i) }))
        .filter((pair) => pair.point && Math.hypot(pair.point.x - point.x, pair.point.y - point.y) < 3);
      cursor.replaceChildren();
      add(cursor, "line", { class: "hair", x1: point.x, x2: point.x, y1: cursor.span[0], y2: cursor.span[1] });
      add(cursor, "circle", { class: `ring ${line.style}`, cx: point.x, cy: point.y, r: 4.5 });
      tooltip.replaceChildren();
      for (const pair of together) {
        const row = add(tooltip, "div", { class: "name" });
        add(row, "i", { class: `dot ${pair.other.style}` });
        row.append(legend.label(pair.other.curve.name));
        const { values, spread, crossed } = pair.other.curve, i = pair.point.i;
        const half = spread[i] > 0 ? ` ± ${compact(spread[i])}` : "";
        add(row, "b", {}, compact(values[i]) + half + (crossed.has(i) ? " ×" : ""));
      }
      const position = line.curve.x[point.i];
      const number = Number.isInteger(position) ? grouped(String(position)) : compact(position);
      const where = named ? panel.names[position - 1] : `${panel.x_label} ${number}`.trim();
      const name = panel.point_names[point.i];
      if (name) add(tooltip, "div", { class: "where" }, name);
      add(tooltip, "div", { class: "where" }, where);
      tooltip.hidden = false;
      const area = svg.getBoundingClientRect(), size = tooltip.getBoundingClientRect();
      const room = document.documentElement.clientWidth - 8, depth = window.innerHeight - 8;
      let x = area.left + point.x + 14, y = area.top + point.y - size.height - 14;
      if (x + size.width > room) x = area.left + point.x - size.width - 14;
      if (y < 8) y = area.top + point.y + 18;
      tooltip.style.left = `${Math.max(8, Math.min(x, room - size.width))}px`;
      tooltip.style.top = `${Math.max(8, Math.min(y, depth - size.height))}px`;
    }

    function readNearest(event) {
      const area = svg.getBoundingClientRect();
      const x = event.clientX - area.left, y = event.clientY - area.top;
      let best = Infinity, found = null;
      for (const line of drawn) {
        for (const point of line.points) {
          const distance = (point.x - x) ** 2 + (point.y - y) ** 2;
          if (distance < best) [best, found] = [distance, [line, point]];
        }
      }
      if (!found) return;
      charts.forEach((chart) => chart !== self && chart.leave());
      read(...found);
    }

    function leave() {
      if (at) tooltip.hidden = true;
      at = null;
      cursor?.replaceChildren();
    }

    // While the page scrolls, a point chosen by the keys stays, with the tooltip beside it.
    function scroll() {
      if (at && svg.matches(":focus-visible")) read(at.line, at.point);
      else leave();
    }

    function step(event) {
      if (event.key === "Escape") return leave();
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      const move = moves[event.key];
      if (!move || !drawn.length) return;
      event.preventDefault();
      if (!at) return read(drawn[0], drawn[0].points[0]);
      const line = drawn[(drawn.indexOf(at.line) + move[0] + drawn.length) % drawn.length];
      const after = line.points.findIndex((point) => point.i >= at.point.i);
      const here = after < 0 ? line.points.length - 1 : after;
      read(line, line.points[Math.max(0, Math.min(line.points.length - 1, here + move[1]))]);
    }

    function rescale(event) {
      log = event.currentTarget.dataset.scale === "log";
      leave();
      figure.querySelectorAll(".scale button").forEach((button) => {
        button.setAttribute("aria-pressed", String((button.dataset.scale === "log") === log));
      });
      figure.querySelectorAll(".gaps").forEach((list) => { list.hidden = (list.dataset.scale === "log") !== log; });
      draw();
    }

    svg.addEventListener("pointermove", readNearest);
    svg.addEventListener("pointerdown", readNearest);
    svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
    svg.addEventListener("keydown", step);
    svg.addEventListener("blur", leave);
    figure.querySelectorAll(".scale button").forEach((button) => button.addEventListener("click", rescale));
    figure.querySelectorAll("[hidden]:not(.gaps)").forEach((node) => { node.hidden = false; });
    const self = { draw, leave, scroll, svg, legend };
    charts.push(self);
    new ResizeObserver(() => { if (!printing && box.clientWidth !== drawnAt) { leave(); draw(); } }).observe(box);
    draw();
  }

  // ---- legend, theme, download -----------------------------------------------------------------------------------

  // One above all charts, or one a section, which hides the curves of that section alone.
  function makeLegend(node) {
    const entries = new Map([...node.querySelectorAll(".entry")].map((entry) => [names[entry.dataset.curve], entry]));
    const hidden = new Set((kept.hidden ?? []).filter((name) => entries.has(name)));
    const all = node.querySelector(".all");

    function update() {
      keep("hidden", [...hidden]);
      entries.forEach((entry, name) => entry.setAttribute("aria-pressed", String(!hidden.has(name))));
      document.querySelectorAll(".gaps li").forEach((item) => {
        if (legendOf(item) === self) item.hidden = hidden.has(names[item.dataset.curve]);
      });
      all.hidden = hidden.size === 0;
      charts.filter((chart) => chart.legend === self).forEach((chart) => { chart.leave(); chart.draw(); });
    }

    function isolate(name) {
      const alone = !hidden.has(name) && hidden.size === entries.size - 1;
      hidden.clear();
      if (!alone) [...entries.keys()].filter((other) => other !== name).forEach((other) => hidden.add(other));
      update();
    }

    function toggle(name) {
      if (!hidden.delete(name)) hidden.add(name);
      update();
    }

    entries.forEach((entry, name) => {
      entry.addEventListener("click", (event) => (event.shiftKey ? isolate : toggle)(name));
      entry.addEventListener("dblclick", (event) => event.shiftKey || isolate(name));
    });
    all.addEventListener("click", () => { hidden.clear(); update(); });
    node.hidden = false;
    // The classes of an entry hold the colour and the dash.
    const look = (name) => [...entries.get(name).classList].filter((word) => word !== "entry").join(" ");
    const shape = (name, size) => entries.get(name).dataset.shape.replace(/-?\d*\.?\d+/g, (number) => ` ${size * number}`);
    const label = (name) => entries.get(name).querySelector("span").cloneNode(true);
    const self = { node, hidden, look, shape, label, update };
    return self;
  }

  function legendOf(node) {
    const own = node.closest(".part")?.querySelector(".legend");
    return legends.find((legend) => legend.node === own) ?? legends[0];
  }

  document.querySelectorAll(".panel").forEach(makeChart);
  // Paper has another width than the screen: charts drawn for it keep the size of their letters.
  addEventListener("beforeprint", () => { printing = true; charts.forEach((chart) => chart.draw(660)); });
  addEventListener("afterprint", () => { printing = false; charts.forEach((chart) => chart.draw()); });
  if (kept.hidden?.length) legends.forEach((legend) => legend.update());
  addEventListener("scroll", () => charts.forEach((chart) => chart.scroll()), { passive: true });
  addEventListener("pointerdown", (event) => {
    charts.forEach((chart) => chart.svg.contains(event.target) || chart.leave());
  });

  const theme = find("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const label = () => {
    theme.textContent = dark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", dark() ? "Use light colours" : "Use dark colours");
    theme.hidden = false;
  };
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    keep("theme", document.documentElement.dataset.theme);
    label();
  });
  if (kept.theme) document.documentElement.dataset.theme = kept.theme;
  system.addEventListener("change", label);
  label();

  // ---- work in progress ------------------------------------------------------------------------------------------

  function recall() {
    try {
      return (data.refresh && JSON.parse(sessionStorage.getItem(location.pathname))) || {};
    } catch {
      return {}; // the browser keeps nothing for files
    }
  }

  function keep(name, value) {
    kept[name] = value;
    try {
      if (data.refresh) sessionStorage.setItem(location.pathname, JSON.stringify(kept));
    } catch {} // as above
  }

  const age = () => Math.max(0, Date.now() / 1000 - data.written);

  function describeAge() {
    const seconds = age();
    const [size, unit] = [[172800, "days"], [3600, "h"], [60, "min"], [0, "s"]].find(([least]) => seconds >= least);
    const count = Math.floor(seconds / (unit === "days" ? 86400 : size || 1));
    const late = data.refresh && seconds > 12 * data.refresh + 60;
    find("written").textContent = `Written ${count} ${unit} ago.${late ? " Nothing new since: the run may have been stopped." : ""}`;
  }

  if (data.refresh) {
    describeAge();
    setInterval(describeAge, 1000);
    const loaded = Date.now();
    setInterval(() => {
      const idle = tooltip.hidden && !document.hidden; // nobody reads a point
      if (idle && Date.now() - loaded >= 1000 * Math.max(data.refresh, age() / 10)) location.reload();
    }, 1000);
  }

  // Shows only the cards that contain all words, and the parts that they lead to.
  const filter = find("filter");
  if (filter) {
    const cards = [...document.querySelectorAll(".grouped > *")];
    let heading = null;
    const entries = [];
    for (const card of cards) {
      if (card.matches(".group")) heading = card;
      else {
        const link = card.querySelector("h2 a");
        const part = link && document.getElementById(link.hash.slice(1));
        entries.push({ card, heading, part, text: `${heading?.textContent} ${card.textContent} ${part?.textContent}`.toLowerCase() });
      }
    }
    const apply = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const entry of entries) entry.card.hidden = !words.every((word) => entry.text.includes(word));
      const shown = new Set(entries.filter((entry) => !entry.card.hidden).flatMap((entry) => [entry.heading, entry.part]));
      for (const { heading, part } of entries) for (const each of [heading, part]) if (each) each.hidden = !shown.has(each);
      filter.nextElementSibling.value = `${entries.filter((entry) => !entry.card.hidden).length} of ${entries.length}`;
    };
    filter.hidden = false;
    filter.addEventListener("input", apply);
    apply();
  }

  const download = find("download");
  download.href = URL.createObjectURL(new Blob([find("data").textContent], { type: "application/json" }));
  download.hidden = false;
})();
