// Elements from code, and figures as text. All text is set as text: nothing that comes from a request is ever parsed.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

// make("td", {class: "number"}, "12", otherElement): `on…` are listeners, other names attributes; false and null are left out.
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// Writes only what differs, so that a reader's selection and a screen reader are left alone.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const NOTHING = "–";

function digits(value, most) {
  return value.toLocaleString("en", {maximumSignificantDigits: most, useGrouping: true});
}

export function count(value) {
  return value === null || value === undefined ? NOTHING : Math.round(value).toLocaleString("en");
}

export function rate(value) {
  if (value === null || value === undefined) return NOTHING;
  return value >= 1e5 ? `${digits(value / 1e3, 3)} k` : digits(value, value < 1 ? 2 : 3);
}

export function share(value) {
  return value === null || value === undefined ? NOTHING : `${digits(value * 100, 3)} %`;
}

export function time(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  if (seconds === 0) return "0 ms";
  if (seconds < 0.0001) return `${digits(seconds * 1e6, 2)} µs`;
  if (seconds < 1) return `${digits(seconds * 1e3, 3)} ms`;
  if (seconds < 120) return `${digits(seconds, 3)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${digits(seconds / 3600, 2)} h`;
}

export const micros = (value) => time(value === null || value === undefined ? null : value / 1e6);

export function bytes(value) {
  if (value === null || value === undefined) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${digits(value, 3)} ${units[power]}`;
}

export function clock(unixMs) {
  return new Date(unixMs).toLocaleTimeString("en-GB");
}
