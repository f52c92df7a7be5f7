// The timeline of a step, and heat maps of histories.
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const FIRE = [[255, 246, 214], [255, 205, 120], [240, 120, 60], [190, 30, 50], [90, 0, 40]];
const QUANTITIES = {
  amax: {name: "amax", log: true, stops: VIRIDIS, show: value => fmt(value)},
  scale: {name: "scale", log: true, stops: VIRIDIS, show: value => fmt(value)},
  saturated: {name: "saturated windows", log: false, stops: FIRE, from: 0, show: value => `${fmt(100 * value, 3)} %`},
  underflow: {name: "values that became zero", log: false, stops: FIRE, from: 0, show: value => `${fmt(100 * value, 3)} %`},
};
const KIND_NAMES = {F: "F forward", I: "I input gradient", W: "W weight gradient", B: "B both gradients"};

function blend(stops, share) {
  const place = Math.min(1, Math.max(0, share)) * (stops.length - 1), n = Math.min(stops.length - 2, Math.floor(place)), part = place - n;
  return stops[n].map((from, channel) => Math.round(from + (stops[n + 1][channel] - from) * part));
}

// ---- heat maps ---------------------------------------------------------------------------------------------

function heat(parent, run, kind, quantity) {
  const look = QUANTITIES[quantity], rows = run.kinds[kind].rows, values = run.kinds[kind][quantity];
  const [box, head] = card(parent, kind, look.name);
  box.dataset.map = `${kind} ${quantity}`;
  const plot = html("div", undefined, box);
  plot.className = "plot";
  const good = values.filter(value => value !== null && (!look.log || value > 0));
  if (!good.length) { html("p", "no values", plot).className = "about"; head.dataset.empty = true; return; }
  const low = look.from ?? good.reduce((a, b) => Math.min(a, b)), high = Math.max(good.reduce((a, b) => Math.max(a, b)), low || 1e-30);
  const share = value => high === low ? .5 : look.log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  const columns = run.steps.length, canvas = document.createElement("canvas");
  canvas.width = columns; canvas.height = rows.length;
  const pen = canvas.getContext("2d"), pixels = pen.createImageData(columns, rows.length);
  values.forEach((value, n) => {
    if (value === null || (look.log && value <= 0)) return;  // left clear
    pixels.data.set([...blend(look.stops, share(value)), 255], 4 * n);
  });
  pen.putImageData(pixels, 0, 0);
  const picture = canvas.toDataURL();
  figures.push(() => drawHeat(plot, {run, kind, quantity, look, rows, values, columns, picture, low, high}));
}

