// Draws the embedded figures; timelines and memory share their time axis.
const embedded = (name) => {
  const data = document.getElementById(`${name}-data`);
  return data && JSON.parse(data.textContent);
};
const given = { timelines: embedded("timelines"), memory: embedded("memory"), loss: embedded("loss") };
const pictures = (given.timelines ?? []).map((one) => new Picture(one));
const ends = [...pictures.map((one) => one.span), ...(given.memory?.curves ?? []).map((c) => c.points.at(-1)[0])];
const view = new View(Math.max(...ends, 1e-9));
const options = { pictures, path: false };
const timelines = given.timelines && new Timelines(document.getElementById("timelines"), view, options);
if (given.memory) {
  const title = pictures[0]?.unit ? `time, ${pictures[0].unit}` : "time";
  new Chart(document.getElementById("memory"), (width) => memoryShapes(given.memory, view, { width, title }), view);
}
if (given.loss) {
  new Chart(document.getElementById("loss"), (width) => plotShapes({ series: given.loss, x: "step", y: "loss" }, width));
}
document.getElementById("critical-path")?.addEventListener("change", (event) => {
  options.path = event.target.checked;
  view.changed();
});
document.body.dataset.drawn = "yes";
