// Sections, tables, and the page's beginning.
const CHIPS = new Map();

function section(id, title, short) {
  const box = html("section", undefined, at("main"));
  box.id = id;
  html("h2", title, box);
  const link = html("a", short || title, at("links"));
  link.href = `#${id}`;
  return box;
}
function grid(parent, look = "grid") { const box = html("div", undefined, parent); box.className = look; return box; }
function lacks(parent, lines) {
  if (!lines.length) return;
  const list = html("ul", undefined, parent);
  list.className = "lacks";
  for (const line of lines) html("li", line, list);
}
function part(id, title, what, big, short) {
  const box = section(id, title, short);
  if (what.charts.length) {
    const cells = big ? box : grid(box);
    for (const spec of what.charts) chart(cells, spec, big);
  }
  return box;
}

function table(parent, head, rows, looks = []) {
  const frame = html("div", undefined, parent);
  frame.className = "scroll wide";
  const made = html("table", undefined, frame), top = html("tr", undefined, html("thead", undefined, made));
  head.forEach((name, n) => { html("th", name, top).className = looks[n] || ""; });
  const body = html("tbody", undefined, made);
  for (const row of rows) {
    const line = html("tr", undefined, body);
    row.forEach((cell, n) => { html("td", cell, line).className = looks[n] || ""; });
  }
  return body;
}
function dot(parent, run) { html("i", undefined, parent).style.background = colour(run); }
const labels = () => data.runs.map(run => run.label);

function overview() {
  at("title").textContent = labels().join(", ");
  document.title = `${labels().join(", ")} – QEffect LM report`;
  const first = data.runs[0];
  at("made").textContent = (many ? `${data.runs.length} runs` : first.folder) + ` · QEffect LM ${data.version}`;
  const box = grid(html("section", undefined, at("main")), "runs");
  data.runs.forEach((run, place) => {
    const one = html("div", undefined, box);
    one.className = "card";
    const name = html("div", undefined, one);
    name.className = "name";
    dot(name, place);
    html("h3", run.label, html("span", undefined, name));
    const status = html("span", run.status, name);
    status.className = `status ${run.look}`;
    status.title = run.status;
    const about = [run.about, run.times, ...(many ? [run.folder] : [])].filter(Boolean);
    html("p", about.join(" · "), one).className = "about";
    const tiles = grid(one, "tiles");
    for (const [title, value, remark] of run.tiles) {
      const tile = html("div", undefined, tiles);
      tile.className = "tile";
      html("span", title, tile); html("b", value, tile);
      if (remark) html("span", remark, tile);
    }
    if (many) chip(run, place);
  });
}

function chip(run, place) {
  const button = html("button", undefined, at("chips"));
  button.className = "chip";
  dot(button, place);
  html("span", run.label, button);
  button.title = run.label;
  button.setAttribute("aria-pressed", true);
  button.addEventListener("click", () => {
    if (hidden.has(place)) hidden.delete(place); else hidden.add(place);
    button.setAttribute("aria-pressed", !hidden.has(place));
    redraw();
  });
}

function pipelineSection() {
  const what = data.pipeline, box = part("pipeline", "Pipeline: predicted and measured", what, false, "Pipeline");
  for (const one of what.timelines) timeline(box, one);
  for (const one of what.ranks) {
    const [frame] = card(box, many ? `${data.runs[one.run].label}: ranks` : "Ranks", `step ${one.step}`);
    frame.classList.add("sub");
    table(frame, ["rank", "bubble", "own time", "leases at once", "predicted", "activations at the peak", "predicted"], one.rows,
      Array(7).fill("num"));
  }
  lacks(box, what.lacks);
}

function fp8Section() {
  const what = data.fp8, box = part("fp8", "FP8 scales", what, false, "FP8");
  for (const run of what.maps) {
    const frame = html("details", undefined, box);
    frame.className = "card";
    frame.open = run === what.maps[0];
    const each = run.each > 1 ? `; a column holds up to ${run.each} lines of scales.jsonl: the largest amax, the smallest scale` : "";
    html("summary", `${many ? `${data.runs[run.run].label}: ` : ""}histories of amax and scale, tensors by steps${each}`, frame);
    const inside = html("div", undefined, frame), kinds = Object.keys(run.kinds);
    for (const quantity of Object.keys(QUANTITIES)) {
      const mine = kinds.filter(kind => run.kinds[kind][quantity]);
      if (!mine.length) continue;
      const cells = grid(inside, "grid maps sub");
      for (const kind of mine) heat(cells, run, kind, quantity);
    }
    frame.addEventListener("toggle", redraw);
  }
  lacks(box, what.lacks);
}

