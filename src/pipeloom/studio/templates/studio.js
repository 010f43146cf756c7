// The page's state is the setting: entries (schedules, and rows of those that were edited) and options as on the
// command line. It stands in the address, and every change of it asks the server for new pictures.
const start = JSON.parse(document.getElementById("start").textContent);
const token = new URLSearchParams(location.search).get("token") ?? "";
const $ = (id) => document.getElementById(id);
const make = (tag, more = {}, ...children) => {
  const { dataset, ...rest } = more, element = Object.assign(document.createElement(tag), rest);
  Object.assign(element.dataset, dataset);
  element.append(...children);
  return element;
};
const DEFAULTS = { "-p": "4", "-m": "8", "-v": "", "-F": "1", "-I": "1", "-W": "1", "-T": "0", "--memory": "", "--per-node": "",
  "--per-uplink": "", "-k": "", "--pair-factor": "", "--times": "" };
const state = { entries: [], options: { ...DEFAULTS }, path: false, edited: null, past: [], future: [] };
const view = new View(1), shown = { pictures: [], marks: [], path: false, right: 122 };
let drawn = [], memory = null, trade = [];

async function ask(name, question) {
  const reply = await fetch(`api/${name}`, {
    method: "POST", body: JSON.stringify(question), headers: { "X-Token": token },
  }).catch(() => { throw new Error("the studio does not answer: was it ended?"); });
  if (reply.status !== 200 && reply.status !== 422) throw new Error(await reply.text());
  const answer = await reply.json();
  if (reply.status === 422) throw new Error([answer.error.message, answer.error.hint].filter(Boolean).join("\n"));
  return answer;
}

// What is wrong, by the part of the page that has to put it right.
const problems = {};
function say(where, problem = "") {
  problems[where] = problem;
  $("problem").textContent = Object.values(problems).filter(Boolean).join("\n");
  $("problem").hidden = !$("problem").textContent;
}

// --- the setting: words of a command, and the address ---

function words(but = []) {
  const timed = state.options["--times"] !== "";
  return Object.entries(state.options).filter(([flag]) => !but.includes(flag) && !(timed && ["-F", "-I", "-W"].includes(flag))).flatMap(([flag, value]) => (value.trim() && value !== DEFAULTS[flag] ? [flag, value.trim()] : []));
}
const setting = (more = {}) => ({ words: words(), ...more });
// Of what is drawn, which need not be the setting any more.
const asked = ({ entry: { name, rows } }, more = {}) => setting({ name, rows, ...more });

function address() {
  const query = new URLSearchParams();
  for (const { name, rows } of state.entries) query.append("s", rows ? `${name}\n${rows}` : name);
  for (const [flag, value] of Object.entries(state.options)) if (value !== DEFAULTS[flag]) query.set(flag, value);
  if (state.path) query.set("path", "1");
  if (state.edited !== null) query.set("edit", state.edited);
  return query;
}

function readAddress() {
  const query = new URLSearchParams(location.hash.slice(1));
  const names = query.getAll("s");
  state.entries = names.length ? names.map((text) => {
    const [name, ...rows] = text.split("\n");
    return rows.length ? { name, rows: rows.join("\n") } : { name };
  }) : start.entries.map((entry) => ({ ...entry }));
  const given = names.length ? {} : start.words;
  for (const flag of Object.keys(DEFAULTS)) state.options[flag] = query.get(flag) ?? given[flag] ?? DEFAULTS[flag];
  state.path = shown.path = query.get("path") === "1";
  state.edited = query.has("edit") && state.entries[+query.get("edit")]?.rows ? +query.get("edit") : null;
}

