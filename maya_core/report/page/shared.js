"use strict";
// Used by both charts: the page's data, colours, number formats, and the tooltip. Names from the program are only set as text.

const DATA = JSON.parse(document.getElementById("data").textContent);

function unpack(text, type) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new type(bytes.buffer); // little-endian, as every browser's machine is
}

let palette = {};
function colour(name) {
  if (!(name in palette)) {
    const style = getComputedStyle(document.documentElement);
    palette[name] = style.getPropertyValue("--" + name).trim() || style.getPropertyValue("--other").trim();
  }
  return palette[name];
}

function digits(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en-US") : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function seconds(value) {
  const size = Math.abs(value);
  if (size >= 0.9995) return digits(value) + " s";
  if (size >= 0.9995e-3) return digits(value * 1e3) + " ms";
  if (size >= 0.9995e-6) return digits(value * 1e6) + " µs";
  return value ? Math.round(value * 1e9) + " ns" : "0 s";
}

// A time with enough digits to distinguish moments that are `apart` seconds apart: 600.25 ms
function moment(value, apart) {
  const [unit, scale] = Math.abs(value) >= 0.9995 ? ["s", 1] : Math.abs(value) >= 0.9995e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return value ? `${(value * scale).toFixed(Math.max(0, Math.ceil(-Math.log10(apart * scale) - 1e-9)))} ${unit}` : "0 s";
}

function kib(value) {
  return value >= 1048576 ? digits(value / 1048576) + " GiB" : value >= 1024 ? digits(value / 1024) + " MiB" : value + " KiB";
}

// Round numbers that divide a range into about `parts` parts.
function ticks(from, to, parts) {
  const rough = (to - from) / parts;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(from / step); n * step <= to; n++) found.push(n * step);
  return found;
}

// A canvas in CSS pixels, sharp on any screen.
function fitted(canvas, height) {
  const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return { context, width, height };
}

// What waits is hatched: told apart without colour too.
function hatched(context, name) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour(name);
  pen.lineWidth = 1.6;
  pen.beginPath();
  for (const shift of [-6, 0, 6]) { pen.moveTo(shift - 1, 7); pen.lineTo(shift + 7, -1); }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

function cut(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let kept = Math.floor(text.length * width / context.measureText(text).width) - 1;
  return kept > 1 ? text.slice(0, kept) + "…" : "";
}

const tip = document.getElementById("tip");

// Lines are [kind, text].
function showTip(lines, x, y) {
  tip.replaceChildren(...lines.filter((line) => line[1]).map(([kind, text]) => {
    const line = document.createElement(kind === "title" ? "b" : "div");
    if (kind === "figure") line.className = "figure";
    line.textContent = text;
    return line;
  }));
  tip.hidden = false;
  const left = x + 16 + tip.offsetWidth > window.innerWidth ? x - 12 - tip.offsetWidth : x + 16;
  const top = y + 16 + tip.offsetHeight > window.innerHeight ? y - 12 - tip.offsetHeight : y + 16;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, top) + "px";
}

function hideTip() { tip.hidden = true; }

function legend(list, entries) {
  list.replaceChildren(...entries.map(([name, label, hatch]) => {
    const item = document.createElement("li");
    const swatch = document.createElement("canvas");
    swatch.width = 28; swatch.height = 22;
    const pen = swatch.getContext("2d");
    pen.scale(2, 2);
    pen.fillStyle = hatch ? hatched(pen, name) : colour(name);
    pen.fillRect(0, 0, 14, 11);
    item.append(swatch, label);
    return item;
  }));
}

const drawings = [];
function redraw() { palette = {}; for (const draw of drawings) draw(); }
window.addEventListener("resize", redraw);
window.addEventListener("beforeprint", redraw);
window.addEventListener("afterprint", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
