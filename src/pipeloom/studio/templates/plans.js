// Plans and runs: their panels stand below those of schedules, and draw with the same code.
const panel = (name, ...children) => {
  const section = make("section", { ariaLabel: name }, make("h2", { textContent: name }), ...children);
  $("plan-panels").append(section);
  return section;
};
const figure = (id) => make("div", { className: "figure", id });
const size = (bytes) => {
  const unit = Math.max(0, Math.min(3, Math.floor(Math.log2(Math.max(1, bytes)) / 10)));
  return `${digits(bytes / 1024 ** unit, 4)} ${["B", "KiB", "MiB", "GiB"][unit]}`;
};

// Timelines and memory with a view of their own.
function stepCharts(prefix) {
  const view = new View(1), options = { pictures: [], path: false, right: 14 }, held = { memory: null };
  return {
    view, options, lines: new Timelines($(`${prefix}-step`), view, options),
    memory: new Chart($(`${prefix}-memory`), (width) => (held.memory ? memoryShapes(held.memory, view, { width, title: "time" }) : null), view),
    show(answer) {
      options.pictures = answer.pictures.map((one) => new Picture(one));
      held.memory = answer.memory;
      const span = Math.max(1e-9, ...options.pictures.map((one) => one.span));
      if (span !== view.span) view.reset(span); else view.changed();
    },
  };
}

// --- a plan ---

const STAGE_COLOURS = ["#9ebbee", "#f6cb8e", "#9fd9d0", "#f2b49b", "#c9b6ee", "#d8d6a4"];
const plan = { cuts: null, past: [], answer: null, charts: null };

async function openPlan() {
  panel(`Plan ${start.plan}`, make("p", { id: "plan-said", ariaLive: "polite" }), make("div", { id: "plan-graph", className: "scroll" }),
    make("div", { id: "cuts", role: "group", ariaLabel: "cuts between the layers" }), make("div", { id: "treated", className: "scroll" }));
  if (start.model) {
    const box = document.querySelector("[aria-label^='Plan ']");
    box.querySelector("h2").after(make("div", { className: "bar" },
      make("button", { id: "uncut", textContent: "Undo the cut", disabled: true, onclick: () => { plan.cuts = plan.past.pop() ?? null; showPlan(); } }),
      make("button", { textContent: "Save plan", onclick: savePlan }),
      make("label", { className: "control cap" }, make("span", { textContent: "memory per device" }),
        make("input", { type: "range", id: "cap", min: 1, max: 200, value: 100, ariaLabel: "cap, in percent of the largest peak" }),
        make("output", { id: "cap-text" })),
      make("select", { id: "treatments", ariaLabel: "what residuals may be" }, ...["none", "recompute", "offload", "both"].map((value) => make("option", { value, textContent: value === "none" ? "keep residuals" : value === "both" ? "recompute, offload" : value }))),
      make("button", { id: "plan-again", textContent: "Plan again" }), make("span", { id: "search", role: "status" })));
    box.append(make("h3", { textContent: "its step, simulated" }), figure("plan-step"), figure("plan-memory"));
    plan.charts = stepCharts("plan");
    $("cap").addEventListener("input", showCap);
    $("plan-again").addEventListener("click", planAgain);
  }
  await showPlan(true);
}

const capBytes = () => Math.round((plan.base * +$("cap").value) / 100);
function showCap() { $("cap-text").textContent = size(capBytes()); }

async function showPlan(first = false) {
  const cuts = plan.cuts;
  try {
    const answer = await ask("plan", { cuts });
    if (cuts !== plan.cuts) return; // others are asked about by now
    plan.answer = answer;
    $("plan-said").textContent = [answer.said, ...answer.over].join(". ");
    $("plan-said").classList.toggle("broken", answer.over.length > 0);
    showTreatments(answer);
    if (start.model) {
      $("plan-graph").innerHTML = answer.svg;
      $("uncut").disabled = !plan.past.length;
      if (first) { plan.base = answer.cap || Math.max(...answer.peaks); $("treatments").value = answer.used; showCap(); }
      showCuts(answer);
      plan.charts.show(answer);
    } else {
      $("cuts").textContent = "Name the plan's model to move its cuts: pipeloom studio PLAN MODEL";
    }
    say("plan");
  } catch (error) {
    if (cuts !== plan.cuts) return;
    if (plan.past.length) { plan.cuts = plan.past.pop(); await showPlan(); }
    say("plan", error.message);
  }
  document.body.dataset.planned = +(document.body.dataset.planned ?? 0) + 1;
}

