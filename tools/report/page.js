// Curves: one figure per chart, drawn anew when its width changes; the tip that follows the pointer.
const figures = [];  // functions that draw a figure anew
const hidden = new Set();  // runs that the reader has switched off
const DASHES = ["", "6 4", "2 3"];
const MARK_ROWS = ["restart", "error", "skip", "warning", "evaluation", "save"];
const MARK_NAMES = {restart: "restarts", error: "errors", skip: "skips", warning: "warnings", evaluation: "evaluations",
  save: "saves"};
let unique = 0;

const colour = run => `var(--r${run % 8})`;
const many = data.runs.length > 1;
const lineColour = line => many ? colour(line.run) : colour([0, 1, 2][line.style] ?? 7);

function fmt(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-3) return value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e").replace("e+", "e");
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= unit) return String(Number((value / (unit === 1e4 ? 1e3 : unit)).toPrecision(digits))) + letter;
  return String(Number(value.toPrecision(size >= 1000 ? Math.max(4, digits) : digits)));
}

function nice(low, high, count) {
  const span = high - low || Math.abs(high) || 1, rough = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough) || power;
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9 && ticks.length < 50; n += 1)
    ticks.push(Number((n * step).toPrecision(12)));
  return ticks;
}
function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.7) return nice(low, high, count).filter(tick => tick > 0);
  const every = Math.ceil(decades / count), ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
    for (const n of decades < 2 ? [1, 2, 5] : [1])
      if (power % every === 0 && n * 10 ** power >= low * 0.999 && n * 10 ** power <= high * 1.001) ticks.push(n * 10 ** power);
  return ticks;
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] < step) low = middle; else high = middle; }
  return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
}

// ---- the axis ----------------------------------------------------------------------------------------------

const AXES = {step: "step", tokens: "tokens", hours: "hours in steps"};
let axisName = "step";

function between(from, to, value) {  // a piecewise linear map
  let low = 0, high = from.length - 1;
  if (high < 1) return to[0];
  while (high - low > 1) { const middle = (low + high) >> 1; if (from[middle] <= value) low = middle; else high = middle; }
  const share = from[high] > from[low] ? (value - from[low]) / (from[high] - from[low]) : 0;
  return to[low] + Math.max(0, Math.min(1, share)) * (to[high] - to[low]);
}
const axesOf = run => data.runs[run].axes;
const placed = run => axisName === "step" || Boolean(axesOf(run)[axisName]);
const position = (run, step) => axisName === "step" ? step : between(axesOf(run).step, axesOf(run)[axisName], step);
const stepAt = (run, place) => axisName === "step" ? place : between(axesOf(run)[axisName], axesOf(run).step, place);
const away = run => hidden.has(run) || !placed(run);
function placeText(place) {
  if (axisName === "step") return `step ${place.toLocaleString("en")}`;
  return axisName === "tokens" ? `${fmt(place, 5)} tokens` : `${fmt(place)} hours`;
}

// ---- the tip -----------------------------------------------------------------------------------------------

function tip(event, lines) {
  const box = at("tip");
  box.replaceChildren();
  for (const [words, value, hue] of lines) {
    const line = html("p", undefined, box);
    if (hue) html("i", undefined, line).style.background = hue;
    html("span", words, line);
    if (value !== undefined) html("b", value, line);
  }
  box.hidden = false;
  const wide = box.offsetWidth, tall = box.offsetHeight, x = event.clientX, y = event.clientY;
  box.style.left = `${Math.max(4, x + 16 + wide > innerWidth ? x - wide - 16 : x + 16)}px`;
  box.style.top = `${Math.max(4, Math.min(innerHeight - tall - 4, y + 14))}px`;
}
function untip() { at("tip").hidden = true; }
function follow(element, tell, leave) {
  for (const name of ["pointermove", "pointerdown"]) element.addEventListener(name, tell);
  element.addEventListener("pointerleave", () => { untip(); if (leave) leave(); });
}

// ---- marks -------------------------------------------------------------------------------------------------

function glyph(kind, x, y, parent, size = 4) {
  const s = size;
  const shapes = {
    save: `M${x - s} ${y - s}H${x + s}L${x} ${y + s}Z`, warning: `M${x} ${y - s}L${x + s} ${y + s}H${x - s}Z`,
    error: `M${x - s} ${y - s}H${x + s}V${y + s}H${x - s}Z`, restart: `M${x - s} ${y - s}L${x + s} ${y}L${x - s} ${y + s}Z`,
    skip: `M${x - s} ${y - s}l1.4 -1.2L${x} ${y - 1.4}L${x + s - 1.4} ${y - s - 1.2}l1.4 1.2L${x + 1.4} ${y}L${x + s} ${y + s}` +
      `l-1.4 1.2L${x} ${y + 1.4}L${x - s + 1.4} ${y + s + 1.2}l-1.4 -1.2L${x - 1.4} ${y}Z`,
  };
  if (shapes[kind]) return make("path", {class: `glyph k-${kind}`, d: shapes[kind]}, parent);
  return make("circle", {class: `glyph k-${kind}`, cx: x, cy: y, r: s * .8}, parent);
}

