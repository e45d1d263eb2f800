"use strict";
// Draws the timeline of the page that page.py writes. Names come from a trace and are untrusted: they go into the canvas and into
// textContent, never into HTML. Nothing here asks the network for anything.
(() => {
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const panel = document.getElementById("timeline");
  const scroller = panel.querySelector(".scroller");
  const spacer = panel.querySelector(".spacer");
  const canvas = panel.querySelector("canvas");
  const tip = document.querySelector(".tip");
  const context = canvas.getContext("2d");
  const ROW = 17, TITLE = 20, AXIS = 24, SHORTEST = 0.5; // pixels, and the fewest microseconds of a view
  const nameOf = (rank) => (rank in data.servers ? `server ${data.servers[rank]}` : `rank ${rank}`);
  const tops = [];
  const bands = []; // one for each rank: where its rows are
  let height = AXIS;
  data.rows.forEach(([rank], number) => {
    const band = bands[bands.length - 1];
    if (!band || band.rank !== rank) {
      height += TITLE;
      bands.push({ rank, top: height, bottom: height });
    }
    tops.push(height);
    height += ROW;
    bands[bands.length - 1].bottom = height;
  });
  height += 4;
  const end = data.begin.reduce((latest, begin, i) => Math.max(latest, begin + data.length[i]), 1);
  const order = data.begin.map((_, i) => i).sort((a, b) => data.row[a] - data.row[b] || data.begin[a] - data.begin[b]);
  let [from, to] = data.view;
  let width = 0, tall = 0, gutter = 0, colours = {};

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    colours = Object.fromEntries([...data.categories, "text", "faint", "line", "card", "row", "on-bar", "accent"].map((n) => [n, read(n)]));
  }

  const x = (moment) => gutter + ((moment - from) / (to - from)) * (width - gutter);
  const moment = (pixel) => from + ((pixel - gutter) / (width - gutter)) * (to - from);

  function duration(us) {
    if (Math.abs(us) >= 1e6) return `${(us / 1e6).toPrecision(4)} s`;
    if (Math.abs(us) >= 1e3) return `${(us / 1e3).toPrecision(4)} ms`;
    return `${us.toPrecision(3)} µs`;
  }

  function amount(bytes) {
    const units = ["B", "KB", "MB", "GB", "TB"];
    let unit = 0;
    while (bytes >= 999.5 && unit < 4) { bytes /= 1000; unit += 1; }
    return `${unit ? bytes.toPrecision(3) : bytes} ${units[unit]}`;
  }

  function fit() {
    const scale = window.devicePixelRatio || 1;
    spacer.style.height = `${height}px`;
    tall = Math.min(height, Math.max(160, Math.round(window.innerHeight * 0.72)));
    width = scroller.clientWidth;
    gutter = 74;
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(tall * scale));
    canvas.style.width = `${width}px`;
    canvas.style.height = `${tall}px`;
    spacer.style.marginTop = `${-tall}px`; // the canvas stays in view while this scrolls behind it
    context.setTransform(scale, 0, 0, scale, 0, 0);
    draw();
  }

  function drawAxis() {
    context.fillStyle = colours.card;
    context.fillRect(0, 0, width, AXIS);
    const raw = (to - from) / Math.max(2, (width - gutter) / 110);
    const power = 10 ** Math.floor(Math.log10(raw));
    const tick = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
    context.fillStyle = colours.faint;
    context.textAlign = "left";
    for (let at = Math.ceil(from / tick) * tick; at <= to; at += tick) {
      context.fillRect(x(at), AXIS - 5, 1, 5);
      const text = Math.abs(at) < tick / 2 ? "0" : duration(at);
      if (x(at) + 6 + context.measureText(text).width < width) context.fillText(text, x(at) + 4, AXIS / 2);
    }
    context.fillStyle = colours.line;
    context.fillRect(0, AXIS - 1, width, 1);
  }

  function drawSpans(above) {
    let drawn = 0, row = -1, filled = -1;
    for (const i of order) {
      const top = tops[data.row[i]] - above;
      const begin = data.begin[i], ends = begin + data.length[i];
      if (top < AXIS - ROW || top > tall || ends < from || begin > to) continue;
      drawn += 1;
      const left = Math.max(gutter, x(begin)), right = Math.min(width, x(ends));
      if (data.row[i] !== row) { row = data.row[i]; filled = -1; }
      if (right <= filled) continue; // less than a pixel, on one that is coloured already
      const wide = Math.max(1, right - left);
      context.fillStyle = colours[data.categories[data.category[i]]];
      context.fillRect(left, top + 1, wide > 3 ? wide - 0.6 : wide, ROW - 2);
      if (wide < 2) filled = left + wide;
      if (wide > 18) label(i, left + 4, top + ROW / 2, wide - 8);
    }
    panel.dataset.drawn = String(drawn);
  }

  function label(i, left, middle, room) {
    const category = data.categories[data.category[i]];
    let text = data.names[data.name[i]];
    if (text.startsWith(`${category} `)) text = text.slice(category.length + 1); // its colour says the rest
    const wide = context.measureText(text).width;
    if (wide > room) text = `${text.slice(0, Math.floor((text.length * room) / wide) - 1)}…`;
    if (text.length < 2 && wide > room) return;
    context.fillStyle = colours["on-bar"];
    context.fillText(text, left, middle, room);
  }

  function drawGutter(above) {
    context.fillStyle = colours.card;
    context.fillRect(0, AXIS, gutter, tall);
    for (const band of bands) {
      if (band.bottom < above || band.top - TITLE - above > tall) continue;
      const middle = band.top - above - TITLE / 2 + 1, host = data.hosts[band.rank];
      context.font = "600 12px system-ui, sans-serif";
      context.textAlign = "left";
      context.fillStyle = colours.text;
      context.fillText(nameOf(band.rank), 8, middle);
      const wide = context.measureText(nameOf(band.rank)).width;
      context.font = "11px system-ui, sans-serif";
      context.fillStyle = colours.faint;
      context.fillText(host, 16 + wide, middle, width - wide - 24);
    }
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colours.faint;
    context.textAlign = "right";
    data.rows.forEach(([, text], number) => context.fillText(text, gutter - 7, tops[number] - above + ROW / 2));
  }

  function draw() {
    const above = scroller.scrollTop;
    context.clearRect(0, 0, width, tall);
    context.textBaseline = "middle";
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colours.row;
    for (const band of bands) context.fillRect(gutter, band.top - above, width, band.bottom - band.top);
    context.fillStyle = colours.line;
    for (const step of data.steps) if (step >= from && step <= to) context.fillRect(x(step), AXIS, 1, tall);
    context.textAlign = "left";
    drawSpans(above);
    drawGutter(above);
    drawAxis();
    panel.dataset.from = String(from);
    panel.dataset.to = String(to);
  }

  function show(begin, length) {
    length = Math.min(Math.max(length, SHORTEST), end * 1.04);
    begin = Math.min(Math.max(begin, -end * 0.02), end * 1.02 - length);
    from = begin;
    to = begin + length;
    tip.hidden = true;
    requestAnimationFrame(draw);
  }

  const zoom = (factor, at = (from + to) / 2) => show(at - (at - from) * factor, (to - from) * factor);
  const pan = (share) => show(from + (to - from) * share, to - from);
  const actions = {
    closer: () => zoom(0.6), farther: () => zoom(1 / 0.6), left: () => pan(-0.25), right: () => pan(0.25),
    all: () => show(-end * 0.02, end * 1.04), steps: () => show(data.view[0], data.view[1] - data.view[0]),
  };

  function under(px, py) { // the shortest span below the pointer: what is nested is drawn above what contains it
    const at = moment(px), slack = ((to - from) / (width - gutter)) * 2;
    const number = tops.findIndex((top) => py + scroller.scrollTop >= top && py + scroller.scrollTop < top + ROW);
    let best = -1;
    if (number < 0 || px < gutter || py < AXIS) return best;
    for (const i of order) {
      if (data.row[i] !== number || data.begin[i] > at + slack || data.begin[i] + data.length[i] < at - slack) continue;
      if (best < 0 || data.length[i] < data.length[best]) best = i;
    }
    return best;
  }

  function tell(event) {
    const box = canvas.getBoundingClientRect();
    const i = under(event.clientX - box.left, event.clientY - box.top);
    tip.hidden = i < 0;
    if (i < 0) return;
    const rank = data.rows[data.row[i]][0], host = data.hosts[rank];
    const lines = [
      data.names[data.name[i]],
      `${duration(data.length[i])}, from ${duration(data.begin[i])}`,
      data.bytes[i] ? `${amount(data.bytes[i])}, ${amount(data.bytes[i] / Math.max(1e-6, data.length[i] / 1e6))}/s` : "",
      `${data.categories[data.category[i]]}, ${nameOf(rank)}${host ? ` on ${host}` : ""}`,
      data.names[data.collective[i]],
    ].filter(Boolean);
    tip.replaceChildren(...lines.map((text, number) => {
      const line = document.createElement(number ? "span" : "b");
      line.textContent = text;
      return line;
    }));
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${event.clientY + 18 + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 12 : event.clientY + 18}px`;
  }

  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, y: event.clientY, from, scroll: scroller.scrollTop };
    canvas.setPointerCapture(event.pointerId);
    canvas.style.cursor = "grabbing";
    tip.hidden = true;
    scroller.focus({ preventScroll: true });
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return tell(event);
    if (event.pointerType === "mouse") scroller.scrollTop = held.scroll - (event.clientY - held.y);
    return show(held.from - ((event.clientX - held.x) / (width - gutter)) * (to - from), to - from);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, () => { held = null; canvas.style.cursor = ""; });
  }
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  scroller.addEventListener("scroll", () => { tip.hidden = true; requestAnimationFrame(draw); });
  scroller.addEventListener("wheel", (event) => { // without Ctrl the wheel scrolls the page, until the timeline was clicked
    const focused = document.activeElement === scroller;
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (sideways) pan((event.shiftKey ? event.deltaY : event.deltaX) / 800);
    else if (event.ctrlKey || focused) zoom(Math.exp(event.deltaY / 400), moment(event.clientX - canvas.getBoundingClientRect().left));
    else return;
    event.preventDefault();
  }, { passive: false });
  const keys = { "+": "closer", "=": "closer", w: "closer", "-": "farther", s: "farther", a: "left", ArrowLeft: "left", d: "right", ArrowRight: "right", 0: "all" };
  scroller.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    actions[keys[event.key]]();
    event.preventDefault();
  });
  for (const button of panel.querySelectorAll("button")) button.addEventListener("click", actions[button.dataset.action]);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); draw(); });
  new ResizeObserver(fit).observe(scroller);

  panel.querySelector(".drawing").hidden = false;
  readColours();
  fit();
  panel.dataset.spans = String(data.begin.length);
})();