// One cell per layer, coloured by stage; between two stages a handle, for the mouse and for arrow keys.
function showCuts({ pieces, cuts }) {
  if (!pieces.length) { $("cuts").textContent = "The stages form branches, so there is no list of layers to cut."; return; }
  const focused = document.activeElement?.dataset?.cut;
  const cells = pieces.map(([layer, ops, stage]) => make("span", {
    className: "layer", title: `${layer || "(no layer)"}: ${ops} ops, stage ${stage}`, textContent: layer.split(".").slice(-2).join(".") || "·",
    style: `background: ${STAGE_COLOURS[stage % STAGE_COLOURS.length]}; flex-grow: ${Math.sqrt(ops)}`,
  }));
  const row = [];
  cells.forEach((cell, at) => {
    const n = cuts.indexOf(at);
    if (n >= 0) {
      const handle = make("button", { className: "handle", dataset: { cut: n }, ariaLabel: `cut between stages ${n} and ${n + 1}: before ${pieces[at][0] || "piece " + at}`, title: "drag, or arrow keys" });
      handle.setAttribute("role", "slider");
      for (const [name, value] of [["now", at], ["min", (cuts[n - 1] ?? 0) + 1], ["max", (cuts[n + 1] ?? pieces.length) - 1]]) handle.setAttribute(`aria-value${name}`, value);
      handle.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (by) { event.preventDefault(); moveCut(n, at + by); }
      });
      handle.addEventListener("pointerdown", (event) => {
        event.preventDefault();
        whileHeld({ up: ({ clientX: x }) => {
          const edges = cells.map((one) => Math.abs(one.getBoundingClientRect().left - x));
          if (Math.abs(x - event.clientX) > 4) moveCut(n, edges.indexOf(Math.min(...edges)));
        } });
      });
      row.push(handle);
    }
    row.push(cell);
  });
  $("cuts").replaceChildren(...row);
  $("cuts").querySelector(`[data-cut="${focused}"]`)?.focus();
}

function moveCut(n, to) {
  const cuts = [...(plan.cuts ?? plan.answer.cuts)];
  if (cuts[n] === to) return;
  plan.past.push(plan.cuts);
  cuts[n] = to;
  plan.cuts = cuts;
  showPlan();
}

function showTreatments({ stages, rows }) {
  const most = Math.max(1, ...stages.map((one) => one.bytes.reduce((a, b) => a + b, 0)));
  const names = ["kept", "recomputed", "offloaded"], colours = ["#4f83e0", "#8fb1ee", "#a1887f"];
  const lines = stages.map(({ stage, rank, ops, times, bytes, sizes, treatments }) => {
    const bar = make("span", { className: "stack", title: names.map((name, i) => `${name} ${sizes[i]}`).join(", ") });
    bar.append(...bytes.map((count, i) => make("i", { style: `width: ${(180 * count) / most}px; background: ${colours[i]}` })));
    const named = Object.entries(treatments).map(([residual, how]) => `${residual}: ${how}`).join(", ");
    return [`stage ${stage}`, `rank ${rank}`, rows?.[stage]?.contents ?? `${ops} ops`, ...times, bar, named];
  });
  const heads = ["stage", "rank", "contents", "F", "B", "recompute", "residuals", "treated"];
  const used = range(heads.length).filter((at) => lines.some((line) => line[at]));
  const row = (tag, cells) => make("tr", {}, ...used.map((at) => make(tag, { className: "left" }, cells[at])));
  $("treated").replaceChildren(make("table", {}, make("thead", {}, row("th", heads)), make("tbody", {}, ...lines.map((line) => row("td", line)))),
    make("ul", { className: "legend" }, ...names.map((name, i) => make("li", {}, make("i", { style: `background: ${colours[i]}` }), name))));
}

async function savePlan() {
  try {
    const { file, json } = await ask("save_plan", { cuts: plan.cuts });
    download(file, JSON.stringify(json, null, 1), "application/json");
  } catch (error) { say("plan", error.message); }
}

async function planAgain() {
  try {
    $("plan-again").disabled = true;
    const before = (await ask("progress", {})).plans;
    let now = await ask("cap", { memory: `${capBytes()}B`, treatments: $("treatments").value });
    while (now.running) {
      $("search").textContent = now.said;
      await new Promise((done) => setTimeout(done, 200));
      now = await ask("progress", {});
    }
    $("search").textContent = now.said;
    if (now.plans > before) { plan.cuts = null; plan.past = []; await showPlan(); }
  } catch (error) { say("plan", error.message); }
  $("plan-again").disabled = false;
}

// --- a run ---

async function openRun() {
  panel(`Run ${start.run}`, make("p", { id: "run-said", role: "status" }), figure("run-step"), figure("run-memory"), make("h3", { textContent: "loss" }), figure("loss"));
  const charts = stepCharts("run");
  let losses = [];
  const chart = new Chart($("loss"), (width) => (losses.length ? plotShapes({ series: losses, x: "step", y: "loss" }, width) : null));
  for (let going = true; going;) {
    const begun = performance.now();
    try {
      const answer = await ask("run", {});
      say("run");
      going = answer.going;
      $("run-said").textContent = answer.said;
      losses = answer.losses;
      chart.draw();
      if (answer.pictures.length) charts.show(answer);
      document.body.dataset.ran = +(document.body.dataset.ran ?? 0) + 1;
    } catch (error) { say("run", error.message); }
    const took = performance.now() - begun; // longer for long runs
    await new Promise((done) => setTimeout(done, Math.max(1000, 20 * took)));
  }
}

if (start.plan) openPlan();
if (start.run) openRun();