// ---- a chart -----------------------------------------------------------------------------------------------

function card(parent, title, unit) {
  const box = html("figure", undefined, parent);
  box.className = "card";
  const head = html("div", undefined, box);
  head.className = "head";
  const name = html("h3", title + " ", head);
  if (unit) html("small", unit, name);
  return [box, head];
}

function chart(parent, spec, big) {
  const [box, head] = card(parent, spec.title, spec.unit);
  box.dataset.chart = spec.key;
  const plot = html("div", undefined, box);
  plot.className = "plot";
  let log = spec.log;
  if (spec.lines.some(line => line.v.some(value => value > 0))) {
    const button = html("button", "log", head);
    button.title = "logarithmic axis";
    button.setAttribute("aria-pressed", log);
    button.addEventListener("click", () => { log = !log; button.setAttribute("aria-pressed", log); draw(); });
  }
  legend(box, spec, big);
  const draw = () => drawChart(plot, spec, big, log);
  figures.push(draw);
}

function sample(parent, hue, dash, points) {
  const svg = make("svg", {width: 22, height: 10}, parent);
  if (points) make("circle", {cx: 11, cy: 5, r: 3.2, fill: hue}, svg);
  else make("path", {d: "M0 5H22", stroke: hue, "stroke-width": 2, "stroke-dasharray": dash}, svg);
}

function legend(box, spec, big) {
  const list = html("div", undefined, box);
  list.className = "legend";
  const seen = new Set();
  for (const line of spec.lines) {
    if (seen.has(line.name)) continue;
    seen.add(line.name);
    if (spec.names.length > 1 || line.ms) {
      const entry = html("span", undefined, list);
      sample(entry, many ? "var(--soft)" : lineColour(line), DASHES[line.style], line.points);
      const each = spec.lines.filter(one => one.name === line.name && one.window).map(one => one.window);
      const windows = [...new Set(each)].sort((a, b) => a - b);
      const over = windows.length > 1 ? `${windows[0]} to ${windows[windows.length - 1]}` : windows[0];
      entry.append(line.name + (line.ms ? `: raw faint, bold its mean of ${over} values` : ""));
    }
  }
  for (const kind of big ? MARK_ROWS.filter(kind => data.marks.some(mark => mark.kind === kind)) : []) {
    const entry = html("span", undefined, list);  // where the rows of marks have no room for names
    entry.className = "narrow";
    glyph(kind, 6, 6, make("svg", {width: 12, height: 12}, entry));
    entry.append(MARK_NAMES[kind]);
  }
  const bad = spec.lines.reduce((sum, line) => sum + (line.bads || 0), 0);
  if (bad) {
    const entry = html("span", undefined, list);
    glyph("skip", 6, 6, make("svg", {width: 12, height: 12}, entry));
    entry.append(`${bad} value${bad > 1 ? "s" : ""} that ${bad > 1 ? "are" : "is"} not finite`);
  }
}

function shownParts(spec) {
  const raw = at("raw").checked, smooth = at("smooth").checked, parts = [];
  for (const line of spec.lines) {
    if (away(line.run)) continue;
    const bold = smooth && line.ms;
    if (raw || !bold) parts.push({line, s: line.s, v: line.v, faint: Boolean(bold)});
    if (bold) parts.push({line, s: line.ms, v: line.mv, faint: false});
  }
  return parts;
}

function range(parts, log) {
  let values = parts.flatMap(part => part.v).filter(value => value !== null && (!log || value > 0));
  if (!values.length) return [log ? 0.1 : 0, 1, 0];
  values = Float64Array.from(values).sort();
  let low = values[0], high = values[values.length - 1];
  if (values.length > 40) {  // a few values far away, as of the first step, do not flatten all others
    const q = share => values[Math.floor(share * (values.length - 1))];
    const [a, b] = [q(.03), q(.97)], spread = log ? Math.log(b / a) : b - a;
    if (spread > 0) {
      high = Math.min(high, log ? b * Math.exp(2 * spread) : b + 3 * spread);
      low = Math.max(low, log ? a / Math.exp(2 * spread) : a - 3 * spread);
    }
  }
  const beyond = values.filter(value => value > high || value < low).length;
  if (low === high) { const pad = Math.abs(low) * .1 || 1; return log ? [low / 1.5, high * 1.5, 0] : [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad, 0]; }
  if (log) { const pad = (high / low) ** .05; return [low / pad, high * pad, beyond]; }
  const pad = (high - low) * .06;
  return [low >= 0 && low < .35 * high ? 0 : low - pad, high + pad, beyond];
}