function drawHeat(plot, map) {
  if (plot.closest("details:not([open])")) return;  // drawn when it is unfolded
  const wide = Math.max(240, plot.clientWidth), {rows, run, columns, look} = map;
  const size = Math.max(4, Math.min(15, Math.floor(320 / rows.length))), phone = wide < 300;
  const longest = Math.max(...rows.map(row => row.length)), every = size >= 9 && !phone;
  const layers = rows.map(row => row.match(/^(?:layer )?(\d+)/)?.[1] ?? row);
  const left = every ? Math.min(wide * .42, 10 + 5.9 * longest) : Math.max(34, 10 + 6 * Math.min(14, Math.max(...layers.map(one => one.length))));
  const right = wide - 8, top = 4, bottom = top + size * rows.length, tall = bottom + 48;
  const svg = make("svg", {viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `${map.kind} ${look.name}, tensors by steps`});
  plot.replaceChildren(svg);
  make("rect", {class: "lane", x: left, y: top, width: right - left, height: bottom - top}, svg);
  const picture = make("image", {x: left, y: top, width: right - left, height: bottom - top, preserveAspectRatio: "none",
    href: map.picture}, svg);
  picture.style.imageRendering = "pixelated";
  let free = -99;
  rows.forEach((row, n) => {
    const y = top + size * (n + .5) + 3.5, fresh = n === 0 || layers[n] !== layers[n - 1];
    if (!every && (!fresh || y - free < 12)) return;
    free = y;
    const text = every ? row : layers[n], room = Math.floor((left - 8) / 5.7);
    make("text", {class: "tick", x: left - 5, y, "text-anchor": "end"}, svg, text.length > room ? text.slice(0, room - 1) + "…" : text);
  });
  const count = Math.max(2, Math.min(columns, Math.floor((right - left) / 62)));
  const shown = [...new Set(Array.from({length: count}, (_, n) => Math.round(n * (columns - 1) / Math.max(1, count - 1))))];
  const cell = (right - left) / columns;
  let end = -99;
  for (const column of shown) {
    const words = fmt(run.steps[column]), x = left + cell * (column + .5), half = 3.2 * words.length;
    const place = Math.min(right - half, Math.max(left + half, x));
    if (place - half < end + 6) continue;
    end = place + half;
    make("path", {class: "axis", d: `M${x} ${bottom}v4`}, svg);
    make("text", {class: "tick", x: place, y: bottom + 15, "text-anchor": "middle"}, svg, words);
  }
  make("text", {class: "tick", x: left - 5, y: bottom + 15, "text-anchor": "end"}, svg, "step");
  bar(svg, map, left, right, bottom + 26);
  const area = make("rect", {class: "hover", x: left, y: top, width: right - left, height: bottom - top}, svg);
  follow(area, event => {
    const frame = svg.getBoundingClientRect(), grow = svg.viewBox.baseVal.width / frame.width;
    const column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - frame.left) * grow - left) / cell)));
    const row = Math.min(rows.length - 1, Math.max(0, Math.floor(((event.clientY - frame.top) * grow - top) / size)));
    const of = run.kinds[map.kind], told = [];
    for (const [name, one] of Object.entries(QUANTITIES))
      if (of[name]) { const value = of[name][row * columns + column]; told.push([one.name, value === null ? "–" : one.show(value)]); }
    tip(event, [[`${rows[row]} ${map.kind}, step ${run.steps[column]}`], ...told]);
  });
}

function bar(svg, map, left, right, y) {
  const id = `bar${unique += 1}`, shade = make("linearGradient", {id}, make("defs", {}, svg));
  for (let n = 0; n <= 8; n += 1) make("stop", {offset: n / 8, "stop-color": `rgb(${blend(map.look.stops, n / 8)})`}, shade);
  const low = map.look.show(map.low), high = map.look.show(map.high), ends = [low, high].map(text => 6 + 6.2 * text.length);
  make("text", {class: "tick", x: left, y: y + 8}, svg, low);
  make("rect", {x: left + ends[0], y: y + 1, width: Math.max(10, right - left - ends[0] - ends[1]), height: 7, rx: 2, fill: `url(#${id})`}, svg);
  make("text", {class: "tick", x: right, y: y + 8, "text-anchor": "end"}, svg, high);
}

// ---- the timeline of a step --------------------------------------------------------------------------------

function percent(share) { return share === null ? "–" : `${fmt(100 * share, 3)} %`; }

function timeline(parent, one) {
  const name = many ? `${data.runs[one.run].label}, step ${one.step}` : `Step ${one.step}`;
  const [box, head] = card(parent, name, `${one.schedule}, ${one.ranks} rank${one.ranks > 1 ? "s" : ""}; ms since rank 0's first F`);
  box.classList.add("sub");
  box.dataset.timeline = one.run;
  const zoom = html("input", undefined, head);
  Object.assign(zoom, {type: "range", min: 1, max: 20, step: .5, value: 1, title: "zoom"});
  zoom.setAttribute("aria-label", "zoom of the timeline");
  zoom.style.marginLeft = "auto"; zoom.style.minWidth = "60px"; zoom.style.flex = "0 1 140px";
  const wide = html("div", undefined, box);
  wide.className = "wide";
  const plot = html("div", undefined, wide);
  plot.className = "plot";
  const list = html("div", undefined, box);
  list.className = "legend";
  const kinds = [...new Set(one.lanes.flatMap(lane => [...lane.kinds]))];
  for (const kind of kinds) {
    const entry = html("span", undefined, list);
    html("i", undefined, entry).style.background = {F: "var(--fs)", I: "var(--is)", W: "var(--ws)"}[kind] || "var(--r3)";
    entry.append(KIND_NAMES[kind]);
  }
  html("span", "numbers are microbatches" + (one.chunks > one.ranks ? ", a rank's further chunks lighter" : ""), list);
  html("span", "tall: measured, low and pale: predicted with this step's mean times", list);
  const words = [`Bubble: measured ${percent(one.bubble[0])}, predicted ${percent(one.bubble[1])}.`];
  if (one.lanes.length < one.ranks) words.push(`${one.lanes.length} of ${one.ranks} ranks are shown.`);
  if (one.cut) words.push(`The last ${one.cut} F, I and W are left out.`);
  const some = one.steps.length < one.recorded ? ", among them " : ": ";
  words.push(`${one.recorded} step${one.recorded > 1 ? "s were" : " was"} recorded${some}${one.steps.join(", ")}; --step chooses one.`);
  html("p", words.join(" "), box).className = "about";
  const draw = () => drawTimeline(plot, wide, one, Number(zoom.value));
  zoom.addEventListener("input", draw);
  figures.push(draw);
}

