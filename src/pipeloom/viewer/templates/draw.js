"use strict";
// Draws timelines, memory and curves. Every drawing is first a list of shapes, from which the page's SVG, files
// for papers (SVG, PDF) and pictures (PNG) are made:
//
//     {boxes: [[x, y, w, h], ...], fill, stroke, strokeWidth}    {line: [[x, y], ...], stroke, width, dash}
//     {text, x, y, size, anchor, fill, bold}
//
// Colours are #rrggbb, or names of PAPER, which the page's style sheet has for light and dark.
const PAPER = {
  ink: "#1b2433", soft: "#5d6a7e", line: "#e2e6ec", grid: "#e9ecf1", panel: "#ffffff", idle: "#eef0f3",
  accent: "#b3261e",
};
const BLOCK_INK = "#10192b", CAP = "#d64545";
// Told apart by people with any kind of colour blindness: light and dark alternate, and lines are dashed too.
const CURVES = [["#9a6be0", "5 3"], ["#e0592a", ""], ["#12a594", "2 2"], ["#3566c4", "8 3"], ["#7d8fa9", ""]];
const MEASURED = "#12a594";
const LEFT = 62, TOP = 26, FOOT = 40;
const LANES = [[0, 0.70], [0.62, 0.70], [0.74, 0.82], [0.84, 0.90], [0.90, 0.96], [0.84, 0.96]];
const IDLE_LANE = LANES[0];

const rowHeight = (ranks) => (ranks <= 8 ? 44 : ranks <= 16 ? 32 : ranks <= 32 ? 20 : 12);
const digits = (value, count = 6) => String(+value.toPrecision(count));
const range = (count) => Array.from({ length: count }, (_, i) => i);

function niceTicks(from, to, most) {
  const rough = (to - from) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= rough);
  const first = Math.ceil(from / step - 1e-9);
  return range(Math.max(0, Math.floor(to / step + 1e-9) - first + 1)).map((i) => +((first + i) * step).toPrecision(12));
}

// The part of a line from left to right that lies between two places.
function between(left, right, line) {
  return line.flatMap((point, i) => {
    const [x1, y1] = point, [x0, y0] = line[i - 1] ?? point;
    const crossed = [left, right].filter((x) => x0 < x && x < x1).map((x) => [x, y0 + (y1 - y0) * (x - x0) / (x1 - x0)]);
    return x1 < left || x1 > right ? crossed : [...crossed, point];
  });
}

// Until the button is let go, or the browser takes the pointer away.
function whileHeld({ move = () => {}, end = () => {}, up }) {
  const held = new AbortController(), { signal } = held;
  addEventListener("pointermove", move, { signal });
  for (const name of ["pointerup", "pointercancel"]) addEventListener(name, (event) => {
    held.abort();
    end();
    if (name === "pointerup") up(event);
  }, { signal });
}

// A picture that Python made, with what drawing it again and again needs: its blocks by rank, in order of time.
class Picture {
  constructor(given) {
    Object.assign(this, given);
    const { blocks } = given, count = blocks.action.length;
    this.scale = given.span / given.ticks;
    this.computing = range(given.ranks).map(() => []);
    this.beside = range(given.ranks).map(() => []);
    for (let i = 0; i < count; i++) (blocks.lane[i] ? this.beside : this.computing)[blocks.rank[i]].push(i);
    this.explain(given);
    this.several = Object.keys(given.shades).length > 0;
    this.number = new Map();
    for (let i = 0; i < count; i++) if (!blocks.lane[i]) this.number.set(blocks.action[i], i);
  }
  // Why ranks are idle, and the critical path.
  explain({ idle = [], path = null }) {
    this.path = path;
    this.gaps = range(this.ranks).map(() => []);
    for (const gap of idle) this.gaps[gap[0]].push(gap);
  }
  start(i) { return this.blocks.start[i] * this.scale; }
  end(i) { return this.blocks.end[i] * this.scale; }
  colour(i) {
    const group = this.groups[this.blocks.group[i]];
    return group.colours[Math.min(3, this.several ? this.shades[parseInt(this.blocks.action[i])] ?? 0 : 0)];
  }
  // The first block of a rank that ends behind a time.
  from(rank, time) {
    const row = this.computing[rank];
    let low = 0, high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end(row[middle]) <= time) low = middle + 1; else high = middle;
    }
    return low;
  }
  at(rank, time) {
    const i = this.computing[rank]?.[this.from(rank, time)];
    return i !== undefined && this.start(i) <= time ? i : null;
  }
  gapAt(rank, time) {
    return this.gaps[rank]?.find(([, start, end]) => start * this.scale <= time && time < end * this.scale) ?? null;
  }
  say(i) {
    const { action, rank } = this.blocks, unit = this.unit ? ` ${this.unit}` : "";
    const pair = this.partner?.[action[i]] ? `, in a pair with ${this.partner[action[i]]}` : "";
    const numbers = action[i].match(/\d+/g), one = this.meanings[action[i].replace(/[\d<>]/g, "")];
    const said = one?.replace(/(?<=stage |micro-batch )\d+/g, () => numbers.shift()) ?? action[i];
    return `${said}${pair}; rank ${rank[i]}, starts at `
      + `${digits(this.start(i))}${unit}, takes ${digits(this.end(i) - this.start(i))}${unit}`;
  }
}