function drawChart(plot, spec, big, log) {
  const wide = Math.max(240, plot.clientWidth), parts = shownParts(spec);
  const marks = at("marks").checked ? data.marks.filter(mark => !away(mark.run)) : [];
  const rows = big ? MARK_ROWS.filter(kind => marks.some(mark => mark.kind === kind)) : [];
  const phone = wide < 480, rail = rows.length * 13 + (rows.length ? 8 : 0);
  const tall = (big ? (phone ? 250 : 330) : (phone ? 180 : 190)) + rail, top = 8, bottom = tall - 20 - rail;
  const [low, high, beyond] = range(parts, log);
  const ticks = (log ? logTicks : nice)(low, high, Math.max(3, Math.floor((bottom - top) / 34)));
  const names = ticks.map(tick => fmt(tick));
  const words = rows.length ? (phone ? 0 : 68) : 0;
  const left = Math.max(words, 14 + 6.3 * Math.max(2, ...names.map(name => name.length))), right = wide - 10;
  const places = spec.lines.filter(line => !away(line.run)).flatMap(line => [line.s[0], line.s[line.s.length - 1],
    ...(line.bad || []).map(pair => pair[0])].filter(step => step !== undefined).map(step => position(line.run, step)));
  let first = places.length ? Math.min(...places) : 0, last = places.length ? Math.max(...places) : 1;
  if (first === last) { first -= 1; last += 1; }
  const across = place => left + (place - first) / (last - first) * (right - left), x = (run, step) => across(position(run, step));
  const y = log ? value => bottom - Math.log(value / low) / Math.log(high / low) * (bottom - top)
    : value => bottom - (value - low) / (high - low) * (bottom - top);
  const svg = make("svg", {viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `${spec.title} over ${AXES[axisName]}`});
  plot.replaceChildren(svg);
  ticks.forEach((tick, place) => {
    make("path", {class: "gridline", d: `M${left} ${y(tick)}H${right}`}, svg);
    make("text", {class: "tick", x: left - 6, y: y(tick) + 3.5, "text-anchor": "end"}, svg, names[place]);
  });
  axis(svg, first, last, across, left, right, bottom, tall - rail - 5);
  const clip = `clip${unique += 1}`;
  make("rect", {x: left - 4, y: top - 3, width: right - left + 8, height: bottom - top + 6},
    make("clipPath", {id: clip}, make("defs", {}, svg)));
  const inner = make("g", {"clip-path": `url(#${clip})`}, svg);
  const near = mark => position(mark.run, mark.step) >= first && position(mark.run, mark.step) <= last;
  for (const mark of marks.filter(near)) markLine(mark, x(mark.run, mark.step), inner, svg, rows, top, bottom, tall - rail, big);
  for (const part of parts) curve(part, x, y, log, inner, spec.dots);
  for (const line of spec.lines)
    if (!away(line.run)) for (const [step] of line.bad || []) glyph("skip", x(line.run, step), top + 3, svg, 3.5);
  rows.forEach((kind, row) => {
    const place = tall - rail + 12 + row * 13;
    if (!phone) make("text", {class: "tick", x: left - 6, y: place + 3.5, "text-anchor": "end"}, svg, MARK_NAMES[kind]);
  });
  if (beyond) make("text", {class: "tick clear", x: right - 2, y: top + 8, "text-anchor": "end"}, svg, `${beyond} beyond the axis`);
  if (!parts.some(part => part.s.length)) make("text", {x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle"}, svg,
    "nothing to draw here");
  hover(svg, spec, parts, marks, {across, y, left, right, top, bottom, tall, first, last, log, low, high});
}

function axis(svg, first, last, x, left, right, bottom, base) {
  make("path", {class: "axis", d: `M${left} ${bottom}H${right}`}, svg);
  const label = 8 + 6.3 * AXES[axisName].length;
  for (const tick of nice(first, last, Math.floor((right - left) / 74))) {
    const place = x(tick);
    if (tick % 1 && axisName !== "hours") continue;
    make("path", {class: "axis", d: `M${place} ${bottom}v4`}, svg);
    if (place < right - label) make("text", {class: "tick", x: place, y: base, "text-anchor": "middle"}, svg, fmt(tick));
  }
  make("text", {class: "tick", x: right, y: base, "text-anchor": "end"}, svg, AXES[axisName]);
}

function markLine(mark, x, inner, svg, rows, top, bottom, railTop, big) {
  const strong = mark.kind === "restart" || mark.kind === "error";
  if (strong) make("path", {class: `line k-${mark.kind}`, "stroke-dasharray": mark.kind === "restart" ? "5 4" : "", d: `M${x} ${top}V${bottom}`}, inner);
  else if (!big) make("path", {class: `line k-${mark.kind}`, d: `M${x} ${bottom}v${mark.kind === "save" || mark.kind === "evaluation" ? -4 : -9}`}, inner);
  if (!big) return;
  const shape = glyph(mark.kind, x, railTop + 12 + rows.indexOf(mark.kind) * 13, svg);
  if (many) shape.style.fill = colour(mark.run);
}

function curve(part, place, y, log, inner, dots) {
  const x = step => place(part.line.run, step), hue = lineColour(part.line), good = part.v.map(value => value !== null && (!log || value > 0));
  if (part.line.points || dots || part.s.length === 1) {
    const size = part.s.length > 60 ? 2 : 3.2;
    part.s.forEach((step, n) => { if (good[n]) make("circle", {cx: x(step), cy: y(part.v[n]), r: size, fill: hue}, inner); });
    if (dots || !part.line.points) return;
  }
  let path = "";
  part.s.forEach((step, n) => {
    if (good[n]) path += `${path && good[n - 1] !== false ? "L" : "M"}${x(step).toFixed(1)} ${y(part.v[n]).toFixed(1)}`;
  });
  const style = part.line.points ? DASHES[2] : DASHES[part.line.style];
  make("path", {class: part.faint ? "curve faint" : "curve", d: path, stroke: hue, "stroke-dasharray": style}, inner);
}

function hover(svg, spec, parts, marks, p) {
  const guide = make("path", {class: "guide", visibility: "hidden"}, svg);
  const area = make("rect", {class: "hover", x: p.left, y: 0, width: p.right - p.left, height: p.tall}, svg);
  follow(area, event => {
    const frame = svg.getBoundingClientRect(), px = (event.clientX - frame.left) / frame.width * svg.viewBox.baseVal.width;
    const here = p.first + (px - p.left) / (p.right - p.left) * (p.last - p.first), reach = (p.last - p.first) / (p.right - p.left);
    const told = [];
    let found = here, best = Infinity;
    for (const part of parts) {
      if (!part.s.length) continue;
      const there = position(part.line.run, part.s[nearest(part.s, stepAt(part.line.run, here))]);
      if (Math.abs(there - here) < best) { best = Math.abs(there - here); found = there; }
    }
    if (best === Infinity && axisName === "step") found = Math.round(here);
    for (const part of parts) {
      if (!part.s.length) continue;
      const run = part.line.run, n = nearest(part.s, stepAt(run, found)), mean = part.v === part.line.mv ? ", mean" : "";
      const where = axisName === "step" && part.s[n] === found ? "" : ` (step ${part.s[n]})`;
      if (Math.abs(position(run, part.s[n]) - found) > Math.max(30 * reach, part.line.points ? 60 * reach : 0)) continue;
      told.push([(many ? `${data.runs[run].label}: ` : "") + part.line.name + mean + where, fmt(part.v[n], 5), lineColour(part.line)]);
    }
    for (const line of spec.lines)
      for (const [there, text] of line.bad || [])
        if (!away(line.run) && Math.abs(position(line.run, there) - here) < 5 * reach)
          told.push([`${line.name} at step ${there}`, text, "var(--red)"]);
    const close = marks.filter(mark => Math.abs(position(mark.run, mark.step) - here) < 5 * reach);
    for (const mark of close.slice(0, 6))
      told.push([`${mark.kind}${mark.of > 1 ? ` (${mark.of})` : ""} at ${mark.step}: ${mark.text}`, undefined, many ? colour(mark.run) : "var(--edge)"]);
    if (close.length > 6) told.push([`… ${close.length - 6} more events`]);
    guide.setAttribute("d", `M${p.across(found)} ${p.top}V${p.bottom}`);
    guide.setAttribute("visibility", found >= p.first && found <= p.last ? "visible" : "hidden");
    tip(event, [[placeText(found)], ...told]);
  }, () => guide.setAttribute("visibility", "hidden"));
}