function drawTimeline(plot, scroll, one, zoom) {
  const wide = Math.max(240, scroll.clientWidth) * zoom, left = 52, right = wide - 10, lane = 40, top = 4;
  const bottom = top + lane * one.lanes.length, tall = bottom + 22;
  const end = Math.max(1e-6, ...one.lanes.flatMap(row => [...row.end, ...row.to]));
  const x = ms => left + ms / end * (right - left);
  plot.style.width = `${wide}px`;
  const svg = make("svg", {viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `timeline of step ${one.step}`});
  plot.replaceChildren(svg);
  const first = new Map();
  one.lanes.forEach((row, place) => {
    const y = top + lane * place;
    make("rect", {class: "lane", x: left, y: y + 2, width: right - left, height: 20}, svg);
    make("rect", {class: "lane", x: left, y: y + 24, width: right - left, height: 11}, svg);
    make("text", {class: "tick", x: left - 6, y: y + 16, "text-anchor": "end"}, svg, `rank ${row.rank}`);
    first.set(place, Math.min(...row.chunks));
    for (let n = 0; n < row.kinds.length; n += 1) {
      const kind = row.kinds[n], look = `piece ${kind}` + (row.chunks[n] === first.get(place) ? "" : " odd");
      const at0 = x(row.begin[n]), size = Math.max(.4, x(row.end[n]) - at0);
      make("rect", {class: look, x: at0.toFixed(2), y: y + 2, width: size.toFixed(2), height: 20, "data-p": `${place},${n}`}, svg);
      const label = String(row.microbatches[n]);
      if (size > 5 + 6 * label.length) make("text", {class: "number", x: at0 + size / 2, y: y + 15.5, "text-anchor": "middle"}, svg, label);
      const from = x(row.from[n]);
      make("rect", {class: `${look} predicted`, x: from.toFixed(2), y: y + 24, width: Math.max(.4, x(row.to[n]) - from).toFixed(2),
        height: 11, "data-p": `${place},${n}`}, svg);
    }
  });
  make("path", {class: "axis", d: `M${left} ${bottom}H${right}`}, svg);
  for (const tick of nice(0, end, Math.floor((right - left) / 80))) {
    make("path", {class: "axis", d: `M${x(tick)} ${bottom}v4`}, svg);
    if (x(tick) < right - 30) make("text", {class: "tick", x: x(tick), y: tall - 4, "text-anchor": "middle"}, svg, fmt(tick));
  }
  make("text", {class: "tick", x: right, y: tall - 4, "text-anchor": "end"}, svg, "ms");
  follow(svg, event => {
    const piece = event.target.closest ? event.target.closest("[data-p]") : null;
    if (!piece) { untip(); return; }
    const [place, n] = piece.dataset.p.split(",").map(Number), row = one.lanes[place];
    const span = (from, to) => `${from.toFixed(2)} to ${to.toFixed(2)} ms, ${(to - from).toFixed(2)} ms`;
    tip(event, [
      [`${KIND_NAMES[row.kinds[n]]}: chunk ${row.chunks[n]}, microbatch ${row.microbatches[n]}, rank ${row.rank}`],
      ["measured", span(row.begin[n], row.end[n])],
      ["predicted", span(row.from[n], row.to[n])],
    ]);
  });
}
