// Memory over the run, stacked by category, with what the allocator holds and what the GPU has.

const LEFT = 64, RIGHT = 14, TOP = 26, BOTTOM = 24, TALL = 300;

function memoryChart(devices) {
  const canvas = document.getElementById("memory-canvas");
  const choice = document.getElementById("memory-choice");
  const charts = devices.map((one) => ({
    ...one, names: Object.keys(one.categories), layers: Object.values(one.categories).map((text) => unpack(text, Uint32Array)), held: unpack(one.reserved, Uint32Array),
  }));
  let chart = charts[0], pointed = null;

  const word = (name) => name.replaceAll("_", " ");
  const total = (i) => chart.layers.reduce((sum, layer) => sum + layer[i], 0);
  const when = (value) => (chart.timed ? seconds(value) : `event ${Math.round(value).toLocaleString("en-US")}`);

  function draw() {
    legend(document.getElementById("memory-legend"), [...chart.names.map((name) => [name, word(name)]), ["ink", "reserved by PyTorch"]]);
    const { context, width, height } = fitted(canvas, TALL);
    const first = chart.at[0], last = chart.at[chart.at.length - 1] || 1, count = chart.at.length;
    const most = chart.held.reduce((high, value) => Math.max(high, value), 1);
    const needed = chart.asked ? total(chart.peak) + chart.asked : most;
    const inSight = needed + chart.outside > 0.35 * chart.capacity; // else capacity would press the chart flat
    const limit = inSight ? Math.max(chart.capacity, Math.min(needed, 1.5 * chart.capacity)) * 1.06 : most * 1.25;
    const x = (value) => LEFT + (value - first) / (last - first || 1) * (width - LEFT - RIGHT);
    const y = (value) => height - BOTTOM - value / limit * (height - TOP - BOTTOM);
    chart.x = x;

    context.strokeStyle = colour("grid");
    context.fillStyle = colour("dim");
    context.textAlign = "right";
    const [unit, scale] = limit > 1048576 ? ["GiB", 1048576] : limit > 1024 ? ["MiB", 1024] : ["KiB", 1];
    for (const value of ticks(0, limit / scale, 5)) {
      context.beginPath(); context.moveTo(LEFT, y(value * scale)); context.lineTo(width - RIGHT, y(value * scale)); context.stroke();
      context.fillText(`${+value.toPrecision(3)} ${unit}`, LEFT - 8, y(value * scale));
    }
    context.textAlign = "center";
    for (const value of ticks(first, last, Math.max(2, width / 160))) if (chart.timed || Number.isInteger(value)) context.fillText(when(value), Math.min(x(value), width - 30), height - BOTTOM / 2);
    context.textAlign = "left";

    const below = new Float64Array(count);
    chart.layers.forEach((layer, place) => {
      context.beginPath();
      context.moveTo(x(chart.at[0]), y(below[0]));
      for (let i = 0; i < count; i++) { if (i) context.lineTo(x(chart.at[i]), y(below[i - 1])); context.lineTo(x(chart.at[i]), y(below[i])); }
      for (let i = count - 1; i >= 0; i--) {
        below[i] += layer[i];
        context.lineTo(x(chart.at[i]), y(below[i]));
        if (i) context.lineTo(x(chart.at[i]), y(below[i - 1] + layer[i - 1]));
      }
      context.fillStyle = colour(chart.names[place]);
      context.fill();
    });

    context.strokeStyle = colour("ink");
    context.lineWidth = 1.4;
    context.beginPath();
    for (let i = 0; i < count; i++) { if (i) context.lineTo(x(chart.at[i]), y(chart.held[i - 1])); context.lineTo(x(chart.at[i]), y(chart.held[i])); }
    context.stroke();
    context.lineWidth = 1;
    steps(context, x, height);
    capacity(context, y, width, inSight);
    peak(context, x, y, width);
    if (chart.asked) missing(context, x, y, limit, width);
    if (pointed !== null) {
      context.strokeStyle = colour("ink");
      context.beginPath(); context.moveTo(x(chart.at[pointed]), TOP); context.lineTo(x(chart.at[pointed]), height - BOTTOM); context.stroke();
    }
  }

  function steps(context, x, height) {
    context.strokeStyle = colour("dim");
    context.fillStyle = colour("dim");
    context.setLineDash([3, 3]);
    let before = LEFT;
    chart.steps.forEach((at, place) => {
      context.beginPath(); context.moveTo(x(at), TOP); context.lineTo(x(at), height - BOTTOM); context.stroke();
      if (x(at) - before > 52) context.fillText(`step ${place + 1}`, before + 5, TOP - 9);
      before = x(at);
    });
    context.setLineDash([]);
  }

  function capacity(context, y, width, inSight) {
    const room = chart.capacity - chart.outside;
    context.fillStyle = colour("bad");
    if (!inSight) {
      context.textAlign = "right";
      context.fillText(`capacity ${kib(chart.capacity)} is above the chart`, width - RIGHT - 4, TOP + 8);
    } else {
      context.strokeStyle = colour("bad");
      context.beginPath(); context.moveTo(LEFT, y(room)); context.lineTo(width - RIGHT, y(room)); context.stroke();
      context.textAlign = "right";
      context.fillText(`room for PyTorch: ${kib(room)} of ${kib(chart.capacity)}`, width - RIGHT, y(room) + 10);
    }
    context.textAlign = "left";
  }

  function peak(context, x, y, width) {
    const i = chart.peak, px = x(chart.at[i]), py = y(total(i)), { moment, module, source } = chart.where;
    context.fillStyle = colour("ink");
    context.beginPath(); context.arc(px, py, 3.5, 0, 7); context.fill();
    const text = [`peak ${kib(total(i))}`, moment, module, source.split(/[\\/]/).pop()].filter(Boolean).join(" · ");
    const wide = Math.min(context.measureText(text).width, width - LEFT - RIGHT - 20);
    const left = Math.min(Math.max(LEFT + 4, px + 8), width - RIGHT - wide - 8), up = py - 13;
    context.fillStyle = colour("sheet");
    context.globalAlpha = 0.88;
    context.fillRect(left - 4, up - 8, wide + 8, 16);
    context.globalAlpha = 1;
    context.fillStyle = colour("ink");
    context.fillText(cut(context, text, wide + 1), left, up);
  }

  // What was asked for where memory ran out, on top of what was there.
  function missing(context, x, y, limit, width) {
    const i = chart.peak, px = Math.min(x(chart.at[i]), width - RIGHT - 1), base = total(i);
    context.strokeStyle = context.fillStyle = colour("bad");
    context.lineWidth = 2;
    context.setLineDash([5, 3]);
    context.beginPath(); context.moveTo(px, y(base)); context.lineTo(px, y(Math.min(base + chart.asked, limit))); context.stroke();
    context.setLineDash([]);
    context.lineWidth = 1;
    context.textAlign = px > width / 2 ? "right" : "left";
    context.fillText(`requests ${kib(chart.asked)}`, px + (px > width / 2 ? -8 : 8), y(Math.min(base + chart.asked / 2, limit * 0.8)));
    context.textAlign = "left";
  }

  function point(i, clientX, clientY) {
    pointed = i;
    showTip([
      ["title", `${kib(total(i))} allocated`], ["figure", `${kib(chart.held[i])} reserved`],
      ...chart.names.map((name, place) => ["", chart.layers[place][i] ? `${word(name)} ${kib(chart.layers[place][i])}` : ""]), ["", `at ${when(chart.at[i])}`],
    ], clientX, clientY);
    draw();
  }

  function nearest(x) {
    let best = 0;
    for (let i = 0; i < chart.at.length; i++) if (Math.abs(chart.x(chart.at[i]) - x) <= Math.abs(chart.x(chart.at[best]) - x)) best = i;
    return best;
  }

  canvas.addEventListener("pointermove", (event) => point(nearest(event.offsetX), event.clientX, event.clientY));
  const leave = () => { pointed = null; hideTip(); draw(); };
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const i = Math.min(Math.max((pointed === null ? chart.peak : pointed) + by, 0), chart.at.length - 1), place = canvas.getBoundingClientRect();
    point(i, place.left + chart.x(chart.at[i]), place.top + TALL / 2);
  });
  if (choice) choice.addEventListener("change", () => {
    chart = charts[+choice.value];
    pointed = null;
    for (const table of document.querySelectorAll(".at-peak")) table.hidden = table.dataset.device !== choice.value;
    draw();
  });
  drawings.push(draw);
  draw();
}

if (DATA.memory.length) memoryChart(DATA.memory);
