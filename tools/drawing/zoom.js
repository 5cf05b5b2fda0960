"use strict";
// Optional: without it a page shows the same, as a whole. A drag across a plot, or its buttons, show a part of the width;
// a double click shows all of it again. data-x: values at the left and at the right; data-y, of curves: value and
// pixels of the lowest and of the highest line, and whether the axis is logarithmic.
const WIDE = 10000;

// Round numbers within two values, about so many.
function ticksWithin(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(one => one * power).find(one => one >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({length: Math.max(0, last - first + 1)}, (_, at) => (first + at) * step);
}

// What a tick says, with the digits that tell it from its neighbours.
function tickText(value, span) {
  const places = Math.min(Math.max(0, 2 - Math.floor(Math.log10(span || 1))), 12);
  return Number(value.toFixed(places)).toLocaleString("en", {maximumFractionDigits: places});
}

// Between values and pixels of a vertical axis.
function axisOf(low, lowest, high, highest, isLog) {
  const to = isLog ? Math.log10 : one => one, from = isLog ? one => 10 ** one : one => one;
  return {
    valueAt: y => from(to(low) + (lowest - y) / (lowest - highest) * (to(high) - to(low))),
    yOf: value => lowest - (to(value) - to(low)) / (to(high) - to(low)) * (lowest - highest),
  };
}

// Least and most y of curves, as paths have them, between two shares of the width; null where there is none.
function reachOf(paths, from, to) {
  const ys = paths.flatMap(path => path.slice(1).split("L").map(point => point.split(" ").map(Number)))
    .filter(([x]) => x >= from * WIDE && x <= to * WIDE).map(([, y]) => y);
  return ys.length ? [Math.min(...ys), Math.max(...ys)] : null;
}

function zoomable(plot) {
  const figure = plot.closest("figure"), labels = figure.querySelector(".drawn > svg");
  const [left, right] = plot.dataset.x.split(" ").map(Number);
  const [low, lowest, high, highest, isLog] = (plot.dataset.y ?? "").split(" ").map(Number), axis = plot.dataset.y;
  const inside = [...plot.querySelectorAll("*")].filter(one => !one.closest("svg[viewBox]"));
  const placed = inside.filter(one => !one.matches(".whole") && ["x", "x1", "cx"].some(name => one.getAttribute(name)?.endsWith("%")));
  const kept = new Map([...placed, ...plot.querySelectorAll("svg[viewBox]")].map(one =>
    [one, Object.fromEntries([...one.attributes].map(({name, value}) => [name, value]))]));
  const add = (parent, name, attributes, text = "") => {
    const made = document.createElementNS(plot.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return parent.appendChild(made);
  };
  let from = 0, to = 1;

  function show(start, end) {
    const width = Math.min(1, Math.max(end - start, 0.002));
    from = Math.min(Math.max(0, start), 1 - width), to = from + width;
    const whole = width === 1, paths = [...plot.querySelectorAll("path.line")].map(one => one.getAttribute("d"));
    figure.querySelectorAll(".zoomed").forEach(one => one.remove());
    [...figure.querySelectorAll(".tick"), ...(axis ? labels.children : [])].forEach(one => one.style.display = whole ? "" : "none");
    const reach = axis && !whole && reachOf(paths, from, to);
    let [top, bottom] = reach || [highest, lowest];
    if (reach) [top, bottom] = [top - (bottom - top) * 0.06 - 0.01, bottom + (bottom - top) * 0.06 + 0.01];
    const y = value => highest + (value - top) / (bottom - top) * (lowest - highest);
    for (const [one, was] of kept) {
      if (was.viewBox) {
        const [, , , tall] = was.viewBox.split(" ").map(Number), scale = axis ? (bottom - top) / (lowest - highest) : 1;
        one.setAttribute("viewBox", `${from * WIDE} ${axis ? top - highest * scale : 0} ${width * WIDE} ${tall * scale}`);
        one.style.overflow = whole ? "" : "hidden";
        continue;
      }
      for (const name of ["x", "x1", "x2", "cx"]) if (was[name]?.endsWith("%")) {
        const share = (parseFloat(was[name]) / 100 - from) / width;
        one.setAttribute(name, `${100 * share}%`);
        if (name !== "x2") one.style.visibility = share < -1e-4 || share > 1.0001 ? "hidden" : "";
      }
      if (was.class?.match(/^(axis|grid)$/)) one.setAttribute("x1", "0%"), one.setAttribute("x2", "100%"), one.style.visibility = "";
      if (axis && was.cy) one.setAttribute("cy", y(Number(was.cy)));
    }
    buttons.forEach((button, at) => button.disabled = whole && at > 0);
    if (whole) return;
    const edge = Number([...plot.children].findLast(one => one.matches("line.axis:not(.tick)")).getAttribute("y1"));
    const begin = left + from * (right - left), stop = left + to * (right - left);
    for (const tick of ticksWithin(begin, stop, 6)) {
      const x = `${100 * (tick - begin) / (stop - begin)}%`;
      add(plot, "line", {class: "axis zoomed", x1: x, x2: x, y1: edge, y2: edge + 4});
      add(plot, "text", {class: "zoomed", x, y: edge + 16, "text-anchor": "middle"}, tickText(tick, stop - begin));
    }
    if (!axis) return;
    const {valueAt, yOf} = axisOf(low, lowest, high, highest, isLog), [least, most] = [valueAt(bottom), valueAt(top)];
    for (const tick of ticksWithin(least, most, 5)) if (!isLog || tick > 0) {
      const at = y(yOf(tick));
      add(plot, "line", {class: "grid zoomed", x1: "0%", x2: "100%", y1: at, y2: at});
      add(labels, "text", {class: "zoomed", x: 45, y: at + 4, "text-anchor": "end"}, tickText(tick, most - least));
    }
  }

  const bar = document.createElement("span"), moves = [
    ["+", "zoom in", () => show(from + (to - from) / 4, to - (to - from) / 4)],
    ["−", "zoom out", () => show(from - (to - from) / 2, to + (to - from) / 2)],
    ["◂", "earlier", () => show(from - (to - from) / 2, to - (to - from) / 2)],
    ["▸", "later", () => show(from + (to - from) / 2, to + (to - from) / 2)],
  ];
  const buttons = moves.map(([text, title, move]) => {
    const button = document.createElement("button");
    Object.assign(button, {type: "button", textContent: text, title, onclick: move});
    return bar.appendChild(button);
  });
  bar.className = "zoom";
  figure.querySelector("figcaption").prepend(bar);
  show(0, 1);
  const shareOf = event => {
    const {left: edge, width} = plot.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - edge) / width));
  };
  let begun = null, band = null;
  plot.style.pointerEvents = "bounding-box";
  plot.addEventListener("pointerdown", event => {
    if (event.pointerType === "touch" || event.button) return;  // a finger scrolls the page
    event.preventDefault();
    plot.setPointerCapture(event.pointerId);
    begun = shareOf(event);
    band = add(plot, "rect", {class: "band", y: 0, height: "100%", x: 0, width: 0});
  });
  plot.addEventListener("pointermove", event => {
    if (begun === null) return;
    const now = shareOf(event);
    band.setAttribute("x", `${100 * Math.min(begun, now)}%`);
    band.setAttribute("width", `${100 * Math.abs(now - begun)}%`);
  });
  for (const kind of ["pointerup", "pointercancel"]) plot.addEventListener(kind, event => {
    if (begun === null) return;
    const [one, other] = [begun, shareOf(event)].sort((a, b) => a - b), width = to - from;
    band.remove();
    begun = null;
    if (kind === "pointerup" && other - one > 0.01) show(from + one * width, from + other * width);
  });
  plot.addEventListener("dblclick", () => show(0, 1));
}

document.querySelectorAll("figure svg[data-x]").forEach(zoomable);
