// The timeline: one row for the host of each rank, and one for each stream. The spans of a row are sorted and do not overlap.

const PHASES = ["forward", "backward", "recomputation", "optimizer", "validation"];
const GUTTER = 196, ROW = 17, HOST_ROW = 10, HEAD = 20, AXIS = 24, WAITS = 8;

function timelineChart(data) {
  const canvas = document.getElementById("timeline-canvas");
  const tick = data.tick_s;
  const whole = [data.window[0], data.window[1]];
  const home = [...whole];
  const edge = [Math.min(0, home[0]), Math.max(data.last, home[1])];
  let view = [...home];
  let chosen = null; // {row, span}
  const rows = [];

  for (const rank of data.ranks) {
    rows.push({ head: `rank ${rank.rank}`, height: HEAD });
    const host = { host: true, rank: rank.rank, name: "host", note: "", height: HOST_ROW };
    rows.push(host);
    const streams = rank.rows.map((row) => {
      const start = unpack(row.start, Uint32Array), length = unpack(row.length, Uint32Array);
      const end = Float64Array.from(start, (at, i) => at + length[i]);
      return {
        rank: rank.rank, name: row.name, note: row.note, height: ROW, start, end, issued: unpack(row.issued, Uint32Array),
        what: unpack(row.what, Uint32Array), module: unpack(row.module, Uint32Array), how: unpack(row.how, Uint8Array),
      };
    });
    rows.push(...streams);
    issue(host, streams, rank.syncs);
  }
  const height = AXIS + rows.reduce((sum, row) => sum + row.height, 0) + 6;
  let top = AXIS;
  for (const row of rows) { row.top = top; top += row.height; }

  // The row of the host: the time between one issued item and the next, and where it waits.
  function issue(host, streams, syncs) {
    const all = [];
    for (const stream of streams)
      for (let i = 0; i < stream.start.length; i++)
        if (!(i && (stream.how[i - 1] & WAITS) && stream.issued[i] === stream.issued[i - 1])) all.push([stream.issued[i], stream, i]);
    for (const [start, end, text] of syncs) all.push([end, null, -1, start, text]);
    all.sort((a, b) => a[0] - b[0]);
    host.start = new Float64Array(all.length);
    host.end = new Float64Array(all.length);
    host.of = all;
    let before = all.length ? Math.max(0, all[0][0] - 1e-5 / tick) : 0;
    all.forEach(([at, stream, , start], i) => {
      host.start[i] = stream ? before : Math.max(before, start);
      host.end[i] = at;
      before = at;
    });
  }

  const used = new Set();
  for (const row of rows) if (row.what) for (const what of row.what) used.add(data.whats[what][2]);
  const known = Object.keys(data.families).filter((name) => used.has(name));
  const entries = () => [
    ...known.map((name) => [name, data.families[name]]), ...(used.has("communication") ? [["communication", "waiting for other ranks", true]] : []),
    ["host", "host issues"], ...(data.ranks.some((rank) => rank.syncs.length) ? [["host", "host waits", true]] : []),
  ];

  const at = (value, width) => GUTTER + (value - view[0]) / (view[1] - view[0]) * (width - GUTTER);

  function first(row, value) { // that ends after it
    let low = 0, high = row.end.length;
    while (low < high) { const mid = (low + high) >> 1; if (row.end[mid] <= value) low = mid + 1; else high = mid; }
    return low;
  }

  function draw() {
    legend(document.getElementById("timeline-legend"), entries());
    const { context, width } = fitted(canvas, height);
    const waiting = hatched(context, "communication"), idle = hatched(context, "host");
    axis(context, width);
    for (const row of rows) label(context, row, width);
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, width - GUTTER, height - AXIS);
    context.clip();
    for (const row of rows) if (row.start) spans(context, row, width, row.host ? idle : waiting);
    for (const row of rows) if (row.host && row.end.length && row.end[row.end.length - 1] <= view[0]) ahead(context, row);
    steps(context, width);
    context.restore();
    if (chosen) outline(context, width);
    const size = (view[1] - view[0]) * tick;
    const text = `${moment((view[0] - whole[0]) * tick, size / 100)} to ${moment((view[1] - whole[0]) * tick, size / 100)} · ${seconds(size)} shown`;
    document.getElementById("range").textContent = text;
  }

  function axis(context, width) {
    context.strokeStyle = colour("grid");
    context.fillStyle = colour("dim");
    context.textAlign = "center";
    const from = (view[0] - whole[0]) * tick, to = (view[1] - whole[0]) * tick;
    const marks = ticks(from, to, Math.max(2, (width - GUTTER) / 120)), apart = marks.length > 1 ? marks[1] - marks[0] : to - from;
    for (const value of marks) {
      const x = at(value / tick + whole[0], width);
      context.beginPath(); context.moveTo(x, AXIS - 4); context.lineTo(x, height); context.stroke();
      if (x > GUTTER + 12 && x < width - 24) context.fillText(moment(value, apart), x, AXIS / 2);
    }
    context.textAlign = "left";
  }

  function label(context, row, width) {
    if (row.head) {
      context.fillStyle = colour("ink");
      context.font = "600 12px system-ui, sans-serif";
      context.fillText(row.head, 0, row.top + row.height / 2 + 2);
      context.font = "11px system-ui, sans-serif";
      context.strokeStyle = colour("line");
      context.beginPath(); context.moveTo(0, row.top + 0.5); context.lineTo(width, row.top + 0.5); context.stroke();
      return;
    }
    context.fillStyle = colour("dim");
    const text = row.note ? `${row.name} · ${row.note}` : row.name;
    context.fillText(cut(context, text, GUTTER - 18), 10, row.top + row.height / 2);
  }

  function fill(context, row, i, pattern) {
    if (row.host) return row.of[i][1] ? colour("host") : pattern;
    return row.how[i] & WAITS ? pattern : colour(data.whats[row.what[i]][2]);
  }

  // Spans narrower than a pixel are combined: the pixel gets the colour that fills most of it, as opaque as they fill it.
  function spans(context, row, width, pattern) {
    const y = row.top + 1.5, tall = row.height - 3, perTick = (width - GUTTER) / (view[1] - view[0]);
    let pixel = -1, shares = new Map();
    const flush = () => {
      if (!shares.size) return;
      let best = null, most = 0, sum = 0;
      for (const [style, share] of shares) { sum += share; if (share > most) { most = share; best = style; } }
      context.globalAlpha = Math.min(1, 0.5 + 0.8 * sum);
      context.fillStyle = best;
      context.fillRect(pixel, y, 1, tall);
      context.globalAlpha = 1;
      shares = new Map();
    };
    for (let i = first(row, view[0]); i < row.start.length && row.start[i] < view[1]; i++) {
      const x = at(Math.max(row.start[i], view[0]), width), wide = (Math.min(row.end[i], view[1]) - Math.max(row.start[i], view[0])) * perTick;
      const style = fill(context, row, i, pattern);
      if (wide < 1) {
        if (Math.floor(x) !== pixel) { flush(); pixel = Math.floor(x); }
        shares.set(style, (shares.get(style) || 0) + wide);
        continue;
      }
      flush();
      context.fillStyle = style;
      context.fillRect(x, y, wide > 3 ? wide - 0.5 : wide, tall);
      if (wide > 34 && !row.host && !(row.how[i] & WAITS)) {
        context.fillStyle = colour("on-span");
        const text = cut(context, data.whats[row.what[i]][0], wide - 8);
        if (text) context.fillText(text, x + 4, row.top + row.height / 2 + 0.5);
      }
    }
    flush();
  }

  function steps(context, width) {
    context.strokeStyle = colour("ink");
    context.fillStyle = colour("ink");
    context.setLineDash([3, 3]);
    let begin = whole[0];
    for (const step of data.steps) {
      const x = Math.min(at(step.end, width), width - 0.5 + Math.max(0, at(step.end, width) - width - 1));
      context.beginPath(); context.moveTo(x, AXIS); context.lineTo(x, height); context.stroke();
      const left = Math.max(GUTTER, at(begin, width));
      if (x > left + 60) context.fillText(`step ${step.number}`, left + 5, AXIS + HEAD / 2 + 1);
      begin = step.end;
    }
    context.setLineDash([]);
  }

  // The host is so far ahead that none of its work is in the window.
  function ahead(context, row) {
    context.fillStyle = colour("dim");
    context.fillText(`← everything was issued ${seconds((view[0] - row.end[row.end.length - 1]) * tick)} before`, GUTTER + 5, row.top + row.height / 2);
  }

  function outline(context, width) {
    const { row, span } = chosen, x = at(row.start[span], width), end = at(row.end[span], width);
    if (end < GUTTER || x > width) return;
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.5;
    context.strokeRect(Math.max(GUTTER, x) - 0.5, row.top + 0.5, Math.max(2, Math.min(width, end) - Math.max(GUTTER, x)), row.height - 1);
    context.lineWidth = 1;
  }

  // The span under the pointer, or the nearest one within three pixels.
  function under(x, y) {
    const width = canvas.clientWidth;
    const row = rows.find((each) => each.start && y >= each.top && y < each.top + each.height);
    if (!row || x < GUTTER || !row.start.length) return null;
    const value = view[0] + (x - GUTTER) / (width - GUTTER) * (view[1] - view[0]);
    const near = 3 * (view[1] - view[0]) / (width - GUTTER);
    let best = null, least = near;
    const from = first(row, value);
    for (const i of [from - 1, from]) {
      if (i < 0 || i >= row.start.length) continue;
      const apart = Math.max(row.start[i] - value, value - row.end[i], 0);
      if (apart < least) { least = apart; best = i; }
    }
    return best === null ? null : { row, span: best };
  }

  function described({ row, span }) {
    if (row.host) {
      const [, stream, i, , text] = row.of[span];
      if (!stream) return [["title", `host ${text}`], ["figure", seconds((row.end[span] - row.start[span]) * tick)], ["", `rank ${row.rank}`]];
      const later = (stream.start[i] - stream.issued[i]) * tick;
      return [
        ["title", `host issues ${data.whats[stream.what[i]][0]}`], ["figure", `${seconds((row.end[span] - row.start[span]) * tick)}; it starts ${seconds(Math.max(0, later))} later`],
        ["", data.modules[stream.module[i]]], ["", `rank ${row.rank}, for ${stream.name}`],
      ];
    }
    const [name, detail, family, alone, surely, profile] = data.whats[row.what[span]];
    const took = (row.end[span] - row.start[span]) * tick, how = row.how[span], waits = how & WAITS;
    const lines = [["title", name + (waits ? (family === "communication" ? ": waits for other ranks" : ": waits for the copy engine") : "")], ["figure", seconds(took)]];
    if (!waits && took > alone * 1.02e-9 + 3e-6) lines[1][1] += `, ${seconds(alone * 1e-9)} if it ran alone`;
    return [
      ...lines, ["", detail], ["", data.modules[row.module[span]]], ["", `${PHASES[how & 7]}, ${data.families[family] || family}`],
      ["", `time ${surely}, ${profile}`], ["", `rank ${row.rank}, ${row.name}${row.note ? ", " + row.note : ""}`],
    ];
  }

  function look(from, to) {
    const least = 200e-9 / tick, size = Math.min(Math.max(to - from, least), edge[1] - edge[0]);
    const start = Math.min(Math.max((from + to - size) / 2, edge[0]), edge[1] - size);
    view = [start, start + size];
    request();
  }

  let waiting = false;
  function request() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  }

  function zoom(factor, around) {
    const centre = around === undefined ? (view[0] + view[1]) / 2 : around;
    look(centre - (centre - view[0]) * factor, centre + (view[1] - centre) * factor);
  }

  const valueAt = (x) => view[0] + (Math.max(x, GUTTER) - GUTTER) / (canvas.clientWidth - GUTTER) * (view[1] - view[0]);

  canvas.addEventListener("wheel", (event) => {
    // Everything is shown already, so the wheel scrolls the page.
    if (event.deltaY > 0 && view[1] - view[0] >= home[1] - home[0]) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const by = event.deltaX / (canvas.clientWidth - GUTTER) * (view[1] - view[0]);
      look(view[0] + by, view[1] + by);
    } else {
      const around = valueAt(event.offsetX), factor = Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.005);
      if ((view[1] - view[0]) * factor >= home[1] - home[0]) look(...home); else zoom(factor, around);
    }
    hideTip();
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.offsetX, view: [...view] };
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("held");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held) {
      const by = (held.x - event.offsetX) / (canvas.clientWidth - GUTTER) * (held.view[1] - held.view[0]);
      look(held.view[0] + by, held.view[1] + by);
      return hideTip();
    }
    const found = under(event.offsetX, event.offsetY);
    if ((found && found.span) !== (chosen && chosen.span) || (found && found.row) !== (chosen && chosen.row)) { chosen = found; request(); }
    if (found) showTip(described(found), event.clientX, event.clientY); else hideTip();
  });
  const release = () => { held = null; canvas.classList.remove("held"); };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { if (!held) { hideTip(); chosen = null; request(); } });
  canvas.addEventListener("dblclick", () => look(...home));
  canvas.addEventListener("blur", hideTip);

  function choose(row, span) {
    chosen = { row, span };
    const middle = (row.start[span] + row.end[span]) / 2, size = view[1] - view[0];
    if (middle < view[0] || middle > view[1]) look(middle - size / 2, middle + size / 2); else request();
    const place = canvas.getBoundingClientRect(), lines = described(chosen);
    showTip(lines, place.left + Math.max(GUTTER, Math.min(canvas.clientWidth, at(middle, canvas.clientWidth))), place.top + row.top + row.height);
    document.getElementById("selected-work").textContent = lines.map((line) => line[1]).filter(Boolean).join(", ");
  }

  function step(by) {
    const filled = rows.filter((row) => row.start && row.start.length);
    if (!filled.length) return;
    const row = chosen ? chosen.row : filled.find((each) => !each.host) || filled[0];
    const span = chosen ? chosen.span + by : Math.min(first(row, view[0]), row.start.length - 1);
    if (span >= 0 && span < row.start.length) choose(row, span);
  }

  function otherRow(by) {
    const filled = rows.filter((row) => row.start && row.start.length);
    const place = chosen ? filled.indexOf(chosen.row) + by : 0;
    if (place < 0 || place >= filled.length) return;
    const around = chosen ? chosen.row.start[chosen.span] : view[0];
    choose(filled[place], Math.min(first(filled[place], around), filled[place].start.length - 1));
  }

  canvas.addEventListener("keydown", (event) => {
    const by = (view[1] - view[0]) * 0.15;
    const keys = {
      ArrowLeft: () => look(view[0] - by, view[1] - by), ArrowRight: () => look(view[0] + by, view[1] + by),
      ArrowUp: () => otherRow(-1), ArrowDown: () => otherRow(1), "+": () => zoom(1 / 1.6), "=": () => zoom(1 / 1.6), "-": () => zoom(1.6),
      0: () => look(...home), Home: () => look(...home), n: () => step(1), p: () => step(-1), Escape: () => { chosen = null; hideTip(); request(); },
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  document.getElementById("zoom-in").addEventListener("click", () => zoom(1 / 1.6));
  document.getElementById("zoom-out").addEventListener("click", () => { if ((view[1] - view[0]) * 1.6 >= home[1] - home[0]) look(...home); else zoom(1.6); });
  document.getElementById("zoom-reset").addEventListener("click", () => look(...home));
  drawings.push(draw);
  draw();
}

if (DATA.timeline) timelineChart(DATA.timeline);
