// Line charts as SVG. Series differ by dashes and weight as well as by colour, and the legend says their values.

import {draw, make, say} from "./dom.js";

const HEIGHT = 150;
const LEFT = 52;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;

// One chart: `series` are {name, column, style}, `show` turns a value into text, `target` is a level to be drawn, or null.
export class Chart {
  constructor(title, series, show, {most = null} = {}) {
    this.title = title;
    this.series = series;
    this.show = show;
    this.most = most;
    this.target = null;
    this.data = {times: [], columns: {}};
    this.at = null;
    this.values = series.map(() => make("span", {class: "value"}, "–"));
    const legend = make("ul", {class: "chart-legend"}, ...series.map((one, index) => make(
      "li", {},
      draw("svg", {width: 26, height: 10, "aria-hidden": "true"}, draw("path", {class: `line ${one.style}`, d: "M1 5H25"})),
      make("span", {}, one.name), this.values[index],
    )));
    this.when = make("span", {class: "when"});
    this.plot = draw("svg", {class: "plot", height: HEIGHT, role: "img", tabindex: "0"});
    this.element = make("figure", {class: "chart panel"}, make("figcaption", {}, make("h3", {}, title), this.when), legend, this.plot);
    this.plot.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.plot.addEventListener("pointerleave", () => this.#pick(null));
    this.plot.addEventListener("blur", () => this.#pick(null));
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  update(times, columns, span, target = null) {
    const first = Math.max(0, times.findIndex((at) => at > times.at(-1) - span));
    this.data = {
      times: times.slice(first),
      columns: Object.fromEntries(this.series.map(({column}) => [column, columns[column].slice(first)])),
    };
    this.span = span;
    this.target = target;
    this.#draw();
  }

  #point(x) {
    const {times} = this.data;
    if (!times.length) return;
    const wanted = times.at(-1) - (1 - (x - LEFT) / this.inner) * this.span;
    let best = 0;
    times.forEach((at, index) => {
      if (Math.abs(at - wanted) < Math.abs(times[best] - wanted)) best = index;
    });
    this.#pick(times[best]);
  }

  #key(event) {
    const {times} = this.data;
    const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -times.length, End: times.length}[event.key];
    if (event.key === "Escape") this.#pick(null);
    if (!step || !times.length) return;
    event.preventDefault();
    const from = this.at === null ? times.length : times.indexOf(this.at);
    this.#pick(times[Math.min(times.length - 1, Math.max(0, from + step))]);
  }

  #pick(at) {
    this.at = at;
    this.#draw();
  }

  #draw() {
    const width = this.plot.parentElement.clientWidth - 24;
    if (width <= 0) return;
    const {times, columns} = this.data;
    this.inner = width - LEFT - RIGHT;
    const values = Object.values(columns).flat().filter((value) => value !== null);
    const hasTarget = this.target !== null && values.length && this.target <= 4 * Math.max(...values);
    const [top, step] = scale(this.most ?? Math.max(...values, hasTarget ? this.target : 0, 0));
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    const x = (at) => LEFT + this.inner * (1 - (times.at(-1) - at) / this.span);
    const parts = [];
    for (let level = 0; level <= top * 1.001; level += step) {
      parts.push(draw("path", {class: "grid", d: `M${LEFT} ${y(level)}H${width - RIGHT}`}));
      parts.push(draw("text", {class: "tick", x: LEFT - 6, y: y(level) + 4, "text-anchor": "end"}, this.show(level)));
    }
    for (const [text, share, anchor] of [[`${ago(this.span)} ago`, 0, "start"], [ago(this.span / 2), 0.5, "middle"], ["now", 1, "end"]]) {
      parts.push(draw("text", {class: "tick", x: LEFT + this.inner * share, y: HEIGHT - 4, "text-anchor": anchor}, text));
    }
    if (hasTarget) {
      parts.push(draw("path", {class: "target", d: `M${LEFT} ${y(this.target)}H${width - RIGHT}`}));
      parts.push(draw("text", {class: "tick", x: LEFT + 4, y: y(this.target) + (this.target > 0.85 * top ? 13 : -4)}, "target"));
    }
    for (const {column, style} of this.series) {
      parts.push(draw("path", {class: `line ${style}`, d: path(times, columns[column] ?? [], x, y)}));
    }
    if (!values.length) {
      parts.push(draw("text", {class: "empty", x: LEFT + this.inner / 2, y: HEIGHT / 2, "text-anchor": "middle"}, "nothing yet"));
    }
    const picked = this.at === null ? -1 : times.indexOf(this.at);
    if (picked >= 0) {
      parts.push(draw("path", {class: "cursor", d: `M${x(times[picked])} ${TOP}V${HEIGHT - BOTTOM}`}));
    }
    this.plot.setAttribute("width", width);
    this.plot.replaceChildren(...parts);
    this.#read(picked >= 0 ? picked : times.length - 1, picked >= 0);
  }

  #read(index, isPicked) {
    const {times, columns} = this.data;
    const when = isPicked ? `${ago(times.at(-1) - times[index])} ago` : "";
    const said = this.series.map(({name, column}, position) => {
      const value = this.show(columns[column]?.[index] ?? null);
      say(this.values[position], value);
      return `${name} ${value}`;
    });
    say(this.when, when);
    this.plot.setAttribute("aria-label", `${this.title}${when ? `, ${when}` : ""}: ${said.join(", ")}`);
  }
}

// A line with gaps where nothing is known; a point alone between two gaps is a short dash.
function path(times, values, x, y) {
  let d = "";
  let isDown = false;
  values.forEach((value, index) => {
    if (value === null) {
      isDown = false;
      return;
    }
    const isAlone = !isDown && (values[index + 1] ?? null) === null;
    d += `${isDown ? "L" : "M"}${x(times[index]).toFixed(1)} ${y(value).toFixed(1)}${isAlone ? "h1.5" : ""}`;
    isDown = true;
  });
  return d;
}

// The least round number that is not below `most`, and a step of which it is a few.
function scale(most) {
  if (!(most > 0)) return [1, 0.5];
  const power = 10 ** Math.floor(Math.log10(most));
  const top = [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((factor) => factor * power >= most * 0.999) * power;
  const factor = Math.round((top / power) * 10) / 10;
  const steps = {1: 2, 1.5: 3, 2: 2, 3: 3, 4: 4, 5: 5, 6: 3, 8: 4, 10: 2}[factor] ?? 2;
  return [top, top / steps];
}

function ago(seconds) {
  return seconds >= 90 ? `${Math.round(seconds / 6) / 10} min` : `${Math.round(seconds)} s`;
}