// The part of the time axis that is shown, which several charts share.
class View {
  constructor(span) { this.charts = new Set(); this.reset(span); }
  reset(span = this.span) { this.span = span; this.from = 0; this.to = span * 1.005; this.changed(); }
  set(from, to) {
    const most = this.span * 1.005, width = Math.min(most, Math.max(this.span * 1e-5, to - from));
    this.from = Math.max(0, Math.min(from, most - width)); this.to = this.from + width;
    this.changed();
  }
  zoom(factor, at = (this.from + this.to) / 2) {
    this.set(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }
  pan(share) { const by = share * (this.to - this.from); this.set(this.from + by, this.to + by); }
  changed() { for (const chart of this.charts ?? []) chart.redraw(); }
}

// Blocks narrower than a pixel or two are drawn by how much of each strip of 3 pixels each colour fills.
const STRIP = 3, NARROW = 1.6;
function mixedColour(shares) {
  const parts = [...shares].map(([colour, share]) => [colour, Math.round(4 * share)]).filter(([, part]) => part);
  const whole = parts.reduce((sum, [, part]) => sum + part, 0);
  const channel = (i) => Math.round(parts.reduce((sum, [colour, part]) => sum + part * parseInt(colour.slice(i, i + 2), 16), 0) / whole);
  return whole ? `#${[1, 3, 5].map((i) => channel(i).toString(16).padStart(2, "0")).join("")}` : null;
}
function denseRow(picture, row, x, end, box) {
  const strips = [];
  for (const i of row) {
    const x0 = Math.max(LEFT, x(picture.start(i))), x1 = Math.min(end, x(picture.end(i))), colour = picture.colour(i);
    for (let at = Math.floor((x0 - LEFT) / STRIP); LEFT + at * STRIP < x1; at++) {
      const within = Math.min(x1, LEFT + (at + 1) * STRIP) - Math.max(x0, LEFT + at * STRIP);
      const strip = (strips[at] ??= new Map());
      strip.set(colour, (strip.get(colour) ?? 0) + within / STRIP);
    }
  }
  let full = null; // the colour and the first of strips without a gap
  for (let at = 0; at <= strips.length; at++) {
    const strip = strips[at] ?? new Map(), colour = mixedColour(strip);
    const busy = [...strip.values()].reduce((sum, share) => sum + share, 0), whole = busy > 7 / 8;
    if (full && !(whole && colour === full.colour)) {
      box(full.colour, LEFT + full.at * STRIP, LEFT + at * STRIP);
      full = null;
    }
    if (whole) full ??= { colour, at };
    else if (colour) box(colour, LEFT + at * STRIP, LEFT + (at + busy) * STRIP);
  }
}

// What lies in the rows of one picture: gaps, blocks, messages, pairs, the path, and a chain of causes.
function timeShapes(picture, view, frame, options) {
  const { width, top, row, right } = frame, scale = (width - LEFT - right) / (view.to - view.from);
  const x = (time) => LEFT + (time - view.from) * scale, boxes = new Map(), texts = [], shapes = [];
  const finest = picture.ranks > 32 ? 1 : 0.5, end = width - right;
  const box = (fill, x0, x1, y, height) => {
    x0 = Math.max(LEFT, x0); x1 = Math.min(end, x1);
    if (x1 <= x0) return;
    if (!boxes.has(fill)) boxes.set(fill, []);
    boxes.get(fill).push([x0, y, Math.max(x1 - x0, finest), height]);
  };
  for (let rank = 0; rank < picture.ranks; rank++) {
    const y = top + rank * row, high = IDLE_LANE[1] * row;
    for (const [, start, stop, reason] of picture.gaps[rank]) {
      const x0 = x(start * picture.scale), x1 = x(stop * picture.scale);
      if (x1 < LEFT || x0 > end) continue;
      box("idle", x0, x1, y, high);
      if (x1 - x0 > reason.length * 6 + 6 && row >= 20) {
        texts.push({ text: reason, x: (x0 + x1) / 2, y: y + high / 2 + 4, size: 10, anchor: "middle", fill: "soft" });
      }
    }
    const own = picture.computing[rank].slice(picture.from(rank, view.from), picture.from(rank, view.to) + 1);
    const seen = own.reduce((sum, i) => sum + Math.min(end, x(picture.end(i))) - Math.max(LEFT, x(picture.start(i))), 0);
    if (own.length > 20 && seen < NARROW * own.length) {
      denseRow(picture, own, x, end, (fill, x0, x1) => box(fill, x0, x1, y, high));
      continue;
    }
    for (const i of own) {
      const x0 = x(picture.start(i)), x1 = x(picture.end(i));
      box(picture.colour(i), x0, x1, y, high);
      const action = picture.blocks.action[i], number = /^\d+[A-Z]+(\d+)$/.exec(action)?.[1];
      if (number === undefined || row < 11) continue;
      const short = picture.several && x1 - x0 > action.length * 6.6 + 4 ? action : number;
      if (x1 - x0 > short.length * 6.4 + 2) {
        const size = row < 16 ? 8 : 11;
        texts.push({ text: short, x: (x0 + x1) / 2, y: y + high / 2 + size / 3, size, anchor: "middle", fill: BLOCK_INK });
      }
    }
    if (row >= 20) {
      for (const i of picture.beside[rank]) {
        const [low, up] = LANES[picture.blocks.lane[i]];
        box(picture.colour(i), x(picture.start(i)), x(picture.end(i)), y + low * row, (up - low) * row);
      }
    }
  }
  for (const [fill, list] of boxes) shapes.push({ boxes: list, fill, stroke: fill === "idle" ? "" : "panel", strokeWidth: row < 20 ? 0.2 : 0.7 });
  const frames = (list, stroke, strokeWidth) => {
    const shown = list.map(([rank, start, stop]) => [x(start), top + rank * row, x(stop) - x(start), IDLE_LANE[1] * row])
      .filter(([x0, , w]) => x0 + w > LEFT && x0 < end);
    if (shown.length) shapes.push({ boxes: shown, fill: "", stroke, strokeWidth });
  };
  frames(picture.pairs.map(([rank, start, stop]) => [rank, start * picture.scale, stop * picture.scale]), BLOCK_INK, 1.6);
  shapes.push(...texts);
  if (options.path && picture.path) {
    const line = between(LEFT, end, picture.path.map(([tick, rank]) => [x(tick * picture.scale), top + rank * row + 0.1 * row]));
    if (line.length) shapes.push({ line, stroke: "panel", width: 5.5 }, { line, stroke: "ink", width: 2.5 });
  }
  const chain = (options.chain ?? []).map((action) => picture.number.get(action)).filter((i) => i !== undefined);
  if (chain.length) {
    const spot = (i) => [picture.blocks.rank[i], picture.start(i), picture.end(i)];
    frames(chain.map(spot), "accent", 1.5);
    frames(chain.slice(0, 1).map(spot), "accent", 3);
  }
  return shapes;
}

// Timelines above each other with the same time axis. `beside`: head -> one text per rank, at the right.
function timelineShapes(pictures, view, options) {
  const { width } = options, shapes = [], panels = [];
  const right = options.right ?? 14;
  let y = 4;
  pictures.forEach((picture, n) => {
    const row = rowHeight(picture.ranks), top = y + TOP;
    shapes.push({ text: picture.title, x: LEFT, y: y + 14, size: 13, fill: "ink", bold: true });
    const mark = options.marks?.[n] ?? {};
    let column = width - right + 8;
    for (const [head, texts] of Object.entries(picture.columns ?? {})) {
      shapes.push({ text: head, x: column + 44, y: y + 14, size: 11, anchor: "end", fill: "soft" });
      if (row >= 12) texts.forEach((text, rank) => shapes.push(
        { text, x: column + 44, y: top + (rank + 0.42) * row + 4, size: row < 16 ? 9 : 11, anchor: "end", fill: "ink" }));
      column += 52;
    }
    for (let rank = 0; rank < picture.ranks; rank += picture.ranks > 32 ? 4 : 1) {
      shapes.push({ text: `rank ${rank}`, x: LEFT - 8, y: top + (rank + 0.42) * row + 4, size: row < 16 ? 10 : 12, anchor: "end", fill: "ink" });
    }
    shapes.push(...timeShapes(picture, view, { width, top, row, right }, { ...options, chain: mark.chain }));
    panels.push({ picture, top, row });
    y = top + picture.ranks * row;
  });
  const ticks = axisShapes(view, { width, y, right, title: pictures[0]?.unit ? `time, ${pictures[0].unit}` : "time" });
  return { shapes: [...ticks.grid(TOP), ...shapes, ...ticks.axis], height: y + FOOT, panels };
}

function axisShapes(view, { width, y, right, title }) {
  const scale = (width - LEFT - right) / (view.to - view.from);
  const at = niceTicks(view.from, view.to, (width - LEFT) / 90).map((t) => [t, LEFT + (t - view.from) * scale]);
  return {
    grid: (top) => at.map(([, x]) => ({ line: [[x, top], [x, y]], stroke: "grid", width: 1 })),
    axis: [
      ...at.map(([t, x]) => ({ text: digits(t), x, y: y + 15, size: 11, anchor: "middle", fill: "soft" })),
      { text: title, x: (LEFT + width - right) / 2, y: y + 32, size: 11, anchor: "middle", fill: "soft" },
    ],
  };
}

function memoryShapes(memory, view, options) {
  const { width, right = 14 } = options, { ranks, curves, top: most } = memory, shapes = [];
  const high = ranks.length <= 8 ? 68 : 42, gap = 18;
  const scale = (width - LEFT - right) / (view.to - view.from), end = width - right;
  const x = (time) => LEFT + (time - view.from) * scale;
  const names = [...new Set(curves.map((curve) => curve.name))];
  const style = ({ name, source, tier }) => {
    const [stroke, dash] = source === "measured" ? [MEASURED, ""] : CURVES[names.indexOf(name) % CURVES.length];
    return [stroke, names.length === 1 ? "" : tier === "host" ? "1 3" : dash];
  };
  let left = LEFT;
  for (const name of names.length > 1 || curves[0].source === "measured" ? names : []) {
    const [stroke, dash] = style(curves.find((curve) => curve.name === name));
    shapes.push({ line: [[left, 10], [left + 24, 10]], stroke, width: 2, dash }, { text: name, x: left + 30, y: 14, size: 12, fill: "ink" });
    left += 54 + name.length * 7;
  }
  ranks.forEach((rank, panel) => {
    const top = TOP + 6 + panel * (high + gap), y = (size) => top + high * (1 - size / most);
    for (const size of niceTicks(0, most, Math.max(2.5, high / 24))) {
      shapes.push({ line: [[LEFT, y(size)], [end, y(size)]], stroke: "grid", width: 1 },
        { text: digits(size, 3), x: LEFT - 6, y: y(size) + 4, size: 10, anchor: "end", fill: "soft" });
    }
    for (const curve of curves.filter((c) => c.rank === rank)) {
      const line = between(LEFT, end, curve.points.flatMap(([time, size], i, points) => [
        ...(i ? [[x(time), y(points[i - 1][1])]] : []), [x(time), y(size)]]));
      if (!line.length) continue;
      const [stroke, dash] = style(curve);
      if ((curve.source === "measured" || names.length === 1) && curve.tier === "device") {
        shapes.push({ area: [...line, [line.at(-1)[0], y(0)], [line[0][0], y(0)]], fill: stroke });
      }
      shapes.push({ line, stroke, width: 1.8, dash });
    }
    shapes.push({ text: `rank ${rank}`, x: LEFT, y: top - 4, size: 11, fill: "ink" });
    const cap = memory.caps[rank];
    if (cap) {
      shapes.push({ line: [[LEFT, y(cap[0])], [end, y(cap[0])]], stroke: CAP, width: 1.2, dash: "2 3" },
        { text: cap[1], x: end - 4, y: y(cap[0]) - 3, size: 10, anchor: "end", fill: CAP });
    }
  });
  const foot = TOP + 6 + ranks.length * (high + gap) - gap;
  const axis = axisShapes(view, { width, y: foot, right, title: `${memory.unit}; ${options.title ?? "time"}` });
  return { shapes: [...shapes, ...axis.axis], height: foot + FOOT };
}

// Curves or points of any two numbers. series: [{name, points: [[x, y, label?], ...], points only: dots}].
function plotShapes({ series, x: xTitle, y: yTitle, height = 260 }, width) {
  const all = series.flatMap((one) => one.points), shapes = [];
  const ends = (at) => {
    const values = all.map((point) => point[at]).filter(Number.isFinite);
    const low = Math.min(...values), high = Math.max(...values), pad = (high - low) * 0.06 || 1;
    return [low - pad, high + pad];
  };
  const [x0, x1] = ends(0), [y0, y1] = ends(1);
  const top = TOP, bottom = height - FOOT, end = width - 14;
  const x = (v) => LEFT + ((v - x0) / (x1 - x0)) * (end - LEFT), y = (v) => bottom - ((v - y0) / (y1 - y0)) * (bottom - top);
  for (const v of niceTicks(y0, y1, 6)) {
    shapes.push({ line: [[LEFT, y(v)], [end, y(v)]], stroke: "grid", width: 1 },
      { text: digits(v), x: LEFT - 6, y: y(v) + 4, size: 11, anchor: "end", fill: "soft" });
  }
  for (const v of niceTicks(x0, x1, width / 110)) {
    shapes.push({ text: digits(v), x: x(v), y: bottom + 15, size: 11, anchor: "middle", fill: "soft" });
  }
  shapes.push({ text: xTitle, x: (LEFT + end) / 2, y: bottom + 32, size: 11, anchor: "middle", fill: "soft" },
    { text: yTitle, x: 8, y: 14, size: 11, fill: "soft" });
  let left = LEFT + 8 + yTitle.length * 6;
  series.forEach(({ name, points, dots }, n) => {
    const [stroke, dash] = CURVES[n % CURVES.length];
    if (name) {
      shapes.push({ line: [[left, 10], [left + 22, 10]], stroke, width: 2, dash }, { text: name, x: left + 28, y: 14, size: 12, fill: "ink" });
      left += 52 + name.length * 7;
    }
    const line = points.filter((point) => Number.isFinite(point[1])).map((point) => [x(point[0]), y(point[1])]);
    if (!dots && line.length) shapes.push({ line, stroke, width: 2, dash });
    if (dots || line.length <= 30) shapes.push({ boxes: line.map(([px, py]) => [px - 3, py - 3, 6, 6]), fill: stroke, stroke: "panel", strokeWidth: 1 });
  });
  return { shapes, height, x, y };
}

// --- shapes as SVG, PDF and PNG ---

const escaped = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const near = (value) => Math.round(value * 100) / 100;

function svgOf(shapes, width, height, colour = (name) => (name in PAPER ? `var(--${name})` : name)) {
  const paint = (fill, stroke, strokeWidth, dash) => `fill="${fill ? colour(fill) : "none"}"`
    + (stroke ? ` stroke="${colour(stroke)}" stroke-width="${strokeWidth}"` : "") + (dash ? ` stroke-dasharray="${dash}"` : "");
  const path = (points) => "M" + points.map(([x, y]) => `${near(x)} ${near(y)}`).join("L");
  const parts = shapes.map((s) => {
    if (s.boxes) {
      const d = s.boxes.map(([x, y, w, h]) => `M${near(x)} ${near(y)}h${near(w)}v${near(h)}h${-near(w)}z`).join("");
      return `<path d="${d}" ${paint(s.fill, s.stroke, s.strokeWidth)}/>`;
    }
    if (s.area) return `<path d="${path(s.area)}z" fill="${colour(s.fill)}" fill-opacity=".25"/>`;
    if (s.line) return `<path d="${path(s.line)}" ${paint("", s.stroke, s.width, s.dash)} stroke-linejoin="round"/>`;
    return `<text x="${near(s.x)}" y="${near(s.y)}" font-size="${s.size}" fill="${colour(s.fill)}"`
      + (s.anchor ? ` text-anchor="${s.anchor}"` : "") + (s.bold ? ' font-weight="600"' : "") + `>${escaped(s.text)}</text>`;
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${Math.ceil(height)}" `
    + `viewBox="0 0 ${width} ${Math.ceil(height)}" font-family="Helvetica, Arial, sans-serif">${parts.join("")}</svg>`;
}

const onPaper = (name) => PAPER[name] ?? name;
const svgFile = (drawing, width) => svgOf(
  [{ boxes: [[0, 0, width, drawing.height]], fill: "panel" }, ...drawing.shapes], width, drawing.height, onPaper);

// One page of the size of the drawing. Text is Helvetica, which every reader has; characters beyond Latin-1 become ?.
function pdfFile(drawing, width) {
  const { shapes, height } = drawing, measure = document.createElement("canvas").getContext("2d"), out = [];
  const rgb = (name) => [1, 3, 5].map((i) => near(parseInt(onPaper(name).slice(i, i + 2), 16) / 255)).join(" ");
  const y = (value) => near(height - value), dashed = (dash) => `[${dash ?? ""}] 0 d`;
  const path = (points) => points.map(([px, py], i) => `${near(px)} ${y(py)} ${i ? "l" : "m"}`).join(" ");
  const latin = (text) => String(text).replace(/…/g, "...").replace(/–/g, "-").replace(/[^\x20-\xff]/g, "?").replace(/[\\()]/g, "\\$&");
  for (const s of shapes) {
    if (s.boxes) {
      const rects = s.boxes.map(([bx, by, w, h]) => `${near(bx)} ${y(by + h)} ${near(w)} ${near(h)} re`).join(" ");
      if (s.fill) out.push(`${rgb(s.fill)} rg`);
      if (s.stroke) out.push(`${rgb(s.stroke)} RG ${s.strokeWidth} w [] 0 d`);
      out.push(rects, s.fill && s.stroke ? "B" : s.fill ? "f" : "S");
    } else if (s.area) {
      out.push(`/Pale gs ${rgb(s.fill)} rg`, path(s.area), "f /Full gs");
    } else if (s.line) {
      if (s.line.length > 1) out.push(`${rgb(s.stroke)} RG ${s.width} w ${dashed(s.dash)}`, path(s.line), "S");
    } else {
      measure.font = `${s.bold ? "bold " : ""}${s.size}px Helvetica, Arial, sans-serif`;
      const shift = measure.measureText(s.text).width * ({ middle: 0.5, end: 1 }[s.anchor] ?? 0);
      out.push(`BT /${s.bold ? "Bold" : "Plain"} ${s.size} Tf ${rgb(s.fill)} rg ${near(s.x - shift)} ${y(s.y)} Td (${latin(s.text)}) Tj ET`);
    }
  }
  const content = out.join("\n"), font = (name) => `<</Type/Font/Subtype/Type1/BaseFont/${name}/Encoding/WinAnsiEncoding>>`;
  const objects = [
    "<</Type/Catalog/Pages 2 0 R>>",
    "<</Type/Pages/Kids[3 0 R]/Count 1>>",
    `<</Type/Page/Parent 2 0 R/MediaBox[0 0 ${width} ${Math.ceil(height)}]/Contents 4 0 R/Resources<</Font<</Plain 5 0 R`
      + "/Bold 6 0 R>>/ExtGState<</Pale<</ca .25>>/Full<</ca 1>>>>>>>>",
    `<</Length ${content.length}>>\nstream\n${content}\nendstream`,
    font("Helvetica"), font("Helvetica-Bold"),
  ];
  let text = "%PDF-1.4\n";
  const places = objects.map((body, i) => {
    const place = text.length;
    text += `${i + 1} 0 obj\n${body}\nendobj\n`;
    return place;
  });
  const table = places.map((place) => `${String(place).padStart(10, "0")} 00000 n \n`).join("");
  const end = `xref\n0 ${objects.length + 1}\n0000000000 65535 f \n${table}trailer\n<</Size ${objects.length + 1}/Root 1 0 R>>\nstartxref\n${text.length}\n%%EOF\n`;
  return Uint8Array.from(text + end, (c) => c.charCodeAt(0));
}

async function pngFile(drawing, width, sharp = 2) {
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([svgFile(drawing, width)], { type: "image/svg+xml" }));
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = width * sharp; canvas.height = drawing.height * sharp;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// --- charts on a page ---

// A drawing that is drawn again whenever its size or its view changes. make: (width) => {shapes, height}.
class Chart {
  constructor(div, make, view = null) {
    this.div = div; this.make = make; this.view = view; this.waiting = false;
    view?.charts.add(this);
    new ResizeObserver(() => { if (div.clientWidth !== this.width) this.redraw(); }).observe(div);
    this.draw();
  }
  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }
  draw() {
    this.width = this.div.clientWidth;
    if (!this.width) return;
    this.drawing = this.make(this.width);
    this.canvas ??= this.div.appendChild(document.createElement("div"));
    this.canvas.innerHTML = this.drawing ? svgOf(this.drawing.shapes, this.width, this.drawing.height) : "";
    this.canvas.firstChild?.setAttribute("aria-hidden", "true");
  }
}

// Timelines that answer: hover says what is there, a click picks it, dragging zooms, and keys do all of it:
// arrows go from block to block, + - 0 zoom, < > move.
class Timelines extends Chart {
  constructor(div, view, options = {}) {
    super(div, (width) => (options.pictures?.length ? timelineShapes(options.pictures, view, { ...options, width }) : null), view);
    this.options = options; this.picked = null;
    this.tip = div.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true }));
    this.band = div.appendChild(Object.assign(document.createElement("div"), { className: "band", hidden: true }));
    this.said = div.appendChild(Object.assign(document.createElement("p"), { className: "said" }));
    this.said.setAttribute("aria-live", "polite");
    div.tabIndex = 0;
    div.setAttribute("role", "application");
    div.setAttribute("aria-label", "timelines: arrow keys go from block to block, plus, minus and 0 zoom, < and > move");
    div.addEventListener("pointermove", (event) => this.hover(event));
    div.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    div.addEventListener("pointerdown", (event) => this.press(event));
    div.addEventListener("dblclick", () => view.reset());
    div.addEventListener("keydown", (event) => this.key(event));
    div.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      view.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(this.place(event).x));
    }, { passive: false });
  }
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }
  get scale() { return (this.width - LEFT - (this.options.right ?? 14)) / (this.view.to - this.view.from); }
  time(x) { return this.view.from + (x - LEFT) / this.scale; }
  // What is at a place: panel, rank, time, and its block or gap.
  find({ x, y }) {
    const at = (this.drawing?.panels ?? []).findIndex(({ picture, top, row }) => y >= top && y < top + picture.ranks * row);
    if (at < 0 || x < LEFT || x > this.width - (this.options.right ?? 14)) return null;
    const { picture, top, row } = this.drawing.panels[at], rank = Math.floor((y - top) / row), time = this.time(x);
    const share = (y - top) / row - rank;
    const lane = (i) => LANES[picture.blocks.lane[i]];
    const small = picture.beside[rank].find((i) => share >= lane(i)[0] && share < lane(i)[1]
      && picture.start(i) <= time && time < picture.end(i));
    const block = share < IDLE_LANE[1] ? picture.at(rank, time) : null;
    return { panel: at, picture, rank, time, block: block ?? small ?? null, gap: block === null ? picture.gapAt(rank, time) : null };
  }
  // The middle of a block on the screen.
  middle(panel, action) {
    const { picture, top, row } = this.drawing.panels[panel], i = picture.number.get(action);
    const box = this.canvas.getBoundingClientRect(), time = (picture.start(i) + picture.end(i)) / 2;
    return [box.left + LEFT + (time - this.view.from) * this.scale, box.top + top + (picture.blocks.rank[i] + 0.35) * row];
  }
  words({ picture, block, gap }) {
    if (block !== null) return [picture.blocks.action[block], picture.say(block)];
    if (gap) return [`idle: ${gap[3]}`, `${gap[4]}; from ${digits(gap[1] * picture.scale)}, for ${digits((gap[2] - gap[1]) * picture.scale)}`];
    return null;
  }
  hover(event) {
    const place = this.place(event), found = this.find(place), words = found && this.words(found);
    this.tip.hidden = !words;
    if (!words) return;
    this.tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: words[0] }), ` ${words[1]}`);
    const left = Math.max(0, Math.min(place.x + 14, this.width - this.tip.offsetWidth - 4));
    this.tip.style.transform = `translate(${left}px, ${place.y + 18 - this.canvas.offsetHeight}px)`;
  }
  press(event) {
    if (event.button) return;
    const from = this.place(event), held = this.find(from), moved = (e) => Math.abs(this.place(e).x - from.x) > 4;
    const carried = held && held.block !== null && this.options.carry?.(held);
    const box = this.canvas.getBoundingClientRect();
    const move = (e) => {
      if (!moved(e)) return;
      const x = this.place(e).x, [low, high] = carried ? [x - 8, x + 8] : [from.x, x].sort((a, b) => a - b);
      this.band.hidden = false;
      this.band.classList.toggle("carried", !!carried);
      Object.assign(this.band.style, { left: `${low}px`, width: `${high - low}px`, height: `${box.height - FOOT}px` });
    };
    const up = (e) => {
      if (!moved(e)) return held && this.pick(held);
      if (carried) return this.options.drop(held, this.find(this.place(e)) ?? { time: this.time(this.place(e).x) });
      const [low, high] = [this.time(from.x), this.time(this.place(e).x)].sort((a, b) => a - b);
      if (event.pointerType === "mouse") this.view.set(low, high);
    };
    whileHeld({ move, end: () => { this.band.hidden = true; }, up });
  }
  pick(found) {
    this.picked = found;
    const words = this.words(found);
    this.said.textContent = words ? `${words[0]}: ${words[1]}` : "";
    this.options.picked?.(found);
  }
  // An arrow goes to the next block of the rank, or to the block of the next rank at the same time.
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return; // the browser's
    const shifts = { "+": 0.5, "=": 0.5, "-": 2 }, moves = { "<": -0.25, ">": 0.25, PageUp: -0.9, PageDown: 0.9 };
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in shifts) this.view.zoom(shifts[event.key]);
    else if (event.key in moves) this.view.pan(moves[event.key]);
    else if (event.key === "0") this.view.reset();
    else if (event.key in arrows) this.step(...arrows[event.key]);
    else return;
    event.preventDefault();
  }
  step(along, across) {
    const panels = this.drawing?.panels ?? [];
    if (!panels.length) return;
    let { panel = 0, rank = 0, block = null } = this.picked ?? {};
    panel = Math.min(panel, panels.length - 1);
    const { picture } = panels[panel];
    const time = block === null ? 0 : picture.start(block);
    rank = Math.max(0, Math.min(picture.ranks - 1, rank + across));
    const row = picture.computing[rank], here = block === null ? -1 : row.indexOf(block);
    if (!row.length) return;
    const next = across || here < 0 ? picture.from(rank, time) : here + along;
    block = row[Math.max(0, Math.min(row.length - 1, next))];
    if (picture.start(block) < this.view.from || picture.end(block) > this.view.to) {
      const half = (this.view.to - this.view.from) / 2;
      this.view.set(picture.start(block) - half, picture.start(block) + half);
    }
    this.pick({ panel, picture, rank, time: picture.start(block), block, gap: null });
  }
}