function eventsSection() {
  const what = data.events, box = section("events", "Events");
  if (what.rows.length) {
    const frame = html("div", undefined, box), off = new Set();
    frame.className = "card";
    const filter = grid(frame, "filter");
    const head = [...(many ? ["run"] : []), "step", "event", "time (UTC)", "what"];
    const looks = [...(many ? [""] : []), "num", "kind", "time", "grow"];
    const body = table(frame, head, [], looks);
    const rows = what.rows.map(([run, kind, step, time, text]) => {
      const row = html("tr", undefined, body);
      row.dataset.kind = kind;
      if (many) { const cell = html("td", undefined, row); const name = html("span", undefined, cell); name.className = "name"; dot(name, run); html("span", data.runs[run].label, name); }
      html("td", step.toLocaleString("en"), row).className = "num";
      const name = html("td", undefined, row);
      name.className = "kind";
      glyph(kind, 6, 6, make("svg", {width: 12, height: 12}, name));
      name.append(kind);
      html("td", time, row).className = "time";
      html("td", text, row).className = "grow";
      return row;
    });
    for (const [kind, count] of Object.entries(what.counts)) {
      const button = html("button", `${kind} ${count}`, filter);
      button.setAttribute("aria-pressed", true);
      button.addEventListener("click", () => {
        if (off.has(kind)) off.delete(kind); else off.add(kind);
        button.setAttribute("aria-pressed", !off.has(kind));
        for (const row of rows) row.hidden = off.has(row.dataset.kind);
      });
    }
    if (what.left) html("p", `${what.left} more are left out, evenly over the run.`, frame).className = "about";
  }
  lacks(box, what.lacks);
}

function configSection() {
  const what = data.config, box = section("config", "Configuration");
  if (many) {
    const [frame] = card(box, "Differences between the runs", what.different.length ? "" : "none");
    frame.dataset.table = "different";
    if (what.different.length) table(frame, ["key", ...labels()], what.different, ["key"]);
  }
  const [frame] = card(box, "What resumes changed", what.resumes.rows.length ? "configuration, layout, device, versions, sources" : "nothing");
  frame.classList.add("sub");
  frame.dataset.table = "resumes";
  const rows = what.resumes.rows.map(row => many ? [data.runs[row[0]].label, row[1].toLocaleString("en"), ...row.slice(2)] : [row[1].toLocaleString("en"), ...row.slice(2)]);
  if (rows.length) table(frame, [...(many ? ["run"] : []), "step", "key", "before", "after"], rows, [...(many ? [""] : []), "num", "key"]);
  if (what.resumes.left) html("p", `${what.resumes.left} more are left out.`, frame).className = "about";
  for (const one of what.whole) {
    const fold = html("details", undefined, box);
    fold.className = "card";
    html("summary", `${many ? `${data.runs[one.run].label}: ` : ""}whole configuration, ${one.rows.length} keys`, fold);
    table(html("div", undefined, fold), ["key", "value"], one.rows, ["key"]);
  }
  lacks(box, what.lacks);
}

function provenanceSection() {
  const what = data.provenance, box = section("versions", "Device, sources, versions", "Versions");
  if (what.rows.length) {
    const frame = html("div", undefined, box);
    frame.className = "card";
    table(frame, ["", ...labels()], what.rows, ["key"]);
  }
  lacks(box, what.lacks);
}

function axisChoice() {
  const known = Object.keys(AXES).filter(name => data.runs.some(run => name === "step" || run.axes[name]));
  for (const name of known) html("option", name === "hours" ? "hours" : `${name}${name === "step" ? "s" : ""}`, at("axis")).value = name;
  at("axes").hidden = known.length < 2;
  at("axis").addEventListener("change", () => { axisName = at("axis").value; redraw(); });
}

function redraw() { untip(); for (const draw of figures) draw(); }

overview();
axisChoice();
lacks(part("loss", "Loss", data.loss, true), data.loss.lacks);
lacks(part("speed", "Throughput, time, memory", data.speed, false, "Time"), data.speed.lacks);
lacks(part("optimizer", "Learning rate and gradient norm", data.optimizer, false, "Optimizer"), data.optimizer.lacks);
pipelineSection();
fp8Section();
if (data.other.charts.length) lacks(part("other", "Further metrics", data.other, false, "Further"), data.other.lacks);
eventsSection();
configSection();
provenanceSection();
for (const id of ["raw", "smooth", "marks"]) at(id).addEventListener("change", redraw);
let width = at("main").clientWidth;
const resized = () => { if (at("main").clientWidth !== width) { width = at("main").clientWidth; redraw(); } };
new ResizeObserver(() => requestAnimationFrame(resized)).observe(at("main"));
window.addEventListener("scroll", untip, {passive: true});
redraw();