function command() {
  const own = state.entries.length === 1 && state.entries[0].rows; // which have their ranks and micro-batches
  const quoted = words(own ? ["-p", "-m", "-v"] : []).map((word) => (/[\s"]/.test(word) ? `"${word}"` : word)).join(" ");
  const names = state.entries.map(({ name, rows }) => (rows ? `${name}.txt` : name));
  return `pipeloom schedule ${own ? "check" : names.length > 1 ? "compare" : "show"} ${names.join(" ")} ${quoted}`.trim();
}

let writing = 0;
function showSetting() {
  clearTimeout(writing); // browsers refuse to change the address often
  writing = setTimeout(() => history.replaceState(null, "", `${location.pathname}${location.search}#${address()}`), REST_MS);
  $("command").textContent = command();
  $("path").checked = state.path;
  $("planned").hidden = !start.plan;
  $("times").checked = state.options["--times"] !== "";
  for (const input of document.querySelectorAll("[data-option]")) {
    if (document.activeElement !== input) input.value = state.options[input.dataset.option];
  }
  for (const slider of document.querySelectorAll("[data-slides]")) {
    const value = parseFloat(state.options[slider.dataset.slides]);
    if (document.activeElement !== slider) slider.value = Number.isFinite(value) ? value : slider.min;
  }
  $("entries").replaceChildren(...state.entries.map(({ name, rows }, n) => make("li", {},
    make("b", { textContent: name, title: start.library[name]?.about ?? "your own" }),
    make("button", { textContent: rows ? "rows" : "edit", ariaLabel: `edit ${name}`, onclick: () => edit(n) }),
    make("button", { textContent: "×", ariaLabel: `remove ${name}`, disabled: state.entries.length < 2, onclick: () => remove(n) }))));
}

// --- drawing ---

let changes = 0, busy = false, again = false, timer = 0;

function change() {
  changes++;
  showSetting();
  clearTimeout(timer);
  if (busy) again = true; else draw();
}

async function draw() {
  busy = true;
  const begun = performance.now(), entries = state.entries.map((entry) => ({ ...entry }));
  try {
    const answer = await ask("draw", setting({ entries }));
    say("schedules"); say("saving");
    show(answer, entries);
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    document.body.dataset.drawMs = (performance.now() - begun).toFixed(1);
  } catch (error) {
    say("schedules", error.message);
    $("timelines").classList.add("stale");
  }
  busy = false;
  document.body.dataset.drawn = changes;
  if (again) { again = false; return draw(); }
  timer = setTimeout(atRest, REST_MS);
}

// What may wait until the sliders rest: reasons, names of orders, and the chart of all schedules.
const REST_MS = 200;
async function atRest() {
  const now = changes;
  try {
    await explain(now);
    await recognise(now);
    if (now === changes) document.body.dataset.recognised = now;
    await showTrade(now);
  } catch (error) {
    if (now === changes) say("schedules", error.message);
  }
  if (now === changes) document.body.dataset.settled = now;
}

async function explain(now) {
  for (const one of drawn) {
    if (one.error || now !== changes) continue;
    const why = await ask("path", asked(one, { path: state.path }));
    if (now !== changes) return;
    one.why = why;
    one.picture.explain(why.picture);
    view.changed();
  }
  if (state.path) showPath();
}

function show(answer, entries) {
  const before = new Map(drawn.map((one) => [one.name, one]));
  drawn = answer.drawn.map((one, n) => {
    if (!one.error) return { ...one, entry: entries[n], picture: new Picture(one.picture) };
    return { ...one, entry: entries[n], picture: before.get(one.name)?.picture, stale: true };
  });
  const errors = drawn.filter((one) => one.error && one.name !== state.entries[state.edited]?.name);
  if (errors.length) say("schedules", errors.map(({ error, name }) => `${name}: ${error.message}\n${error.hint ?? ""}`).join("\n"));
  const alive = drawn.filter((one) => one.picture);
  shown.pictures = alive.map((one) => one.picture);
  shown.marks = alive.map(() => ({}));
  memory = answer.memory ?? memory;
  const groups = new Map(shown.pictures.flatMap((one) => one.groups).sort((a, b) => a.lane - b.lane).map((g) => [g.name, g.colours[0]]));
  $("legend").replaceChildren(...[...groups].map(([name, colour]) => make("li", {}, make("i", { style: `background: ${colour}` }), name)));
  $("timelines").classList.toggle("stale", alive.some((one) => one.stale));
  const span = Math.max(1e-9, ...shown.pictures.map((one) => one.span));
  if (span !== view.span) view.reset(span); else view.changed();
  timelines.picked = null;
  $("answer").hidden = !state.path;
  showEditor();
}

async function recognise(now) {
  const lines = [];
  for (const one of drawn) {
    if (!one.entry.rows || one.error) continue;
    const { names } = await ask("recognise", asked(one));
    const known = names.map(({ name, about, aliases }) => `${name} (${[about, ...(aliases.length ? [`also ${aliases.join(", ")}`] : [])].join("; ")})`);
    lines.push(make("li", { textContent: `${one.name} is ${known.length ? known.join(", or ") : "none of the library's schedules"}` }));
  }
  if (now === changes) $("known").replaceChildren(...lines);
}

const BIG = 4096;
async function showTrade(now) {
  const size = (drawn[0]?.ranks ?? 0) * (drawn[0]?.microbatches ?? 0);
  const names = size > BIG ? state.entries.filter((one) => !one.rows).map((one) => one.name) : [...Object.keys(start.library), ...start.files];
  const points = [], refused = [];
  trade = points;
  for (const name of names) {
    const answer = await ask("figures", setting({ name }));
    if (now !== changes) return;
    if (answer.error) refused.push(make("li", { textContent: `${name}: ${answer.error.message}` }));
    else if (answer.peak) points.push([answer.step_s, answer.peak, name]); // forwards alone hold nothing
    if (points.length % 6 === 0) tradeChart.draw();
  }
  for (const { entry, figures, name } of drawn) if (figures && entry.rows) points.push([figures.step_s, figures.peak, name]);
  tradeChart.draw();
  $("refused").replaceChildren(...refused);
}

function tradeShapes(width) {
  if (!trade.length) return null;
  const plot = plotShapes({ series: [{ points: trade, dots: true }], x: "step", y: "peak, micro-batches", height: 320 }, width);
  const places = new Map();
  for (const [step, peak, name] of trade) {
    const key = `${digits(step)} ${digits(peak)}`;
    places.set(key, { step, peak, names: [...(places.get(key)?.names ?? []), name] });
  }
  const spots = [...places.values()].sort((a, b) => a.step - b.step) // the fastest is named first
    .map((place) => ({ ...place, left: plot.x(place.step), top: plot.y(place.peak) }));
  const taken = spots.map(({ left, top }) => [left - 8, left + 8, top]); // by points, then by names, too
  const points = spots.flatMap(({ step, peak, names, left, top }) => {
    const at = { left: `${left}px`, top: `${top}px` };
    const drawnAlready = (name) => state.entries.some((entry) => entry.name === name);
    const said = `${names.join(", ")}: step ${digits(step)}, peak ${digits(peak)} micro-batches`;
    const point = make("button", { className: "point", title: said, ariaLabel: said,
      onclick: () => add(names.find((name) => !drawnAlready(name))) });
    point.classList.toggle("chosen", names.some(drawnAlready));
    Object.assign(point.style, at);
    const short = names.length > 2 ? `${names[0]} +${names.length - 1}` : names.join(", ");
    // A name stands behind its point, else in front of it, else nowhere: the point says it, too.
    const long = short.length * 6.4, free = (from) => from > LEFT && from + long < width
      && taken.every(([start, stop, y]) => Math.abs(y - top) >= 14 || from + long < start || from > stop);
    const from = [left + 9, left - 9 - long].find(free);
    if (from === undefined) return [point];
    taken.push([from, from + long, top]);
    const text = make("span", { className: "name", textContent: short });
    Object.assign(text.style, at);
    text.classList.toggle("before", from < left);
    return [point, text];
  });
  const focused = document.activeElement?.title;
  $("trade").querySelectorAll(".point, .name").forEach((old) => old.remove());
  $("trade").append(...points);
  points.find((point) => focused && point.title === focused)?.focus();
  return plot;
}

// --- entries ---

function add(name) {
  if (!name) return;
  if (!state.entries.some((entry) => entry.name === name)) state.entries.push({ name });
  change();
}
function remove(n) {
  state.entries.splice(n, 1);
  if (state.edited === n) state.edited = null; else if (state.edited > n) state.edited--;
  change();
}

// --- asking ---

function block(panel, action, text = action) {
  return make("button", { className: "link", textContent: text, onclick: () => pickAction(panel, action) });
}
function pickAction(panel, action) {
  const picture = shown.pictures[panel], i = picture.number.get(action);
  if (i === undefined) return;
  timelines.pick({ panel, picture, rank: picture.blocks.rank[i], time: picture.start(i), block: i, gap: null });
}
const list = (tag, items) => make(tag, {}, ...items.map((item) => make("li", {}, ...item)));

// One question at a time: of blocks passed over while an answer is on its way, only the last is asked about.
let told = Promise.resolve();
function picked(found) { told = told.then(() => tell(found)); }

async function tell(found) {
  const { panel, picture, rank, time, block: i } = found, passed = () => timelines.picked !== found;
  if (passed()) return;
  const one = drawn.find((each) => each.picture === picture), now = changes;
  if (!one || one.stale) return;
  const compute = i !== null && !picture.blocks.lane[i], action = compute ? picture.blocks.action[i] : null;
  shown.marks[panel] = {};
  if (!compute && i !== null) return view.changed();
  try {
    const answer = await ask("ask", asked(one, compute ? { action } : { rank, time }));
    if (now !== changes || passed()) return;
    shown.marks[panel] = { chain: [...(compute ? [action] : []), ...answer.chain.map((piece) => piece.action)] };
    const chain = list("ol", answer.chain.map((piece) => [piece.kind === "overhead" ? "overhead before " : "", block(panel, piece.action), ` on rank ${piece.rank} from ${digits(piece.start_s)} to ${digits(piece.end_s)}`]));
    const parts = compute ? [
      make("h3", { textContent: `${action} of ${one.name}` }), make("p", { textContent: picture.say(i) }),
      make("h3", { textContent: "waited for" }),
      list("ul", answer.waits.length ? answer.waits.map((wait) => [wait.ran ? "its rank to run " : "the result of ", block(panel, wait.action), `, there at ${digits(wait.until)}`]) : [["nothing"]]),
      make("h3", { textContent: "holds" }),
      make("p", { textContent: answer.holds ? `residuals of its micro-batch, ${digits(answer.holds.share, 3)} of what a micro-batch takes on the rank, from ${digits(answer.holds.from)} to the end of ${answer.holds.until} at ${digits(answer.holds.to)}` : "no residuals: only a forward makes some" }),
    ] : [
      make("h3", { textContent: `rank ${rank} is idle from ${digits(answer.from)} to ${digits(answer.to)}: ${answer.reason}` }),
      make("p", { textContent: answer.sentence }),
    ];
    $("answer").replaceChildren(...parts, ...(answer.chain.length ? [make("h3", { textContent: "because, back to the start" }), chain] : []));
    $("answer").hidden = false;
    view.changed();
  } catch (error) {
    say("schedules", error.message);
  }
}

function showPath() {
  const one = drawn.find(({ why }) => why);
  if (!one) return;
  const { path, reasons, idle_s: idle } = one.why;
  $("answer").replaceChildren(
    make("h3", { textContent: `critical path of ${one.name}: only what makes one of these shorter makes the step shorter` }),
    list("ul", path.map((line) => [line])),
    make("h3", { textContent: "idle, rank-time" }),
    list("ul", Object.entries(reasons).map(([reason, seconds]) => [`${reason}: ${digits(seconds)} (${digits(100 * seconds / idle, 3)} %)`])));
  $("answer").hidden = false;
}

// --- editing ---

function edit(n) {
  readRows();
  const entry = state.entries[n];
  if (!entry.rows) {
    const one = drawn.find(({ name, error }) => name === entry.name && !error);
    if (!one) return say("schedules", `${entry.name} is not drawn, so there are no rows to edit`);
    if (!one.rows) return say("schedules", `${entry.name} cannot be edited as text: it has more than fits (use fewer micro-batches), two directions, or slices`);
    const taken = new Set(state.entries.map((one) => one.name));
    const name = ["mine", ...range(99).map((i) => `mine${i + 2}`)].find((one) => !taken.has(one));
    state.entries[n] = { name, rows: one.rows };
  }
  state.edited = n; state.past = []; state.future = [];
  change();
}

function setRows(rows, remember = true) {
  const entry = state.entries[state.edited];
  if (rows === entry.rows) return;
  if (remember) { state.past.push(entry.rows); state.future = []; }
  entry.rows = rows;
  change();
}
function travel(from, to) {
  readRows();
  if (!from.length) return;
  to.push(state.entries[state.edited].rows);
  setRows(from.pop(), false);
}

let typing = 0;
// What stands in the text becomes the rows: soon after a key, or at once when the editor is closed.
function readRows() {
  if (!typing) return;
  clearTimeout(typing);
  typing = 0;
  if (state.edited !== null) setRows([...$("rows").querySelectorAll("textarea")].map((one) => one.value.trim().replace(/\s+/g, " ")).join("\n"));
}

function showEditor() {
  const n = state.edited;
  $("editor").hidden = n === null;
  if (n === null) return;
  const { rows, name } = state.entries[n], lines = rows.split("\n"), error = drawn.find((one) => one.name === name)?.error;
  $("edited").textContent = name;
  $("undo").disabled = !state.past.length; $("redo").disabled = !state.future.length;
  const box = $("rows");
  while (box.children.length > lines.length) box.lastChild.remove();
  while (box.children.length < lines.length) {
    const rank = box.children.length, area = make("textarea", { rows: 1, spellcheck: false, ariaLabel: `row of rank ${rank}` });
    area.addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(readRows, 200);
    });
    box.append(make("div", { className: "row" }, make("span", { textContent: `rank ${rank}` }), area, make("p", { className: "broken" })));
  }
  const named = (error?.rows ?? []).filter((rank) => rank < lines.length);
  const at = !error ? [] : error.circle.length ? error.circle.map(([rank]) => rank) : named.length ? named.slice(0, 1) : [0];
  lines.forEach((line, rank) => {
    const row = box.children[rank], area = row.children[1];
    if (!typing && (document.activeElement !== area || area.value.trim().replace(/\s+/g, " ") !== line)) area.value = line;
    const stuck = error?.circle.find(([r]) => r === rank);
    const text = stuck ? `stands at ${stuck[1]}, which needs ${stuck[2]}` : at[0] === rank ? error.message : "";
    row.lastChild.textContent = at.includes(rank) && text ? text + (at[0] === rank && error.hint ? ` (${error.hint})` : "") : "";
    area.setAttribute("aria-invalid", at.includes(rank));
    if (at.includes(rank)) row.dataset.broken = ""; else delete row.dataset.broken;
  });
  showCircle(error?.circle ?? []);
}

// A deadlock as a circle: each rank stands at an action, and points to the rank that has what it needs.
function showCircle(circle) {
  if (!circle.length) return $("circle").replaceChildren();
  const size = 300, middle = size / 2, radius = 96;
  const place = (i, r = radius) => {
    const angle = (2 * Math.PI * i) / circle.length - Math.PI / 2;
    return [middle + r * Math.cos(angle), middle + r * Math.sin(angle)];
  };
  const shapes = circle.flatMap(([rank, at, needs], i) => {
    const gap = (32 * circle.length) / (2 * Math.PI * radius), back = 1 - gap - gap / 4;
    const [x, y] = place(i), steps = range(13).map((s) => place(i + gap + (s / 12) * (1 - 2 * gap)));
    const [tx, ty] = steps.at(-1), [bx, by] = place(i + back, radius - 5), [cx, cy] = place(i + back, radius + 5);
    const [nx, ny] = place(i + 0.5, radius + (circle.length > 2 ? 24 : 20));
    return [
      { line: steps, stroke: "accent", width: 2 }, { line: [[bx, by], [tx, ty], [cx, cy]], stroke: "accent", width: 2 },
      { text: `rank ${rank}`, x, y: y - 4, size: 13, anchor: "middle", fill: "ink", bold: true },
      { text: at, x, y: y + 12, size: 12, anchor: "middle", fill: "ink" },
      { text: `needs ${needs}`, x: nx, y: ny + 4, size: 11, anchor: nx > middle + 9 ? "" : nx < middle - 9 ? "end" : "middle", fill: "soft" },
    ];
  });
  $("circle").innerHTML = svgOf(shapes, size, size).replace("<svg ", '<svg role="img" overflow="visible" ');
  $("circle").firstChild.setAttribute("aria-label", `deadlock: ${circle.map(([rank, at, needs]) => `rank ${rank} at ${at} needs ${needs}`).join("; ")}`);
}

function carry({ picture, block }) {
  const edited = state.entries[state.edited], one = drawn.find((each) => each.picture === picture);
  return !picture.blocks.lane[block] && edited && one && edited.name === one.name && edited.rows === one.entry.rows && !one.stale;
}

// Puts a block in front of the first one whose middle is behind the place where it was let go.
function drop({ picture, block: i, rank: from }, to) {
  readRows();
  const action = picture.blocks.action[i], rank = to.picture === picture ? to.rank : from;
  const lines = state.entries[state.edited].rows.split("\n").map((line) => line.split(" "));
  lines[from] = lines[from].flatMap((word) => word.split("&").filter((one) => one !== action).join("&") || []);
  const behind = picture.computing[rank].find((j) => j !== i && (picture.start(j) + picture.end(j)) / 2 > to.time);
  const place = behind === undefined ? -1 : lines[rank].findIndex((word) => word.split("&").includes(picture.blocks.action[behind]));
  lines[rank].splice(place < 0 ? lines[rank].length : place, 0, action);
  setRows(lines.map((line) => line.join(" ")).join("\n"));
}

// --- saving ---

function download(file, content, type) {
  const link = make("a", { download: file, href: URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function saveDrawing(form) {
  const width = 1000, drawing = timelineShapes(shown.pictures, view, { ...shown, width });
  const file = `${state.entries.map((one) => one.name.replace(/\W+/g, "_")).join("-")}.${form}`;
  if (form === "svg") download(file, svgFile(drawing, width), "image/svg+xml");
  if (form === "pdf") download(file, pdfFile(drawing, width), "application/pdf");
  if (form === "png") download(file, await pngFile(drawing, width), "image/png");
}

async function save(form, n) {
  readRows();
  try {
    const { file, text, json } = await ask("save", asked({ entry: state.entries[n] }, { form }));
    say("saving");
    download(file, text ?? JSON.stringify(json), "text/plain");
  } catch (error) {
    say("saving", error.message);
  }
}

// --- the page ---

const timelines = new Timelines($("timelines"), view, Object.assign(shown, { picked, carry, drop }));
const memoryChart = new Chart($("memory"), (width) => (memory ? memoryShapes(memory, view, { width, right: shown.right }) : null), view);
const tradeChart = new Chart($("trade"), tradeShapes);

for (const input of document.querySelectorAll("[data-option]")) {
  input.addEventListener("change", () => { state.options[input.dataset.option] = input.value; change(); });
}
for (const slider of document.querySelectorAll("[data-slides]")) {
  slider.addEventListener("input", () => {
    const flag = slider.dataset.slides, off = slider.value === "0" && ["-v", "--memory", "--per-node", "--per-uplink"].includes(flag);
    state.options[flag] = off ? "" : slider.value;
    change();
  });
}
$("add").append(...[...Object.keys(start.library), ...start.files].map((name) => make("option", { value: name, textContent: name, title: start.library[name]?.about ?? "" })));
$("add").addEventListener("change", (event) => { add(event.target.value); event.target.value = ""; });
$("path").addEventListener("change", (event) => {
  state.path = shown.path = event.target.checked;
  if (!state.path) $("answer").hidden = true;
  showSetting();
  view.changed();
  explain(changes).catch((error) => say("schedules", error.message));
});
$("times").addEventListener("change", (event) => { state.options["--times"] = event.target.checked ? start.plan : ""; change(); });
$("undo").addEventListener("click", () => travel(state.past, state.future));
$("redo").addEventListener("click", () => travel(state.future, state.past));
$("close").addEventListener("click", () => { readRows(); state.edited = null; showSetting(); showEditor(); });
$("editor").addEventListener("keydown", (event) => {
  if (!(event.ctrlKey || event.metaKey) || !["z", "y"].includes(event.key)) return;
  event.preventDefault();
  if (event.key === "z" && !event.shiftKey) travel(state.past, state.future); else travel(state.future, state.past);
});
document.addEventListener("click", ({ target }) => {
  if (target.dataset.draws) saveDrawing(target.dataset.draws);
  if (target.dataset.saves) save(target.dataset.saves, "edited" in target.dataset ? state.edited : 0);
});
addEventListener("hashchange", () => { readAddress(); change(); });
readAddress();
change();
