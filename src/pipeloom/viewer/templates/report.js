"use strict";
// Draws the embedded figures, dresses them in the page's colours, and keeps their time axes together.
const dark = matchMedia("(prefers-color-scheme: dark)");
const settings = {
  responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset",
};
// Under a finger, dragging scrolls the page.
const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
const figures = [...document.querySelectorAll(".figure")].map((div) => ({
  div, spec: JSON.parse(document.getElementById(div.id + "-data").textContent),
}));

function template() {
  const css = getComputedStyle(document.documentElement);
  const read = (name) => css.getPropertyValue(name).trim();
  const axis = { gridcolor: read("--grid"), linecolor: read("--line"), tickcolor: read("--line"), automargin: false };
  return { layout: {
    font: { family: getComputedStyle(document.body).fontFamily, color: read("--ink"), size: 12 },
    xaxis: axis, yaxis: axis,
    hoverlabel: { bgcolor: read("--panel"), bordercolor: read("--soft"), font: { color: read("--ink"), size: 13 } },
  } };
}

function draw() {
  return Promise.all(figures.map(({ div, spec }) =>
    Plotly.react(div, spec.data, { ...spec.layout, dragmode, uirevision: "zoom is kept", template: template() }, settings)));
}

function follow(leader, other) {
  leader.on("plotly_relayout", () => {
    const range = leader.layout.xaxis.range;
    const same = other.layout.xaxis.range.every((end, i) => Math.abs(end - range[i]) < 1e-9);
    if (!same) Plotly.relayout(other, { "xaxis.range": [...range] });
  });
}

// The switch changes the figure's own data, so that a change of colours does not undo it.
function showPath(visible) {
  const { div, spec } = figures.find((figure) => figure.div.id === "timelines");
  const lines = spec.data.flatMap((trace, i) => trace.name === "critical path" ? [i] : []);
  for (const i of lines) spec.data[i].visible = visible;
  return Plotly.restyle(div, { visible }, lines);
}

draw().then(() => {
  const path = document.getElementById("critical-path");
  if (path) path.addEventListener("change", () => showPath(path.checked));
  const timelines = document.getElementById("timelines"), memory = document.getElementById("memory");
  if (timelines && memory) { follow(timelines, memory); follow(memory, timelines); }
  dark.addEventListener("change", draw);
  document.body.dataset.drawn = "yes";
});
